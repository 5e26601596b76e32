"""One client's connection: bytes come in, requests go to the handler, one after another, responses go out."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from moonpool.runtime.frontend.http.exchange import Exchange
from moonpool.runtime.frontend.http.head import HEADER_LENGTH, BadMessage, HeadParser
from moonpool.runtime.frontend.http.intake import Chunked, Fixed, over_input_size, too_large
from moonpool.runtime.frontend.statuses import HTTP
from moonpool.runtime.public_text import public_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.runtime.frontend.http.exchange import Body, Part
    from moonpool.runtime.frontend.http.head import Head
    from moonpool.runtime.frontend.http.options import HttpLimits
    from moonpool.runtime.frontend.http.port import Port

_log = logging.getLogger("moonpool")
# What a client may send on after an error, so that it gets to read the response before it sees a reset.
_LINGER_S = 2.0
_WAITING_BYTES = _SMALL_BYTES = 64 << 10
_TURNS = 32
_END_OF_HEAD = b"\r\n\r\n"


class Connection(asyncio.BufferedProtocol):
    """Reads a request, hands it over, and reads the next one when that is answered."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._transport: asyncio.Transport
        self.peer: tuple[str, int] | None = None
        # Bytes that wait for more, or for the response before them.
        self._waiting = b""
        self._parser: HeadParser | None = None
        self._fed_bytes = 0
        self._head: Head | None = None
        self._begun_ns = 0
        self._intake: Fixed | Chunked | None = None
        # Of a body that is to come, in memory that is shared.
        self._awaited_bytes = 0
        self._exchange: Exchange | None = None
        self._is_reading = False
        self._is_paused = False
        self._is_lingering = False
        # After the response that is under way the connection ends.
        self.closes = False
        self._drained: asyncio.Future[None] | None = None
        # On the port's clock, for its look at who is too slow.
        self.since = port.now
        self._unsent_bytes = 0
        self._stalled_since: float | None = None

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts the connection, or refuses it."""
        self._transport = transport  # type: ignore[assignment]
        name = transport.get_extra_info("peername")
        if isinstance(name, tuple):
            self.peer = name[0], name[1]
        is_welcome = self._port.opened(self)
        if self._hold_place() and not is_welcome:
            self.closes = True
            if self._port.is_crowded:
                self.abort()
            else:
                self._refuse(BadMessage(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections"))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """The client has gone: whatever it waited for is cancelled."""
        self._port.closed(self)
        self._end_intake()
        self._parser = None
        self._waiting = b""
        self.resume_writing()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._port.meter.answered(HTTP["CANCELLED"])
            exchange.is_gone = True
            if exchange.cancel is not None:
                exchange.cancel()
            if exchange.ended is not None:
                exchange.ended()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's
        """The rest of a large body goes where it belongs, all else into the port's buffer."""
        if self._intake is not None:
            room = self._intake.room()
            if room is not None and len(room):
                return room
        return self._port.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes came into the buffer."""
        intake = self._intake
        if intake is None:
            self._take(bytes(self._port.buffer[:nbytes]))
        elif intake.room() is None:
            self._read(bytes(self._port.buffer[:nbytes]))
        elif isinstance(intake, Fixed) and intake.received(nbytes):
            self._read(b"")

    def eof_received(self) -> bool:
        """Clients that end their side wait for nothing any more; the transport closes."""
        return False

    def pause_writing(self) -> None:
        """More waits for the client than it takes."""
        if self._drained is None:
            self._drained = self._port.loop.create_future()
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._stalled_since = self._port.now

    def resume_writing(self) -> None:
        """The client has caught up."""
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
        # The next request came before the response to this one: let it lie where it is.
        self._hold(data)

    def _hold(self, data: bytes) -> None:
        """Keep what cannot be read yet, and take no more where that is much."""
        self._waiting = data
        if len(data) > _WAITING_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _take_more(self) -> None:
        """What was held has been read but for a little."""
        if self._is_paused and len(self._waiting) <= _WAITING_BYTES:
            self._is_paused = False
            if not self._transport.is_closing() and self._hold_place():
                self._transport.resume_reading()

    def _hold_place(self) -> bool:
        """Keep the socket's place in the loop's epoll; without one the connection ends."""
        socket = self._transport.get_extra_info("socket")
        if socket is None or self._port.watches.hold(socket.fileno()):
            return True
        self.abort()
        return False

    def _read(self, data: bytes) -> None:
        """Take whatever requests are in the data, as far as they may be answered now."""
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
                        # They were all answered at once: other clients want to be, too.
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
        except BadMessage as error:
            self._refuse(error)
        except Exception as error:
            _log.exception("reading a request failed")
            self._refuse(BadMessage(HTTPStatus.INTERNAL_SERVER_ERROR, public_text(error)))
        finally:
            self._is_reading = False
            if self._exchange is None:
                self._take_more()

    def _read_head(self, data: bytes) -> bytes | None:
        """Returns what lies behind the head, and behind the body where all of it is there."""
        port = self._port
        if data[:2] == b"\r\n":
            return data[2:]  # some clients send it behind a body
        end = data.find(_END_OF_HEAD) + 4
        if end > port.limits.head_bytes or (end == 3 and len(data) > port.limits.head_bytes):
            raise BadMessage(
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
        """The head comes in pieces. What is wrong with it is said without waiting for the rest."""
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
        """More of the body is to come: refuse it where that can be said already, and make room."""
        port = self._port
        length = head.content_length
        most_bytes = min(port.limits.body_bytes, port.handler.most_bytes_of(head))
        if length > most_bytes:
            raise self._refusal(head, most_bytes)(str(length), most_bytes)
        # A small body is read all the same, as the connection may then go on.
        if length > _SMALL_BYTES or head.is_chunked or head.expects_continue:
            refusal = port.handler.refuse(head)
            if refusal is not None:
                raise refusal
        self._head = head
        self._begun_ns = time.monotonic_ns()
        if head.is_chunked:
            self._intake = Chunked(most_bytes, self._refusal(head, most_bytes))
        else:
            memory, self._awaited_bytes = port.room_for(head, length)
            self._intake = Fixed(memory)
        if head.expects_continue and head.version == "1.1":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _refusal(self, head: Head, most_bytes: int) -> Callable[[str, int], BadMessage]:
        """Return a function that makes the refusal of a body over the limit, from its size and the limit."""
        if most_bytes != self._port.limits.input_bytes:
            return too_large
        return partial(over_input_size, is_json=HEADER_LENGTH not in head.headers)

    def _end_intake(self) -> None:
        self._intake = None
        self._port.awaited_bytes -= self._awaited_bytes
        self._awaited_bytes = 0

    def _read_body(self, intake: Fixed | Chunked, data: bytes) -> bytes | None:
        is_received = isinstance(intake, Fixed) and intake.received_bytes == intake.size_bytes
        rest = data if is_received else intake.take(data)
        head = self._head
        if rest is None or head is None:
            return None
        self._end_intake()
        self._head = None
        self._hand_over(head, intake.body, self._begun_ns)
        return rest

    def _hand_over(self, head: Head, body: Body, begun_ns: int | None = None) -> None:
        exchange = self._exchange = Exchange(self, head, body, begun_ns)
        try:
            self._port.handler.handle(exchange)
        except Exception as error:
            _log.exception("answering %s %r failed", head.method, head.target[:200])
            exchange.fail(500, public_text(error))

    # Out

    def disposition(self, head: Head) -> bytes:
        """What the response to this request says of the connection; nothing where that is understood."""
        if not head.keeps_alive or self._port.is_draining:
            self.closes = True
        if self.closes:
            return b"close"
        return b"keep-alive" if head.version == "1.0" else b""

    @property
    def limits(self) -> HttpLimits:
        """Of its port."""
        return self._port.limits

    def write(self, data: Part) -> None:
        """Send in order."""
        self._transport.write(data)

    def write_parts(self, parts: Sequence[Part]) -> None:
        """Send in order, without making one of them."""
        self._transport.writelines(parts)

    @property
    def unsent_bytes(self) -> int:
        """How much waits for the client."""
        return self._transport.get_write_buffer_size()

    @property
    def is_stalled(self) -> bool:
        """Whether the client takes less than is sent."""
        return self._stalled_since is not None

    async def writable(self) -> None:
        """Returns when there is room, or nobody who would need it."""
        if self._drained is not None:
            await asyncio.shield(self._drained)

    def end(self, exchange: Exchange) -> None:
        """The response is complete: the next request may be read."""
        if self._exchange is not exchange:
            return
        self._exchange = None
        exchange.is_gone = True
        exchange.cancel = None
        self._port.meter.answered(exchange.status)
        if exchange.ended is not None:
            exchange.ended()
        self._since_now()
        if self.closes:
            self._transport.close()
            return
        if self._is_reading:
            return
        if self._waiting:
            # From the loop: whoever ends many short exchanges must not pile them up on its stack.
            self._port.loop.call_soon(self._go_on)
        self._take_more()

    def _go_on(self) -> None:
        if self._exchange is None and self._waiting and not self._transport.is_closing():
            data, self._waiting = self._waiting, b""
            self._read(data)

    def _refuse(self, error: BadMessage) -> None:
        """Answer a message that is none, and end the connection once the client may have read that."""
        self._end_intake()
        self._parser = None
        self._waiting = b""
        self.closes = True
        self._port.refuse(self, error)
        self._is_lingering = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._since_now()
        else:  # TLS says by itself that it ends
            self._transport.close()

    def abort(self) -> None:
        """End it at once."""
        self._transport.abort()

    # Time

    def _since_now(self) -> None:
        self.since = self._port.now

    @property
    def is_idle(self) -> bool:
        """Whether nothing has begun that it would be a pity to cut off."""
        return self._exchange is None and self._intake is None and not self._waiting

    def close_if_idle(self) -> None:
        """The server ends: what is under way is finished."""
        if self.is_idle:
            self._transport.close()

    def look(self, now: float) -> None:
        """End the connection if its client has taken too long with something."""
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


def _too_slow(what: str) -> BadMessage:
    return BadMessage(HTTPStatus.REQUEST_TIMEOUT, f"the {what} of the request took too long")
