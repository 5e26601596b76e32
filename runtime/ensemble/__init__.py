"""Ensembles: models that consist of steps, each of which is a request to another model."""
