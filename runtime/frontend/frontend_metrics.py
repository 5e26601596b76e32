"""Connections and answers of the frontends, by protocol."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from moonpool.runtime.exposition import Family, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator


# gRPC's library does not tell of connections, and nothing is better than a 0 that is none.
_WITH_CONNECTIONS = frozenset({"http"})


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
        """A request has ended: with an HTTP status, or the name of a gRPC code."""
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


class Traffic(NamedTuple):
    """What a protocol has counted since somebody asked last."""

    protocol: str
    opened: int
    closed: int
    answers: list[tuple[str, int]]


class FrontendMetrics:
    """All protocols. They are there from the start, so that a rate of nothing is 0."""

    def __init__(self) -> None:
        self.http = Meter()
        self.grpc = SharedMeter()
        self._told: dict[str, tuple[int, int, dict[str, int]]] = {}
        # What other processes count, where those have the clients: by protocol, and of each that lives what is open.
        self._lock = threading.Lock()
        self._elsewhere: dict[str, tuple[int, dict[str, int]]] | None = None
        self._open: dict[object, dict[str, int]] = {}

    # Of this process for another one

    def take(self) -> list[Traffic]:
        """What came since the last time. For one thread."""
        came = []
        for protocol, meter in (("http", self.http), ("grpc", self.grpc)):
            before = self._told.get(protocol, (0, 0, {}))
            now = self._told[protocol] = meter.counts()
            opened, closed = now[0] - before[0], now[0] - now[1] - (before[0] - before[1])
            answers = [(s, n - before[2].get(s, 0)) for s, n in now[2].items()]
            answers = [(status, count) for status, count in answers if count]
            if opened or closed or answers:
                came.append(Traffic(protocol, opened, closed, answers))
        return came

    # Of other processes in this one

    def count_elsewhere(self) -> None:
        """From now on clients are other processes', and who comes here comes from them."""
        with self._lock:
            self._elsewhere = {"http": (0, {}), "grpc": (0, {})}

    def add(self, source: object, traffic: Traffic) -> None:
        """What another process has counted."""
        with self._lock:
            if self._elsewhere is None or traffic.protocol not in self._elsewhere:
                return
            opened, answers = self._elsewhere[traffic.protocol]
            for status, count in traffic.answers:
                answers[status] = answers.get(status, 0) + count
            self._elsewhere[traffic.protocol] = opened + traffic.opened, answers
            its_open = self._open.setdefault(source, {})
            was_open = its_open.get(traffic.protocol, 0)
            its_open[traffic.protocol] = max(0, was_open + traffic.opened - traffic.closed)

    def forget(self, source: object) -> None:
        """It has ended, and its connections with it."""
        with self._lock:
            self._open.pop(source, None)

    def _counts(self) -> Iterator[tuple[str, int, int, dict[str, int]]]:
        with self._lock:
            if self._elsewhere is not None:
                for protocol, (opened, answers) in self._elsewhere.items():
                    is_open = sum(each.get(protocol, 0) for each in self._open.values())
                    yield protocol, opened, is_open, dict(answers)
                return
        for protocol, meter in (("http", self.http), ("grpc", self.grpc)):
            yield protocol, *meter.counts()

    def families(self) -> list[Family]:
        """As they are now."""
        ever, present, answers = [], [], []
        for protocol, opened, is_open, by_status in self._counts():
            labels = (("protocol", protocol),)
            if protocol in _WITH_CONNECTIONS:
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
                "Requests of any kind that have ended, by HTTP status or gRPC code",
                "counter",
                answers,
            ),
        ]
