"""Confidence intervals, comparisons of results, and files with each request."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonpool.benchmarks.comparison import (
    BadCondition,
    Change,
    Condition,
    change,
    changes,
    changes_in_turns,
    confidence,
    paired_change,
    quantile_of_t,
)
from moonpool.benchmarks.export import WRITERS, histogram_lines, rows, trace_events
from moonpool.benchmarks.generator.engine import CANCELLED, COLUMNS, DUE, END, FIRST, OUTCOME, SENT, SUCCEEDED
from moonpool.benchmarks.loads import Rate
from moonpool.benchmarks.windows import Log, Point, Window, of_runs
from moonpool.runtime.client.request import MissingPackage

MS = 1_000_000


def point(p99_us: list[float], rate: float = 100.0) -> dict[str, Any]:
    """A point of a result with a window for each of these latencies."""
    windows = [{"requests_per_s": rate, "failed": 0, "latency_us": {"p99": each, "p50": each / 2}} for each in p99_us]
    return {"concurrency": 4, **windows[0], "windows": windows}


def test_the_quantiles_are_those_of_tables() -> None:
    assert quantile_of_t(1) == 12.706
    assert quantile_of_t(4.9) == 2.776
    assert quantile_of_t(0.5) == 12.706
    assert quantile_of_t(1000) == pytest.approx(2.0, abs=0.05)


def test_an_interval_has_the_mean_in_nineteen_of_twenty_cases() -> None:
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(1000):
        runs = point(generator.normal(100, 10, 5).tolist())["windows"]
        interval = confidence(runs)["p99"]
        hits += interval["low"] <= 100 <= interval["high"]

    assert 925 <= hits <= 975


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "`bench compare A B --fail-if 'p99>1.05x'` finds a regression of 10 % in noise of 2 %, and none where there is "
    "none.",
)
def test_a_planted_regression_is_found_and_no_other_one() -> None:
    generator = np.random.default_rng(7)
    condition = Condition.parse("p99>1.05x")

    def failure(slower: float) -> str | None:
        old, new = (point((generator.normal(1000 * factor, 20, 5)).tolist()) for factor in (1.0, slower))
        return condition.failure(new, changes(old, new))

    assert [failure(1.10) is not None for _ in range(20)] == [True] * 20
    assert [failure(1.0) for _ in range(20)] == [None] * 20


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "Two servers that were measured in turns are compared pair by pair: a drift or a burst of the machine neither "
    "hides a regression of 10 % nor makes one up.",
)
def test_a_regression_is_found_under_a_machine_s_moods() -> None:
    generator = np.random.default_rng(3)
    condition = Condition.parse("p99>1.05x")

    def failure(slower: float) -> str | None:
        # It becomes half as quick on the way, and one window in ten takes three times as long.
        drift = np.linspace(1000, 1500, 15)
        sides = []
        for factor in (1.0, slower):
            bursts = np.where(generator.random(15) < 0.1, 3.0, 1.0)
            sides.append(point((drift * factor * bursts * generator.normal(1, 0.02, 15)).tolist()))
        old, new = sides
        return condition.failure(new, changes_in_turns(old, new))

    assert [failure(1.10) is not None for _ in range(20)] == [True] * 20
    assert [failure(1.0) for _ in range(20)] == [None] * 20


def test_few_pairs_have_a_wide_interval() -> None:
    assert paired_change([100], [120]) == Change(pytest.approx(1.2), 0.0, math.inf)  # type: ignore[arg-type]
    assert paired_change([0.0], [1]) is None
    two = paired_change([100, 100], [110, 112])
    assert two is not None
    assert not two.is_certain
    many = paired_change([100.0] * 6, [110, 110, 111, 112, 109, 400])
    assert many is not None
    assert many.ratio == pytest.approx(1.105, abs=0.001)
    assert many.is_certain


def test_a_ratio_that_noise_explains_is_not_certain() -> None:
    wide = change([100, 200, 150], [130, 240, 170])
    clear = change([100, 101, 99], [120, 121, 119])

    assert wide is not None
    assert not wide.is_certain
    assert clear is not None
    assert clear.is_certain
    assert clear.ratio == pytest.approx(1.2, rel=0.001)
    assert clear.low < clear.ratio < clear.high
    # One sample has no interval, and zeros have no ratio.
    assert change([100], [120]) == Change(pytest.approx(1.2), 0.0, math.inf)  # type: ignore[arg-type]
    assert change([0, 1], [1, 1]) is None
    # Equal samples leave no doubt.
    assert change([100, 100], [110, 110]) == Change(*[pytest.approx(1.1)] * 3)  # type: ignore[arg-type]


def test_runs_are_compared_where_there_are_runs() -> None:
    old, new = point([100, 100, 100]), point([200, 200, 200])
    old["runs"], new["runs"] = point([100, 101])["windows"], point([150, 151])["windows"]

    assert changes(old, new)["p99"].ratio == pytest.approx(1.4975, rel=0.01)
    assert "p90" not in changes(old, new)


@pytest.mark.parametrize(
    ("text", "is_met"),
    [
        ("p99>1.1x", True),
        ("p99>1.3x", False),
        ("p50<0.9x", False),
        ("p99>0.1ms", True),
        ("p99>0.2ms", False),
        ("p99 > 115us", True),
        ("requests_per_s<200", True),
        ("failed>0", False),
        ("p90>1.1x", True),
        ("p90>5ms", True),
    ],
)
def test_a_condition_is_met_or_not(text: str, is_met: bool) -> None:
    old, new = point([100, 101, 99]), point([120, 121, 119])

    assert (Condition.parse(text).failure(new, changes(old, new)) is not None) == is_met


@pytest.mark.parametrize("text", ["p99", "p98>1x", "p99=1x", "p99>x", "p99>-1x", "p99>soon", "failed>nan", ">1x"])
def test_conditions_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadCondition):
        Condition.parse(text)


def measured() -> Point:
    """A window with an answer, a stream's answer, a failure and a cancelled request."""
    log = np.zeros((4, len(COLUMNS)), np.int64)
    log[:, DUE] = np.array([0, 2, 4, 6]) * MS + 10**12
    log[:, SENT] = log[:, DUE] + [0, MS, 0, 0]
    log[:, END] = log[:, DUE] + np.array([1, 5, 1, 1]) * MS
    log[1, FIRST] = log[1, DUE] + 3 * MS
    log[:, OUTCOME] = [SUCCEEDED, SUCCEEDED, 0, CANCELLED]
    whole = Log(log, ["no luck"])
    return Point(Rate(5), [Window(1.0, whole.latencies_ns, log=whole)] * 3, stable=True)


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "Each request can be written as a line of JSON or a row of Parquet, and all of them as a histogram or a trace for "
    "Perfetto.",
)
def test_each_request_has_a_row(tmp_path: Path) -> None:
    WRITERS["jsonl"][1](tmp_path / "a", [measured()])
    lines = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]

    assert len(lines) == 12
    first, stream, failed, cancelled = lines[:4]
    assert first == {
        "request_rate": 5, "distribution": "poisson", "window": 0, "at_s": 0.0, "sent_s": 0.0,
        "first_s": None, "latency_s": 0.001, "request": 0, "outcome": "answered",
    }  # fmt: skip
    assert (stream["sent_s"], stream["first_s"], stream["latency_s"]) == (0.001, 0.003, 0.005)
    assert (failed["outcome"], cancelled["outcome"]) == ("no luck", "cancelled")


def test_a_table_of_parquet_is_what_pyarrow_reads(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    if importlib.util.find_spec("pyarrow") is None:
        with pytest.raises(MissingPackage, match="pyarrow"):
            WRITERS["parquet"][1](path, [measured()])
        return
    from pyarrow import parquet

    WRITERS["parquet"][1](path, [measured()])

    assert parquet.read_table(path).to_pylist() == list(rows([measured()]))


def test_a_histogram_has_the_percentiles(tmp_path: Path) -> None:
    latencies_ns = np.arange(1, 1001) * MS
    lines = list(histogram_lines(latencies_ns))
    table = [list(map(float, line.split())) for line in lines[1:] if not line.startswith("#")]

    for value_ms, share, count, *_ in table:
        assert value_ms == count
        assert count == pytest.approx(max(1, share * 1000), abs=1)
    assert [row[0] for row in table] == sorted(row[0] for row in table)
    assert table[-1][:3] == [1000, 1, 1000]
    assert any(share == 0.5 and value == 500 for value, share, *_ in table)
    assert len(table) > 40
    assert "Total count    =         1000" in lines[-1]
    assert len(list(histogram_lines(np.zeros(0, np.int64)))) == 1
    WRITERS["hgrm"][1](tmp_path / "a", [measured()])
    assert (tmp_path / "a").read_text().startswith("# 5 requests/s asked for\n")


def test_a_trace_has_requests_on_tracks(tmp_path: Path) -> None:
    WRITERS["trace"][1](tmp_path / "a", [measured()])
    events = json.loads((tmp_path / "a").read_text())["traceEvents"]

    assert events == list(trace_events([measured()]))
    requests = [event for event in events if event["name"] == "request"]
    # The second request is still in flight when the third one comes.
    assert [event["tid"] for event in requests[:4]] == [1, 1, 2, 2]
    waits = [event for event in events if event["name"] == "wait to be sent"]
    assert [event["dur"] for event in waits] == [1000.0] * 3
    assert list(trace_events([])) == []


def test_a_point_of_runs_has_the_windows_of_all() -> None:
    whole = of_runs([measured(), measured()])

    assert len(whole.whole.latencies_ns) == 12
    assert len(whole.windows) == 6
    assert whole.stable
