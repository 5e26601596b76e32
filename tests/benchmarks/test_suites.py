"""Every benchmark runs and writes what it promises, so that none of them rots between two releases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu.cards import Fake, fake, fake_library

from moonpool.benchmarks.suites.all import NAMES

__all__ = ["fake", "fake_library"]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "suites"
# Not every machine has what these measure. Without it they say so, and have no figures.
DEPENDENT = ("triton", "gpu", "ray_serve")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not FOLDER.is_dir(), reason="only the tests are here, not the benchmarks"),
]


def run(*arguments: str, **variables: str) -> str:
    """The output of `python -m ARGUMENTS`, with these variables besides."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        pytest.fail(f"{arguments} ended with {ended.returncode}:\n{ended.stderr}", pytrace=False)
    return ended.stdout


def lines_of(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_answers_its_question(name: str) -> None:
    lines = lines_of(run(f"moonpool.benchmarks.suites.{name}", "--quick", "--json", "-"))
    first, last = lines[0], lines[-1]
    figures = [line for line in lines if line["kind"] == "figure"]

    assert (first["kind"], first["benchmark"], first["quick"]) == ("run", name, True)
    assert first["machine"].keys() >= {"cpu", "cores", "kernel", "python", "numpy", "date", "load"}  # type: ignore[attr-defined]
    assert last["kind"] == "noise"
    # A case that could not be measured has the reason in place of a figure.
    skipped = [line for line in lines if line["kind"] == "skipped"]
    assert all(line["reason"] for line in skipped)
    assert [line for line in figures if not line["p10"] <= line["median"] <= line["p90"]] == []  # type: ignore[operator]
    assert any(line["headline"] for line in figures) or (name in DEPENDENT and skipped)


def test_trips_to_a_gpu_are_measured_where_there_is_one(fake: Fake) -> None:
    found = run("moonpool.benchmarks.suites.gpu", "--quick", "--json", "-", LD_LIBRARY_PATH=str(fake.library.parent))
    figures = {(line["name"], line["column"]) for line in lines_of(found) if line["kind"] == "figure"}

    assert {
        ("there and back, by handle", "1 MB"),
        ("by handle over events alone", "1 MB"),
        ("by handle over through ordinary memory", "1 MB"),
        ("by handle over on the CPU", "16 B"),
        ("by handle over 16 B by handle", "1 MB"),
        ("bytes a second of an array that is not moonpool's over a copy alone", "1 MB"),
    } <= figures


def test_every_benchmark_is_among_those_that_are_tested() -> None:
    runnable = {path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text()}

    assert runnable - {"all", "compare"} == set(NAMES)


def test_every_benchmark_is_explained() -> None:
    readme = (FOLDER.parent / "README.md").read_text()

    assert [name for name in NAMES if f"`{name}`" not in readme] == []


def test_a_benchmark_prints_a_table_for_people() -> None:
    text = run("moonpool.benchmarks.suites.memory", "--quick")

    assert "| idle stub |" in text
    assert "too short to quote" in text


def test_all_runs_what_it_is_told_and_renders_what_it_found(tmp_path: Path) -> None:
    short = run("moonpool.benchmarks.suites.all", "memory", "--quick", "--results", str(tmp_path))
    again = run("moonpool.benchmarks.suites.all", "--table", "--results", str(tmp_path))
    whole = (tmp_path / "RESULTS.md").read_text()

    assert short == again
    assert {path.name for path in tmp_path.iterdir()} == {"memory.jsonl", "RESULTS.md"}
    # The short table has the headlines alone.
    assert "| idle stub |" in whole
    assert "| idle stub |" not in short
    assert "| idle stub over interpreter with numpy |" in short


def test_all_refuses_a_benchmark_that_is_not_there() -> None:
    command = [sys.executable, "-m", "moonpool.benchmarks.suites.all", "speed"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    assert "there is no benchmark 'speed'" in ended.stderr


def test_compare_sets_a_tree_beside_another() -> None:
    table = run("moonpool.benchmarks.suites.compare", "memory", str(ROOT), "--runs", "2", "--quick")

    assert table.startswith("| | before | now | change |")
    assert "| idle stub, RSS |" in table
