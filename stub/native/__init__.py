"""Serves moonpool's own kind of model: arrays by name, with type hints in place of a configuration."""
