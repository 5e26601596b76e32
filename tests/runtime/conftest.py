"""What tests of the runtime share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.recorder import model_directory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's directory for backends that do not look at it."""
    return model_directory(tmp_path / "m", 1)
