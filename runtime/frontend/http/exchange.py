"""One request and the response to it."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from moonpool.ipc.memo import Memo
from moonpool.runtime.frontend.http.head import JSON

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.runtime.frontend.http.connection import Connection
    from moonpool.runtime.frontend.http.head import Head, Headers
    from moonpool.runtime.frontend.http.options import HttpLimits

Body = bytes | bytearray | memoryview
Part = bytes | memoryview
# Joining what is small costs less than handing it over piece by piece.
_JOIN_BYTES = 16 << 10


class Exchange:
    """Belongs to whoever handles the request, until the response has ended. For the loop's thread.

    Everything may be called after the client has gone, and does nothing then.
    """

    __slots__ = (
        "_begun_ns",
        "_connection",
        "_length",
        "body",
        "cancel",
        "ended",
        "head",
        "is_gone",
        "status",
    )

    def __init__(
        self, connection: Connection, head: Head, body: Body, begun_ns: int | None = None
    ) -> None:
        self._connection = connection
        self._begun_ns = begun_ns
        self.head = head
        self.body: Body = body
        # Called when the client goes before the response has ended. It must not block.
        self.cancel: Callable[[], None] | None = None
        # Called when the response has ended, however it ended.
        self.ended: Callable[[], None] | None = None
        self.is_gone = False
        # Of the response, 0 before it has begun; and how many bytes of it are still to come, -1 for chunks.
        self.status = 0
        self._length = 0

    @property
    def limits(self) -> HttpLimits:
        """Of the port that it came to."""
        return self._connection.limits

    @property
    def begun_ns(self) -> int:
        """When the head of the request had come, if its body came later, else now; of `time.monotonic_ns`."""
        return time.monotonic_ns() if self._begun_ns is None else self._begun_ns

    @property
    def client(self) -> tuple[str, int] | None:
        """Address and port of the client, where it has some."""
        return self._connection.peer

    def respond(self, status: int, headers: Headers = JSON, parts: Sequence[Part] = ()) -> None:
        """The whole response. The parts keep their memory until they are sent."""
        if self.is_gone:
            return
        length = 0
        for part in parts:
            length += len(part)
        self.status = status
        connection = self._connection
        head = _head(status, headers, length, connection.disposition(self.head))
        if self.head.method == "HEAD":
            connection.write(head)
        elif length <= _JOIN_BYTES:
            connection.write(b"".join((head, *parts)))
        else:
            connection.write_parts([head, *parts])
        connection.end(self)

    def fail(self, status: int, text: str, headers: Headers = JSON) -> None:
        """An error in the form that KServe v2 has for all of them."""
        self.respond(status, headers, (error_body(text),))

    def begin(self, status: int, headers: Headers, length: int | None = None) -> None:
        """A response whose body comes piece by piece: of `length` bytes, or in chunks where that is None."""
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
        self._connection.write(_head(status, headers, framing, disposition))

    def send(self, piece: Part) -> None:
        """A piece of the body. Who sends many waits for `writable` in between."""
        if self.is_gone or not len(piece) or self.head.method == "HEAD":
            return
        if self._length == -1:
            self._connection.write_parts([b"%x\r\n" % len(piece), piece, b"\r\n"])
            return
        if self._length >= 0:
            # Neither more nor less than was announced: the next response would be taken for its rest.
            piece = piece[: self._length]
            self._length -= len(piece)
        self._connection.write(piece)

    def finish(self) -> None:
        """The body is complete."""
        if self.is_gone:
            return
        if self.head.method != "HEAD":
            if self._length == -1:
                self._connection.write(b"0\r\n\r\n")
            elif self._length > 0:
                self._connection.abort()
                return
        self._connection.end(self)

    def abort(self) -> None:
        """The response cannot be completed: the client sees that by the end of the connection."""
        if not self.is_gone:
            self._connection.abort()

    @property
    def unsent_bytes(self) -> int:
        """How much of what was sent the client has not taken yet."""
        return 0 if self.is_gone else self._connection.unsent_bytes

    async def writable(self) -> None:
        """Returns when the client has taken most of what was sent, or has gone."""
        if not self.is_gone:
            await self._connection.writable()


def error_body(text: str) -> bytes:
    """`{"error": text}`, without the library that the rest of the JSON is made with."""
    import json

    return b'{"error":%b}' % json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")


# As Triton's library for HTTP says it.
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus} | {405: b"Not Allowed"}
_heads: Memo[tuple[int, Headers, int | None, bytes], bytes] = Memo(1024)


def _head(status: int, headers: Headers, length: int | None, disposition: bytes) -> bytes:
    """Status line and headers. `length` is -1 for chunks, None where only the connection's end tells.

    `disposition` says what becomes of the connection, where that has to be said.
    """
    key = (status, headers, length, disposition)
    known = _heads.get(key)
    if known is not None:
        return known
    lines = [b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b""))]
    lines += [b"%b: %b" % header for header in headers]
    if length == -1:
        lines.append(b"Transfer-Encoding: chunked")
    elif length is not None and status not in (204, 304):
        lines.append(b"Content-Length: %d" % length)
    if disposition:
        lines.append(b"Connection: " + disposition)
    return _heads.keep(key, b"\r\n".join([*lines, b"", b""]))
