"""Reads, completes and checks the configuration of a model."""
