"""Counts what each protocol of a server does: connections, answers, and how long requests of its clients took.

Theory of operation. The protocols count connections and answers on the thread of their event loop alone, so a `Meter`
needs no lock for them: only that thread writes, and readers copy. Requests in a stream of gRPC end on any thread, so
`ClientRequests` has a lock.
"""

from __future__ import annotations

import operator
from _thread import allocate_lock
from time import monotonic_ns
from typing import NamedTuple

from moonpool.runtime.observe.distributions import BucketCounts
from moonpool.runtime.observe.statistics import DURATION_BOUNDS_NS


class ClientRequests:
    """Counts the requests for inference that clients have asked, each of them once, whatever its model asked further.

    Thread-safe.

    Durations are nanoseconds, from the time when a request was received until its response was sent.
    """

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._failures = 0
        # Of those that succeeded.
        self._durations = BucketCounts(DURATION_BOUNDS_NS)

    def ended(self, received_ns: int, has_failed: bool) -> None:
        """Count a request that was received at that time of `time.monotonic_ns`.

        One that its client gave up has failed.
        """
        taken_ns = monotonic_ns() - received_ns
        with self._lock:
            if has_failed:
                self._failures += 1
            else:
                self._durations.add(taken_ns)

    def counts(self) -> ClientCounts:
        """Return the counts until now."""
        with self._lock:
            by_duration = list(self._durations.counts)
            return ClientCounts(self._failures, self._durations.total, by_duration)


class ClientCounts(NamedTuple):
    """Counts of `ClientRequests` until some time."""

    failures: int
    success_ns: int
    by_duration: list[int]
    """The requests that succeeded, in the buckets of `DURATION_BOUNDS_NS`."""

    @property
    def successes(self) -> int:
        """The number of requests that succeeded."""
        return sum(self.by_duration)

    def plus(self, other: ClientCounts) -> ClientCounts:
        """Return the sum of two counts."""
        by_duration = list(map(operator.add, self.by_duration, other.by_duration))
        return ClientCounts(self.failures + other.failures, self.success_ns + other.success_ns, by_duration)


class Meter:
    """The counts of one protocol. One thread counts, except in `clients`, and any thread may read."""

    def __init__(self) -> None:
        self.clients = ClientRequests()
        self._answers: dict[str | int, int] = {}
        self._opened = self._closed = 0

    def connected(self) -> None:
        """Count a connection that was opened."""
        self._opened += 1

    def disconnected(self) -> None:
        """Count the end of a connection."""
        self._closed += 1

    def answered(self, status: str | int) -> None:
        """Count a request that has ended, by HTTP status or by the name of a gRPC code."""
        self._answers[status] = self._answers.get(status, 0) + 1

    def counts(self) -> tuple[int, int, dict[str, int]]:
        """Return all connections until now, those that are open, and the answers by status."""
        answers = {str(status): count for status, count in self._answers.copy().items()}
        return self._opened, self._opened - self._closed, answers
