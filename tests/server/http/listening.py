"""A port with a handler that does what tests want of it, and a client that sends bytes."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.client import HTTPResponse
from typing import Any, NamedTuple, TypeVar

import pytest
import uvloop

from moonpool.runtime.server.http.connection import HttpExchange, HttpPort, error_body
from moonpool.runtime.server.http.head import BadHttpMessage, Head, Headers
from moonpool.runtime.server.http.options import HttpLimits
from moonpool.runtime.server.listening import bound_sockets
from moonpool.runtime.server.tls import TlsServer

# The first loop of a process opens a pipe for signals that libuv keeps for the next ones.
uvloop.new_event_loop().close()

T = TypeVar("T")
TIMEOUT_S = 60.0


class Answer(NamedTuple):
    """The response that a client reads."""

    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """One connection, byte by byte."""

    def __init__(self, number: int) -> None:
        self.socket: socket.socket = socket.create_connection(("127.0.0.1", number), TIMEOUT_S)
        self._answers = self.socket.makefile("rb")

    def wrap(self, context: ssl.SSLContext, name: str) -> None:
        """Speak TLS from now on."""
        self._answers.close()
        self.socket = context.wrap_socket(self.socket, server_hostname=name)
        self._answers = self.socket.makefile("rb")

    def send(self, *data: bytes) -> None:
        for piece in data:
            self.socket.sendall(piece)

    def answer(self, method: str = "GET") -> Answer:
        """Return the next answer."""
        response = HTTPResponse(_Kept(self._answers), method=method)  # type: ignore[arg-type]
        response.begin()
        body = response.read()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, body)

    def line(self) -> bytes:
        """Return one line."""
        return self._answers.readline()

    def rest(self) -> bytes:
        """Return all bytes until the server ends the connection."""
        return self._answers.read()

    def close(self) -> None:
        self._answers.close()
        self.socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Kept:
    """Gives one file to the readers of several answers, and stays open."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def makefile(self, _: str) -> _Kept:
        return self

    def close(self) -> None:
        """Stay open for the next answer."""

    def flush(self) -> None:
        """Do nothing, as nothing is written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class Scripted:
    """Answers by path: /echo at once, /held when the test says so, /broken never, /stream in pieces, /big with many
    bytes.
    """

    def __init__(self) -> None:
        self.held: list[HttpExchange] = []
        self.cancelled = threading.Event()
        self.handled: list[tuple[str, bytes]] = []
        self.lent: list[memoryview] = []

    def handle(self, exchange: HttpExchange) -> None:
        path = exchange.head.target
        self.handled.append((exchange.head.method, bytes(path)))
        if path == b"/held":
            exchange.cancel = self.cancelled.set
            self.held.append(exchange)
        elif path == b"/stream":
            exchange.begin(200, ())
            for piece in (b"one", b"two", b""):
                exchange.send(piece)
            exchange.finish()
        elif path == b"/broken":
            raise ZeroDivisionError
        elif path.startswith(b"/big/"):
            part = bytes(1 << 20)
            exchange.respond(200, (), [part] * int(path[5:]))
        else:
            exchange.respond(200, (), (bytes(exchange.body),))

    def failure(self, _: Head, __: int, text: str, headers: Headers) -> tuple[Headers, bytes]:
        return headers, error_body(text)

    def refuse(self, head: Head) -> BadHttpMessage | None:
        return BadHttpMessage(403, "not this one") if head.target == b"/refused" else None

    def most_bytes_of(self, head: Head) -> int:  # noqa: ARG002 - the same for all
        return 1 << 40

    def over_size(self, _: Head) -> None:
        return None

    def memory_for(self, head: Head, size_bytes: int) -> memoryview | None:
        if head.target == b"/broken":
            raise ZeroDivisionError
        if head.target != b"/lent":
            return None
        self.lent.append(memoryview(bytearray(size_bytes)))
        return self.lent[-1]


class Listening:
    """A port in a loop of its own thread."""

    def __init__(self, tls: ssl.SSLContext | None = None, **limits: Any) -> None:
        self._tls = tls
        self.handler = Scripted()
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-http")
        self._thread.start()
        self.port = self.call(lambda: HttpPort(self.loop, self.handler, HttpLimits(**limits)))
        self.server = self.run(self._listen)
        self.number = self.server.sockets[0].getsockname()[1]

    async def _listen(self) -> asyncio.AbstractServer | TlsServer:
        if self._tls is None:
            return await self.loop.create_server(self.port, "127.0.0.1", 0)
        sockets = await bound_sockets("127.0.0.1", 0, reuse_port=False)
        server = TlsServer(self.port, sockets, self._tls, 100)
        await server.start_serving()
        return server

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the loop's thread, and return its result."""
        done: Future[T] = Future()

        def call() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(call)
        return done.result(TIMEOUT_S)

    def run(self, function: Callable[[], Any]) -> Any:
        """Run a coroutine in the loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(function(), self.loop).result(TIMEOUT_S)

    def client(self) -> Client:
        return Client(self.number)

    def ask(self, data: bytes, method: str = "GET") -> Answer:
        with self.client() as client:
            client.send(data)
            return client.answer(method)

    def close(self) -> None:
        self.call(self.server.close)
        self.call(self.port.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def listening() -> Iterator[Listening]:
    made = Listening()
    yield made
    made.close()
