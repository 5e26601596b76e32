"""gRPC in a front end: ModelInfer here where that can be, everything else at the main process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.runtime.frontend.grpc.inference import Inference
from moonpool.runtime.frontend.grpc.server import GrpcServer
from moonpool.runtime.frontend.pool.grpc_relay import GrpcRelay
from moonpool.runtime.model_control import version_of

if TYPE_CHECKING:
    import threading

    from moonpool.ipc.errors import MoonpoolError
    from moonpool.runtime.frontend.grpc.call import Call
    from moonpool.runtime.frontend.grpc.infer_request import Asked
    from moonpool.runtime.frontend.grpc.methods import Method
    from moonpool.runtime.frontend.grpc.options import GrpcOptions
    from moonpool.runtime.frontend.pool.front_service import FrontService
    from moonpool.runtime.frontend.service import Service
    from moonpool.runtime.frontend.submission import Hosted

_INFER, _STREAM = b"ModelInfer", b"ModelStreamInfer"
_SHARED = b"shared_memory_region"


class FrontGrpcInference(Inference):
    """ModelInfer of models whose stubs belong to another process."""

    def __init__(
        self, relay: GrpcRelay, service: Service, turn: threading.Lock, options: GrpcOptions
    ) -> None:
        super().__init__(service, turn, options)
        self._relay = relay

    def find(self, asked: Asked) -> Hosted:
        hosted: Hosted = self.service.models.find(asked.model, version_of(asked.version))
        return hosted

    def is_ours(self, call: Call, data: bytes) -> bool:
        if _SHARED not in data:
            return True
        # Clients register their memory with the main process.
        self._relay.pass_on(call, data)
        return False

    def refuse(self, call: Call, asked: Asked, error: MoonpoolError) -> None:  # noqa: ARG002
        # The main process knows all models, and what is wrong with other names.
        self._relay.pass_on(call, asked.data)


class FrontGrpcServer(GrpcServer):
    """Listens beside other processes, at the port of all. As `GrpcServer` otherwise."""

    def __init__(self, service: FrontService, options: GrpcOptions, upstream: str) -> None:
        """`upstream` is where the main process listens."""
        self._relay = GrpcRelay(upstream)
        super().__init__(service, options)

    def make_inference(
        self, service: Service, turn: threading.Lock, options: GrpcOptions
    ) -> Inference:
        return FrontGrpcInference(self._relay, service, turn, options)

    def methods(self) -> dict[bytes, Method]:
        found = super().methods()
        for path, method in found.items():
            if path.endswith(_STREAM):
                found[path] = method._replace(handle=self._relay.handle_stream)
            elif not path.endswith(_INFER):
                found[path] = method._replace(handle=self._relay.handle)
        return found

    def close(self) -> None:
        super().close()
        self._relay.close()
