"""`moonpool bench`: a table, a file, a picture."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics

import pytest
from tests.runtime.cli.shell import MODELS, CommandLine, write_model

from moonpool.runtime.cli.shared import figure, table


@pytest.mark.parametrize("mode", [[], ["--async"]])
def test_there_is_a_row_for_each_concurrency(cli: CommandLine, mode: list[str]) -> None:
    ended = cli(
        "bench", MODELS, "add_sub", "--concurrency", "1,3", "--seconds", "0.05", *mode,
        "--batch", "2", "--save", "results",
    )  # fmt: skip

    sent, load, head, *rows = ended.stdout.splitlines()[:5]
    assert load.startswith("load average ")
    assert sent == (
        f"add_sub, in process, {'asyncio' if mode else 'threads'}, each request: INPUT0 FP32 [2, 4], "
        "INPUT1 FP32 [2, 4], 64 bytes, made up"
    )
    told = re.findall(r"^moonpool: (.*): [\d,]+ requests/s in \d+ windows$", ended.stderr, re.MULTILINE)
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
    ended = cli("bench", MODELS, "add_sub", "--concurrency", "1", "--seconds", "0.05", "--save", ".")

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

    replaced = cli(*bench, "--overwrite", "--against", "add_sub-one instance.json", "--label", "again")
    assert "again over one instance:" in replaced.stdout


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "Results of different requests are not compared. If the model's configuration or the "
    "circumstances differ, the command names the difference.",
)
def test_results_of_other_requests_are_refused_and_other_configurations_are_told(cli: CommandLine) -> None:
    bench = ("bench", MODELS, "add_sub", "--concurrency", "1", "--seconds", "0.05", "--windows", "3")
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
    "Instances can be killed or stopped under load: the report has the time until they are back, the share of failed "
    "requests, and the latencies of the others.",
)
def test_instances_are_killed_under_load(cli: CommandLine) -> None:
    ended = cli(
        "bench", MODELS, "add_sub", "--instances", "2", "--concurrency", "2", "--seconds", "0.4",
        "--windows", "3", "--kill-every", "0.3s", "--resources", "--save", ".",
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    found = json.loads((cli.folder / "add_sub.json").read_text())
    assert found["faults"]["count"] >= 1
    assert found["faults"]["not_recovered"] == 0
    assert re.search(r"times an instance was killed; as many as before were ready after", ended.stdout)
    [point] = found["series"]
    assert point["requests"] > 0
    assert point["resources"]["cpu_s_per_request"] > 0
    assert point["resources"]["memory_bytes"] > 1 << 20
    assert "cpu µs/request" in ended.stdout


@pytest.mark.promise(
    "Measuring (`moonpool bench`)", "Levels of the sandbox are measured in turns, with their ratios over the first one."
)
def test_the_cost_of_isolation_is_measured(cli: CommandLine) -> None:
    ended = cli(
        "bench", MODELS, "add_sub", "--concurrency", "1", "--seconds", "0.2", "--windows", "3",
        "--isolation", "off,standard", "--save", ".",
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    found = json.loads((cli.folder / "add_sub.json").read_text())
    assert found["where"] == "in process, threads, sandbox off"
    [other] = found["isolation"]
    assert other["where"] == "in process, threads, sandbox standard"
    ours, theirs = ([window["requests_per_s"] for window in each["series"][0]["windows"]] for each in (other, found))
    # A window without an answer, as on a busy machine, is left out.
    quotients = sorted(a / b for a, b in zip(ours, theirs, strict=True) if a and b)
    ratio = other["series"][0]["ratios"]["requests_per_s"]
    expected = [quotients[0], statistics.median(quotients), quotients[-1]]
    assert [ratio["least"], ratio["median"], ratio["most"]] == pytest.approx(expected)
    assert "sandbox standard over in process, threads, sandbox off:" in ended.stdout


def test_results_are_compared_by_conditions(cli: CommandLine) -> None:
    bench = (
        "bench", MODELS, "add_sub", "--concurrency", "1", "--seconds", "0.2", "--windows", "3",
        "--runs", "2", "--save", ".", "--export", "html,jsonl,hgrm,trace",
    )  # fmt: skip
    ended = cli(*bench)
    assert ended.returncode == 0, ended.stderr
    assert "95 % intervals of the means of 2 runs" in ended.stdout
    found = json.loads((cli.folder / "add_sub.json").read_text())
    [point] = found["series"]
    assert len(point["runs"]) == 2
    assert point["confidence"]["p50"]["low"] <= point["confidence"]["p50"]["high"]
    lines = (cli.folder / "add_sub.requests.jsonl").read_text().splitlines()
    assert len(lines) == sum(window["requests"] for window in point["windows"])
    assert "exists already" in cli(*bench).stderr

    # The same figures, half as fast.
    for each in [*point["runs"], point]:
        each["latency_us"]["p50"] *= 2
    (cli.folder / "slow.json").write_text(json.dumps(found))
    compare = ("bench", "compare", "add_sub.json", "slow.json")
    assert cli(*compare).returncode == 0
    ended = cli(*compare, "--fail-if", "p50>1000x", "--fail-if", "failed>0")
    assert ended.returncode == 0, ended.stderr
    ended = cli(*compare, "--fail-if", "p50>1us")
    assert ended.returncode == 1
    assert "failed: p50>1us at 1" in ended.stderr
    ended = cli(*compare, "--fail-if", "p50>")
    assert ended.returncode == 2
    assert "p50>" in ended.stderr
    assert cli("bench", "compare", "add_sub.json", "none.json").returncode == 1
    assert cli("bench", "compare", "none").stderr == "moonpool: error: none: No such file or directory\n"
    assert cli("bench", "models", "add_sub", "third").returncode == 2
    assert cli("bench", "models", "add_sub", "--fail-if", "p50>1x").returncode == 2


@pytest.mark.promise("Measuring (`moonpool bench`)", "All loads that did not settle share one line.")
def test_loads_that_did_not_settle_have_one_line(cli: CommandLine) -> None:
    ended = cli("bench", MODELS, "add_sub", "--concurrency", "1,2", "--seconds", "0.02", "--windows", "2")

    [line] = [line for line in ended.stderr.splitlines() if "still differed at the end" in line]
    assert "in process, threads with 1, 2 callers" in line
    one = cli("bench", MODELS, "add_sub", "--concurrency", "1", "--seconds", "0.02", "--windows", "2")
    assert "in process, threads with 1 caller;" in one.stderr


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
    ("value", "shown"), [(0, "0"), (0.01234, "0.0123"), (1.0, "1"), (1.234, "1.23"), (99.96, "100"), (12345, "12,300")]
)
def test_figures_have_three_digits(value: float, shown: str) -> None:
    assert figure(value) == shown
