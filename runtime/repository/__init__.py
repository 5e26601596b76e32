"""Finds models and their environments on disk, and reads them."""
