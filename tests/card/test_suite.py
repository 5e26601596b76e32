"""The stage of tests: a case that hangs, or a file that cannot be imported, costs no other case its result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.card import results

ROOT = Path(__file__).parents[2]
CASES = """
import ctypes
import pytest

pytestmark = pytest.mark.gpu

def test_first():
    pass

@pytest.mark.timeout(600)
def test_that_waits_in_the_driver():
    ctypes.CDLL(None).pause()

@pytest.mark.parametrize("number", range(20))
def test_of_many(number):
    assert number != 10

def test_without_a_card():
    pytest.skip("this machine has no GPU")

def test_for_no_card():
    raise RuntimeError
"""


ENDS = """
import os
import pytest
from tests import leaks

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("number", range(7))
def test_that_ends_its_worker(number):
    # With a limit of ten seconds for the file. As a rule it is 20 s.
    assert leaks.GRACE_S == 0.5
    if number < 6:
        os._exit(1)
"""


def results_of(folder: Path, share: float, limit_s: float = 10.0) -> dict[str, tuple[Any, str]]:
    """Run the cases in a folder as a step does, and return what each came to."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        results.RESULTS: str(folder),
        results.STAGE: "tests",
        results.SHARE: str(share),
        results.LIMIT_S: str(limit_s),
    }
    command = [sys.executable, "-m", "tests.card.suite", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return {line["name"].rpartition("::")[2]: (line["ok"], line["text"]) for line in results.read(folder)}


@pytest.mark.slow
def test_a_case_that_hangs_and_a_file_that_cannot_be_imported_cost_no_other_case_its_result(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "test_ends.py").write_text(ENDS)
    (tmp_path / "test_broken.py").write_text("import package_that_no_machine_has\n")
    found = results_of(tmp_path, share=1.0)
    hung, words = found["test_that_waits_in_the_driver"]
    (broken,) = [name for name in found if name.endswith("test_broken.py")]

    assert found["test_first"] == (True, "")
    assert hung is False
    assert "crashed while running" in words
    assert found["test_of_many[9]"] == (True, "")
    assert found["test_of_many[10]"] == (False, "E       assert 10 != 10")
    assert found["test_of_many[19]"] == (True, "")
    assert found["test_without_a_card"][0] is None
    assert found["test_that_ends_its_worker[5]"][0] is False
    assert found["test_that_ends_its_worker[6]"] == (True, "")
    assert found[broken][0] is False
    assert "package_that_no_machine_has" in found[broken][1]


@pytest.mark.slow
def test_a_tenth_of_the_time_is_for_every_tenth_case(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    found = results_of(tmp_path, share=0.1)

    assert found[f"{tmp_path}: cases"] == (True, "")
    assert set(found) - {f"{tmp_path}: cases"} == {"test_first", "test_of_many[8]", "test_of_many[18]"}
