"""`-m gpu` selects every test that needs a card, and no other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_script_for_a_card_runs_every_file_that_has_tests_for_one() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = set(re.findall(r"^(tests/[^:]+\.py)::", listed, re.MULTILINE))
    named = re.findall(r"^  (tests/\S+)$", (ROOT / ".ci/gpu").read_text(), re.MULTILINE)

    assert files
    assert {file for file in files if not file.startswith(tuple(named))} == set()
    assert {name for name in named if not any(file.startswith(name) for file in files)} == set()
