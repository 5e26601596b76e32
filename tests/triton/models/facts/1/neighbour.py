"""Beside the model."""
