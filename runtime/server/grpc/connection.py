"""Connections of clients that speak gRPC: bytes come in, RPCs go to their handlers, messages and statuses go out.

Theory of operation. A connection, its session and its calls belong to the thread of the event loop. The session
(`_http2.cpp`) does HTTP/2 without I/O: `_feed` gives it what came, and calls what its events are about; `_flush` writes
what it has for the client. What is sent while events are handled leaves with one flush after the last of them; what is
sent at other times leaves in the loop's next turn, together with all that was sent in this one.

Large messages. When one begins to come, its handler may choose the memory for it (`coming`). What is taken so is
bounded for each connection and for all of them, as a client may announce more than it sends; beyond the bounds,
messages are received into memory of no special kind, which the kernel gives only as bytes come. Large responses leave
as views.

Back-pressure. While the transport is paused, as the client does not read, nothing is taken out of the session: messages
wait there once, as the objects that they are, and `sent` of a call is not called. In the other direction a call
receives one message, and what comes behind it stays in the session until `receive` asks for the next one; the client's
window ends soon. A message from the session that was held there is handed out in the loop's next turn: a handler that
asks for the next one at once would otherwise pile up on the stack.

Hostile clients. The session has budgets and limits of its own; when it is over, the connection is closed behind what it
has to say. `look`, once a second, refills the budgets, and ends connections that do not greet, do not answer pings,
take nothing of what waits for them, or are too old, and calls whose large messages do not come. Pings that come too
often count as strikes, as in gRPC's own server.

Order of closing. However a connection ends, the transport calls `connection_lost` once, which ends all calls early. A
connection that drains sends GOAWAY, and closes when its last call has ended. One that is closing is aborted if its
client does not take the last bytes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import zlib
from collections.abc import Callable
from concurrent.futures import Executor
from random import uniform
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from moonpool.ipc.errors import Closed
from moonpool.ipc.memo import Memo
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.event_loop import Watches
from moonpool.runtime.server.clients import Admission, Clients
from moonpool.runtime.server.grpc import call as rpc
from moonpool.runtime.server.grpc.call import TOGETHER_BYTES, Message, Metadata, OpenCalls, PlacedMessage, Received
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.status import OK, Status

if TYPE_CHECKING:
    from moonpool.runtime.server.grpc import _http2

_log = RuntimeLog("moonpool")
# As in `_http2.cpp`.
_HEAD, _MESSAGE, _END, _CLOSED, _REFUSED, _SENT, _PING, _GREETED, _COMING = range(9)
_PART_BYTES = 256 << 10
_BAD_TIMEOUT = -2
# In place of the compression of a message.
_IS_COMING = 2
# PlacedMessage messages that have not come whole, of one connection and of all.
_AWAITED_BYTES, _ALL_AWAITED_BYTES = 64 << 20, 256 << 20
_NO_ERROR, _CALM = 0, 11
# How long a client may take to say its first words, and to read the last ones.
_GREETING_S, _LINGER_S = 20.0, 2.0
# A client without calls that may not ping then.
_SELDOM_S = 7200.0
# More bytes are packed or unpacked on another thread.
_LARGE_BYTES = TOGETHER_BYTES
# A client may take longer for a large message if at least so many bytes come in a second.
_BYTES_PER_S = 16 << 10
_SLOW = Status("DEADLINE_EXCEEDED", "the request took too long to arrive")
_LEVELS = {"low": 1, "medium": 6, "high": 9}
_ZLIB_BITS = {"gzip": 31, "deflate": 15}
_OWN = frozenset(("te", "content-type", "host"))


class CallHead(NamedTuple):
    method: bytes
    metadata: Metadata
    encoding: str
    """The compression of messages from the client."""
    takes_gzip: bool
    refusal: Status | None


_heads: Memo[bytes, CallHead] = Memo(1024)
_NO_HEAD = CallHead(b"", (), "identity", False, Status("RESOURCE_EXHAUSTED", "the metadata is too large"))  # fmt: skip


def read_head(raw: bytes) -> CallHead:
    """Read names and values, each of which ends with a zero byte."""
    words = raw.split(b"\0")
    plain: dict[bytes, bytes] = {}
    metadata: list[tuple[str, str | bytes]] = []
    refusal = None
    for name, value in zip(words[::2], words[1::2], strict=False):
        key = name.decode("latin-1")
        if key.startswith((":", "grpc-")) or key in _OWN:
            plain[name] = value
        elif key.endswith("-bin"):
            for each in value.split(b","):
                try:
                    metadata.append((key, base64.b64decode(each + b"=" * (-len(each) % 4), validate=True)))  # fmt: skip
                except (binascii.Error, ValueError):
                    refusal = Status("INTERNAL", f"the metadata '{key}' is not base64")
        else:
            metadata.append((key, value.decode("utf-8", "replace")))
    if plain.get(b":method") != b"POST":
        refusal = Status("INTERNAL", "the method of a gRPC request is POST")
    elif not plain.get(b"content-type", b"").startswith(b"application/grpc"):
        refusal = Status("INTERNAL", "the content type of a gRPC request is application/grpc")
    accepted = plain.get(b"grpc-accept-encoding", b"").split(b",")
    return CallHead(
        plain.get(b":path", b""),
        tuple(metadata),
        plain.get(b"grpc-encoding", b"identity").decode("latin-1"),
        b"gzip" in (each.strip() for each in accepted),
        refusal,
    )


class BadMessage(Exception):
    """A message that cannot be unpacked. Carries the status."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.text)
        self.status = status


def too_large(size_bytes: int, most_bytes: int) -> Status:
    """Return the status for a message over the limit."""
    text = f"the message has {size_bytes} bytes, and {most_bytes} is the most"
    return Status("RESOURCE_EXHAUSTED", text)


def unpacked(data: bytes, encoding: str, most_bytes: int) -> bytes:
    """Unpack a message. Raises `BadMessage`."""
    bits = _ZLIB_BITS.get(encoding)
    if bits is None:
        text = f"messages in the encoding '{encoding}' are not read; gzip and deflate are"
        raise BadMessage(Status("UNIMPLEMENTED", text))
    unpacker = zlib.decompressobj(bits)
    try:
        message = unpacker.decompress(data, most_bytes + 1)
    except zlib.error as error:
        text = f"the message is not what its encoding '{encoding}' says: {error}"
        raise BadMessage(Status("INTERNAL", text)) from None
    if len(message) > most_bytes:
        raise BadMessage(too_large(len(message), most_bytes))
    if not unpacker.eof:
        raise BadMessage(Status("INTERNAL", "the compressed message is not complete"))
    return message


def packed(data: Message, level: int) -> tuple[Message, bool]:
    """Return a message in gzip's form, and True, or as it is if that is no larger."""
    packer = zlib.compressobj(level, wbits=31)
    parts = data if isinstance(data, tuple) else (data,)
    smaller = b"".join((*map(packer.compress, parts), packer.flush()))
    return (smaller, True) if len(smaller) < _size_of(data) else (data, False)


def _size_of(message: Message) -> int:
    return sum(map(len, message)) if isinstance(message, tuple) else len(message)


_PLAIN_TEXT = frozenset(range(0x20, 0x7F)) - {ord("%")}


def _escaped(details: bytes) -> bytes | None:
    """Return the text of a status as it travels; None if there is none."""
    if not details:
        return None
    return b"".join(b"%c" % each if each in _PLAIN_TEXT else b"%%%02X" % each for each in details)


class Port(Protocol):
    """The port, as its connections know it."""

    loop: asyncio.AbstractEventLoop
    watches: Watches
    options: GrpcOptions
    calls: OpenCalls
    clients: Clients[GrpcConnection]
    buffer: memoryview
    pool: Executor
    now: float
    awaited_bytes: int

    def make_session(self) -> _http2.Session: ...


class Http2Call(rpc.GrpcCall):
    """One RPC over HTTP/2."""

    __slots__ = ("_arrived", "_connection", "_has_all", "_head", "_id", "_may_be_held", "_placed", "_placed_at",
        "_receiver", "_sent")  # fmt: skip

    def __init__(self, connection: GrpcConnection, stream: int, head: CallHead, timeout_s: float | None) -> None:
        rpc.GrpcCall.begin(self, connection.calls, head.method, head.metadata, timeout_s)
        self._connection = connection
        self._id = stream
        self._head = head
        # The handler that waits for a message, or the message that waits for the handler, and if it is compressed.
        self._receiver: Received | None = None
        self._arrived: tuple[Any, int] | None = None
        # The message that is coming into memory of the handler's choice, and since when, on the port's clock.
        self._placed: PlacedMessage | None = None
        self._placed_at = 0.0
        # If the session was given a message and holds what came behind it, and if the client will send no more.
        self._may_be_held = self._has_all = False
        self._sent: Callable[[], object] | None = None

    # In

    def _receive(self, received: Received) -> None:
        loop = self._connection.loop
        if self._arrived is not None:
            (data, is_compressed), self._arrived = self._arrived, None
            loop.call_soon(self._hand_out, received, data, is_compressed)
            return
        if self._may_be_held:
            found = self._connection.session.take(self._id)
            if found is not None and found[1] == _IS_COMING and found[0] is not None:
                self.coming(found[0], found[2])
                found = self._connection.session.take(self._id)
            if found is not None:
                data_or_none, code_or_flag, size_bytes = found
                if data_or_none is not None:
                    message: Any = self._end_placed() or data_or_none
                    loop.call_soon(self._hand_out, received, message, code_or_flag)
                    return
                self.refused(code_or_flag, size_bytes)
            self._may_be_held = False
            # The windows have grown.
            self._connection.flush_soon()
        if self._has_all or self._is_over:
            loop.call_soon(received, None)
        else:
            self._receiver = received

    def coming(self, first: bytes, size_bytes: int) -> None:
        """Let the handler choose the memory for a large message."""
        connection = self._connection
        if self._is_over or not connection.may_await(size_bytes):
            return
        placed = self._calls.place(self, first, size_bytes)
        if placed is not None and connection.session.place(self._id, placed.memory):
            self._placed, self._placed_at = placed, connection.now
            connection.count_awaited(size_bytes)

    def look(self, now: float, timeout_s: float) -> None:
        """End the call if its client holds memory for a message, and sends little of it."""
        if self._placed is not None and not self._is_over:
            allowed_s = timeout_s + self._connection.session.filled(self._id) / _BYTES_PER_S
            if now - self._placed_at > allowed_s:
                self.end_early(_SLOW)

    def _end_placed(self) -> PlacedMessage | None:
        placed, self._placed = self._placed, None
        if placed is not None:
            self._connection.count_awaited(-len(placed.memory))
        return placed

    def arrived(self, data: bytes | memoryview, is_compressed: int) -> None:
        """Take a message of the client."""
        self._may_be_held = True
        message: Any = self._end_placed() or data
        if self._receiver is None:
            self._arrived = message, is_compressed
        else:
            receiver, self._receiver = self._receiver, None
            self._hand_out(receiver, message, is_compressed)

    def _hand_out(self, received: Received, data: Any, is_compressed: int) -> None:
        if not is_compressed:
            received(data)
        elif len(data) <= _LARGE_BYTES:
            self._unpack(received, data)
        else:
            self._connection.apart(self._unpack, received, data)

    def _unpack(self, received: Received, data: bytes) -> None:
        """Unpack a message, on any thread."""
        most_bytes = self._connection.options.max_message_bytes
        try:
            message = unpacked(data, self._head.encoding, most_bytes)
        except BadMessage as error:
            self._hand_over(self.end_early, error.status)
            return
        self._hand_over(received, message)

    def refused(self, code: int, size_bytes: int) -> None:
        """End for a message that the session refuses."""
        if code == Status("INTERNAL", "").number:
            self.end_early(Status("INTERNAL", "the head of a message is malformed"))
        else:
            self.end_early(too_large(size_bytes, self._connection.options.max_message_bytes))

    def has_all(self) -> None:
        """Note that the client sends no more."""
        self._has_all = True
        if self._receiver is not None:
            receiver, self._receiver = self._receiver, None
            receiver(None)

    def closed(self) -> None:
        """End, as the stream or the connection has ended."""
        self._calls.ended(self)
        self.end_early()
        self._end_placed()
        self._sent = None
        self.has_all()

    # Out

    def _transmit(self, message: Message | None, status: Status | None, sent: Callable[[], object] | None) -> None:
        level = self._connection.level if self._head.takes_gzip else 0
        if message is None or not level:
            self._write(message, status, sent, False)
        elif _size_of(message) <= _LARGE_BYTES:
            smaller, is_packed = packed(message, level)
            self._write(smaller, status, sent, is_packed)
        else:
            self._connection.apart(self._pack, message, level, status, sent)

    def _pack(self, message: Message, level: int, status: Status | None, sent: Callable[[], object] | None) -> None:
        """Pack a message, on any thread."""
        smaller, is_packed = packed(message, level)
        self._hand_over(self._write, smaller, status, sent, is_packed)

    def _write(
        self, message: Message | None, status: Status | None, sent: Callable[[], object] | None, is_packed: bool
    ) -> None:
        number, details = -1, None
        if status is OK:
            number = 0
        elif status is not None:
            number, details = status.number, _escaped(status.details)
        connection = self._connection
        try:
            connection.session.send(self._id, message, is_packed, sent is not None, number, details)
        except (ConnectionError, MemoryError) as error:
            # Answers to others may be on this stack.
            _log.debug("a connection for gRPC ends: %s", error)
            connection.abort()
            return
        if sent is not None:
            self._sent = sent
        connection.idle_pings = 0
        connection.flush_soon()

    def has_sent(self) -> None:
        """Note that the message has left."""
        sent, self._sent = self._sent, None
        if sent is not None:
            sent()


class Stall:
    """The time for which a client has taken nothing of what waits for it.

    Messages count alone: a client that pings, and reads the answers, does not read its responses by that.
    """

    def __init__(self) -> None:
        self._taken_bytes = 0
        self._since: float | None = None

    def look(self, now: float, unsent_bytes: int, taken_bytes: int) -> float:
        """Return seconds, from the bytes that wait and those that the client has taken until now."""
        if not unsent_bytes:
            self._since = None
        elif self._since is None or taken_bytes > self._taken_bytes:
            self._since, self._taken_bytes = now, taken_bytes
        return 0.0 if self._since is None else now - self._since


class GrpcConnection:
    def __init__(self, port: Port) -> None:
        self._port = port
        self.loop = port.loop
        self.calls = port.calls
        self.options = port.options
        self.level = _LEVELS.get(port.options.infer_response_compression_level, 0)
        self.session: _http2.Session
        self._transport: asyncio.Transport
        self._of: dict[int, Http2Call] = {}
        self._is_busy = self._is_flushing = self._is_paused = False
        self._is_greeted = self._is_draining = self._has_tls = False
        # Seconds of the loop's clock.
        self._opened = self._heard = self.loop.time()
        self._closing_since: float | None = None
        age_s = port.options.max_connection_age_ms / 1000
        # Connections that were opened together end apart.
        self._too_old = self._opened + uniform(0.9, 1.1) * age_s if age_s else None
        self._ends: float | None = None
        # Pings of ours that wait for an answer since, and how many were sent since the last message.
        self._pinged: float | None = None
        self.idle_pings = 0
        # Pings of the client.
        self._last_ping: float | None = None
        self._strikes = 0
        self.unsent_bytes = 0
        self._awaited_bytes = 0
        self._buffer = port.buffer
        self._stall = Stall()

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the client, or send it away if there are too many."""
        self._transport = transport  # type: ignore[assignment]
        place = self._port.clients.opened(self)
        socket = transport.get_extra_info("socket")
        has_watch = socket is None or self._port.watches.hold(socket.fileno())
        if not (place is Admission.WELCOME and has_watch):
            # Not GOAWAY: a client that was greeted before it takes that for a connection that has worked, and comes
            # back without a pause.
            self.abort()
            return
        self._transport.set_write_buffer_limits(high=4 * _PART_BYTES)
        self._has_tls = transport.get_extra_info("sslcontext") is not None
        self.session = self._port.make_session()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """End all calls."""
        self._port.clients.closed(self)
        calls, self._of = self._of, {}
        for call in calls.values():
            call.closed()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's
        """Receive into the memory of a placed message, or into the buffer of all connections.

        `buffer_updated` takes everything out of that buffer.
        """
        room = self.session.room() if self._awaited_bytes else None
        self._buffer = self._port.buffer if room is None else room
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Handle what came."""
        if self._closing_since is not None:
            return
        self._heard = self._port.now
        self._is_busy = True
        has_all = False
        try:
            while not has_all and self._closing_since is None:
                events, has_all = self.session.feed(self._buffer, nbytes)
                self._handle(events)
        except (ConnectionError, MemoryError) as error:
            _log.debug("a connection for gRPC ends: %s", error)
            self.abort()
            return
        finally:
            self._is_busy = False
        self._flush()

    def pause_writing(self) -> None:
        """Keep everything in the session, as the client does not read."""
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self.flush_soon()

    # Events

    def _handle(self, events: list[tuple[Any, ...]]) -> None:
        calls = self._of
        for event in events:
            kind = event[0]
            if kind == _HEAD:
                self._begin(event[1], event[2], event[3])
            elif kind == _PING:
                self._ponged() if event[1] else self._count_ping(event[2])
            elif kind == _GREETED:
                self._is_greeted = True
            elif (call := calls.get(event[1])) is not None:
                try:
                    self._tell(call, event)
                except Exception:  # the other calls of this client go on
                    _log.exception("a callback of gRPC failed")

    def _tell(self, call: Http2Call, event: tuple[Any, ...]) -> None:
        kind = event[0]
        if kind == _MESSAGE:
            call.arrived(event[2], event[3])
        elif kind == _END:
            call.has_all()
        elif kind == _CLOSED:
            del self._of[event[1]]
            call.closed()
            if self._is_draining and not self._of:
                self.flush_soon()
        elif kind == _SENT:
            call.has_sent()
        elif kind == _COMING:
            call.coming(event[2], event[3])
        elif kind == _REFUSED:
            call.refused(event[2], event[3])

    def _begin(self, stream: int, raw: bytes | None, timeout_ns: int) -> None:
        head = _NO_HEAD if raw is None else _heads.get(raw) or _heads.keep(raw, read_head(raw))
        timeout_s = timeout_ns / 1e9 if timeout_ns >= 0 else None
        call = self._of[stream] = Http2Call(self, stream, head, timeout_s)
        if head.refusal is not None or timeout_ns == _BAD_TIMEOUT:
            self.calls.open.add(call)
            call.fail(head.refusal or Status("INTERNAL", "the header grpc-timeout is malformed"))
        else:
            self.calls.begin(call)

    def _ponged(self) -> None:
        self._pinged = None

    def _count_ping(self, has_sent: bool) -> None:
        """Count a ping of the client, and send it away if it pings too often without having been sent anything."""
        options, now = self.options, self.loop.time()
        if has_sent:
            self._strikes, self._last_ping = 0, None
        pause_s = options.http2_min_recv_ping_interval_without_data_ms / 1000
        if not (self._of or options.keepalive_permit_without_calls):
            pause_s = _SELDOM_S
        is_early = self._last_ping is not None and now - self._last_ping < pause_s
        self._last_ping = now
        self._strikes += is_early
        if options.http2_max_ping_strikes and self._strikes > options.http2_max_ping_strikes:
            self.session.goaway(_CALM, b"too_many_pings")
            self._close()

    # Out

    def flush_soon(self) -> None:
        """Write what the session has for the client, in the loop's next turn unless that happens anyhow."""
        if not (self._is_busy or self._is_flushing):
            self._is_flushing = True
            self.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        is_over = False
        try:
            while not (self._is_paused or self._transport.is_closing()):
                data, size_bytes, events, is_over = self.session.out()
                if size_bytes:
                    self._write(data)
                if events:
                    self._handle(events)
                if size_bytes < _PART_BYTES:
                    break
        except (ConnectionError, MemoryError) as error:
            _log.debug("a connection for gRPC ends: %s", error)
            self.abort()
            return
        if is_over or (self._is_draining and not self._of):
            self._close()

    def _write(self, data: bytes | list[bytes | memoryview]) -> None:
        if not isinstance(data, list):
            self._transport.write(data)
        elif self._has_tls:
            # Each part would become a record of its own.
            self._transport.write(b"".join(data))
        else:
            self._transport.writelines(data)

    # Large messages

    @property
    def now(self) -> float:
        """The time of the port's last look."""
        return self._port.now

    def may_await(self, size_bytes: int) -> bool:
        """Return True if a message of this size may take memory before it has come."""
        return (
            self._awaited_bytes + size_bytes <= _AWAITED_BYTES
            and self._port.awaited_bytes + size_bytes <= _ALL_AWAITED_BYTES
        )

    def count_awaited(self, more_bytes: int) -> None:
        """Count bytes of placed messages that have not come whole."""
        self._awaited_bytes += more_bytes
        self._port.awaited_bytes += more_bytes

    def apart(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on another thread, or, without one, here."""
        try:
            self._port.pool.submit(function, *arguments)
        except (Closed, OutOfThreads):
            function(*arguments)

    # The end

    def drain(self) -> None:
        """Accept no more calls, and close when the last one has ended."""
        if not self._is_draining and self._closing_since is None:
            self._is_draining = True
            self.session.goaway(_NO_ERROR, b"")
            self.flush_soon()

    def _close(self) -> None:
        """Close when the client has what was written."""
        if self._closing_since is None:
            self._closing_since = self.loop.time()
            if not self._is_paused and not self._transport.is_closing():
                self._write(self.session.out()[0])
            self._transport.close()

    def abort(self) -> None:
        """End at once."""
        self._closing_since = self._closing_since or self.loop.time()
        self._transport.abort()

    def look(self, now: float) -> None:
        """Look after the connection, once a second."""
        if self._closing_since is not None:
            if now - self._closing_since > _LINGER_S:
                self.abort()
            return
        waiting_bytes, sent_bytes = self.session.replenish()
        buffered_bytes = self._transport.get_write_buffer_size()
        self.unsent_bytes = waiting_bytes + buffered_bytes
        stalled_s = self._stall.look(now, self.unsent_bytes, sent_bytes - buffered_bytes)
        timeout_s = self.options.write_timeout_ms / 1000
        if (
            (timeout_s and stalled_s > timeout_s)
            or (not self._is_greeted and now - self._opened > _GREETING_S)
            or (self._ends is not None and now > self._ends)
        ):
            self.abort()
        elif self._too_old is not None and now > self._too_old:
            self._too_old = None
            grace_s = self.options.max_connection_age_grace_ms / 1000
            self._ends = now + grace_s if grace_s else None
            self.drain()
        self._keep_alive(now)
        if self._awaited_bytes and self.options.read_timeout_ms:
            for call in list(self._of.values()):
                call.look(now, self.options.read_timeout_ms / 1000)

    def _keep_alive(self, now: float) -> None:
        options = self.options
        if self._pinged is not None:
            if now - self._pinged > options.keepalive_timeout_ms / 1000:
                self.abort()
        elif now - self._heard > options.keepalive_time_ms / 1000 and (
            self._of or options.keepalive_permit_without_calls
        ):
            most = options.http2_max_pings_without_data
            if not most or self.idle_pings < most:
                self._pinged = now
                self.idle_pings += 1
                self.session.ping()
                self.flush_soon()


class GrpcProtocol(GrpcConnection, asyncio.BufferedProtocol):
    """A connection as transports know it."""

    __slots__ = ()
