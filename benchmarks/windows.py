"""Windows of a measurement: the figures of one window, and the sweep over all loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.benchmarks.generator.engine import CANCELLED, COLUMNS, DUE, END, FIRST, OUTCOME, SUCCEEDED
from moonpool.benchmarks.loads import Concurrency, Load, Schedule
from moonpool.benchmarks.resources import Resources, resources_together

PARTS = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, slots=True)
class Split:
    """The server's own account of a window, from its statistics: sums over the requests that succeeded."""

    requests: int
    rows: int
    executions: int
    # Keys are the names of the statistics extension.
    sums_ns: Mapping[str, int]

    def mean_us(self, part: str) -> float:
        """Return the mean microseconds of a part for one request; 0 without requests."""
        return self.sums_ns[part] / self.requests / 1000 if self.requests else 0.0

    @property
    def rows_per_execution(self) -> float:
        return self.rows / self.executions if self.executions else 0.0

    def as_dict(self) -> dict[str, object]:
        return {
            "requests": self.requests,
            "rows_per_execution": self.rows_per_execution,
            **{f"{part}_us": self.mean_us(part) for part in PARTS},
        }


def between(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Split | None:
    """Subtract one reading of `model_stats` from the next; None if one is missing."""
    if before is None or after is None:
        return None
    then, now = before.get("inference_stats", {}), after.get("inference_stats", {})
    return Split(
        requests=_grown(then, now, "success", "count"),
        rows=_number(after, "inference_count") - _number(before, "inference_count"),
        executions=_number(after, "execution_count") - _number(before, "execution_count"),
        sums_ns={part: _grown(then, now, part, "ns") for part in PARTS},
    )


def success_count(statistics: Mapping[str, Any]) -> int:
    """Return how many requests have succeeded, from an entry of `model_stats`."""
    return _number(statistics.get("inference_stats", {}).get("success", {}), "count")


def _grown(then: Mapping[str, Any], now: Mapping[str, Any], part: str, unit: str) -> int:
    return _number(now.get(part, {}), unit) - _number(then.get(part, {}), unit)


def _number(values: Mapping[str, Any], name: str) -> int:
    """Read a number. Protobuf's JSON leaves zeros out, and writes large numbers as text."""
    return int(values.get(name, 0))


def together(splits: Sequence[Split]) -> Split | None:
    """Add up; None without any."""
    if not splits:
        return None
    return Split(
        requests=sum(s.requests for s in splits),
        rows=sum(s.rows for s in splits),
        executions=sum(s.executions for s in splits),
        sums_ns={part: sum(s.sums_ns[part] for s in splits) for part in PARTS},
    )


PERCENTILES = {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
# A request that is sent later than this after its planned time was delayed.
_DELAY_NS = 1_000_000
# If a process of the generator takes this share of a core, it may itself limit the figures.
SATURATED = 0.9
# If more than this share of the planned requests was delayed, the load was not the requested one.
FALLS_BEHIND = 0.05


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Load of a model's instances: sums over a window."""

    instances: int
    # Processor seconds that the instances used, and that the machine was idle.
    used_s: float
    spare_s: float


@dataclass(frozen=True, slots=True)
class Log:
    """Each request of a window."""

    # A row for each request that has ended, with the engine's columns.
    rows: NDArray[np.int64]
    # The texts of errors, by their numbers.
    texts: Sequence[str] = ()

    @property
    def is_answered(self) -> NDArray[np.bool_]:
        answered: NDArray[np.bool_] = self.rows[:, OUTCOME] == SUCCEEDED
        return answered

    @property
    def latencies_ns(self) -> NDArray[np.int64]:
        """The latencies of the requests that were answered."""
        found: NDArray[np.int64] = (self.rows[:, END] - self.rows[:, DUE])[self.is_answered]
        return found

    @property
    def first_ns(self) -> NDArray[np.int64]:
        """The times to the first response, of requests in streams that had one."""
        rows = self.rows[self.rows[:, FIRST] > 0]
        found: NDArray[np.int64] = rows[:, FIRST] - rows[:, DUE]
        return found

    @property
    def cancelled(self) -> int:
        return int((self.rows[:, OUTCOME] == CANCELLED).sum())


def joined(logs: Sequence[Log]) -> Log:
    """Join logs; errors of one text get one number."""
    texts: dict[str, int] = {}
    parts = []
    for log in logs:
        rows = log.rows.copy()
        for number, text in enumerate(log.texts):
            rows[log.rows[:, OUTCOME] == number, OUTCOME] = texts.setdefault(text, len(texts))
        parts.append(rows)
    return Log(np.concatenate(parts) if parts else np.zeros((0, len(COLUMNS)), np.int64), list(texts))


def _none() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class Window:
    """Figures of one window. Times are in nanoseconds, one for each answered request, in no particular order."""

    seconds: float
    latencies_ns: NDArray[np.int64] = field(default_factory=_none)
    # Requests that failed, by the text of the error.
    errors: Counter[str] = field(default_factory=Counter)
    # Open loop: for each request, how much later than planned it was sent.
    late_ns: NDArray[np.int64] = field(default_factory=_none)
    # Planned requests that were never sent.
    unsent: int = 0
    # Streams: the time to the first response of a request, and between two responses.
    first_ns: NDArray[np.int64] = field(default_factory=_none)
    between_ns: NDArray[np.int64] = field(default_factory=_none)
    # Share of a core that the busiest process of the generator took; None for callers in this process.
    generator_share: float | None = None
    # The server's own account; None if it has no statistics.
    split: Split | None = None
    # Load of the instances and of the machine; None for a model behind a server.
    model: ModelLoad | None = None
    # Resources of the server, or of this process and its instances; None if they are not measured.
    resources: Resources | None = None
    # Each request by itself.
    log: Log = field(default_factory=lambda: Log(np.zeros((0, len(COLUMNS)), np.int64)))

    @property
    def requests_per_s(self) -> float:
        """The rate of answered requests."""
        return len(self.latencies_ns) / self.seconds if self.seconds else 0.0

    @property
    def responses(self) -> int:
        """The number of responses in streams."""
        return len(self.first_ns) + len(self.between_ns)

    @property
    def failed(self) -> int:
        return self.errors.total()

    @property
    def cancelled(self) -> int:
        """The number of requests that the load itself cancelled."""
        return self.log.cancelled

    def latency_us(self, percentile: float) -> float:
        """Return a percentile of the latency in microseconds; NaN without answers."""
        return percentile_us(self.latencies_ns, percentile)

    @property
    def mean_latency_us(self) -> float:
        """The mean latency in microseconds; NaN without answers."""
        return float(self.latencies_ns.mean()) / 1000 if len(self.latencies_ns) else float("nan")

    @property
    def delayed(self) -> int:
        """The number of requests that were sent more than a millisecond late, or never."""
        return int((self.late_ns > _DELAY_NS).sum()) + self.unsent


def percentile_us(times_ns: NDArray[np.int64], percentile: float) -> float:
    """Return a percentile in microseconds; NaN without times."""
    return float(np.percentile(times_ns, percentile)) / 1000 if len(times_ns) else float("nan")


def merged(windows: Sequence[Window]) -> Window:
    """Join windows into one that is as long as all of them."""
    shares = [w.generator_share for w in windows if w.generator_share is not None]
    return Window(
        seconds=sum(w.seconds for w in windows),
        latencies_ns=np.concatenate([w.latencies_ns for w in windows]),
        errors=sum((w.errors for w in windows), Counter()),
        late_ns=np.concatenate([w.late_ns for w in windows]),
        unsent=sum(w.unsent for w in windows),
        first_ns=np.concatenate([w.first_ns for w in windows]),
        between_ns=np.concatenate([w.between_ns for w in windows]),
        generator_share=max(shares, default=None),
        split=together([w.split for w in windows if w.split is not None]),
        model=_together([w.model for w in windows]),
        resources=resources_together([w.resources for w in windows]),
        log=joined([w.log for w in windows]),
    )


def _together(loads: Sequence[ModelLoad | None]) -> ModelLoad | None:
    """Add up; None if one is unknown, or if instances came or went."""
    known = [load for load in loads if load is not None]
    if not known or len(known) < len(loads) or len({load.instances for load in known}) > 1:
        return None
    return ModelLoad(known[0].instances, sum(load.used_s for load in known), sum(load.spare_s for load in known))


# Figures have settled when this many windows in a row agree, as in perf_analyzer.
COUNT = 3


def is_stable(windows: Sequence[Window], percent: float) -> bool:
    """Return True if rates and mean latencies of the last three windows are within `percent` of their mean."""
    last = windows[-COUNT:]
    if len(last) < COUNT or any(not len(window.latencies_ns) for window in last):
        return False
    rates = [window.requests_per_s for window in last]
    latencies = [window.mean_latency_us for window in last]
    return _agree(rates, percent) and _agree(latencies, percent)


def _agree(values: Sequence[float], percent: float) -> bool:
    mean = sum(values) / len(values)
    return all(abs(value - mean) <= mean * percent / 100 for value in values)


class Subject(Protocol):
    """A model that is measured, in this process or behind a server. For one thread."""

    # An address, or a few words for this process.
    where: str

    def window(self, load: Load, seconds: float) -> Window:
        """Measure one window, with the subject's own counts."""

    def advice(self, whole: Window) -> Mapping[str, Any] | None:
        """Return advice that would make the model quicker under the load of these windows, if any is known."""

    def measure_resources(self, metrics_url: str | None) -> None:
        """Measure the resources of each window from now on."""

    def instance_pids(self) -> Sequence[int]:
        """Return the processes of the model's instances that are ready. From any thread."""

    def answered(self) -> int | None:
        """Return how many requests the model has answered so far, by its host's count; None if that is unknown. From
        any thread.
        """

    def configuration_fields(self) -> dict[str, str] | None:
        """Return the digests of `digests_of_configuration` for the model; None if its configuration is unknown."""


@dataclass(frozen=True, slots=True)
class Point:
    """A subject under one load: all windows in order; `stable` is True if the last three agree."""

    load: Load
    windows: Sequence[Window]
    stable: bool
    # Advice for this load, in the form of `another_instance.advice`, if there is any.
    advice: Mapping[str, Any] | None = None
    # The points of several runs, of which this one is made.
    runs: Sequence[Point] = ()

    @property
    def whole(self) -> Window:
        """The last three windows, of each run, as one. Tables show this."""
        if self.runs:
            return merged([window for run in self.runs for window in run.windows[-COUNT:]])
        return merged(self.windows[-COUNT:])


def of_runs(runs: Sequence[Point]) -> Point:
    """Make one point of several with the same load; it is stable if all of them are."""
    return Point(
        runs[0].load,
        [window for run in runs for window in run.windows],
        all(run.stable for run in runs),
        runs[-1].advice,
        runs,
    )


def sweep(
    subjects: Sequence[Subject],
    loads: Iterable[Load],
    *,
    seconds: float,
    warm_up_s: float,
    most_windows: int,
    stable_percent: float,
    tell: Callable[[Load, int, Sequence[Window]], None],
) -> Iterator[list[Point]]:
    """Measure all loads; yield for each load a point of each subject. The next load is asked for after that.

    After a warm-up that does not count, the subjects have one window each in every round, until all of them are stable
    or have had `most_windows`. Another subject begins in each round, so that a drift of the machine hits all of them
    alike. `tell` is called before each round with its number, 0 for the warm-up, and the windows of the round before.
    """
    for load in loads:
        if warm_up_s:
            tell(load, 0, ())
            for subject in subjects:
                # A schedule has a length of its own.
                subject.window(Concurrency(1) if isinstance(load, Schedule) else load, warm_up_s)
        windows: list[list[Window]] = [[] for _ in subjects]
        for turn in range(most_windows):
            tell(load, turn + 1, [each[-1] for each in windows if each])
            shift = turn % len(subjects)
            for index in [*range(shift, len(subjects)), *range(shift)]:
                windows[index].append(subjects[index].window(load, seconds))
            if all(is_stable(each, stable_percent) for each in windows):
                break
        yield [
            Point(load, each, is_stable(each, stable_percent), subject.advice(merged(each[-COUNT:])))
            for subject, each in zip(subjects, windows, strict=True)
        ]
