"""Calls that the models in stubs make: requests to other models, and what they ask of the runtime."""
