"""A runtime, a service and its gRPC server, in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import grpc
import tritonclient.grpc as triton
import uvloop
from tritonclient.grpc import service_pb2 as kserve
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

import moonpool
from moonpool.runtime.process.event_loop import run
from moonpool.runtime.schedule.event_loop import driver_of
from moonpool.runtime.server.grpc.call import GrpcCall
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.server import GrpcServer
from moonpool.runtime.server.service import Service

TIMEOUT_S = 60.0
ROOT = Path(__file__).parent.parent.parent.parent
EXAMPLES = ROOT / "examples" / "models"
MODELS = ROOT / "tests" / "models" / "grpc"
messages: ModuleType = kserve


# The first loop of a process opens a pipe for signals that libuv keeps for the next ones.
uvloop.new_event_loop().close()

T = TypeVar("T")


class OnLoop:
    """A server in an event loop of its own, on a thread of its own. The methods are for other threads."""

    def __init__(self, make: Callable[[], GrpcServer]) -> None:
        """Make the server in the loop, and take its port."""
        self._loop: asyncio.AbstractEventLoop
        self._end: asyncio.Event
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=lambda: run(self._live()), daemon=True)
        self._thread.start()
        assert self._has_begun.wait(TIMEOUT_S)
        try:
            self.server = self.run(self._make(make))
        except BaseException:
            self._leave()
            raise

    async def _live(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._has_begun.set()
        await self._end.wait()
        driver_of(self._loop).close()

    async def _make(self, make: Callable[[], GrpcServer]) -> GrpcServer:
        server = make()
        try:
            await server.bind()
        except BaseException:
            server.close()
            raise
        return server

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self.server.port

    @property
    def calls(self) -> set[GrpcCall]:
        """The calls that have not ended."""
        return self.server.calls.open

    def start(self) -> None:
        self.run(self.server.start())

    def drain(self, timeout_s: float) -> bool:
        return self.run(self.server.drain(timeout_s))

    def close(self) -> None:
        """End the server, and its loop."""
        if self._thread.is_alive():
            self.run(self._close())
            self._leave()

    async def _close(self) -> None:
        self.server.close()

    def _leave(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(TIMEOUT_S)


class Served:
    """Started by its constructor. `close` ends everything, the clients too."""

    def __init__(self, models: Sequence[str], options: GrpcOptions) -> None:
        self.runtime = moonpool.Runtime()
        self._channels: list[grpc.Channel] = []
        self._clients: list[triton.InferenceServerClient] = []
        for name in models:
            folder = MODELS / name if (MODELS / name).is_dir() else EXAMPLES / name
            self.runtime.load(name, folder)
        self.service = Service(self.runtime)
        self.server = OnLoop(lambda: GrpcServer(self.service, options))
        self.server.start()
        # Tests look into these parts of the server.
        self.port: Any = self.server.server
        self._backlog = self.server.server._streams.backlog
        self.address = f"127.0.0.1:{self.server.port}"

    @property
    def unread_bytes(self) -> list[int]:
        """The bytes that wait for each client that reads too slowly."""
        return [*self._backlog._of.copy().values()]

    def client(self) -> triton.InferenceServerClient:
        """Return a client of Triton's."""
        client = triton.InferenceServerClient(self.address)
        self._clients.append(client)
        return client

    def channel(self, *options: tuple[str, object]) -> grpc.Channel:
        """Return a channel of gRPC's with a connection of its own."""
        own = ("grpc.use_local_subchannel_pool", 1)
        channel = grpc.insecure_channel(self.address, [own, *options])
        self._channels.append(channel)
        return channel

    def stub(self) -> GRPCInferenceServiceStub:
        """Return the methods of the service as functions."""
        return GRPCInferenceServiceStub(self.channel())

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for channel in self._channels:
            channel.close()
        self.server.close()
        self.runtime.close()
