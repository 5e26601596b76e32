"""The table of stages: the tests that need a card, and the time that all of it takes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.card import stages

ROOT = Path(__file__).parents[2]


def test_all_limits_together_are_the_time_that_there_is() -> None:
    assert sum(stage.limit_s for stage in stages.STAGES) <= stages.TOTAL_S


def test_no_step_takes_longer_than_a_minute() -> None:
    steps = [step for stage in stages.STAGES for each in stage.rounds for step in each]

    assert {step.name: step.limit_s for step in steps if step.limit_s > 60} == {}


@pytest.mark.slow
def test_the_stage_of_tests_has_every_file_with_cases_for_a_card() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q"]
    listed = subprocess.run(
        [*command, "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = set(re.findall(r"^(tests/[^:]+\.py)::", listed, re.MULTILINE))
    (tests,) = [stage for stage in stages.STAGES if stage.name == "tests"]
    named = [step.name for each in tests.rounds for step in each]

    assert files
    assert {file for file in files if not file.startswith(tuple(named))} == set()
    assert {name for name in named if not any(file.startswith(name) for file in files)} == set()
