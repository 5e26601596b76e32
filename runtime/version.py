"""The version of moonpool, as in `pyproject.toml`."""

VERSION = "0.1.0"
