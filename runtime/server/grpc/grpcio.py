"""The port over grpcio's own server, for machines without nghttp2 or without the compiled session.

It does what `GrpcConnection` does, with the public names of grpcio alone, and takes several times the processor time.

Theory of operation. grpcio makes a task of the event loop for each RPC. `GrpcioCall.run` is that task: it writes what the handler sends, in
order, until there is a status. Each message that the handler asks for is read by a task of its own. If the client goes, or its deadline
passes, grpcio cancels the task, and the call ends early. grpcio bounds messages, connections and metadata itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.server.grpc.call import GrpcCall, Message, OpenCalls, Received
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.status import Status

_CODES = {code.name: code for code in grpc.StatusCode}
_Item = tuple[Message | None, Status | None, Callable[[], object] | None]


class GrpcioCall(GrpcCall):
    """One RPC of grpcio's server."""

    __slots__ = ("_context", "_items", "_reading")

    def __init__(self, calls: OpenCalls, method: bytes, context: Any) -> None:
        super().__init__(calls, method, tuple(context.invocation_metadata() or ()), None)
        self._context = context
        self._items: asyncio.Queue[_Item] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None

    def _receive(self, received: Received) -> None:
        self._reading = self._calls.loop.create_task(self._read(received))

    async def _read(self, received: Received) -> None:
        message = await self._context.read()
        received(None if message is grpc.aio.EOF else message)

    def _transmit(
        self, message: Message | None, status: Status | None, sent: Callable[[], object] | None
    ) -> None:
        self._items.put_nowait((message, status, sent))

    async def run(self) -> None:
        """Write what the handler sends, until the status."""
        self._calls.begin(self)
        try:
            while True:
                message, status, sent = await self._items.get()
                if message is not None:
                    await self._context.write(
                        b"".join(message) if type(message) is tuple else message
                    )
                if sent is not None:
                    sent()
                if status is not None:
                    break
            if status.code != "OK":
                self._context.set_code(_CODES[status.code])
                self._context.set_details(status.details.decode())
        finally:
            self._calls.ended(self)
            self.end_early()
            if self._reading is not None:
                self._reading.cancel()


class GrpcioPort:
    """A port whose connections are grpcio's."""

    def __init__(self, calls: OpenCalls, options: GrpcOptions) -> None:
        self.port = 0
        self._calls = calls
        self._options = options
        self._server = grpc.aio.server(options=options.channel_arguments())
        self._server.add_generic_rpc_handlers((_Handlers(calls),))
        self._ending: asyncio.Task[None] | None = None

    async def bind(self) -> None:
        options = self._options
        host = f"[{options.address}]" if ":" in options.address else options.address
        is_path = options.address.startswith("unix:")
        where = options.address if is_path else f"{host}:{options.port}"
        try:
            if options.use_ssl or options.use_ssl_mutual:
                port = self._server.add_secure_port(where, _credentials(options))
            else:
                port = self._server.add_insecure_port(where)
        except RuntimeError:
            port = 0
        if not port:
            raise MoonpoolError(
                f"gRPC cannot listen on {where}: the port is taken by another process, or this "
                "machine does not have the address"
            )
        self.port = 0 if is_path else port

    async def start(self) -> None:
        await self._server.start()

    async def drain(self, timeout_s: float) -> bool:
        # grpcio cancels what is left when the time is over.
        ending = self._end(timeout_s)
        is_drained = await self._calls.drain(timeout_s)
        await ending
        return is_drained

    def close(self) -> None:
        self._end(0)

    def _end(self, grace_s: float) -> asyncio.Task[None]:
        self._ending = self._calls.loop.create_task(self._server.stop(grace_s))
        return self._ending


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Has every RPC run as a `GrpcioCall`."""

    def __init__(self, calls: OpenCalls) -> None:
        self._calls = calls

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method.encode()

        async def run(_: Any, context: Any) -> None:
            await GrpcioCall(self._calls, method, context).run()

        return grpc.stream_stream_rpc_method_handler(run)


def _credentials(options: GrpcOptions) -> Any:
    root = _read(options.root_cert) if options.root_cert else None
    pair = (_read(options.server_key), _read(options.server_cert))
    mutual = options.use_ssl_mutual
    return grpc.ssl_server_credentials([pair], root if mutual else None, mutual)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise MoonpoolError(
            f"gRPC with TLS needs the PEM file '{path}': {error.strerror}"
        ) from error
