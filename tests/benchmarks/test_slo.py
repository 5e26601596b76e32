"""Limits of latency, the search for the highest rate that keeps them, and the shapes of loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moonpool.benchmarks.generator.engine import CANCELLED, COLUMNS, DUE, END, FIRST, OUTCOME, SUCCEEDED
from moonpool.benchmarks.loads import BadLoad, Rate, Schedule, Shape, seconds_of, share_of
from moonpool.benchmarks.slo import RateSearch, Slo
from moonpool.benchmarks.windows import Log, Point, Window, joined


def window(latencies_ms: list[float], first_ms: float = 0, cancelled: int = 0) -> Window:
    """A window of one second with these latencies."""
    rows = np.zeros((len(latencies_ms) + cancelled, len(COLUMNS)), np.int64)
    rows[:, DUE] = np.arange(len(rows)) * 1000
    rows[: len(latencies_ms), OUTCOME] = SUCCEEDED
    rows[: len(latencies_ms), END] = np.array(latencies_ms) * 1e6
    rows[:, END] += rows[:, DUE]
    rows[len(latencies_ms) :, OUTCOME] = CANCELLED
    if first_ms:
        rows[: len(latencies_ms), FIRST] = rows[: len(latencies_ms), DUE] + int(first_ms * 1e6)
    log = Log(rows)
    return Window(1.0, log.latencies_ns, late_ns=np.zeros(len(rows), np.int64), first_ns=log.first_ns, log=log)


def point(rate: float, latencies_ms: list[float], **more: float) -> Point:
    return Point(Rate(rate), [window(latencies_ms, **more)] * 3, stable=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "limits_us"),
    [
        ("p99=20ms", {"p99": 20_000}),
        ("p50=1.5,max=2s", {"p50": 1500, "max": 2e6}),
        ("mean=300us,first=5ms", {"mean": 300, "first": 5000}),
    ],
)
def test_limits_are_read(text: str, limits_us: dict[str, float]) -> None:
    assert Slo.parse(text).limits_us == pytest.approx(limits_us)


@pytest.mark.parametrize("text", ["", "p98=1ms", "p99", "p99=fast", "p99=0ms", "p99=-1ms"])
def test_limits_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadLoad):
        Slo.parse(text)


def test_a_load_holds_if_nothing_breaks_it() -> None:
    slo = Slo.parse("p99=20ms,mean=10ms")

    assert slo.broken(point(100, [5.0] * 100)) is None
    assert slo.broken(point(100, [5.0] * 90 + [30.0] * 10)) == "p99 30 ms"
    assert slo.broken(point(100, [15.0] * 100)) == "mean 15 ms"
    assert slo.broken(point(200, [5.0] * 100)) == "50% of the rate"
    late = point(100, [5.0] * 100)
    late.windows[0].late_ns[:10] = 2_000_000
    assert slo.broken(late) == "30 of 300 sent late"
    assert slo.broken(Point(Rate(100), [window([5.0] * 100)] * 3, stable=False)) == "not settled"
    assert slo.broken(point(100, [])) == "no request was answered"


def test_goodput_counts_the_answers_within_the_limits() -> None:
    assert Slo.parse("p99=20ms").goodput_per_s(window([5.0] * 90 + [30.0] * 10)) == 90
    # An answer that is slower than the median's limit is as good as others.
    assert Slo.parse("p50=1ms,p99=20ms").goodput_per_s(window([5.0] * 10)) == 10
    assert Slo.parse("first=2ms").goodput_per_s(window([5.0] * 10, first_ms=1)) == 10
    assert Slo.parse("first=2ms").goodput_per_s(window([5.0] * 10, first_ms=3)) == 0
    assert Slo.parse("first=2ms").goodput_per_s(window([5.0] * 10)) == 0
    assert Slo.parse("p99=20ms").goodput_per_s(window([5.0] * 10, cancelled=5)) == 10


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "`--slo` finds the highest rate that holds within 5 %, and gives the goodput at each rate.",
)
@pytest.mark.parametrize("capacity", [0.7, 37.0, 1234.0, 98_000.0])
@pytest.mark.parametrize("start", [1.0, 500.0])
def test_the_search_finds_the_highest_rate_that_holds(capacity: float, start: float) -> None:
    slo = Slo.parse("p99=20ms")
    search = RateSearch(slo, start, "poisson", window_s=20.0)
    points = []
    for load in search:
        # A rate is measured by what a server of that capacity would answer.
        answers = [5.0 if load.per_s <= capacity else 50.0] * max(1, round(min(load.per_s, 1000)))
        whole = Window(len(answers) / load.per_s, (np.array(answers) * 1e6).astype(np.int64))
        points.append(Point(load, [whole] * 3, stable=True))
        search.saw(points[-1])

    found = slo.as_dict(points)
    assert found["highest_rate"] <= capacity < found["lowest_broken_rate"]
    assert found["highest_rate"] == pytest.approx(capacity, rel=0.06)
    assert len(points) < 25


def test_a_search_without_any_rate_that_holds_ends() -> None:
    slo = Slo.parse("p99=1us")
    search = RateSearch(slo, 100.0, "constant", window_s=0.5)
    points = []
    for load in search:
        points.append(point(load.per_s, [5.0]))
        search.saw(points[-1])

    assert slo.as_dict(points)["highest_rate"] is None
    # At a lower rate a window would have less than ten requests.
    assert [each.load.per_s for each in points if isinstance(each.load, Rate)] == [100, 50, 25, 20]


def test_logs_are_joined_with_one_number_for_each_text() -> None:
    rows = np.zeros((3, len(COLUMNS)), np.int64)
    rows[:, OUTCOME] = [SUCCEEDED, 0, 1]
    whole = joined([Log(rows, ["a", "b"]), Log(rows, ["b", "a"])])

    outcomes = whole.rows[:, OUTCOME].tolist()
    assert [whole.texts[each] if each >= 0 else "" for each in outcomes] == [
        "", "a", "b", "", "b", "a",
    ]  # fmt: skip
    assert rows[:, OUTCOME].tolist() == [SUCCEEDED, 0, 1]


@pytest.mark.parametrize(("text", "seconds"), [("20ms", 0.02), ("250us", 0.00025), ("2", 2.0), ("1.5 min", 90.0)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)


def test_shares_are_read() -> None:
    assert share_of("5%") == share_of("0.05") == pytest.approx(0.05)
    for text in ("0", "101%", "many", "nan"):
        with pytest.raises(BadLoad):
            share_of(text)


def counts(text: str, seconds: float, distribution: str = "constant") -> list[int]:
    """The requests in each tenth of a window."""
    due_ns = Shape.parse(text, distribution).due_ns(seconds, seed=1)
    assert (np.diff(due_ns) >= 0).all()
    found: list[int] = np.histogram(due_ns, 10, (0, seconds * 1e9))[0].tolist()
    return found


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "The rate of an open loop may grow, swing or come in bursts, or follow the times in a file.",
)
def test_a_load_has_its_shape() -> None:
    ramp = counts("ramp:0-1000", 10.0)
    assert ramp == pytest.approx([50 + 100 * each for each in range(10)], abs=3)
    burst = counts("burst:100-1000/5s/20%", 10.0)
    assert burst == pytest.approx([1000, 100, 100, 100, 100] * 2, abs=3)
    swing = counts("periodic:0-1000/10s", 10.0)
    assert sum(swing) == pytest.approx(5000, abs=10)
    assert swing[0] < 60 < 940 < swing[4]
    assert sum(counts("ramp:0-1000", 10.0, "poisson")) == pytest.approx(5000, rel=0.1)


@pytest.mark.parametrize(
    "text",
    [
        "ramp", "ramp:1", "ramp:0-0", "ramp:1-2/5s", "periodic:1-2", "burst:1-2/5s", "burst:1-2/5s/0",
        "saw:1-2", "periodic:1-2/0s", "ramp:1.1.1-2",
    ],
)  # fmt: skip
def test_shapes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadLoad):
        Shape.parse(text, "poisson")


def test_a_schedule_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "times.txt"
    file.write_text("10\n10.5\n12\n")

    assert Schedule.read(file, 2.0).due_ns(1.0, 1).tolist() == [0, 250_000_000, 1_000_000_000]
    for text in ("", "1\n0.5\n", "soon\n", "nan\n"):
        file.write_text(text)
        with pytest.raises(BadLoad):
            Schedule.read(file, 1.0)
