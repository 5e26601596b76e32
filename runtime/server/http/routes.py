"""A table of routes, for requests that are not in a hurry: each is answered in a task of the event loop.

Theory of operation. Everything runs in the loop's thread but for the reading of long JSON (`LongBodies`), which a
thread of the executor does with nothing but the body. Its lock is the loop's: one body is read at a time, in the order
in which they came, so that their values do not need memory at once. The task of a client that goes before its turn is
cancelled.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from functools import partial
from secrets import token_hex
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.server.http.body import ENCODINGS, TooLong, inflate
from moonpool.runtime.server.http.connection import HttpExchange, error_body, error_headers, http_status
from moonpool.runtime.server.http.head import JSON, TEXT, BadHttpMessage, Body, Head, Headers, path_of
from moonpool.runtime.server.http.json_text import TooMuchJson, dumps, loads
from moonpool.runtime.server.http.turns import LONG_BYTES

T = TypeVar("T")
_log = RuntimeLog("moonpool")


class RouteRequest:
    """A request to a route. `parts` are the named parts of its path, as the client wrote them."""

    def __init__(self, exchange: HttpExchange, parts: Mapping[str, str], long_bodies: LongBodies) -> None:
        self.exchange = exchange
        self.parts = parts
        # By which the client and the log know the request, once an endpoint has named it.
        self.id = ""
        self._long_bodies = long_bodies

    @property
    def method(self) -> str:
        return self.exchange.head.method

    @property
    def model(self) -> tuple[str, str]:
        """Name and version of the model that the path names; empty texts if it names none."""
        return self.parts.get("model", ""), self.parts.get("version", "")

    async def json(self, empty: Any = None) -> Any:
        """Return the value of the body, or `empty`, if that is given, for an empty body. Raises `NotJson`."""
        if empty is not None and not len(self.exchange.body):
            return empty
        return await self.read(loads)

    async def read(self, function: Callable[[Body], T]) -> T:
        """Return what a function makes of the body, and raise what it raises. A thread calls it if the body is long or
        compressed. Raises `InvalidRequest` for a body that cannot be decompressed.
        """
        encoding = self.header(b"content-encoding", "identity")
        if encoding == "identity":
            body = self.exchange.body
            if len(body) <= LONG_BYTES:
                return function(body)
        elif encoding in ENCODINGS:
            function = partial(_read_inflated, function, self.exchange.limits.json_bytes)
        else:
            raise InvalidRequest(f"the Content-Encoding '{encoding}' is not supported: it may be gzip or deflate")
        return await self._long_bodies.read(self.exchange, function)

    def cancel_if_gone(self) -> None:
        """Cancel the task that calls this, if the client goes before it has its answer."""
        self.exchange.cancel = partial(_cancel, asyncio.current_task())

    def header(self, name: bytes, default: str) -> str:
        """Return the value of a header by its lower-case name."""
        value = self.exchange.head.headers.get(name)
        return default if value is None else value.decode("latin-1")

    def query(self, name: str) -> str | None:
        """Return a parameter of the query, the last one of this name."""
        query = self.exchange.head.target.partition(b"?")[2].decode("latin-1")
        return dict(parse_qsl(query, keep_blank_values=True)).get(name)


def _read_inflated(function: Callable[[Body], T], limit_bytes: int, body: Body) -> T:
    """Return what a function makes of a compressed body."""
    try:
        inflated = inflate(body, limit_bytes)
    except TooLong as error:
        raise TooMuchJson(error.text) from None
    except BadHttpMessage as error:
        raise InvalidRequest(error.text) from None
    return function(inflated)


class LongBodies:
    """Has long bodies read on a thread, one at a time. For the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, executor: Executor) -> None:
        self._loop = loop
        self._executor = executor
        self._turn = asyncio.Lock()

    async def read(self, exchange: HttpExchange, function: Callable[[Body], T]) -> T:
        """Return what a function makes of the body, and raise what it raises. Cancels the task if the client goes."""
        # A task that waits keeps its body. Clients that come and go would fill the memory while one is read.
        exchange.cancel = partial(_cancel, asyncio.current_task())
        async with self._turn:
            exchange.cancel = None
            if not exchange.is_gone:
                made = await self._loop.run_in_executor(self._executor, function, exchange.body)
        if exchange.is_gone:
            raise asyncio.CancelledError
        return made


def _cancel(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        task.cancel()


class RouteReply(NamedTuple):
    """The whole response to a request."""

    status: int
    headers: Headers
    body: bytes = b""


def reply(value: Any) -> RouteReply:
    """Return a value as JSON."""
    return RouteReply(200, JSON, dumps(value))


def failure(status: int, text: str, headers: Headers = JSON) -> RouteReply:
    """Return an error in the form that all have."""
    return RouteReply(status, headers, error_body(text))


# The errors of OpenAI's API: the names of their types and codes by status.
_INVALID, _SERVER = "invalid_request_error", "server_error"
_TYPES = {
    400: _INVALID,
    401: "authentication_error",
    403: "permission_error",
    404: _INVALID,
    405: _INVALID,
    413: _INVALID,
    415: _INVALID,
    422: _INVALID,
    429: "rate_limit_error",
}
# As in Triton's front end.
_WITHOUT_DETAIL = (401, 413)
_MOST_ID_CHARACTERS = 128
_CODES = {401: "invalid_auth", 404: "not_found", 413: "content_too_large"}


class ErrorReply:
    """Is what a client of OpenAI's API gets for an error."""

    def __init__(
        self,
        status: int,
        text: str,
        headers: Headers = JSON,
        *,
        code: str | None = None,
        param: str | None = None,
        detail: object = None,
    ) -> None:
        self.status = status
        self.headers = headers
        self.error = {
            "message": text,
            "type": _TYPES.get(status, _SERVER),
            "param": param,
            "code": code or _CODES.get(status),
        }
        # As Triton's own front end has it.
        self._detail = text if detail is None else detail

    @property
    def body(self) -> bytes:
        detail = {} if self.status in _WITHOUT_DETAIL else {"detail": self._detail}
        return _written({"error": self.error, **detail})

    @property
    def event(self) -> bytes:
        """The event that ends a stream. openai-python raises it, and so does not take what came before for all."""
        return b"data: %b\n\n" % _written({"error": self.error})


def id_of(head: Head) -> str:
    """Return the id of a request: the client's, or one of ours."""
    given = head.headers.get(b"x-request-id", b"").decode("latin-1")
    if given and len(given) <= _MOST_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    return token_hex(16)


def id_header(request_id: str) -> Headers:
    """Return the header that tells a client the id of its request."""
    return ((b"x-request-id", request_id.encode("ascii")),)


def _written(value: object) -> bytes:
    """Return an error as JSON, even if a text that it quotes has half of a character."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


Endpoint = Callable[[RouteRequest], Awaitable[RouteReply | None]]


class Route:
    """A path with its endpoints by method. An endpoint that returns None has answered by itself.

    `{name}` in a path stands for anything but a slash, and `{version}` for digits.
    """

    def __init__(self, path: str, endpoints: Mapping[str, Endpoint], wrong: Headers = TEXT) -> None:
        """`wrong` are the headers of the answer to other methods."""
        self.path = path
        self.endpoints = endpoints
        self.wrong = wrong
        self.pattern = re.compile(re.sub(r"\{(\w+)\}", _part, path))


def _part(found: re.Match[str]) -> str:
    return f"(?P<{found[1]}>{'[0-9]' if found[1] == 'version' else '[^/]'}+)"


class RouteTable:
    """Answers by the first route whose path fits. For the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, executor: Executor, routes: Iterable[Route]) -> None:
        self._loop = loop
        self._long_bodies = LongBodies(loop, executor)
        self._routes = list(routes)
        # Of paths without names, so that the usual ones are found at once.
        self._plain = {route.path: self._find(route.path) for route in self._routes if "{" not in route.path}
        # The loop itself refers to tasks only weakly.
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, exchange: HttpExchange) -> None:
        """Answer in a task. If the client goes meanwhile, the task ends in its own time."""
        task = self._loop.create_task(self._answer(exchange))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, exchange: HttpExchange) -> None:
        try:
            made = await self._reply(exchange)
        except Exception as error:
            if not isinstance(error, MoonpoolError):
                path = exchange.head.target.decode("latin-1")
                _log.exception("answering %s %s failed", exchange.head.method, path)
            if exchange.status:
                exchange.abort()
            else:
                exchange.fail(http_status(error), public_text(error), error_headers(error, JSON))
        else:
            if made is not None:
                exchange.respond(made.status, made.headers, (made.body,) if made.body else ())

    async def _reply(self, exchange: HttpExchange) -> RouteReply | None:
        path = path_of(exchange.head)
        found = self._plain.get(path) or self._find(path)
        if found is None:
            exchange.fail(404, "Not Found", TEXT)
            return None
        route, names = found
        endpoint = route.endpoints.get(exchange.head.method)
        if endpoint is None:
            exchange.fail(405, "Method Not Allowed", route.wrong)
            return None
        return await endpoint(RouteRequest(exchange, names, self._long_bodies))

    def _find(self, path: str) -> tuple[Route, dict[str, str]] | None:
        """Return the first route that fits, and the parts of the path that it names."""
        for route in self._routes:
            found = route.pattern.fullmatch(path)
            if found is not None:
                return route, found.groupdict()
        return None
