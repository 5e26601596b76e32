"""From our connections to an ASGI application and back."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from moonpool.runtime.frontend.http.head import TEXT
from moonpool.runtime.public_text import public_text

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from moonpool.runtime.frontend.http.exchange import Exchange

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
    Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
    Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# Where in the scope those find the exchange who want more than ASGI has.
EXCHANGE = "moonpool.exchange"
_log = logging.getLogger("moonpool")
# What the connection says itself.
_OWN_HEADERS = (b"connection", b"transfer-encoding", b"content-length", b"date", b"server")


class AsgiBridge:
    """Runs the application in a task for each request. For the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, application: Application) -> None:
        self._loop = loop
        self._application = application
        # A loop itself refers to tasks weakly only.
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: Exchange) -> None:
        """Have the application answer. It is cancelled when the client goes."""
        task = self._loop.create_task(self._answer(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: Exchange) -> None:
        call = _Call(exchange)
        exchange.cancel = call.gone
        try:
            await self._application(call.scope(), call.receive, call.send)
        except Exception as error:
            if exchange.is_gone and isinstance(error, OSError):
                return  # as ASGI has an application learn that the client has gone
            path = exchange.head.target.decode("latin-1")
            _log.exception("answering %s %s failed", exchange.head.method, path)
            if exchange.status:
                exchange.abort()
            else:
                exchange.fail(500, public_text(error), TEXT)
        else:
            # Does nothing where the application has ended its response.
            exchange.abort()


class _Call:
    """One request as the application sees it."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._has_body = True
        self._has_gone = asyncio.Event()
        self._start: tuple[int, tuple[tuple[bytes, bytes], ...], int | None] | None = None

    def scope(self) -> Scope:
        head = self._exchange.head
        raw_path, _, query = head.target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": head.version,
            "method": head.method,
            "scheme": "http",
            # Not decoded: names are what the client wrote.
            "path": raw_path.decode("latin-1"),
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": head.raw_headers,
            "client": self._exchange.client,
            "server": None,
            EXCHANGE: self._exchange,
        }

    def gone(self) -> None:
        """The client has gone."""
        self._has_gone.set()

    async def receive(self) -> MutableMapping[str, Any]:
        """The whole body, and after it nothing but the end of the connection."""
        if self._has_body:
            self._has_body = False
            return {
                "type": "http.request",
                "body": bytes(self._exchange.body),
                "more_body": False,
            }
        await self._has_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """A part of the response. Raises `OSError` where the client has gone, as ASGI wants it."""
        exchange = self._exchange
        if exchange.is_gone:
            raise OSError("the client has gone")
        if message["type"] == "http.response.start":
            given = message.get("headers", ())
            length = next((int(v) for k, v in given if k.lower() == b"content-length"), None)
            headers = tuple((k.title(), v) for k, v in given if k.lower() not in _OWN_HEADERS)
            self._start = message["status"], headers, length
            return
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        if self._start is not None:
            status, headers, length = self._start
            self._start = None
            if is_last:
                exchange.respond(status, headers, (body,) if body else ())
                return
            exchange.begin(status, headers, length)
        exchange.send(body)
        if is_last:
            exchange.finish()
        else:
            await exchange.writable()
            # An application that never waits must not keep the others waiting.
            await asyncio.sleep(0)
