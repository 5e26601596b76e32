"""Templates: processes of a model from which its instances are forked."""
