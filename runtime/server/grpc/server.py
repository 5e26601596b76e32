"""The gRPC server: its port, its handlers, its beginning and its end.

Theory of operation. A server belongs to the thread of an event loop. `drain` ends the calls, after which no handler is called; `close` has
the threads for work that takes long end when they are done. It does not wait for them: a load goes on until it is done, and the runtime waits
for it, too.
"""

from __future__ import annotations

import asyncio

from moonpool.runtime.process.threads import TaskPool
from moonpool.runtime.server.clients import AllClients, Clients
from moonpool.runtime.server.grpc.call import Method, OpenCalls
from moonpool.runtime.server.grpc.connection import GrpcConnection
from moonpool.runtime.server.grpc.control import GrpcControl
from moonpool.runtime.server.grpc.inference import GrpcInference
from moonpool.runtime.server.grpc.methods import methods
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.port import make_port
from moonpool.runtime.server.grpc.reflection import reflection_methods
from moonpool.runtime.server.grpc.stream import Streams
from moonpool.runtime.server.service import Service

# Each RPC except for inference and health has a thread while it is answered. RPCs that wait for models have a pool of their own.
_CONTROL_THREADS = 4
_PATIENT_THREADS = 16


class GrpcServer:
    """Serves a service over gRPC until it is drained or closed. For the thread of the loop that it was made in."""

    def __init__(
        self, service: Service, options: GrpcOptions, together: AllClients | None = None
    ) -> None:
        """Take no port yet. `together` counts the clients of all ports of the process."""
        loop = asyncio.get_running_loop()
        self._quick = TaskPool(_CONTROL_THREADS, "moonpool-grpc-control")
        self._slow = TaskPool(_PATIENT_THREADS, "moonpool-grpc-patient")
        self._control = GrpcControl(service)
        self._inference = self.make_inference(service, loop, options)
        self._streams = Streams(self._inference, options)
        meter = service.metrics.frontends.grpc
        methods = self.methods()
        if options.reflection:
            methods |= reflection_methods()
        self.calls = OpenCalls(loop, methods, options, meter)
        """The RPCs that have not ended."""
        clients: Clients[GrpcConnection] = Clients(
            "gRPC", options.max_connections, together or AllClients(), meter
        )
        self._port = make_port(self.calls, options, clients, self._inference.executor)

    def make_inference(
        self, service: Service, loop: asyncio.AbstractEventLoop, options: GrpcOptions
    ) -> GrpcInference:
        """Return the part that answers requests for inference."""
        return GrpcInference(service, loop, options)

    def methods(self) -> dict[bytes, Method]:
        """Return all methods by their paths."""
        return methods(self._control, self._inference, self._streams, self._quick, self._slow)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._port.port

    async def bind(self) -> None:
        """Take the port; nobody is served before `start`.

        Raises `MoonpoolError` if the port is taken, or a file for TLS cannot be read.
        """
        await self._port.bind()

    async def start(self) -> None:
        """Accept calls from now on."""
        await self._port.start()

    async def drain(self, timeout_s: float) -> bool:
        """Accept no more calls, finish those in flight, and cancel those that are not finished in time.

        Returns whether all were finished.
        """
        self._control.is_draining = True
        return await self._port.drain(timeout_s)

    def close(self) -> None:
        """End at once. May be called many times, and in any state."""
        self._control.is_draining = True
        self._port.close()
        self._quick.shutdown(wait=False)
        self._slow.shutdown(wait=False, cancel_futures=True)
        self._inference.close()
