"""Test a model without a server: see `docs/TESTING_MODELS.md`."""

from moonpool.testing.utilities import utilities

__all__ = ["utilities"]
