"""The gRPC server: its port, its handlers, its beginning and its end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tritonclient.grpc import service_pb2 as kserve

from moonpool.runtime.frontend.grpc import health
from moonpool.runtime.frontend.grpc.control import Health
from moonpool.runtime.frontend.grpc.core import GrpcCore
from moonpool.runtime.frontend.grpc.handlers import unary

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from moonpool.runtime.frontend.grpc.call import Call
    from moonpool.runtime.frontend.grpc.options import GrpcOptions
    from moonpool.runtime.frontend.service import Service

_KSERVE = "inference.GRPCInferenceService"
# Threads for what may take a moment: each of these RPCs has one while it is answered.
_CONTROL_THREADS = 4


class GrpcServer:
    """Serves a service over gRPC from `start` to `close`. Its methods may be called from any thread."""

    def __init__(self, service: Service, options: GrpcOptions) -> None:
        """Take the port. Raises `MoonpoolError` where it is taken, or a file of TLS cannot be read."""
        self._executor = ThreadPoolExecutor(_CONTROL_THREADS, "moonpool-grpc-control")
        self._health = Health(service)
        self._core = GrpcCore(_handlers(self._health, self._executor), options)

    @property
    def port(self) -> int:
        """Where it listens, also where any port was asked for."""
        return self._core.port

    def start(self) -> None:
        """Answer from now on."""
        self._core.start()

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new, and finish what there is; what is not finished in time is cancelled.

        Returns whether all was finished.
        """
        self._health.is_draining = True
        return self._core.stop(timeout_s)

    def close(self) -> None:
        """End at once. May be called many times, also before `start` and after `drain`."""
        self.drain(0)
        self._executor.shutdown()


def _handlers(asked: Health, executor: Executor) -> dict[bytes, Callable[[Call], None]]:
    kinds = {
        "ServerLive": unary(kserve.ServerLiveRequest, asked.server_live),
        "ServerReady": unary(kserve.ServerReadyRequest, asked.server_ready, executor),
        "ModelReady": unary(kserve.ModelReadyRequest, asked.model_ready, executor),
    }
    handlers = {f"/{_KSERVE}/{name}".encode(): handler for name, handler in kinds.items()}
    check = unary(health.HealthCheckRequest, asked.check, executor)
    handlers[f"/{health.SERVICE}/Check".encode()] = check
    return handlers
