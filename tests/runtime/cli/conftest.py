"""Fixtures of the tests of the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.cli.shell import CommandLine


@pytest.fixture
def cli(tmp_path: Path) -> CommandLine:
    """moonpool's command line, in an empty folder."""
    return CommandLine(tmp_path)
