"""`moonpool bench --loadgen`: MLPerf's LoadGen, with a model in process and behind a server."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from tests.benchmarks.conftest import Kserve, kserve
from tests.runtime.cli.shell import MODELS, CommandLine

from moonpool.benchmarks import loadgen
from moonpool.benchmarks.loadgen import LoadGenPlan, LoadGenResult

__all__ = ["kserve"]

HAS_LOADGEN = importlib.util.find_spec("mlperf_loadgen") is not None
needs_loadgen = pytest.mark.skipif(not HAS_LOADGEN, reason="LoadGen (mlcommons-loadgen) is missing")
SHAPES = ("--shape", "INPUT0=4", "--shape", "INPUT1=4")


@needs_loadgen
@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "MLPerf's LoadGen can send the requests, in its four scenarios, to a model in process or behind a server; its logs "
    "are kept.",
)
@pytest.mark.parametrize(
    ("scenario", "where"),
    [("SingleStream", "process"), ("Offline", "process"), ("Server", "http"), ("MultiStream", "grpc")],
)
def test_a_scenario_is_run(cli: CommandLine, kserve: Kserve, scenario: str, where: str) -> None:
    subject = [MODELS, "add_sub"] if where == "process" else ["add_sub", "--url", kserve.endpoint(where).url]
    # On a busy machine a tight limit would make the result invalid.
    limits = ["--request-rate", "50", "--slo", "p99=60s"] if scenario == "Server" else []
    ended = cli(
        "bench", *subject, "--loadgen", scenario, "--seconds", "0.2", "--warm-up", "0.1", *limits, *SHAPES,
        "--save", ".",
    )  # fmt: skip

    logs = cli.folder / f"add_sub-{scenario}"
    summary = (logs / "mlperf_log_summary.txt").read_text()
    facts = json.loads((logs / "moonpool.json").read_text())
    assert scenario.lower() in summary.lower().replace(" ", "")
    assert "MLPerf Results Summary" in ended.stdout
    assert (facts["scenario"], facts["failed"]) == (scenario, 0)
    # LoadGen may call a run of a busy machine too short.
    assert ended.returncode == (0 if facts["valid"] else 1), ended.stderr
    assert (logs / "mlperf_log_detail.txt").stat().st_size


class _FakeLoadGen:
    """LoadGen as far as a scenario is set; keeps the settings."""

    def __init__(self) -> None:
        self.settings = SimpleNamespace()
        names = {name: name for name in loadgen.SCENARIOS}
        self.TestScenario = SimpleNamespace(**names)
        self.TestMode = SimpleNamespace(PerformanceOnly=0)

    def TestSettings(self) -> Any:  # noqa: N802 - as LoadGen has it
        return self.settings


@pytest.mark.parametrize(("scenario", "samples"), [("SingleStream", 1), ("MultiStream", 8)])
def test_a_model_may_be_faster_than_the_guess(scenario: str, samples: int) -> None:
    guess_per_s = 1000.0
    fake = _FakeLoadGen()
    loadgen._settings(fake, LoadGenPlan(scenario, samples, 0.2), guess_per_s)
    expected = {name: each for name, each in vars(fake.settings).items() if "expected" in name}

    [expected_ns] = expected.values()
    # LoadGen would run out of queries.
    assert expected_ns <= 1e9 * samples / guess_per_s / 4


@pytest.mark.parametrize(
    ("unmet", "words"),
    [
        ("", None),
        ("Early stopping satisfied: NO", "Not satisfied: Early stopping. A longer run (--seconds)"),
        ("Performance constraints satisfied : NO", "Not satisfied: Performance constraints"),
    ],
)
def test_an_invalid_result_has_a_reason(unmet: str, words: str | None) -> None:
    summary = f"Result is : X\n  Min queries satisfied : Yes\n  {unmet}\n"
    found = LoadGenResult(summary, "6", Counter()).complaint

    assert (found is None) if words is None else (found is not None and words in found)
    assert "(--seconds)" not in (found or "") or "Performance" not in unmet


@needs_loadgen
def test_requests_that_fail_make_a_run_invalid(cli: CommandLine, kserve: Kserve) -> None:
    ended = cli("bench", "fails", "--url", kserve.grpc.url, "--loadgen", "Offline", "--seconds", "0.1")

    assert ended.returncode == 1
    assert "no luck today" in ended.stderr


@pytest.mark.skipif(HAS_LOADGEN, reason="LoadGen is here")
def test_without_loadgen_it_is_said_how_to_install_it(cli: CommandLine) -> None:
    ended = cli("bench", MODELS, "add_sub", "--loadgen", "Offline")

    assert ended.returncode == 1
    assert "mlcommons-loadgen" in ended.stderr
