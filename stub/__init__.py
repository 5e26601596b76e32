"""Runs one model instance in its own process, a child of the runtime."""
