"""Requests over HTTP that a front end does not answer itself: they go to the main process and come back as they are."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from httptools import HttpParserError, HttpResponseParser

from moonpool.runtime.frontend.http.head import TEXT

if TYPE_CHECKING:
    from moonpool.runtime.frontend.http.exchange import Exchange
    from moonpool.runtime.frontend.http.head import Head

    Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_log = logging.getLogger("moonpool")
_READ_BYTES = 256 << 10
# Of a connection, and not of a message.
_OWN_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect", b"upgrade")
)
_MOST_IDLE = 32


class Relay:
    """Passes exchanges on. For the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: str) -> None:
        """`path` is the socket at which the main process listens."""
        self._loop = loop
        self._path = path
        self._idle: deque[Connection] = deque(maxlen=_MOST_IDLE)
        # A loop itself refers to tasks weakly only.
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange) -> None:
        """Have the main process answer. It hears of it when the client goes."""
        task = self._loop.create_task(self._answer(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.cancel = partial(_cancel, task)

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await self._pass_on(exchange)
        except (OSError, EOFError, HttpParserError) as error:
            _log.warning("the main process did not answer: %s", error or type(error).__name__)
            if exchange.status:
                exchange.abort()
            else:
                exchange.fail(503, "the server is stopping", TEXT)

    async def _pass_on(self, exchange: Exchange) -> None:
        request = _request(exchange.head, len(exchange.body))
        reader, writer = await self._connect()
        answer = _Answer(exchange)
        try:
            writer.write(request)
            writer.write(exchange.body)
            await writer.drain()
            while not answer.is_complete:
                data = await reader.read(_READ_BYTES)
                if not data:
                    raise EOFError("it closed the connection")
                answer.feed(data)
                await exchange.writable()
        except BaseException:
            # What is still to come of this answer must not be taken for that to another request.
            writer.close()
            raise
        if answer.keeps_alive and len(self._idle) < _MOST_IDLE:
            self._idle.append((reader, writer))
        else:
            writer.close()

    async def _connect(self) -> Connection:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof() and not writer.is_closing():
                return reader, writer
            writer.close()
        return await asyncio.open_unix_connection(self._path)

    def close(self) -> None:
        """End all connections that nobody uses."""
        while self._idle:
            self._idle.pop()[1].close()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _request(head: Head, body_bytes: int) -> bytes:
    lines = [b"%b %b HTTP/1.1" % (head.method.encode(), head.target)]
    lines += [b"%b: %b" % pair for pair in head.raw_headers if pair[0] not in _OWN_HEADERS]
    if body_bytes or head.method not in ("GET", "HEAD"):
        lines.append(b"content-length: %d" % body_bytes)
    return b"\r\n".join([*lines, b"", b""])


class _Answer:
    """Takes a response in pieces, and gives them to the client as they come."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._parser = HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._length: int | None = None
        self.is_complete = False
        self.keeps_alive = False

    def feed(self, data: bytes) -> None:
        """Raises HttpParserError."""
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by httptools."""
        lower = name.lower()
        if lower == b"content-length":
            self._length = int(value)
        elif lower not in _OWN_HEADERS:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Called by httptools."""
        status, headers = self._parser.get_status_code(), tuple(self._headers)
        self._exchange.begin(status, headers, self._length)
        if self._exchange.head.method == "HEAD":
            # Nothing follows, whatever its length says; what would be parsed next is another answer.
            self._finish()

    def on_body(self, piece: bytes) -> None:
        """Called by httptools."""
        self._exchange.send(piece)

    def on_message_complete(self) -> None:
        """Called by httptools."""
        if not self.is_complete:
            self.keeps_alive = self._parser.should_keep_alive()
            self._finish()

    def _finish(self) -> None:
        self.is_complete = True
        self._exchange.finish()
