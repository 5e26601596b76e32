"""The engine of the load generator: one thread, its connections, and the times of their requests.

Theory of operation. `Generator` polls all its connections with one epoll set and never waits for a single one. It sends
requests that were serialized before the window, and the protocol (`Wire`) reads no more of an answer than it needs to
find the end. So the generator takes a few microseconds of a core for a request, much less than a server. `busy_s` is
its own share of the processor; when that comes near the length of the window, the figures may be those of the
generator.

A closed loop keeps a number of requests in flight and sends the next one when an answer has come. An open loop gets the
planned times of all requests beforehand and sends each at its time, whether or not earlier ones were answered. If no
connection is free then, the request is late, and its latency still counts from the planned time. Otherwise a server
that stalls would have few slow requests, because it would hold back the others (coordinated omission).

A window begins at `begin_ns`, a time on the clock that all processes of the machine share, so that several processes
start together. It ends when the last request was answered or has timed out. A connection that fails loses one
request and is opened again for the next one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import socket
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from moonpool import MoonpoolError
from moonpool.runtime.client.request import Unreachable
from moonpool.runtime.process.diagnose import remedy

if TYPE_CHECKING:
    import ssl

# The outcome of a request that succeeded. Any other outcome is the text of an error.
ANSWERED = ""


class WireError(MoonpoolError):
    """A peer broke the protocol, and nothing more can be read from its connection."""

    code = "UNAVAILABLE"


class Wire(Protocol):
    """One connection's protocol without its socket, one request after the other."""

    # The generator may drop the next bytes, this many, unread; it counts down.
    skip: int
    # True if the peer closes the connection after this answer.
    closes: bool
    # Responses since the connection began; a stream has more of them than requests.
    responses: int

    def opening(self) -> Sequence[bytes | memoryview]:
        """Return the bytes to send when the connection is open."""

    def begin(self, kind: int, sequence: int) -> Sequence[bytes | memoryview]:
        """Return the bytes of the next request: the one with the number `kind`, with the id of its sequence, if it has
        one.
        """

    def cancel(self) -> Sequence[bytes | memoryview] | None:
        """Return the bytes that cancel the request in flight; None if only closing the connection does."""

    def feed(self, data: bytes) -> str | None:
        """Read received bytes; return the outcome of the request if it has ended.

        `data` is empty if `skip` has been counted down to 0. Raises `WireError`.
        """

    def outgoing(self) -> Sequence[bytes | memoryview]:
        """Return the bytes that the protocol itself has to send after a `feed`."""


_CONNECT_S = 10.0
_READ_BYTES = 1 << 16
# The most buffers that one system call takes.
_BUFFERS = 512
# All bytes that are dropped are read to here.
_DROPPED = memoryview(bytearray(1 << 20))


class ServerAddress:
    """The address of the server, and how connections to it are made. Shared by all connections of a generator."""

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext | None) -> None:
        self.host, self.port = address
        self.tls = tls
        # The family and address of the first connection. Later ones go there and ask nobody for its name.
        self._peer: tuple[int, Any] | None = None

    def connected(self) -> socket.socket | TlsSocket:
        """Return a connection that can be used. Waits for it, so not while others are measured. Raises
        `Unreachable`.
        """
        try:
            sock = socket.create_connection((self.host, self.port), _CONNECT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peer = sock.family, sock.getpeername()
            if self.tls is None:
                sock.setblocking(False)
                return sock
            try:
                wrapped = self.tls.wrap_socket(sock, server_hostname=self.host)
            except OSError:
                sock.close()
                raise
            wrapped.setblocking(False)
            return TlsSocket(wrapped)
        except OSError as error:
            raise self.unreachable(error) from error

    def connecting(self) -> socket.socket:
        """Return a socket that connects meanwhile. Raises `Unreachable`."""
        if self._peer is None:
            raise RuntimeError("the first connection must be made by `connected`")
        family, peer = self._peer
        try:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise self.unreachable(error) from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(peer)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            raise self.unreachable(OSError(code, os.strerror(code)))
        return sock

    def unreachable(self, error: OSError) -> Unreachable:
        """Return the error for a connection that cannot be made."""
        what = f"no server answers at {self.host}:{self.port}"
        if todo := remedy(error):
            what = f"there can be no more connections to {self.host}:{self.port}"
        return Unreachable(f"{what}: {error}{todo}")


class TlsSocket:
    """A socket with TLS, with the calls of a plain one that never blocks.

    A record has at most 16 KiB, and every read here takes more, so nothing that was decrypted stays behind unseen by
    epoll.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self.fileno = sock.fileno
        self.close = sock.close

    @classmethod
    def around(cls, sock: socket.socket, tls: ssl.SSLContext, host: str) -> TlsSocket:
        """Return a connection that has still to shake hands."""
        return cls(tls.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False))

    def shake_hands(self) -> int:
        """Go on with the handshake; return the events to wait for, 0 when it is done. Raises OSError."""
        import ssl

        try:
            self._sock.do_handshake()
        except ssl.SSLWantReadError:
            return select.EPOLLIN
        except ssl.SSLWantWriteError:
            return select.EPOLLOUT
        return 0

    def send(self, data: bytes | memoryview) -> int:
        import ssl

        try:
            return self._sock.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def sendmsg(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Send of the first buffer as much as goes."""
        return self.send(buffers[0])

    def recv(self, size: int) -> bytes:
        import ssl

        try:
            return self._sock.recv(size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def recv_into(self, buffer: memoryview, size: int) -> int:
        import ssl

        try:
            return self._sock.recv_into(buffer, size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None


class LoadConnection:
    """A socket that never blocks, and the protocol on it. It can be opened again after it was closed."""

    def __init__(self, target: ServerAddress, make_wire: Callable[[], Wire], poller: select.epoll) -> None:
        self._target = target
        self._make_wire = make_wire
        self._poller = poller
        self._socket: socket.socket | TlsSocket | None = None
        self._waiting: deque[memoryview] = deque()
        # True while it connects or shakes hands; what is to be sent waits.
        self.is_opening = False
        self.wire: Wire = make_wire()
        # The time from which the latency of the request in flight counts: when it was sent, or planned.
        self.begin_ns = 0
        # The times at which it was sent, and of its first and latest response; 0 before.
        self.sent_ns = self.first_ns = self.heard_ns = 0
        # The number of the request in flight: which of the prepared ones it is.
        self.kind = 0
        # Counts requests, so that a planned cancellation finds out whether its request is still in flight.
        self.turn = 0
        # The sequence that the connection carries, its length, and how much of it was sent.
        self.sequence = self.length = self.position = 0

    def open(self) -> int:
        """Connect, and return the descriptor to poll. Waits until the connection is there. Raises `Unreachable`."""
        return self._begin_polling(self._target.connected(), select.EPOLLIN)

    def open_meanwhile(self) -> int:
        """Begin to connect, and return the descriptor to poll, without waiting. Raises `Unreachable`."""
        self.is_opening = True
        return self._begin_polling(self._target.connecting(), select.EPOLLOUT)

    def _begin_polling(self, sock: socket.socket | TlsSocket, events: int) -> int:
        self._socket = sock
        self.wire = self._make_wire()
        self._poller.register(sock, events)
        self._send(self.wire.opening())
        return sock.fileno()

    def go_on_opening(self) -> None:
        """Connect and shake hands as far as that goes now; in the end, send what waits. Raises OSError and
        `Unreachable`.
        """
        sock, target = self._socket, self._target
        try:
            if isinstance(sock, socket.socket):
                if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(code, os.strerror(code))
                if target.tls is not None:
                    sock = self._socket = TlsSocket.around(sock, target.tls, target.host)
            wanted = sock.shake_hands() if isinstance(sock, TlsSocket) else 0
        except OSError as error:
            raise target.unreachable(error) from error
        if wanted and sock is not None:
            self._poller.modify(sock, wanted)
            return
        self.is_opening = False
        self.flush()
        if self._waiting and sock is not None:
            self._poller.modify(sock, select.EPOLLIN | select.EPOLLOUT)

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def close(self) -> None:
        """Close the socket. The request in flight is lost."""
        if self._socket is not None:
            self._poller.unregister(self._socket)
            self._socket.close()
            self._socket = None
        self.is_opening = False
        self._waiting.clear()

    def begin(self, kind: int) -> None:
        """Send the request of that number. Raises OSError."""
        self.first_ns = self.heard_ns = 0
        self.kind = kind
        self.turn += 1
        self._send(self.wire.begin(kind, self.sequence))

    def cancel(self) -> None:
        """Cancel the request in flight. Raises OSError."""
        out = self.wire.cancel()
        if out is None:
            self.close()
        else:
            self._send(out)

    def _send(self, buffers: Sequence[bytes | memoryview]) -> None:
        sock = self._socket
        if not buffers or sock is None:
            return
        if self.is_opening:
            self._waiting.extend(memoryview(data) for data in buffers)
            return
        if not self._waiting and len(buffers) == 1:
            # Nearly all requests are one small piece, which is sent at once.
            data = buffers[0]
            try:
                sent = sock.send(data)
            except BlockingIOError:
                sent = 0
            if sent == len(data):
                return
            self._waiting.append(memoryview(data)[sent:])
        else:
            self._waiting.extend(memoryview(data) for data in buffers)
        self.flush()
        if self._waiting:
            self._poller.modify(sock, select.EPOLLIN | select.EPOLLOUT)

    def flush(self) -> None:
        """Send more of the bytes that the socket did not take before."""
        sock, waiting = self._socket, self._waiting
        if sock is None:
            return
        while waiting:
            buffers = [waiting[index] for index in range(min(len(waiting), _BUFFERS))]
            try:
                sent = sock.sendmsg(buffers)
            except BlockingIOError:
                return
            for buffer in buffers:
                if sent < len(buffer):
                    waiting[0] = buffer[sent:]
                    break
                sent -= len(buffer)
                waiting.popleft()
        self._poller.modify(sock, select.EPOLLIN)

    def receive(self) -> str | None:
        """Read once; return the outcome of the request if it has ended.

        Raises OSError, and `WireError` if nothing more can be read.
        """
        sock, wire = self._socket, self.wire
        if sock is None:
            return None
        try:
            if wire.skip > _READ_BYTES:
                size = sock.recv_into(_DROPPED, min(wire.skip, len(_DROPPED)))
                wire.skip -= size
                data = b""
            else:
                data = sock.recv(_READ_BYTES)
                size = len(data)
        except BlockingIOError:
            return None
        if not size:
            raise ConnectionResetError("the server closed the connection")
        if wire.skip and not data:
            return None
        outcome = wire.feed(data)
        self._send(wire.outgoing())
        return outcome


def _numbers() -> array[int]:
    return array("q")


# The numbers of a request in a log. Times are on the clock that all processes of the machine share: when it was due (or
# sent, in a closed loop), sent, had its first response (0 for none, or outside of a stream), and ended. The outcome is
# one of those below, or the number of an error in `Tally.errors`, from 0.
COLUMNS = ("due_ns", "sent_ns", "first_ns", "end_ns", "kind", "outcome")
DUE, SENT, FIRST, END, KIND, OUTCOME = range(6)
SUCCEEDED, CANCELLED = -1, -2


@dataclass(slots=True)
class Tally:
    """Counts and times of one process in one window. Times are in nanoseconds."""

    # The `COLUMNS` of each request that has ended, one after the other.
    log: array[int] = field(default_factory=_numbers)
    # Open loop: for each request, how much later than planned it was sent.
    late_ns: array[int] = field(default_factory=_numbers)
    # Streams: the times between two responses.
    between_ns: array[int] = field(default_factory=_numbers)
    # Requests that failed, by the text of the error.
    errors: Counter[str] = field(default_factory=Counter)
    # The number of each text in `errors`.
    numbers: dict[str, int] = field(default_factory=dict)
    # Planned requests that were never sent.
    unsent: int = 0
    seconds: float = 0.0
    # Processor time that this process took.
    busy_s: float = 0.0

    def number_of(self, error: str) -> int:
        """Count an error, and return its number."""
        self.errors[error] += 1
        return self.numbers.setdefault(error, len(self.numbers))


_clock = time.perf_counter_ns
_NS = 1_000_000_000


class Stopped(MoonpoolError):
    """The parent process has ended."""

    code = "CANCELLED"


@dataclass(frozen=True, slots=True)
class Cancellation:
    """A share of the requests, spread evenly, is cancelled some time after it was sent."""

    share: float
    after_ns: int

    def hits(self, number: int) -> bool:
        """Return True if the request of this number, from 0, is to be cancelled."""
        return int((number + 1) * self.share) > int(number * self.share)


# The places of a request in its sequence. Request `kind` at place `p` is number `p * kinds + kind` of those prepared.
_START, _MIDDLE, _END, _ALONE = range(4)


@dataclass(frozen=True, slots=True)
class SequenceLengths:
    """Each connection carries one sequence after the other, of lengths between these two; ids count from `first_id`."""

    least: int
    most: int
    first_id: int
    # The number of different requests.
    kinds: int


class Generator:
    """Sends requests and measures answers. Connections stay open between windows. For one thread."""

    def __init__(
        self,
        address: tuple[str, int],
        wires: Sequence[Callable[[], Wire]],
        *,
        timeout_s: float,
        is_stream: bool = False,
        stop_descriptor: int | None = None,
        cancellation: Cancellation | None = None,
        sequences: SequenceLengths | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Give connection i the protocol `wires[i % len(wires)]`. A window ends when `stop_descriptor` can be read."""
        self._cancellation = cancellation
        self._sequences = sequences
        self._next_id = sequences.first_id if sequences else 0
        self._lengths = random.Random(self._next_id)
        # In all windows, as one may be too short for a request of a small share.
        self._ever_sent = 0
        # Planned cancellations in order of time: the time, the connection, and the turn of its request.
        self._cancellations: deque[tuple[int, LoadConnection, int]] = deque()
        self._kinds: Sequence[int] = (0,)
        self._sent = 0
        self._target = ServerAddress(address, tls)
        self._wires = wires
        self._timeout_s = timeout_s
        self._timeout_ns = round(timeout_s * _NS)
        self._is_stream = is_stream
        self._poller = select.epoll()
        self._stop_descriptor = stop_descriptor
        if stop_descriptor is not None:
            self._poller.register(stop_descriptor, select.EPOLLIN)
        self._connections: list[LoadConnection] = []
        self._open: dict[int, LoadConnection] = {}
        self._tally = Tally()
        # The deadlines of the requests in flight, the next one first: each begins after the ones before it.
        self._deadlines_ns: OrderedDict[LoadConnection, int] = OrderedDict()
        # Connections whose request could not be sent; the next `_step` returns them.
        self._lost: list[LoadConnection] = []

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._poller.close()

    def closed_loop(self, in_flight: int, seconds: float, begin_ns: int, kinds: Sequence[int] = (0,)) -> Tally:
        """Keep `in_flight` requests in flight for `seconds`, then wait for the last answers. Raises `Unreachable`.

        `kinds` are the numbers of the prepared requests to send, in turns.
        """
        self._kinds = kinds
        self._connect(in_flight)
        with self._window(begin_ns) as tally:
            end_ns = begin_ns + round(seconds * _NS)
            flying = set(self._connections[:in_flight])
            for connection in flying:
                self._begin(connection, _clock())
            while flying:
                ended = self._step(flying)
                now_ns = _clock()
                for connection in ended:
                    if now_ns < end_ns:
                        self._begin(connection, now_ns)
                    else:
                        flying.discard(connection)
        return tally

    def open_loop(self, due_ns: Sequence[int], most: int, begin_ns: int, kinds: Sequence[int] = (0,)) -> Tally:
        """Send a request at each planned time, in nanoseconds after the beginning, on at most `most` connections.

        If no connection is free, a request waits for one, and its latency counts from the planned time. Half a second
        after the last planned time the requests that are left are given up as unsent. Raises `Unreachable`.
        """
        self._kinds = kinds
        self._connect(1)
        with self._window(begin_ns) as tally:
            flying: set[LoadConnection] = set()
            idle = list(self._connections[:most])
            give_up_ns = begin_ns + (due_ns[-1] if due_ns else 0) + _NS // 2
            sent = 0
            while sent < len(due_ns) or flying:
                now_ns = _clock()
                while sent < len(due_ns) and begin_ns + due_ns[sent] <= now_ns < give_up_ns:
                    if not idle:
                        if len(self._connections) >= most:
                            break
                        idle.append(self._add())
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
                next_ns: int | None = None
                if sent < len(due_ns):
                    can_send = idle or len(self._connections) < most
                    next_ns = begin_ns + due_ns[sent] if can_send else give_up_ns
                elif not flying:
                    break
                ended = self._step(flying, next_ns)
                flying.difference_update(ended)
                idle += ended
        return tally

    @contextlib.contextmanager
    def _window(self, begin_ns: int) -> Iterator[Tally]:
        tally = self._tally = Tally()
        self._lost.clear()
        self._cancellations.clear()
        self._deadlines_ns.clear()
        self._sent = 0
        time.sleep(max(0.0, (begin_ns - _clock()) / _NS))
        busy_s = time.process_time()
        yield tally
        tally.busy_s = time.process_time() - busy_s
        tally.seconds = (_clock() - begin_ns) / _NS

    def _add(self) -> LoadConnection:
        """Return one more connection, which is not open yet."""
        make_wire = self._wires[len(self._connections) % len(self._wires)]
        self._connections.append(LoadConnection(self._target, make_wire, self._poller))
        return self._connections[-1]

    def _connect(self, count: int) -> None:
        """Open so many connections, before the window."""
        while len(self._connections) < count:
            self._add()
        for connection in self._connections[:count]:
            if not connection.is_open:
                self._open[connection.open()] = connection

    def _begin(self, connection: LoadConnection, begin_ns: int) -> None:
        if not connection.is_open:
            self._open[connection.open_meanwhile()] = connection
        connection.begin_ns = begin_ns
        connection.sent_ns = _clock()
        self._deadlines_ns[connection] = connection.sent_ns + self._timeout_ns
        number, self._sent = self._sent, self._sent + 1
        kind = self._kinds[number % len(self._kinds)]
        try:
            connection.begin(kind if self._sequences is None else self._in_sequence(connection, kind))
        except OSError as error:
            self._lose(connection, error)
            self._lost.append(connection)
            return
        number, self._ever_sent = self._ever_sent, self._ever_sent + 1
        if self._cancellation is not None and self._cancellation.hits(number):
            at_ns = connection.sent_ns + self._cancellation.after_ns
            self._cancellations.append((at_ns, connection, connection.turn))

    def _in_sequence(self, connection: LoadConnection, kind: int) -> int:
        """Go on with the connection's sequence, or begin its next one; return the number of the prepared request."""
        plan = self._sequences
        if plan is None:
            return kind
        if connection.position == connection.length:
            connection.sequence, self._next_id = self._next_id, self._next_id + 1
            connection.length = self._lengths.randint(plan.least, plan.most)
            connection.position = 0
        is_first, is_last = (connection.position == 0, connection.position == connection.length - 1)
        connection.position += 1
        place = (_ALONE if is_last else _START) if is_first else (_END if is_last else _MIDDLE)
        return place * plan.kinds + kind

    def _lose(self, connection: LoadConnection, reason: object) -> None:
        """Count the request as failed, and close the connection; the next request opens it again."""
        self._failed(connection, str(reason))
        connection.close()

    def _failed(self, connection: LoadConnection, error: str) -> None:
        # The server has given up the sequence, and would refuse the rest of it.
        connection.position = connection.length
        self._note(connection, self._tally.number_of(error))

    def _note(self, connection: LoadConnection, outcome: int) -> None:
        """Write the request that has ended into the log."""
        del self._deadlines_ns[connection]
        kind = connection.kind
        if self._sequences is not None:
            kind %= self._sequences.kinds
        self._tally.log.extend((connection.begin_ns, connection.sent_ns, connection.first_ns, _clock(), kind, outcome))

    def _step(self, flying: set[LoadConnection], planned_ns: int | None = None) -> list[LoadConnection]:
        """Wait for events and handle them; return the connections whose request has ended.

        Ends in time for the next planned request, and for the deadline of each request in flight.
        """
        if self._lost:
            lost, self._lost = self._lost, []
            return lost
        now_ns = _clock()
        if self._cancellations:
            cancel_ns = self._cancellations[0][0]
            if cancel_ns <= now_ns:
                return self._cancel(flying)
            planned_ns = cancel_ns if planned_ns is None else min(planned_ns, cancel_ns)
        deadline_ns = next(iter(self._deadlines_ns.values()), None)
        if planned_ns is not None and (deadline_ns is None or planned_ns < deadline_ns):
            # epoll's timeout is in milliseconds, and a planned time must not wait for the next one.
            select.select([self._poller], [], [], max(0.0, (planned_ns - now_ns) / _NS))
            wait_s: float | None = 0.0
        else:
            wait_s = None if deadline_ns is None else max(0.0, (deadline_ns - now_ns) / _NS)
        events = self._poller.poll(wait_s)
        ended = []
        for descriptor, event in events:
            if descriptor == self._stop_descriptor:
                raise Stopped("the parent process has ended")
            connection = self._open[descriptor]
            if connection not in flying:
                # No request is in flight here, so the server has closed the connection.
                connection.close()
            elif self._has_ended(connection, event):
                ended.append(connection)
        return ended + self._expired()

    def _expired(self) -> list[LoadConnection]:
        """Count the requests as failed whose deadline has passed, whatever other connections did meanwhile."""
        expired = []
        now_ns = _clock()
        while self._deadlines_ns:
            connection, deadline_ns = next(iter(self._deadlines_ns.items()))
            if deadline_ns > now_ns:
                break
            self._lose(connection, f"no answer within {self._timeout_s:g} s")
            expired.append(connection)
        return expired

    def _cancel(self, flying: set[LoadConnection]) -> list[LoadConnection]:
        """Cancel the request whose time has come, if it is still in flight."""
        _, connection, turn = self._cancellations.popleft()
        if connection.turn != turn or connection not in flying:
            return []
        try:
            connection.cancel()
        except OSError as error:
            self._lose(connection, error)
            return [connection]
        # What was sent of a sequence is over with its request.
        connection.position = connection.length
        self._note(connection, CANCELLED)
        return [connection]

    def _has_ended(self, connection: LoadConnection, event: int) -> bool:
        wire = connection.wire
        before = wire.responses
        try:
            if connection.is_opening:
                connection.go_on_opening()
                return False
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
            self._note(connection, SUCCEEDED)
        else:
            self._failed(connection, outcome)
        if wire.closes:
            connection.close()
        return True

    def _heard(self, connection: LoadConnection, responses: int) -> None:
        """Note the times of responses. Those that come in one read share the time since the one before."""
        now_ns = _clock()
        if not connection.heard_ns:
            connection.first_ns = now_ns
            responses -= 1
        if responses:
            since_ns = connection.heard_ns or now_ns
            self._tally.between_ns.extend([(now_ns - since_ns) // responses] * responses)
        connection.heard_ns = now_ns
