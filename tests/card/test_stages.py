"""The table of stages: the tests that need a card, and the time that all of it takes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.card import prepared, stages

ROOT = Path(__file__).parents[2]
MODULES = ("httptools", "orjson", "posix_ipc", "rapidjson", "tritonclient")
# Nothing finds what a machine with a card may lack.
WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({MODULES}))\n"


def said(program: str) -> str:
    """Run a program that has none of these packages, and return what it prints."""
    command = [sys.executable, "-c", f"{WITHOUT}sys.path[:] = {sys.path!r}\n{program}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_all_limits_together_are_the_time_that_there_is() -> None:
    assert sum(stage.limit_s for stage in stages.STAGES) <= stages.TOTAL_S


def test_no_step_takes_longer_than_a_minute() -> None:
    steps = [step for stage in stages.STAGES for each in stage.rounds for step in each]

    assert {step.name: step.limit_s for step in steps if step.limit_s > 60} == {}


def test_a_file_of_tests_is_a_stage_and_the_report_is_always_the_last_one() -> None:
    found = stages.chosen(["facts", "tests/gpu/test_lane.py"])
    steps = [step.name for stage in found for each in stage.rounds for step in each]

    assert steps == ["facts", "tests/gpu/test_lane.py", "report"]
    assert stages.chosen([]) == list(stages.STAGES)
    with pytest.raises(ValueError, match=r"no stage 'fact'; there are: facts probe .*tests/"):
        stages.chosen(["fact"])


@pytest.mark.slow
def test_the_stage_of_tests_has_all_cases_for_a_card_and_they_are_found_without_the_packages() -> None:
    # All folders are looked through with what this machine has, and the named ones without the packages.
    command = [sys.executable, "-m", "pytest"]
    options = ["-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    everywhere = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (tests,) = [stage for stage in stages.STAGES if stage.name == "tests"]
    named = [step.name for each in tests.rounds for step in each]
    without = said(f"import pytest; sys.exit(pytest.main({[*options, *named]!r}))")

    cases = cases_in(everywhere)
    assert cases
    assert cases_in(without) == cases
    assert {name for name in named if not any(case.startswith(name) for case in cases)} == set()


def cases_in(listed: str) -> set[str]:
    return set(re.findall(r"^tests/[^:]+\.py::.*$", listed, re.MULTILINE))


def test_a_machine_without_the_packages_is_asked_what_its_sandbox_offers() -> None:
    program = "import runpy; runpy.run_module('moonpool', run_name='__main__')"

    assert "usage: moonpool sandbox" in said(f"sys.argv[1:] = ['sandbox', '--help']\n{program}")


def test_the_packages_that_are_brought_are_those_that_the_machine_lacks() -> None:
    has = (ROOT / ".ci/card-packages.txt").read_text().split()

    assert set(prepared.PACKAGES) & set(has) == set()
    assert len(prepared.PACKAGES) == len(MODULES)
