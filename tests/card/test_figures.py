"""Figures, and what else a visit measures, become results with their goals, whatever happens to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.card import breadth, figures, results, stages

from moonpool.benchmarks.suites.report import Report, read, table


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(results.RESULTS, str(tmp_path))
    return tmp_path


def by_name(folder: Path) -> dict[str, Mapping[str, Any]]:
    return {line["name"]: line for line in results.read(folder)}


def measured(part: str, *, is_judged: bool = True) -> None:
    report = Report("gpu", "How fast?", True, figures.Recorder(part, is_judged=is_judged).hear)
    report.figure("trip", "µs", [1.0, 3.0, 2.0], column="16 B")
    report.ratio(f"{part} over another", [1.6, 1.7], goal="at most 1.5")
    report.ratio(f"{part} over a bare one", [0.9], goal="at least 0.9")
    report.skipped("torch", "it is not here")
    report.failed("a copy", "it hangs")
    report.close()


def test_each_figure_is_a_result_beside_its_goal(folder: Path) -> None:
    measured("sizes")

    found = by_name(folder)
    assert found["trip, 16 B"]["ok"] is True
    assert (found["trip, 16 B"]["value"], found["trip, 16 B"]["unit"]) == (2.0, "µs")
    assert "3 samples" in found["trip, 16 B"]["text"]
    missed = found["sizes over another"]
    assert (missed["ok"], missed["expected"], missed["unit"]) == (False, "at most 1.5", "times")
    assert found["sizes over a bare one"]["ok"] is True
    assert found["sizes: torch"]["ok"] is None
    assert found["sizes: a copy"]["ok"] is False


def test_the_fake_driver_misses_no_goal(folder: Path) -> None:
    measured("sizes", is_judged=False)

    assert by_name(folder)["sizes over another"]["ok"] is True


def test_all_parts_together_are_one_run_of_the_benchmark(folder: Path) -> None:
    measured("sizes")
    measured("forms")

    lines = read(folder / figures.NAME)
    assert [line["kind"] for line in lines].count("run") == 1
    assert lines[0]["benchmark"] == "gpu"
    shown = table(lines)
    assert "sizes over another" in shown
    assert "forms over another" in shown
    assert json.dumps(lines)


def test_what_becomes_of_an_attempt_is_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(error: Exception) -> Any:
        raise error

    monkeypatch.setattr(breadth, "is_fake", lambda: False)
    breadth.tried("works", lambda: "well")
    breadth.tried("lacks", lambda: breadth.needed("package_that_no_machine_has"))
    breadth.tried("breaks", lambda: raises(RuntimeError("no such function")))
    monkeypatch.setattr(breadth, "is_fake", lambda: True)
    breadth.tried("breaks on the fake driver", lambda: raises(RuntimeError("no such function")))
    breadth.tried("is wrong there", lambda: raises(AssertionError("1 in place of 2")))

    oks = {name: line["ok"] for name, line in by_name(folder).items()}
    assert oks == {
        "works": True,
        "lacks": None,
        "breaks": False,
        "breaks on the fake driver": None,
        "is wrong there": False,
    }


def test_every_part_is_a_step() -> None:
    steps = {
        stage.name: {step.arguments[0] for each in stage.rounds for step in each if step.arguments}
        for stage in stages.STAGES
    }

    assert steps["figures"] == figures.MEASURED_S.keys()
    assert steps["breadth"] == breadth.PARTS.keys()
