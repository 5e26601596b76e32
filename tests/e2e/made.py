"""Repositories of models that another program writes, as its libraries are heavy."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.hosting import MODELS


def missing(*modules: str) -> pytest.MarkDecorator:
    """Skip the test if one of these modules is not installed."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(
        bool(absent), reason=f"not installed: {', '.join(absent)} (pip install {' '.join(absent)})"
    )


def made_by(program: str, folder: Path) -> Path:
    """Let a program of `tests/models` write models into the folder, and return it."""
    command = [sys.executable, "-W", "ignore", str(MODELS / program), str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return folder
