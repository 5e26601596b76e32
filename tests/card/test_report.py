"""The summary of a visit: short, with the first failure of each stage, and of the last run of each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.card import report, results

ROOT = Path(__file__).parents[2]

NO_CARD = (None, "nvidia-smi is not here")


def line(stage: str, name: str, ok: bool | None = True, value: Any = None, **more: str) -> Any:
    rest = {"unit": "", "expected": "", "text": "", **more}
    return {"stage": stage, "name": name, "ok": ok, "value": value, "at_s": 1.0, **rest}


def test_a_summary_has_at_most_60_lines_and_figures_with_goals_come_first() -> None:
    found = [line("figures", f"figure {number}", True, 1.5, unit="µs") for number in range(500)]
    found.append(line("figures", "by handle", False, 1.7, expected="at most 1.5"))
    page = report.summary(found, NO_CARD)
    rows = [each for each in page if each.startswith("| by handle") or "| figure " in each]

    assert len(page) <= 60
    assert rows[0] == "| figure | value | goal | |"
    assert rows[1] == "| by handle | 1.7 | at most 1.5 | **missed** |"
    assert any("more | in results.jsonl" in each for each in page)


def test_a_stage_has_its_counts_and_a_step_that_was_killed_before_other_failures() -> None:
    found = [
        line("tests", "a", True),
        line("tests", "b", False, text="E   assert 1 | 2\nE   more"),
        line("tests", "c", None),
        line("tests", "step y", True, 50.0),
        line("tests", "step x", False, 60.02, text="killed at its limit of 60 s"),
    ]
    page = report.summary(found, NO_CARD)

    assert "| tests | 1 | 1 | 1 | 60 | step x: killed at its limit of 60 s |" in page
    assert "| soak | | | | | did not run |" in page
    rows = report.summary(found[:3], NO_CARD)
    assert "| tests | 1 | 1 | 1 | 0 | b: E assert 1 \\| 2 E more |" in rows


def test_a_stage_that_ran_again_is_reported_as_it_ran_last() -> None:
    first = [line(results.START, "stages"), line("facts", "a"), line("probe", "b", False)]
    second = [line(results.START, "stages"), line("probe", "b")]
    found = report.last_of_each_stage([*first, *second])

    assert [(each["stage"], each["ok"]) for each in found] == [("facts", True), ("start", True), ("probe", True)]


@pytest.mark.slow
def test_the_page_is_printed_and_an_earlier_one_is_not_taken_for_it(tmp_path: Path) -> None:
    page = tmp_path / report.NAME
    page.write_text("of an earlier run\n")
    ended = subprocess.run(
        ["bash", ".ci/gpu", str(tmp_path), "report"],
        cwd=ROOT, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    assert page.read_text() in ended.stdout
    assert "of an earlier run" not in ended.stdout


def test_what_is_left_on_the_card_is_said() -> None:
    found = [line("facts", "nvidia-smi before", True, 3.0, unit="MiB")]
    page = report.summary(found, (515.0, "NVIDIA H100\n4711, python3, 512 MiB"))

    assert page[-1] == "In use on the card before: 3 MiB; after: 515 MiB (4711, python3, 512 MiB)."
