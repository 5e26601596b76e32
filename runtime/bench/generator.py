"""The loop of the load generator: one thread that polls its connections and never waits for one of them.

Closed: so many requests are in flight, each sent when the one before was answered. Open: requests are sent
when their time has come, whatever became of those before.
"""

from __future__ import annotations

import contextlib
import select
import time
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.bench.connection import Connection
from moonpool.runtime.bench.tally import Tally
from moonpool.runtime.bench.wire import ANSWERED, WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from moonpool.runtime.bench.wire import Wire

_clock = time.perf_counter_ns
_NS = 1_000_000_000


class Stopped(MoonpoolError):
    """Whoever wanted to know is gone."""

    code = "CANCELLED"


class Generator:
    """The connections stay open from window to window; `close` ends them. For one thread."""

    def __init__(
        self,
        address: tuple[str, int],
        wires: Sequence[Callable[[], Wire]],
        *,
        timeout_s: float,
        is_stream: bool = False,
        stop_descriptor: int | None = None,
    ) -> None:
        """Connection i speaks `wires[i % len(wires)]`. Anything to read at `stop_descriptor` ends a window."""
        self._address = address
        self._wires = wires
        self._timeout_s = timeout_s
        self._is_stream = is_stream
        self._poller = select.epoll()
        self._stop_descriptor = stop_descriptor
        if stop_descriptor is not None:
            self._poller.register(stop_descriptor, select.EPOLLIN)
        self._connections: list[Connection] = []
        self._open: dict[int, Connection] = {}
        self._tally = Tally()
        # Those whose request could not even be sent.
        self._lost: list[Connection] = []

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._poller.close()

    def closed_loop(self, in_flight: int, seconds: float, begin_ns: int) -> Tally:
        """Keep so many requests in flight for so long, then wait for the last. Raises `Unreachable`."""
        self._connect(in_flight)
        with self._window(begin_ns) as tally:
            end_ns = begin_ns + round(seconds * _NS)
            flying = set(self._connections[:in_flight])
            for connection in flying:
                self._begin(connection, _clock())
            while flying:
                ended = self._step(self._timeout_s, flying)
                now_ns = _clock()
                for connection in ended:
                    if now_ns < end_ns:
                        self._begin(connection, now_ns)
                    else:
                        flying.discard(connection)
        return tally

    def open_loop(self, due_ns: Sequence[int], most: int, begin_ns: int) -> Tally:
        """Send a request at each of these times after the beginning, on at most so many connections.

        A request for which no connection is free is sent when one is; its latency counts from the time it
        was due. What is not sent half a second after the last was due is not sent at all. Raises `Unreachable`.
        """
        with self._window(begin_ns) as tally:
            flying: set[Connection] = set()
            idle = list(self._connections[:most])
            give_up_ns = begin_ns + (due_ns[-1] if due_ns else 0) + _NS // 2
            sent = 0
            while sent < len(due_ns) or flying:
                now_ns = _clock()
                while sent < len(due_ns) and begin_ns + due_ns[sent] <= now_ns < give_up_ns:
                    if not idle:
                        if len(self._connections) >= most:
                            break
                        self._connect(len(self._connections) + 1)
                        idle.append(self._connections[-1])
                    due = begin_ns + due_ns[sent]
                    connection = idle.pop()
                    flying.add(connection)
                    self._begin(connection, due)
                    now_ns = _clock()
                    tally.late_ns.append(now_ns - due)
                    sent += 1
                if now_ns >= give_up_ns and sent < len(due_ns):
                    tally.unsent = len(due_ns) - sent
                    sent = len(due_ns)
                wait_s = self._timeout_s
                if sent < len(due_ns):
                    can_send = idle or len(self._connections) < most
                    next_ns = begin_ns + due_ns[sent] if can_send else give_up_ns
                    wait_s = min(wait_s, max(0.0, (next_ns - now_ns) / _NS))
                elif not flying:
                    break
                ended = self._step(wait_s, flying, is_precise=sent < len(due_ns))
                flying.difference_update(ended)
                idle += ended
        return tally

    @contextlib.contextmanager
    def _window(self, begin_ns: int) -> Iterator[Tally]:
        tally = self._tally = Tally()
        self._lost.clear()
        time.sleep(max(0.0, (begin_ns - _clock()) / _NS))
        busy_s = time.process_time()
        yield tally
        tally.busy_s = time.process_time() - busy_s
        tally.seconds = (_clock() - begin_ns) / _NS

    def _connect(self, count: int) -> None:
        while len(self._connections) < count:
            make_wire = self._wires[len(self._connections) % len(self._wires)]
            self._connections.append(Connection(self._address, make_wire, self._poller))
        for connection in self._connections[:count]:
            if not connection.is_open:
                self._open[connection.open()] = connection

    def _begin(self, connection: Connection, begin_ns: int) -> None:
        if not connection.is_open:
            self._open[connection.open()] = connection
        connection.begin_ns = begin_ns
        try:
            connection.begin()
        except OSError as error:
            self._lose(connection, error)
            self._lost.append(connection)

    def _lose(self, connection: Connection, reason: object) -> None:
        """Its request has failed; the next one needs another connection."""
        self._tally.errors[str(reason)] += 1
        connection.close()

    def _step(
        self, wait_s: float, flying: set[Connection], *, is_precise: bool = False
    ) -> list[Connection]:
        """Take what comes within this time; returns the connections whose request has ended.

        A precise wait ends at its time; any other is the longest that an answer may take.
        """
        if self._lost:
            lost, self._lost = self._lost, []
            return lost
        if is_precise:
            # epoll counts in milliseconds.
            select.select([self._poller], [], [], wait_s)
            wait_s = 0.0
        events = self._poller.poll(wait_s)
        if not events and not is_precise:
            for connection in flying:
                self._lose(connection, f"no answer within {self._timeout_s:g} s")
            return list(flying)
        ended = []
        for descriptor, event in events:
            if descriptor == self._stop_descriptor:
                raise Stopped("the window was not wanted to its end")
            connection = self._open[descriptor]
            if connection not in flying:
                # Nothing was asked: the server hung up.
                connection.close()
            elif self._has_ended(connection, event):
                ended.append(connection)
        return ended

    def _has_ended(self, connection: Connection, event: int) -> bool:
        wire = connection.wire
        before = wire.responses
        try:
            if event & select.EPOLLOUT:
                connection.flush()
            outcome = connection.receive() if event & ~select.EPOLLOUT else None
        except (OSError, WireError) as error:
            self._lose(connection, error)
            return True
        if self._is_stream and wire.responses > before:
            self._heard(connection, wire.responses - before)
        if outcome is None:
            return False
        if outcome == ANSWERED:
            self._tally.latencies_ns.append(_clock() - connection.begin_ns)
        else:
            self._tally.errors[outcome] += 1
        if wire.closes:
            connection.close()
        return True

    def _heard(self, connection: Connection, responses: int) -> None:
        """Responses that come together share the time since the one before."""
        now_ns = _clock()
        if not connection.heard_ns:
            self._tally.first_ns.append(now_ns - connection.begin_ns)
            responses -= 1
        if responses:
            since_ns = connection.heard_ns or now_ns
            self._tally.between_ns.extend([(now_ns - since_ns) // responses] * responses)
        connection.heard_ns = now_ns
