"""HTTP in a front end: inference of plain models is answered here, all other requests are passed on to the main process.

A request that is passed on travels as the client sent it, over a connection of the relay to the main process, and the
answer comes back the same way, piece by piece. Only headers about the connection itself are left out. Everything is for the
event loop's thread.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from functools import partial
from typing import Any

from httptools import HttpParserError, HttpResponseParser

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.event_loop import open_unix_connection
from moonpool.runtime.server.clients import AllClients
from moonpool.runtime.server.http.connection import HttpExchange
from moonpool.runtime.server.http.handler import HttpHandler
from moonpool.runtime.server.http.head import TEXT, Head
from moonpool.runtime.server.http.inference import HttpInferCall, HttpInference, InferTarget
from moonpool.runtime.server.http.options import HttpOptions
from moonpool.runtime.server.http.server import HttpServer
from moonpool.runtime.server.inference.request import Hosted
from moonpool.runtime.server.pool.attached import AttachedModel, AttachedModels
from moonpool.runtime.server.service import Service
from moonpool.runtime.stubs.regions import CallerMemory

# JSON may escape letters of the key, although no library does.
_SHARED = re.compile(rb"shared_memory_region|\\u00[4-7]")


class FrontInference(HttpInference):
    """Answers inference with the stubs of the main process, or passes the request on."""

    def __init__(self, relay: Relay, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._relay = relay

    def handle(self, exchange: HttpExchange, target: InferTarget) -> None:
        model = self._model(target)
        if model is None or self._may_name_shared_memory(exchange, target):
            self._relay.handle(exchange)
        else:
            HttpInferCall(self, exchange, target, model).begin()

    def _model(self, target: InferTarget) -> AttachedModel | None:
        models: AttachedModels = self.service.models  # type: ignore[assignment]
        try:
            model = models.find(target.model, target.version)
        except MoonpoolError:
            return None
        return None if model.model.config.decoupled else model

    @staticmethod
    def _may_name_shared_memory(exchange: HttpExchange, target: InferTarget) -> bool:
        """Return whether the main process must answer, as clients register their memory there. A compressed body may name it, too."""
        if target.encoding != "identity":
            return True
        body = exchange.body if exchange.text is None else exchange.text
        length = len(body) if target.header_length is None else target.header_length
        return _SHARED.search(body, 0, length) is not None

    def caller_memory(self, hosted: Hosted) -> CallerMemory | None:
        model: AttachedModel = hosted  # type: ignore[assignment]
        return model.memory


class FrontHttpServer(HttpServer):
    """Listens at the public port, beside the other front ends."""

    def __init__(
        self,
        service: Service,
        options: HttpOptions,
        upstream: str,
        together: AllClients | None = None,
    ) -> None:
        """`upstream` is the path of the socket at which the main process listens."""
        super().__init__(service, options, together)
        self._upstream = upstream
        self._relay: Relay | None = None

    def make_handler(self) -> HttpHandler:
        loop, options = asyncio.get_running_loop(), self._options
        relay = self._relay = Relay(loop, self._upstream)
        return HttpHandler(
            FrontInference(relay, self._service, loop, self._executor, options.limits),
            relay,
            *self.guards(),
        )

    def close(self) -> None:
        super().close()
        if self._relay is not None:
            self._relay.close()


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_log = RuntimeLog("moonpool")
_READ_BYTES = 256 << 10
# Headers about a connection, which mean nothing on another one.
_OWN_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"expect", b"upgrade")
)
_MOST_IDLE = 32


class Relay:
    """Passes exchanges on to the main process. For the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: str) -> None:
        """`path` is that of the socket at which the main process listens."""
        self._loop = loop
        self._path = path
        self._idle: deque[Connection] = deque(maxlen=_MOST_IDLE)
        # The loop itself refers to tasks weakly.
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: HttpExchange) -> None:
        """Have the main process answer. If the client goes, the connection there is closed, which cancels the request."""
        # The main process counts it.
        exchange.received_ns = 0
        task = self._loop.create_task(self._answer(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        exchange.cancel = partial(_cancel, task)

    async def _answer(self, exchange: HttpExchange) -> None:
        try:
            await self._pass_on(exchange)
        except (OSError, EOFError, HttpParserError) as error:
            _log.warning("the main process did not answer: %s", error or type(error).__name__)
            if exchange.status:
                exchange.abort()
            else:
                is_gone = isinstance(error, (ConnectionError, FileNotFoundError, EOFError))
                reason = "is stopping" if is_gone else "cannot pass this request on at the moment"
                exchange.fail(503, f"the server {reason}", TEXT)

    async def _pass_on(self, exchange: HttpExchange) -> None:
        parts = [part for part in (exchange.text, exchange.body) if part is not None]
        request = _request(exchange.head, sum(map(len, parts)))
        reader, writer = await self._connect()
        answer = _Answer(exchange)
        try:
            writer.write(request)
            for part in parts:
                writer.write(part)
            await writer.drain()
            while not answer.is_complete:
                data = await reader.read(_READ_BYTES)
                if not data:
                    raise EOFError("it closed the connection")
                answer.feed(data)
                await exchange.writable()
        except BaseException:
            # The rest of this answer must not be taken for the answer to another request.
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
        return await open_unix_connection(self._path)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop()[1].close()


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _request(head: Head, body_bytes: int) -> bytes:
    lines = [b"%b %b HTTP/1.1" % (head.method.encode(), head.target)]
    lines += [b"%b: %b" % pair for pair in head.raw_headers if pair[0].lower() not in _OWN_HEADERS]
    if body_bytes or head.method not in ("GET", "HEAD"):
        lines.append(b"content-length: %d" % body_bytes)
    return b"\r\n".join([*lines, b"", b""])


class _Answer:
    """Takes a response in pieces, and sends each to the client as it comes."""

    def __init__(self, exchange: HttpExchange) -> None:
        self._exchange = exchange
        self._parser = HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._length: int | None = None
        self.is_complete = False
        self.keeps_alive = False

    def feed(self, data: bytes) -> None:
        """Parse bytes of the response. Raises `HttpParserError`."""
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
            # No body follows, whatever the length says. The parser would take the next answer for it.
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
