"""Fixtures for tests of the runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.recorder import model_directory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a model's directory, for backends that do not look at it."""
    return model_directory(tmp_path / "m", 1)
