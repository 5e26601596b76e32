"""Connections and answers of the frontends, by protocol."""

from __future__ import annotations

import threading
from collections import defaultdict

from moonpool.runtime.exposition import Family, Sample


class Meter:
    """What one protocol counts, on one thread; any thread may read."""

    def __init__(self) -> None:
        self._answers: defaultdict[str | int, int] = defaultdict(int)
        self._opened = self._closed = 0

    def connected(self) -> None:
        """A client has a connection more."""
        self._opened += 1

    def disconnected(self) -> None:
        """One that was counted is no more."""
        self._closed += 1

    def answered(self, status: str | int) -> None:
        """A request has its answer: with an HTTP status, or the name of a gRPC code."""
        self._answers[status] += 1

    def counts(self) -> tuple[int, int, dict[str, int]]:
        """Connections ever, those that are open, and answers by status."""
        answers = {str(status): count for status, count in self._answers.copy().items()}
        return self._opened, self._opened - self._closed, answers


class SharedMeter(Meter):
    """A meter that many threads count on."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def answered(self, status: str | int) -> None:
        with self._lock:
            super().answered(status)


class FrontendMetrics:
    """All protocols. They are there from the start, so that a rate of nothing is 0."""

    def __init__(self) -> None:
        self.http = Meter()
        self.grpc = SharedMeter()

    def families(self) -> list[Family]:
        """As they are now."""
        ever, present, answers = [], [], []
        for protocol, meter in (("http", self.http), ("grpc", self.grpc)):
            labels = (("protocol", protocol),)
            opened, is_open, by_status = meter.counts()
            ever.append(Sample("", labels, opened))
            present.append(Sample("", labels, is_open))
            for status, count in sorted(by_status.items()):
                answers.append(Sample("", (*labels, ("status", status)), count))
        return [
            Family(
                "moonpool_frontend_connections_total",
                "Connections that clients have opened",
                "counter",
                ever,
            ),
            Family(
                "moonpool_frontend_open_connections", "Connections that are open", "gauge", present
            ),
            Family(
                "moonpool_frontend_requests_total",
                "Requests of any kind that were answered, by HTTP status or gRPC code",
                "counter",
                answers,
            ),
        ]
