"""`moonpool bench`: a table, a file, a picture."""

from __future__ import annotations

import importlib.util
import json

import pytest
from tests.runtime.cli.shell import MODELS, CommandLine

from moonpool.runtime.cli.table import figure, table


@pytest.mark.parametrize("mode", [[], ["--async"]])
def test_there_is_a_row_for_each_concurrency(cli: CommandLine, mode: list[str]) -> None:
    ended = cli(
        "bench", MODELS, "add_sub", "--concurrency", "1,3", "--seconds", "0.05", *mode,
        "--batch", "2", "--save", "results",
    )  # fmt: skip

    head, *rows = ended.stdout.splitlines()[:3]
    assert head.split()[:2] == ["callers", "requests/s"]
    assert [row.split()[0] for row in rows] == ["1", "3"]
    saved = [line for line in ended.stdout.splitlines() if line.startswith("results/")]
    assert saved[:2] == ["results/add_sub.json", "results/add_sub.csv"]
    report = json.loads((cli.folder / saved[0]).read_text())
    assert report["inputs"] == {"INPUT0": ["FP32", 2, 4], "INPUT1": ["FP32", 2, 4]}
    assert [point["concurrency"] for point in report["series"]] == [1, 3]
    for point in report["series"]:
        assert point["requests"] > 0
        assert point["failed"] == 0
        assert point["rows_per_batch"] >= 2
        assert 3 <= len(point["windows"]) <= 10
        latency = point["latency_us"]
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
    assert ended.returncode == 0


def test_there_is_a_picture_or_word_of_what_it_needs(cli: CommandLine) -> None:
    ended = cli(
        "bench", MODELS, "add_sub", "--concurrency", "1", "--seconds", "0.05", "--save", "."
    )

    if importlib.util.find_spec("matplotlib"):
        assert (cli.folder / "add_sub.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "pip install 'moonpool[plot]'" in ended.stderr
    assert ended.returncode == 0


def test_inputs_that_do_not_fit_are_told_at_once(cli: CommandLine) -> None:
    ended = cli("bench", MODELS, "add_sub", "--shape", "INPUT0=5")

    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "INPUT0" in ended.stderr


def test_a_table_is_aligned() -> None:
    rows = [["name", "1"], ["a", "1,000"]]

    assert table(rows, align="<>", indent=2) == ["  name      1", "  a     1,000"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.01234, "0.0123"), (1.0, "1"), (1.234, "1.23"), (99.96, "100"), (12345, "12,300")],
)
def test_figures_have_three_digits(value: float, shown: str) -> None:
    assert figure(value) == shown
