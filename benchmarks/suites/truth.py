"""`moonpool bench` against what is known: latencies by a schedule, another generator, and planted regressions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from moonpool.benchmarks.comparison import Condition, changes_in_turns
from moonpool.benchmarks.data import DataMix, RequestData
from moonpool.benchmarks.loads import Concurrency
from moonpool.benchmarks.result import result
from moonpool.benchmarks.server import MeasuredServer
from moonpool.benchmarks.suites.figure import counted
from moonpool.benchmarks.suites.peer.presser import Case, Failed, Own, PerfAnalyzer, presser
from moonpool.benchmarks.suites.peer.served import MoonpoolServed
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.windows import Point, sweep
from moonpool.runtime.client.request import Endpoint, QuestionTensor

_MODEL = "timed"
_TIMEOUT_S = 60.0
# The sleeps of the schedule, evenly from 50 to 150 ms, in an order that has nothing of it. All instances sleep at once.
_SLEEPS_MS = np.random.default_rng(1).permutation(np.linspace(50, 150, 160))
_INSTANCES = 16
# Sleeps for two generators. Their number is prime to the numbers of callers: with 40, perf_analyzer's four callers did
# not send all of them equally often, and by the server's own statistics their requests took 5 % longer.
_NAPS_MS = np.random.default_rng(2).permutation(np.linspace(5, 20, 11)).tolist()
_TURNS = 10
_FIGURES = {"p50": 50, "p90": 90, "p95": 95, "p99": 99}
_WITHIN_2, _WITHIN_5 = "0.98 to 1.02", "0.95 to 1.05"
# A regression: each request takes a tenth more of the processor. A comparison has so many pairs of windows.
_WORK_MS, _SLOWER = 2.0, 1.1
_PAIRS, _WINDOW_S, _COMPARISONS = 12, 0.25, 20
_CONDITION = "p50>1.05x"


def measure(report: Report, quick: bool) -> None:
    """All three on servers of their own."""
    with contextlib.closing(MoonpoolServed((_MODEL,))) as server:
        for protocol in ("http", "grpc"):
            _schedule(report, server, protocol, 1 if quick else 10, quick)
        _regressions(report, server, quick)
    _another_generator(report, quick)


def _times(sleep_ms: float, work_ms: float) -> RequestData:
    array = np.array([sleep_ms, work_ms], np.float32)
    return RequestData([QuestionTensor.of("MS", "FP32", array)])


@contextlib.contextmanager
def _measured(
    server: MoonpoolServed, protocol: str, requests: Sequence[RequestData], callers: int
) -> Iterator[MeasuredServer]:
    endpoint = Endpoint(protocol, "127.0.0.1", server.port(protocol))
    found = MeasuredServer(endpoint, _MODEL, "", timeout_s=_TIMEOUT_S)
    try:
        mix = DataMix(requests, np.arange(len(requests), dtype=np.int32))
        found.prepare(mix, processes=1, most_connections=callers)
        yield found
    finally:
        found.close()


def _schedule(report: Report, server: MoonpoolServed, protocol: str, rounds: int, quick: bool) -> None:
    """Compare percentiles with those of the sleeps."""
    ratios: dict[str, list[float]] = {name: [] for name in _FIGURES}
    seconds = 0.2 if quick else 3.0
    with _measured(server, protocol, [_times(each, 0) for each in _SLEEPS_MS], _INSTANCES) as subject:
        for _ in range(rounds):
            window = subject.window(Concurrency(_INSTANCES), seconds)
            for name, percentile in _FIGURES.items():
                known_us = 1000 * float(np.percentile(_SLEEPS_MS, percentile))
                ratios[name].append(window.latency_us(percentile) / known_us)
    for name, values in ratios.items():
        what = f"{name} over the schedule's"
        report.ratio(what, values, column=protocol.upper(), goal=_WITHIN_2, headline=True)


def _regressions(report: Report, server: MoonpoolServed, quick: bool) -> None:
    """Count the comparisons in turns that find a planted regression, and those that find one where there is none."""
    condition = Condition.parse(_CONDITION)
    found: dict[str, list[float]] = {}
    for name, slower in (("planted", _SLOWER), ("none", 1.0)):
        with contextlib.ExitStack() as stack:
            old, new = (
                stack.enter_context(_measured(server, "http", [_times(0, _WORK_MS * factor)], 1))
                for factor in (1.0, slower)
            )
            found[name] = [float(_is_found(condition, old, new, quick)) for _ in range(1 if quick else _COMPARISONS)]
    for name, goal in (("planted", f"all {_COMPARISONS}"), ("none", "0")):
        what = f"comparisons that find 10 %, of {len(found[name])}"
        column = "10 % more work" if name == "planted" else "the same work"
        report.figure(what, "", [sum(found[name])], column=column, goal=goal, headline=True)


def _is_found(condition: Condition, old: MeasuredServer, new: MeasuredServer, quick: bool) -> bool:
    """Measure both in turns; return True if the condition is met, as by `bench compare` of the file."""
    load = Concurrency(1)
    points: list[Sequence[Point]] = list(
        sweep(
            [new, old],
            [load],
            seconds=0.05 if quick else _WINDOW_S,
            warm_up_s=0.05,
            most_windows=6 if quick else _PAIRS,
            # It never settles, so all pairs are measured.
            stable_percent=-1.0,
            tell=lambda *_: None,
        )
    )
    after, before = (result({}, [point])["series"][0] for point in points[0])
    return condition.failure(after, changes_in_turns(before, after)) is not None


def _another_generator(report: Report, quick: bool) -> None:
    """Measure one server by perf_analyzer and by moonpool's generator in turns."""
    other, own = presser(), Own()
    if not isinstance(other, PerfAnalyzer):
        report.skipped("perf_analyzer's figures", "perf_analyzer is not installed")
        return
    with contextlib.closing(MoonpoolServed((_MODEL, "add_sub"))) as server:
        for protocol in ("http",) if quick else ("http", "grpc"):
            for callers in (1,) if quick else (1, 4):
                # The model sleeps for most of a request, so that neither generator takes processors from it.
                naps = [{"MS": [sleep_ms, 0.0]} for sleep_ms in _NAPS_MS]
                known = Case(protocol, _MODEL, "FP32", {}, False, callers, values=naps)
                sums = {"INPUT0": 4, "INPUT1": 4}
                busy = Case(protocol, "add_sub", "FP32", sums, True, callers)
                for case, words, goal in ((known, "sleeps", _WITHIN_5), (busy, "adds", "")):
                    subject = f"a model that {words}"
                    try:
                        ratios, shares = _in_turns(case, server, other, own, quick)
                    except Failed as error:
                        report.skipped(f"perf_analyzer, {protocol}, {subject}", str(error))
                    else:
                        _show_turns(report, case, subject, goal, ratios, shares)
    report.note(
        "With few cores, a generator takes processors from a server that computes. So the figures of a model that adds "
        "tell how much each generator slows the server down; those of a model that sleeps tell if they agree."
    )


def _show_turns(
    report: Report, case: Case, subject: str, goal: str, ratios: dict[str, list[float]], shares: dict[str, list[float]]
) -> None:
    column = f"{case.protocol.upper()}, {counted(case.callers, 'caller')}"
    for name, values in ratios.items():
        what = f"{name} over perf_analyzer's, {subject}"
        report.ratio(what, values, column=column, goal=goal, headline=True)
    for generator, values in shares.items():
        what = f"the generator's share, {subject}, {generator}"
        report.figure(what, "cores", values, column=column, headline=True)


def _in_turns(
    case: Case, server: MoonpoolServed, other: PerfAnalyzer, own: Own, quick: bool
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the ratios of ours over theirs by figure, and the share of a core by generator."""
    ratios: dict[str, list[float]] = {"requests/s": [], "p50": [], "p99": []}
    shares: dict[str, list[float]] = {own.words: [], other.words: []}
    port = server.port(case.protocol)
    for turn in range(1 if quick else _TURNS):
        order = (other, own) if turn % 2 else (own, other)
        found = {each.words: each.press(case, port, 0.3 if quick else 3.0) for each in order}
        mine, theirs = found[own.words], found[other.words]
        for name, our, their in zip(ratios, mine, theirs, strict=False):
            ratios[name].append(our / their)
        for words, values in shares.items():
            values.append(found[words].generator_share)
    return ratios, shares


if __name__ == "__main__":
    main("truth", "Are the figures of `moonpool bench` true?", measure)
