"""The version of moonpool; `pyproject.toml` takes it from here."""

VERSION = "0.2.0"
