"""A server without a port: answers HTTP requests and RPCs that somebody else has received.

The handlers are those of `moonpool serve`, so texts, codes and forms are the same. Here requests come as values, and
their responses go out as values, which Ray carries from process to process.

Theory of operation. A `LocalServer` belongs to the thread of one event loop, which is running when it is made. Each
request becomes an `HttpExchange` or a `GrpcCall` whose other end is a queue. The handlers write to it on the loop's
thread, now or later. A coroutine of Ray reads it. If Ray cancels that coroutine, because its client has gone, the
exchange or the call ends early, which cancels the request in its scheduler.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.process.threads import TaskPool
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.server.grpc.call import GrpcCall, Message, Metadata, OpenCalls, Received
from moonpool.runtime.server.grpc.control import GrpcControl
from moonpool.runtime.server.grpc.inference import GrpcInference
from moonpool.runtime.server.grpc.methods import methods
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.status import Status
from moonpool.runtime.server.grpc.stream import Streams
from moonpool.runtime.server.http.body import too_large
from moonpool.runtime.server.http.connection import HttpExchange, error_body
from moonpool.runtime.server.http.control import control_routes
from moonpool.runtime.server.http.handler import HttpHandler
from moonpool.runtime.server.http.head import JSON, Body, Head, Headers, Part
from moonpool.runtime.server.http.inference import HttpInference
from moonpool.runtime.server.http.options import HttpLimits
from moonpool.runtime.server.http.routes import RouteTable
from moonpool.runtime.server.meter import Meter
from moonpool.runtime.server.openai.routes import OpenAIEndpoints
from moonpool.runtime.server.repository_control import RepositoryControl
from moonpool.runtime.server.restriction import Origins, Restriction
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.shared_memory import SystemSharedMemory

# For work of milliseconds, and for work that waits for models.
_QUICK_THREADS, _PATIENT_THREADS = 4, 16


class HttpRequest(NamedTuple):
    """A request as it travels between processes. Header names are in lower case."""

    method: str
    target: bytes
    """The path and the query."""
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class HttpReply(NamedTuple):
    """A whole response, or the beginning of one whose body follows in pieces."""

    status: int
    headers: Headers
    body: bytes = b""


class RpcReply(NamedTuple):
    """The answer to an RPC: a message, or the name of a gRPC code and a text."""

    message: bytes | None
    code: str = "OK"
    details: str = ""


def service_of(runtime: Runtime) -> Service:
    """Make a service for clients elsewhere. What they change here would change one process of many."""
    return Service(
        runtime, shared_memory=SystemSharedMemory(is_enabled=False), repository=RepositoryControl(runtime, mode="none")
    )


class LocalServer:
    """Answers for one `Service`. For the thread of the loop that it was made in, except for `close`."""

    def __init__(self, service: Service, limits: HttpLimits | None = None) -> None:
        """The caller closes the service's runtime."""
        loop = asyncio.get_running_loop()
        self._limits = limits or HttpLimits()
        self._quick = TaskPool(_QUICK_THREADS, "moonpool-ray")
        self._patient = TaskPool(_PATIENT_THREADS, "moonpool-ray-patient")
        self._http = HttpHandler(
            HttpInference(service, loop, self._quick, self._limits),
            RouteTable(
                loop,
                self._quick,
                [*control_routes(service, self._patient), *OpenAIEndpoints(service, self._patient).routes()],
            ),
            Restriction({}, None),
            Origins(),
        )
        options = GrpcOptions()
        self._inference = GrpcInference(service, loop, options)
        streams = Streams(self._inference, options)
        control = GrpcControl(service)
        found = methods(control, self._inference, streams, self._quick, self._patient)
        self._calls = OpenCalls(loop, found, options, Meter())

    def close(self) -> None:
        """End the threads, after the last request. May be called on any thread."""
        self._quick.shutdown(wait=False)
        self._patient.shutdown(wait=False, cancel_futures=True)
        self._inference.close()

    # HTTP

    async def http(self, request: HttpRequest) -> HttpReply:
        """Return the whole response to a request."""
        reply = HttpReply(500, JSON)
        body = []
        async for piece in self.http_stream(request):
            if isinstance(piece, HttpReply):
                reply = piece
            else:
                body.append(piece)
        return reply._replace(body=b"".join(body))

    async def http_stream(self, request: HttpRequest) -> AsyncIterator[HttpReply | bytes]:
        """Yield an `HttpReply` without a body, and then the body in pieces."""
        method, target, headers, body = request
        head = Head(method, target, "1.1", headers)
        exchange = LocalExchange(head, body, self._limits, self._http)
        most_bytes = min(self._limits.body_bytes, self._http.most_bytes_of(head))
        if len(body) > most_bytes:
            error = too_large(str(len(body)), most_bytes)
            yield HttpReply(error.status, error.headers)
            yield error_body(error.text)
            return
        self._http.handle(exchange)
        try:
            async for piece in exchange.pieces():
                yield piece
        finally:
            exchange.go()

    # gRPC

    async def rpc(self, path: bytes, metadata: Metadata, message: bytes) -> RpcReply:
        """Answer an RPC with one message in each direction. `path` is as in
        `/inference.GRPCInferenceService/ModelInfer`.
        """
        last: bytes | None = None
        status = RpcReply(None, "INTERNAL", "the RPC ended without a status")
        async for reply in self.rpc_stream(path, metadata, message):
            if reply.message is None:
                status = reply
            else:
                last = reply.message
        return status._replace(message=last) if status.code == "OK" else status

    async def rpc_stream(self, path: bytes, metadata: Metadata, message: bytes) -> AsyncIterator[RpcReply]:
        """Send one message to an RPC, and yield its answers and then its status, which has no message."""
        call = LocalCall(self._calls, path, metadata, message)
        self._calls.begin(call)
        try:
            async for reply in call.replies():
                yield reply
        finally:
            self._calls.ended(call)
            call.end_early()


class _Pipe:
    """Takes values on the loop's thread, and gives them to one coroutine until `end`."""

    def __init__(self) -> None:
        self._values: deque[tuple[Any, int, Callable[[], object] | None]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._has_ended = False
        self.waiting_bytes = 0

    def put(self, value: object, size_bytes: int = 0, taken: Callable[[], object] | None = None) -> None:
        """Add a value. `taken` is called when the coroutine takes it."""
        self._values.append((value, size_bytes, taken))
        self.waiting_bytes += size_bytes
        self._wake()

    def end(self) -> None:
        """Let `values` end behind those that are there."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def values(self) -> AsyncIterator[Any]:
        """Yield the values as they come."""
        loop = asyncio.get_running_loop()
        while True:
            while self._values:
                value, size_bytes, taken = self._values.popleft()
                self.waiting_bytes -= size_bytes
                if taken is not None:
                    taken()
                yield value
            if self._has_ended:
                return
            self._waiter = loop.create_future()
            await self._waiter


class LocalExchange(HttpExchange):
    """A request and the response to it, without a connection."""

    __slots__ = ("_handler", "_limits", "_pipe", "_was_aborted")

    def __init__(self, head: Head, body: Body, limits: HttpLimits, handler: HttpHandler) -> None:
        super().__init__(None, head, body)  # type: ignore[arg-type]  # what uses a connection is overridden
        self._handler = handler
        self._limits = limits
        self._pipe = _Pipe()
        self._was_aborted = False

    @property
    def limits(self) -> HttpLimits:
        return self._limits

    def respond(self, status: int, headers: Headers = JSON, parts: Sequence[Part] = ()) -> None:
        self.begin(status, headers)
        for part in parts:
            self.send(part)
        self.finish()

    def fail(self, status: int, text: str, headers: Headers = JSON) -> None:
        made, body = self._handler.failure(self.head, status, text, headers)
        self.respond(status, made, (body,))

    def begin(self, status: int, headers: Headers, length: int | None = None) -> None:  # noqa: ARG002
        if not self.is_gone:
            self.status = status
            self._pipe.put(HttpReply(status, (*headers, *self.own_headers)))

    def send(self, piece: Part) -> None:
        if not self.is_gone and len(piece) and self.head.method != "HEAD":
            self._pipe.put(bytes(piece), len(piece))

    def finish(self, last: Part = b"") -> None:
        self.send(last)
        self._end(self.ended)

    def abort(self) -> None:
        self._was_aborted = not self.is_gone
        self.go()

    @property
    def unsent_bytes(self) -> int:
        return self._pipe.waiting_bytes

    async def writable(self) -> None:
        return

    def go(self) -> None:
        """Cancel the request, as nobody waits for the response any more. Does nothing once the response has ended."""
        self._end(self.cancel, self.ended)

    def _end(self, *callbacks: Callable[[], None] | None) -> None:
        if self.is_gone:
            return
        self.is_gone = True
        self._pipe.end()
        for callback in callbacks:
            if callback is not None:
                callback()

    async def pieces(self) -> AsyncIterator[HttpReply | bytes]:
        """Yield the beginning of the response, and then its body. Raises `MoonpoolError` if the response breaks off."""
        async for piece in self._pipe.values():
            yield piece
        if self._was_aborted or not self.status:
            raise MoonpoolError("the response broke off")


class LocalCall(GrpcCall):
    """An RPC whose client sends one message, without a connection."""

    __slots__ = ("_messages", "_pipe")

    def __init__(self, calls: OpenCalls, method: bytes, metadata: Metadata, message: bytes) -> None:
        super().__init__(calls, method, metadata, None)
        self._messages: deque[bytes] = deque((message,))
        self._pipe = _Pipe()

    def _receive(self, received: Received) -> None:
        # Later, as a handler may ask for the next message while it is called with this one.
        message = self._messages.popleft() if self._messages else None
        self._calls.loop.call_soon(received, message)

    def _transmit(self, message: Message | None, status: Status | None, sent: Callable[[], object] | None) -> None:
        if message is not None:
            data = b"".join(message) if isinstance(message, tuple) else message
            self._pipe.put(RpcReply(data), taken=sent)
        elif sent is not None:
            self._calls.loop.call_soon(sent)
        if status is not None:
            self._pipe.put(RpcReply(None, status.code, status.details.decode()))
            self._pipe.end()

    async def replies(self) -> AsyncIterator[RpcReply]:
        """Yield the messages, and then the status."""
        async for reply in self._pipe.values():
            yield reply
