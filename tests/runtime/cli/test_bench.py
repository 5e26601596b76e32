"""`moonpool bench`: a table, a file, a picture."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
from tests.runtime.cli.shell import MODELS, CommandLine, write_model

from moonpool.runtime.cli.shared import figure, table


@pytest.mark.parametrize("mode", [[], ["--async"]])
def test_there_is_a_row_for_each_concurrency(cli: CommandLine, mode: list[str]) -> None:
    ended = cli(
        "bench", MODELS, "add_sub", "--concurrency", "1,3", "--seconds", "0.05", *mode,
        "--batch", "2", "--save", "results",
    )  # fmt: skip

    sent, head, *rows = ended.stdout.splitlines()[:4]
    assert sent == (
        f"add_sub, in process, {'asyncio' if mode else 'threads'}, each request: INPUT0 FP32 [2, 4], "
        "INPUT1 FP32 [2, 4], 64 bytes, made up"
    )
    told = re.findall(
        r"^moonpool: (.*): [\d,]+ requests/s in \d+ windows$", ended.stderr, re.MULTILINE
    )
    assert told == ["1 caller", "3 callers"]
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
        assert "-m pip install 'matplotlib" in ended.stderr
    assert ended.returncode == 0


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "A saved result is never replaced unless `--overwrite` says so, and is named by its `--label`.",
)
def test_a_result_has_a_label_and_replaces_no_other(cli: CommandLine) -> None:
    bench = (
        "bench", MODELS, "add_sub", "--concurrency", "1", "--seconds", "0.05", "--windows", "3",
        "--save", ".", "--label", "one instance",
    )  # fmt: skip
    first = cli(*bench)
    assert "add_sub-one instance.json" in first.stdout
    written = (cli.folder / "add_sub-one instance.json").read_text()
    assert json.loads(written)["label"] == "one instance"

    refused = cli(*bench)
    assert refused.returncode == 1
    assert "exists already" in refused.stderr
    # The command refused before it measured anything.
    assert refused.stdout == ""
    assert (cli.folder / "add_sub-one instance.json").read_text() == written

    replaced = cli(
        *bench, "--overwrite", "--against", "add_sub-one instance.json", "--label", "again"
    )
    assert "again over one instance:" in replaced.stdout


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "Results of different requests are not compared. If the model's configuration or the "
    "circumstances differ, the command names the difference.",
)
def test_results_of_other_requests_are_refused_and_other_configurations_are_told(
    cli: CommandLine,
) -> None:
    bench = (
        "bench",
        MODELS,
        "add_sub",
        "--concurrency",
        "1",
        "--seconds",
        "0.05",
        "--windows",
        "3",
    )
    cli(*bench, "--save", ".")

    ended = cli(*bench, "--batch", "2", "--against", "add_sub.json")
    assert ended.returncode == 1
    assert "was measured with other requests: INPUT0 FP32 [1, 4]" in ended.stderr
    assert ended.stdout == ""

    ended = cli(*bench, "--instances", "2", "--against", "add_sub.json")
    assert ended.returncode == 0
    assert "the model's configuration (instance_group)" in ended.stderr
    assert "the two differ" not in cli(*bench, "--against", "add_sub.json").stderr


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "All loads that did not settle share one line.",
)
def test_loads_that_did_not_settle_have_one_line(cli: CommandLine) -> None:
    ended = cli(
        "bench", MODELS, "add_sub", "--concurrency", "1,2", "--seconds", "0.02", "--windows", "2"
    )

    [line] = [line for line in ended.stderr.splitlines() if "still differed at the end" in line]
    assert "in process, threads with 1, 2 callers" in line


def test_inputs_that_do_not_fit_are_told_at_once(cli: CommandLine) -> None:
    ended = cli("bench", MODELS, "add_sub", "--shape", "INPUT0=5")

    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "INPUT0" in ended.stderr


@pytest.mark.promise("The server (`moonpool serve`)", "`check`, `infer` and `bench` host models …")
def test_models_are_hosted_as_the_operator_says(cli: CommandLine) -> None:
    write_model(
        cli.folder / "models",
        "greedy",
        "from moonpool import Float32\n\n\nclass Same:\n"
        "    def __call__(self, X: Float32[:]) -> Float32[:]:\n        return X\n",
        'parameters { key: "MOONPOOL_SANDBOX_PORTS" value: { string_value: "443" } }',
    )
    arguments = (
        "bench", "models", "greedy", "--concurrency=1", "--seconds=0.05", "--shape=X=2",
        "--sandbox=strict",
    )  # fmt: skip

    ended = cli(*arguments)
    assert ended.returncode == 1
    assert "cannot give it more than its sandbox does" in ended.stderr
    assert cli(*arguments, "--sandbox-grants=greedy:MOONPOOL_SANDBOX_PORTS=443").returncode == 0
    assert cli(*arguments, "--model-option=greedy:MOONPOOL_SANDBOX_PORTS=80").returncode == 0


def test_a_table_is_aligned() -> None:
    rows = [["name", "1"], ["a", "1,000"]]

    assert table(rows, align="<>", indent=2) == ["  name      1", "  a     1,000"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.01234, "0.0123"), (1.0, "1"), (1.234, "1.23"), (99.96, "100"), (12345, "12,300")],
)
def test_figures_have_three_digits(value: float, shown: str) -> None:
    assert figure(value) == shown
