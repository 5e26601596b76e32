"""Rates and latencies of the last minutes, sampled once a second from counts that the server keeps anyway.

Those of a model are of all requests that it executed. Those of all models together are of the requests of clients: what
an ensemble asks its steps, and models ask each other, is part of these.

Theory of operation. One thread takes the samples, `moonpool-history`. It starts with the first look, so a server whose
page nobody opens has no such thread unless it was started on purpose. `_lock` guards the samples, which are read while
a request is answered, and the start of the thread; it is not held while the counts of stubs are collected, since that
may wait for them. Nobody knows when the counts of the first sample came, so `start` takes it itself: what is counted
after a start is in the samples, however late the thread runs. `_starting` lets one caller do that. The thread ends by
`close` or by itself when the runtime is closed. `close` sets `_closing` under the lock, so that no start can come after
it, and joins without it.
"""

from __future__ import annotations

import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from moonpool.runtime.hosting.registry import ModelRegistry
from moonpool.runtime.observe.statistics import DURATION_BOUNDS_NS, Statistics
from moonpool.runtime.openai.pieces import NO_PIECES, PieceCounts
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.server.meter import ClientCounts
from moonpool.runtime.server.page.adviser import Adviser

# Returns the counts of the pieces of a model; None if there are none.
Pieces = Callable[[str], PieceCounts | None]
INTERVAL_S = 1.0
_INTERVAL_NS = int(INTERVAL_S * 1e9)
# The number of samples that plots show, and of those that a present rate covers.
SAMPLES = 180
WINDOW = 5


class _Counts(NamedTuple):
    """Has what is counted until a moment, or between two."""

    at_ns: int
    success: int = 0
    failure: int = 0
    success_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    by_duration: Sequence[int] = ()
    """The requests that succeeded, in the buckets of `_Series.bounds_ns`."""
    pieces: PieceCounts | None = None
    """None as long as the model has had no chat and no completion."""

    def since(self, before: _Counts) -> _Counts:
        """Return what came after `before`."""
        numbers = map(operator.sub, self[:-2], before[:-2])
        by_duration = list(map(operator.sub, self.by_duration, before.by_duration))
        pieces = None if self.pieces is None else self.pieces.minus(before.pieces or NO_PIECES)
        return _Counts._make((*numbers, by_duration, pieces))


class _Sample(NamedTuple):
    requests: int
    failures: int
    # The mean of the requests that succeeded; None without any.
    latency_us: int | None
    queued: int


class _Series:
    """One model version, or all clients: the samples for plots, and the last counts, for present rates."""

    def __init__(self, source: object, bounds_ns: Sequence[int], begin: _Counts) -> None:
        """`source` is what counts. One that is new begins another series."""
        self.source = source
        self.bounds_ns = bounds_ns
        self.counts = deque([begin], maxlen=WINDOW + 1)
        self.samples: deque[_Sample] = deque(maxlen=SAMPLES)

    def take(self, counts: _Counts, queued: int) -> None:
        came = counts.since(self.counts[-1])
        self.counts.append(counts)
        latency_us = came.success_ns // came.success // 1000 if came.success else None
        self.samples.append(_Sample(came.success + came.failure, came.failure, latency_us, queued))


class History:
    """Takes samples on a thread of its own. Any thread may call any method."""

    def __init__(
        self, models: ModelRegistry, clients: Callable[[], ClientCounts], pieces: Pieces, adviser: Adviser | None = None
    ) -> None:
        """`clients` returns the counts of the requests of all clients until now, `pieces` those of the pieces of a
        model, by its name.
        """
        self._pieces = pieces
        self._models = models
        self._count_clients = clients
        self._adviser = adviser or Adviser()
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        # By `name:version`, and by "" of the requests of clients.
        self._series: dict[str, _Series] = {}
        # The number of samples that were taken.
        self._taken = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Take the first sample, and go on until `close` or the end of the runtime. A second call does nothing. Raises
        `OutOfThreads`.
        """
        with self._starting:
            if self._thread is not None or self._closing.is_set() or self._models.is_closed:
                return
            self.sample()
            with self._lock:
                if not self._closing.is_set():
                    thread = threading.Thread(target=self._run, name="moonpool-history", daemon=True)
                    start_thread(thread)
                    self._thread = thread

    def _run(self) -> None:
        due_s = time.monotonic() + INTERVAL_S
        while not self._closing.wait(max(0.0, due_s - time.monotonic())):
            if self._models.is_closed:
                return
            self.sample()
            # After a suspension of the machine, or a stop in a debugger, missed samples are not made up for.
            due_s = max(due_s + INTERVAL_S, time.monotonic())

    def sample(self) -> None:
        """Take a sample of every model version now."""
        now_ns = time.monotonic_ns()
        served = list(self._models.served())
        self._adviser.sample(served)
        with self._lock:
            before, self._series = self._series, {}
            clients = self._count_clients()
            counts = _Counts(
                now_ns, clients.successes, clients.failures, clients.success_ns, by_duration=clients.by_duration
            )
            queued = sum(hosted.scheduler.queued for hosted in served)
            self._take("", before, self._count_clients, DURATION_BOUNDS_NS, counts, queued)
            for hosted in served:
                statistics = hosted.scheduler.statistics
                counts = _counts(statistics, now_ns, self._pieces(hosted.model.name))
                self._take(str(hosted), before, statistics, statistics.bounds_ns, counts, hosted.scheduler.queued)
            self._taken += 1

    def _take(
        self,
        name: str,
        before: Mapping[str, _Series],
        source: object,
        bounds_ns: Sequence[int],
        counts: _Counts,
        queued: int,
    ) -> None:
        series = before.get(name)
        if series is None or series.source is not source:
            begin = counts
            # Nobody knows when counts from before the first sample came. A version that is new later began after the
            # last one.
            if self._taken:
                begin = _Counts(counts.at_ns - _INTERVAL_NS, by_duration=[0] * len(counts.by_duration))
            series = _Series(source, bounds_ns, begin)
        self._series[name] = series
        series.take(counts, queued)

    def recent(self, name: str) -> dict[str, Any]:
        """Return rates per second, mean durations and quantiles of a model version over the last seconds."""
        came, window_s, bounds_ns = self._came(name)
        return {
            **_rates(came, window_s),
            "queue_us": _mean_us(came, came.queue_ns),
            "input_us": _mean_us(came, came.input_ns),
            "infer_us": _mean_us(came, came.infer_ns),
            "output_us": _mean_us(came, came.output_ns),
            **_quantiles(bounds_ns, came.by_duration),
            **_of_pieces(came.pieces, window_s),
        }

    def recent_of_clients(self) -> dict[str, Any]:
        """Return rates per second, mean duration and quantiles of the requests of clients over the last seconds."""
        came, window_s, bounds_ns = self._came("")
        return {**_rates(came, window_s), **_quantiles(bounds_ns, came.by_duration)}

    def _came(self, name: str) -> tuple[_Counts, float, Sequence[int]]:
        """Return what came in the last seconds, their number, and the bounds of its durations."""
        with self._lock:
            series = self._series.get(name)
            if series is None:
                return _Counts(0), INTERVAL_S, ()
            came = series.counts[-1].since(series.counts[0])
        return came, came.at_ns / 1e9 or INTERVAL_S, series.bounds_ns

    def advice(self, name: str) -> dict[str, Any] | None:
        """Return the advice on a model version; None for most."""
        return self._adviser.of(name)

    def since(self, number: int) -> dict[str, Any]:
        """Return the samples after the first `number`: of the requests of clients under "", and of each model by
        `name:version`.

        All lists end with the sample of the same moment. If some of these samples are dropped already, or `number` is
        another server's, all kept samples are returned.
        """
        with self._lock:
            wanted = self._taken - number if 0 <= number <= self._taken else SAMPLES
            return {
                "interval_s": INTERVAL_S,
                "taken": self._taken,
                "series": {name: _columns(series.samples, wanted) for name, series in self._series.items()},
            }

    def close(self) -> None:
        """End the sampling for good."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None:
            thread.join()


def _columns(samples: Iterable[_Sample], wanted: int) -> dict[str, list[int | None]]:
    rows = list(samples)[-wanted:] if wanted else []
    return {key: [getattr(row, key) for row in rows] for key in _Sample._fields}


def _counts(statistics: Statistics, at_ns: int, pieces: PieceCounts | None) -> _Counts:
    return _Counts(
        at_ns,
        statistics.success_count,
        statistics.fail_count,
        statistics.success_ns,
        statistics.queue_ns,
        statistics.input_ns,
        statistics.infer_ns,
        statistics.output_ns,
        list(statistics.by_duration),
        pieces,
    )


def _rates(came: _Counts, window_s: float) -> dict[str, float | None]:
    return {
        "requests_per_s": round((came.success + came.failure) / window_s, 2),
        "failures_per_s": round(came.failure / window_s, 2),
        "latency_us": _mean_us(came, came.success_ns),
    }


def _of_pieces(came: PieceCounts | None, window_s: float) -> dict[str, float | None]:
    """Return the rate of pieces and the time to the first one."""
    if came is None:
        return {"pieces_per_s": None, "first_piece_us": None}
    first_us = round(came.first_ns / came.answers / 1000, 1) if came.answers else None
    return {"pieces_per_s": round(came.pieces / window_s, 2), "first_piece_us": first_us}


def _mean_us(came: _Counts, total_ns: int) -> float | None:
    return round(total_ns / came.success / 1000, 1) if came.success else None


def _quantiles(bounds_ns: Sequence[int], by_duration: Sequence[int]) -> dict[str, int | None]:
    return {
        "half_within_us": _within_us(bounds_ns, by_duration, 0.5),
        "p99_within_us": _within_us(bounds_ns, by_duration, 0.99),
    }


def _within_us(bounds_ns: Sequence[int], by_duration: Sequence[int], part: float) -> int | None:
    """Return the least bound that at least this part of the requests stayed below; None if there is none."""
    wanted, below = part * sum(by_duration), 0
    for bound_ns, count in zip(bounds_ns, by_duration, strict=False):
        below += count
        if below and below >= wanted:
            return bound_ns // 1000
    return None
