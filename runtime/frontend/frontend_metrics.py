"""Connections and answers of the frontends, by protocol."""

from __future__ import annotations

import threading

from moonpool.runtime.exposition import Family, Sample


class Meter:
    """What one protocol counts. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str | int, int] = {}
        self._opened = self._closed = 0

    def connected(self) -> None:
        """A client has a connection more."""
        with self._lock:
            self._opened += 1

    def disconnected(self) -> None:
        """One that was counted is no more."""
        with self._lock:
            self._closed += 1

    def answered(self, status: str | int) -> None:
        """A request has its answer: with an HTTP status, or the name of a gRPC code."""
        with self._lock:
            self._answers[status] = self._answers.get(status, 0) + 1

    def counts(self) -> tuple[int, int, dict[str, int]]:
        """Connections ever, those that are open, and answers by status."""
        with self._lock:
            answers = {str(status): count for status, count in self._answers.items()}
            return self._opened, self._opened - self._closed, answers


class FrontendMetrics:
    """All protocols. They are there from the start, so that a rate of nothing is 0."""

    def __init__(self) -> None:
        self.http = Meter()
        self.grpc = Meter()

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
