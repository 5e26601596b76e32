"""Connections of clients to one port: bytes come in, requests go to the handler one after another, responses go out.

Theory of operation.

Who. A port, its connections and their exchanges belong to one event loop, and everything here runs on its thread: there
are no locks. `HttpPort` makes an `HttpConnection` for each client, looks after all of them once a second, and has what
they share: one buffer to receive into, the heads that are known, the limits for all clients together. A connection
makes an `HttpExchange` for each request and gives it to the port's `Handler`, which owns it until the response has
ended, now or later. The handler never blocks. If its client goes, `exchange.cancel` is called, and from then on every
call of the exchange does nothing.

Keep-alive and pipelining. A connection has one exchange at a time, so responses leave in the order of the requests.
What a client sends behind a request waits in `_waiting`. When the response ends, `end` has the loop call `_go_on` for
the next one; it does not call it itself, as a client that has sent thousands of short requests would otherwise pile
them up on the stack. If the handler answers at once, `_read` goes on in its own loop, for `_TURNS` requests, and then
lets other clients have their turn.

Back-pressure. Once 64 KiB wait behind a request, the connection stops reading its socket until the response has ended,
and TCP slows the client. In the other direction the transport keeps what the client does not take. `pause_writing`
notes when that began; a handler with many pieces awaits `writable`. A client that takes nothing for `write_timeout_s`
is cut off, and if all clients together leave too much, the port cuts off those for whom the most waits.

Memory for bodies. A head is received into the port's buffer, which is one for all connections, as its bytes are taken
out before the loop calls anybody else. A body with a length is received where it is to stay. That memory is taken when
the head is complete, so a client that only announces a body must not get much: large memory is mapped and untouched
until bytes come, and memory that stubs see is limited for all announcements together (`awaited_bytes`).

Hostile clients. Heads, bodies and waiting bytes have limits in bytes; heads, bodies, idle connections and unread
responses have limits in seconds. `since` is the time at which the present phase began, by the port's clock, which
`_look` sets once a second: no request sets a timer. A malformed message is answered, and nothing behind it is read as a
request, since nobody knows where the next one would begin. A body that will be refused anyhow is refused before it is
received.

Order of closing. `_refuse` writes the answer, ends the writing side, and reads and drops what still comes for
`_LINGER_S` seconds: if the socket was closed with unread bytes in it, the kernel would reset the connection, and the
client might lose the answer. A response whose connection has to end closes the transport after the last byte
(`closes`). `abort` ends it at once. However a connection ends, the transport calls `connection_lost` once, which takes
it off the port's count, frees the memory of an unfinished body, wakes the task that awaits `writable`, and then cancels
the exchange. When the port drains, idle connections are closed, responses that are under way say that the connection
ends, and connections that remain when the time is over are aborted.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Protocol

from moonpool.ipc.errors import HTTP_STATUSES, MoonpoolError
from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.event_loop import watches_of
from moonpool.runtime.server.clients import Admission, AllClients, Clients, relieve
from moonpool.runtime.server.http.body import Chunked, Fixed, memory_of, over_input_size, too_large
from moonpool.runtime.server.http.head import JSON, BadHttpMessage, Body, Head, Headers, HeadParser, Heads, Part
from moonpool.runtime.server.http.options import HttpLimits
from moonpool.runtime.server.meter import Meter

_log = RuntimeLog("moonpool")
# Joining small parts costs less than handing them over one by one.
_JOIN_BYTES = 16 << 10
# How long a client may go on sending after an error, so that it reads the response before it sees a reset.
_LINGER_S = 2.0
_WAITING_BYTES = _SMALL_BYTES = 64 << 10
# Requests of one client that are answered before others have their turn.
_TURNS = 32
_END_OF_HEAD = b"\r\n\r\n"
_BUFFER_BYTES = 256 << 10
_LOOK_S = 1.0
# For all clients together: memory that stubs see, for bodies that have been announced and have not come.
_AWAITED_BYTES = 256 << 20
# The part beyond the limit of connections that is answered with 503. Further ones are closed without an answer.
_TOLD_PART = 8
_BAD_REQUEST = HTTPStatus.BAD_REQUEST.value
_NO_HEAD = Head("GET", b"", "1.1", ())


def http_status(error: BaseException) -> int:
    """Return the status of the response for an error. It is 500 for errors that are not moonpool's."""
    return error.http_status if isinstance(error, MoonpoolError) else 500


def error_headers(error: BaseException, headers: Headers) -> Headers:
    """Return the headers of the response for an error: with the seconds after which a client may try again, where they
    are known.
    """
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is None:
        return headers
    return (*headers, (b"Retry-After", b"%d" % max(1, math.ceil(retry_after_s))))


def error_body(text: str) -> bytes:
    """Return `{"error": text}` as JSON."""
    return b'{"error":%b}' % json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")


class Handler(Protocol):
    """Answers the requests of a port. All methods run on the loop's thread and must not block."""

    def handle(self, exchange: HttpExchange) -> None:
        """Answer now or later."""

    def refuse(self, head: Head) -> BadHttpMessage | None:
        """Return the answer to a request whose body need not be sent, or None if it must."""

    def failure(self, head: Head, status: int, text: str, headers: Headers) -> tuple[Headers, bytes]:
        """Return headers and body of an error, in the form of the API that was asked."""

    def most_bytes_of(self, head: Head) -> int:
        """Return the largest body of such a request."""

    def over_size(self, head: Head) -> Callable[[str, int], BadHttpMessage] | None:
        """Return a function that makes the refusal of a larger one, from its size and the limit; None for the usual
        words.
        """

    def memory_for(self, head: Head, size_bytes: int) -> memoryview | None:
        """Return memory to receive the body into, or None for any.

        If it is smaller than the body, what comes before is received apart.
        """


class HttpExchange:
    """One request and the response to it. The handler owns it until the response has ended. For the loop's thread.

    All methods may be called after the client has gone, and do nothing then.
    """

    __slots__ = (
        "_begun_ns",
        "_connection",
        "_held",
        "_length",
        "body",
        "cancel",
        "ended",
        "has_failed",
        "head",
        "is_gone",
        "own_headers",
        "received_ns",
        "status",
        "text",
    )

    def __init__(self, connection: HttpConnection, head: Head, body: Body, begun_ns: int | None = None) -> None:
        self._connection = connection
        self._begun_ns = begun_ns
        self.head = head
        self.body: Body = body
        # The beginning of the body, if `body` is memory that others may write to and has only the rest.
        self.text: memoryview | None = None
        # Called if the client goes before the response has ended. It must not block.
        self.cancel: Callable[[], None] | None = None
        # Called when the response has ended in any way.
        self.ended: Callable[[], None] | None = None
        self.is_gone = False
        # If the exchange is a request for inference, the time of `time.monotonic_ns` when it had come, by which it is
        # counted; else 0.
        self.received_ns = 0
        # If it failed after its status had said that it succeeds.
        self.has_failed = False
        # Headers of this response alone, behind those that others have, too.
        self.own_headers: Headers = ()
        # The head of a response that has begun, until it is sent with the first piece of the body.
        self._held = b""
        # The status of the response, 0 before it has begun; and the bytes that it still lacks, -1 for chunks.
        self.status = 0
        self._length = 0

    @property
    def limits(self) -> HttpLimits:
        return self._connection._port.limits

    @property
    def writing(self) -> asyncio.Lock:
        """The lock of who writes a long answer as JSON. All clients of the port share it."""
        return self._connection._port.writing

    @property
    def begun_ns(self) -> int:
        """The time of `time.monotonic_ns` when the head was complete, if the body came later, else now."""
        return time.monotonic_ns() if self._begun_ns is None else self._begun_ns

    def respond(self, status: int, headers: Headers = JSON, parts: Sequence[Part] = ()) -> None:
        """Send the whole response. The parts keep their memory until they are sent."""
        if self.is_gone:
            return
        length = 0
        for part in parts:
            length += len(part)
        self.status = status
        connection = self._connection
        pieces = _head(status, headers, length, connection.disposition(self.head), self.own_headers)
        if self.head.method == "HEAD":
            connection.write(b"".join(pieces))
        elif length <= _JOIN_BYTES:
            pieces += parts
            connection.write(b"".join(pieces))
        else:
            connection.write_parts([b"".join(pieces), *parts])
        connection.end(self)

    def fail(self, status: int, text: str, headers: Headers = JSON) -> None:
        """Send an error."""
        failure = self._connection._port.handler.failure(self.head, status, text, headers)
        self.respond(status, failure[0], (failure[1],))

    def begin(self, status: int, headers: Headers, length: int | None = None) -> None:
        """Begin a response whose body comes piece by piece: `length` bytes, or chunks if it is None.

        Its head is sent with the first piece, or at the end.
        """
        if self.is_gone:
            return
        self.status = status
        if length is None and (status in (204, 304) or self.head.method == "HEAD"):
            length = 0
        if length is None and self.head.version == "1.0":
            self._connection.closes = True
            framing: int | None = None
            self._length = -2
        else:
            framing = -1 if length is None else length
            self._length = framing
        disposition = self._connection.disposition(self.head)
        self._held = b"".join(_head(status, headers, framing, disposition, self.own_headers))

    def send(self, piece: Part) -> None:
        """Send a piece of the body. Callers with many pieces await `writable` in between."""
        if self.is_gone or not len(piece) or self.head.method == "HEAD":
            return
        if self._length == -1:
            self._write_parts([b"%x\r\n" % len(piece), piece, b"\r\n"], len(piece))
            return
        if self._length >= 0:
            # Neither more nor less than announced: the client would take the next response for the rest.
            piece = piece[: self._length]
            self._length -= len(piece)
        self._write_parts([piece], len(piece))

    def finish(self, last: Part = b"") -> None:
        """Send the last piece of the body, if there is one, and end it."""
        if self.is_gone:
            return
        if self._length == -1 and self.head.method != "HEAD":
            chunk = [b"%x\r\n" % len(last), last, b"\r\n"] if len(last) else []
            self._write_parts([*chunk, b"0\r\n\r\n"], len(last))
        else:
            self.send(last)
            if self._held:
                self._write_parts([], 0)
            if self._length > 0 and self.head.method != "HEAD":
                self._connection.abort()
                return
        self._connection.end(self)

    def _write_parts(self, parts: list[Part], size_bytes: int) -> None:
        """Write the head, if it was held, and parts with about so many bytes."""
        if self._held:
            parts.insert(0, self._held)
            self._held = b""
        if size_bytes <= _JOIN_BYTES:
            self._connection.write(b"".join(parts))
        else:
            self._connection.write_parts(parts)

    def abort(self) -> None:
        """End the connection, which tells the client that the response is not complete."""
        if not self.is_gone:
            self._connection.abort()

    @property
    def unsent_bytes(self) -> int:
        """The bytes that were sent and the client has not taken yet."""
        return 0 if self.is_gone else self._connection.unsent_bytes

    async def writable(self) -> None:
        """Return when the client has taken most of what was sent, or has gone."""
        if not self.is_gone:
            await self._connection.writable()


# Phrases as Triton's library for HTTP writes them.
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus} | {405: b"Not Allowed"}
_STATUS_LINES = {status: b"HTTP/1.1 %d %b\r\n" % (status, phrase) for status, phrase in _PHRASES.items()}


def _head(status: int, headers: Headers, length: int | None, disposition: bytes, own: Headers) -> list[Part]:
    """Return status line and headers of a response, in pieces.

    `length` is -1 for chunks, and None if the body ends with the connection. `disposition` is the value of the header
    `Connection`, if there has to be one. Headers of `own` are behind all others.
    """
    line = _STATUS_LINES.get(status)
    pieces: list[Part] = [b"HTTP/1.1 %d \r\n" % status if line is None else line]
    _add_lines(pieces, headers)
    if length == -1:
        pieces.append(b"Transfer-Encoding: chunked\r\n")
    elif length is not None and status not in (204, 304):
        pieces.append(b"Content-Length: %d\r\n" % length)
    if disposition:
        pieces += (b"Connection: ", disposition, b"\r\n")
    if own:
        _add_lines(pieces, own)
    pieces.append(b"\r\n")
    return pieces


def _add_lines(pieces: list[Part], headers: Headers) -> None:
    for name, value in headers:
        pieces.append(name)
        pieces.append(b": ")
        pieces.append(value)
        pieces.append(b"\r\n")


class HttpConnection:
    """One client. Reads a request, hands it to the handler, and reads the next one when that is answered."""

    def __init__(self, port: HttpPort) -> None:
        self._port = port
        self._transport: asyncio.Transport
        # Bytes that wait for more bytes, or for the response to the request before them.
        self._waiting = b""
        # The head that is coming in pieces, and how much of it the parser has.
        self._parser: HeadParser | None = None
        self._fed_bytes = 0
        # The request whose body is coming.
        self._head: Head | None = None
        self._begun_ns = 0
        self._intake: Fixed | Chunked | None = None
        # The part of `port.awaited_bytes` that this body has.
        self._awaited_bytes = 0
        self._exchange: HttpExchange | None = None
        self._is_reading = False
        self._is_paused = False
        self._is_lingering = False
        # The connection ends after the present response.
        self.closes = False
        self._drained: asyncio.Future[None] | None = None
        # When the present phase began, on the port's clock.
        self.since = port.now
        # While the client takes less than is sent: the least that has waited for it, and since when.
        self._unsent_bytes = 0
        self._stalled_since: float | None = None

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, or refuse it."""
        self._transport = transport  # type: ignore[assignment]
        place = self._port.clients.opened(self)
        self._port.begin_to_look(self)
        if self._hold_place() and place is not Admission.WELCOME:
            self.closes = True
            if place is Admission.NONE:
                self.abort()
            else:
                self._refuse(BadHttpMessage(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections"))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """Cancel what the client waited for."""
        self._port.clients.closed(self)
        self._port.end_to_look()
        self._end_intake()
        self._parser = None
        self._waiting = b""
        self.resume_writing()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._port.answered(exchange, HTTP_STATUSES["CANCELLED"])
            exchange.is_gone = True
            # What cancels it refers to it.
            cancel, exchange.cancel = exchange.cancel, None
            if cancel is not None:
                cancel()
            if exchange.ended is not None:
                exchange.ended()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's
        """Return the memory of a body that has a length, or the port's buffer."""
        if self._intake is not None:
            room = self._intake.room()
            if room is not None and len(room):
                return room
        return self._port.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Read what was received into the buffer."""
        intake = self._intake
        if intake is None:
            self._take(bytes(self._port.buffer[:nbytes]))
        elif intake.room() is None:
            self._read(bytes(self._port.buffer[:nbytes]))
        elif isinstance(intake, Fixed) and intake.received(nbytes):
            self._read(b"")

    def eof_received(self) -> bool:
        """Have the transport close: clients that end their side wait for nothing any more."""
        return False

    def pause_writing(self) -> None:
        """Note that the client takes less than is sent."""
        if self._drained is None:
            self._drained = self._port.loop.create_future()
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._stalled_since = self._port.now

    def resume_writing(self) -> None:
        """Wake the task that waited for the client to catch up."""
        drained, self._drained = self._drained, None
        self._stalled_since = None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # In

    def _take(self, data: bytes) -> None:
        if self._is_lingering:
            return
        if self._waiting:
            data = self._waiting + data
            self._waiting = b""
        if self._exchange is None:
            self._read(data)
            return
        # The next request came before the response to this one.
        self._hold(data)

    def _hold(self, data: bytes) -> None:
        """Keep bytes that cannot be read yet, and stop receiving if there are many."""
        self._waiting = data
        if len(data) > _WAITING_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _take_more(self) -> None:
        """Receive again once few bytes are left waiting."""
        if self._is_paused and len(self._waiting) <= _WAITING_BYTES:
            self._is_paused = False
            if not self._transport.is_closing() and self._hold_place():
                self._transport.resume_reading()

    def _hold_place(self) -> bool:
        """Get a place for the socket in the loop's epoll, or end the connection (see `process.event_loop`)."""
        socket = self._transport.get_extra_info("socket")
        if socket is None or self._port.watches.hold(socket.fileno()):
            return True
        self.abort()
        return False

    def _read(self, data: bytes) -> None:
        """Read the requests in `data`, as far as they can be answered now."""
        self._is_reading = True
        turns = 0
        try:
            while self._exchange is None and not self._is_lingering:
                intake = self._intake
                if intake is None:
                    if not data or self.closes:
                        break
                    turns += 1
                    if turns > _TURNS:
                        # All of them were answered at once: let other clients have their turn.
                        self._port.loop.call_soon(self._go_on)
                        break
                    rest = self._read_head(data)
                else:
                    rest = self._read_body(intake, data)
                if rest is None:
                    return
                data = rest
            if not self._is_lingering:
                self._hold(data)
        except BadHttpMessage as error:
            self._refuse(error)
        except Exception as error:
            _log.exception("reading a request failed")
            self._refuse(BadHttpMessage(HTTPStatus.INTERNAL_SERVER_ERROR, public_text(error)))
        finally:
            self._is_reading = False
            if self._exchange is None:
                self._take_more()

    def _read_head(self, data: bytes) -> bytes | None:
        """Return what lies behind the head, and behind the body if all of it has come; None if the head is not
        complete.
        """
        port = self._port
        if data[:2] == b"\r\n":
            return data[2:]  # some clients send it behind a body
        end = data.find(_END_OF_HEAD) + 4
        if end > port.limits.head_bytes or (end == 3 and len(data) > port.limits.head_bytes):
            raise BadHttpMessage(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"request line and headers exceed {port.limits.head_bytes} bytes",
            )
        if end == 3:
            self._begin_head(data)
            return None
        if self._parser is not None:
            self._feed(data[:end])
        head = port.heads.read(data[:end], self._parser)
        self._parser = None
        self._since_now()
        if not head.is_chunked:
            whole = end + head.content_length
            if len(data) >= whole and head.content_length <= port.limits.body_bytes:
                self._hand_over(head, data[end:whole])
                return data[whole:]
        self._begin_body(head)
        return data[end:]

    def _begin_head(self, data: bytes) -> None:
        """Parse the first part of a head, so that an error in it is answered without waiting for the rest."""
        if self._parser is None:
            self._parser = HeadParser()
            self._fed_bytes = 0
            self._since_now()
        self._feed(data)
        self._waiting = data

    def _feed(self, data: bytes) -> None:
        if self._parser is not None:
            self._parser.feed(data[self._fed_bytes :])
            self._fed_bytes = len(data)

    def _begin_body(self, head: Head) -> None:
        """Refuse a body that need not come, or make room for it."""
        port = self._port
        length = head.content_length
        self._head = head
        most_bytes = min(port.limits.body_bytes, port.handler.most_bytes_of(head))
        if length > most_bytes:
            raise self._refusal(head, most_bytes)(str(length), most_bytes)
        # A small body is read in any case, as the connection may go on after it.
        if length > _SMALL_BYTES or head.is_chunked or head.expects_continue:
            refusal = port.handler.refuse(head)
            if refusal is not None:
                raise refusal
        self._begun_ns = time.monotonic_ns()
        if head.is_chunked:
            self._intake = Chunked(most_bytes, self._refusal(head, most_bytes))
        else:
            memory, self._awaited_bytes = port.room_for(head, length)
            self._intake = Fixed(memory, length)
        if head.expects_continue and head.version == "1.1":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _refusal(self, head: Head, most_bytes: int) -> Callable[[str, int], BadHttpMessage]:
        """Return a function that makes the refusal of a body over the limit, from its size and the limit."""
        of_api = self._port.handler.over_size(head)
        if of_api is not None:
            return of_api
        if most_bytes != self._port.limits.input_bytes:
            return too_large
        return partial(over_input_size, is_json=head.header_length is None)

    def _end_intake(self) -> None:
        self._intake = None
        self._port.awaited_bytes -= self._awaited_bytes
        self._awaited_bytes = 0

    def _read_body(self, intake: Fixed | Chunked, data: bytes) -> bytes | None:
        """Return what lies behind the body, or None if it is not complete."""
        is_received = isinstance(intake, Fixed) and intake.received_bytes == intake.size_bytes
        rest = data if is_received else intake.take(data)
        head = self._head
        if rest is None or head is None:
            return None
        self._end_intake()
        self._head = None
        text = intake.text if isinstance(intake, Fixed) else None
        self._hand_over(head, intake.body, self._begun_ns, text)
        return rest

    def _hand_over(self, head: Head, body: Body, begun_ns: int | None = None, text: memoryview | None = None) -> None:
        exchange = self._exchange = HttpExchange(self, head, body, begun_ns)
        exchange.text = text
        try:
            self._port.handler.handle(exchange)
        except Exception as error:
            _log.exception("answering %s %r failed", head.method, head.target[:200])
            exchange.fail(500, public_text(error))

    # Out

    def disposition(self, head: Head) -> bytes:
        """Return the header `Connection` of the response to this request; empty if it needs none."""
        if not head.keeps_alive or self._port.clients.is_closed:
            self.closes = True
        if self.closes:
            return b"close"
        return b"keep-alive" if head.version == "1.0" else b""

    def write(self, data: Part) -> None:
        """Send bytes after those that were sent before."""
        self._transport.write(data)

    def write_parts(self, parts: Sequence[Part]) -> None:
        """Send parts in order, without joining them."""
        self._transport.writelines(parts)

    @property
    def unsent_bytes(self) -> int:
        """The bytes that wait for the client."""
        return self._transport.get_write_buffer_size()

    @property
    def is_stalled(self) -> bool:
        """If the client takes less than is sent."""
        return self._stalled_since is not None

    async def writable(self) -> None:
        """Return when there is room for more, or the client has gone."""
        if self._drained is not None:
            await asyncio.shield(self._drained)

    def end(self, exchange: HttpExchange) -> None:
        """End the response, and read the next request."""
        if self._exchange is not exchange:
            return
        self._exchange = None
        exchange.is_gone = True
        exchange.cancel = None
        self._port.answered(exchange, exchange.status)
        if exchange.ended is not None:
            exchange.ended()
        self._since_now()
        if self.closes:
            self._transport.close()
            return
        if self._is_reading:
            return
        if self._waiting:
            # From the loop, so that many short exchanges do not pile up on the stack.
            self._port.loop.call_soon(self._go_on)
        self._take_more()

    def _go_on(self) -> None:
        if self._exchange is None and self._waiting and not self._transport.is_closing():
            data, self._waiting = self._waiting, b""
            self._read(data)

    def _refuse(self, error: BadHttpMessage) -> None:
        """Answer a malformed message, and end the connection once the client has had time to read the answer."""
        self._end_intake()
        self._parser = None
        self._waiting = b""
        self.closes = True
        head, self._head = self._head, None
        self._port.refuse(self, head, error)
        self._is_lingering = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._since_now()
        else:  # TLS itself says that it ends
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    # Time

    def _since_now(self) -> None:
        self.since = self._port.now

    @property
    def is_idle(self) -> bool:
        """If no request has begun."""
        return self._exchange is None and self._intake is None and not self._waiting

    def close_if_idle(self) -> None:
        """Close the connection unless a request has begun, as the server ends."""
        if self.is_idle:
            self._transport.close()

    def look(self, now: float) -> None:
        """End the connection if its client has taken too long."""
        limits = self._port.limits
        waited_s = now - self.since
        if self._stalled_since is not None:
            unsent_bytes = self._transport.get_write_buffer_size()
            if unsent_bytes < self._unsent_bytes:
                self._unsent_bytes, self._stalled_since = unsent_bytes, now
            elif now - self._stalled_since > limits.write_timeout_s:
                self.abort()
        elif self._is_lingering:
            if waited_s > _LINGER_S:
                self.abort()
        elif self._exchange is not None:
            return
        elif self._intake is not None:
            allowed_s = self._intake.received_bytes / limits.body_bytes_per_s
            if waited_s > limits.body_timeout_s + allowed_s:
                self._refuse(_too_slow("body"))
        elif self._parser is not None:
            if waited_s > limits.head_timeout_s:
                self._refuse(_too_slow("headers"))
        elif waited_s > limits.idle_timeout_s:
            self._transport.close()


class HttpProtocol(HttpConnection, asyncio.BufferedProtocol):
    """A connection as transports know it."""

    __slots__ = ()


def _too_slow(what: str) -> BadHttpMessage:
    return BadHttpMessage(HTTPStatus.REQUEST_TIMEOUT, f"the {what} of the request took too long")


def clients_of(
    name: str, most: int, together: AllClients, meter: Meter, *, is_apart: bool = False
) -> Clients[HttpConnection]:
    """Return what counts the clients of a port."""
    most_told = max(1, most // _TOLD_PART)
    return Clients(name, most, together, meter, most_told=most_told, is_apart=is_apart)


class HttpPort:
    """Makes the connections of one port, and looks after them. For the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handler: Handler,
        limits: HttpLimits,
        clients: Clients[HttpConnection] | None = None,
    ) -> None:
        """Make no connection yet."""
        self.loop = loop
        self.watches = watches_of(loop)
        self.writing = asyncio.Lock()
        self.handler = handler
        self.limits = limits
        self.handshake_timeout_s = limits.head_timeout_s
        self.clients = clients or clients_of("HTTP", limits.connections, AllClients(), Meter())
        self.meter = self.clients.meter
        self.heads = Heads()
        # One for all connections: bytes are taken out of it before more are received.
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        # Memory that stubs see, for bodies that have been announced and are not complete.
        self.awaited_bytes = 0
        # Seconds of the loop's clock at the last look. So no time limit is off by more than one look.
        self.now = loop.time()
        times_s = (limits.head_timeout_s, limits.body_timeout_s, limits.idle_timeout_s)
        self._look_s = min(_LOOK_S, *(time_s / 4 for time_s in (*times_s, limits.write_timeout_s)))
        self._looking: asyncio.TimerHandle | None = None

    def __call__(self) -> HttpProtocol:
        """Make a protocol for a new connection."""
        return HttpProtocol(self)

    def begin_to_look(self, connection: HttpConnection) -> None:
        """Look after connections from the first one on."""
        if self._looking is None:
            self.now = connection.since = self.loop.time()
            self._looking = self.loop.call_later(self._look_s, self._look)

    def end_to_look(self) -> None:
        """Rest after the last connection."""
        if not self.clients.open and self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look(self) -> None:
        self.now = self.loop.time()
        for connection in list(self.clients.open):
            connection.look(self.now)
        relieve(each for each in self.clients.open if each.is_stalled)
        self._looking = self.loop.call_later(self._look_s, self._look)

    def room_for(self, head: Head, size_bytes: int) -> tuple[memoryview, int]:
        """Return memory for a body that is to come, and how much of it counts in `awaited_bytes` until it has come.

        Raises `BadHttpMessage` if there is none.
        """
        # The memory is taken before a byte has come, so a client that only announces must not get very much of it.
        if self.awaited_bytes + size_bytes <= _AWAITED_BYTES:
            memory = self.handler.memory_for(head, size_bytes)
            if memory is not None and len(memory) <= size_bytes:
                self.awaited_bytes += size_bytes
                return memory, size_bytes
        return memory_of(size_bytes), 0

    def answered(self, exchange: HttpExchange, status: int) -> None:
        """Count an exchange that has ended with this status."""
        self.meter.answered(status)
        if exchange.received_ns:
            has_failed = exchange.has_failed or status >= _BAD_REQUEST
            self.meter.clients.ended(exchange.received_ns, has_failed=has_failed)

    def refuse(self, connection: HttpConnection, head: Head | None, error: BadHttpMessage) -> None:
        """Write the answer to a malformed request, or to one whose body is not read."""
        self.meter.answered(error.status)
        HttpExchange(connection, _NO_HEAD if head is None else head, b"").fail(error.status, error.text, error.headers)

    async def drain(self, timeout_s: float) -> bool:
        """Finish what has begun and end all connections. Returns False if some were cut off when the time was over."""
        self.clients.is_closed = True
        for connection in list(self.clients.open):
            connection.close_if_idle()
        if await self.clients.emptied(timeout_s):
            return True
        self.close()
        return False

    def close(self) -> None:
        """End all connections at once."""
        self.clients.is_closed = True
        for connection in list(self.clients.open):
            connection.abort()
