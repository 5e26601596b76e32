"""Code in the folder of the model, for all its versions."""
