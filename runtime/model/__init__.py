"""A model, its configuration and a request to it: values, and the checks on them."""
