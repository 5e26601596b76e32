"""The methods of the service: who answers each, on which threads, and which API each belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tritonclient.grpc import service_pb2

from moonpool.runtime.frontend.grpc import health
from moonpool.runtime.frontend.grpc.handlers import unary

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from moonpool.runtime.frontend.grpc.call import Call
    from moonpool.runtime.frontend.grpc.control import Control
    from moonpool.runtime.frontend.grpc.inference import Inference

    Handler = Callable[[Call], None]

_SERVICE = "inference.GRPCInferenceService"


class Method(NamedTuple):
    """What is done for an RPC; `api` is its name in restrictions, `is_change` whether it changes the server."""

    handle: Handler
    api: str
    is_change: bool = False


# By API: the method, whether it changes the server, and whether it waits for models.
_CONTROL: dict[str, tuple[tuple[str, bool, bool], ...]] = {
    "health": (("ModelReady", False, True),),
    "metadata": (("ServerMetadata", False, False), ("ModelMetadata", False, False)),
    "model-config": (("ModelConfig", False, False),),
    "statistics": (("ModelStatistics", False, False),),
    "model-repository": (
        ("RepositoryIndex", False, False),
        ("RepositoryModelLoad", True, True),
        ("RepositoryModelUnload", True, True),
    ),
    "shared-memory": (
        ("SystemSharedMemoryStatus", False, False),
        ("SystemSharedMemoryRegister", True, False),
        ("SystemSharedMemoryUnregister", True, False),
        ("CudaSharedMemoryStatus", False, False),
        ("CudaSharedMemoryRegister", True, False),
        ("CudaSharedMemoryUnregister", True, False),
    ),
    "trace": (("TraceSetting", True, False),),
    "logging": (("LogSettings", True, False),),
}


def methods(
    control: Control, inference: Inference, quick: Executor, slow: Executor
) -> dict[bytes, Method]:
    """All methods by their paths. `quick` and `slow` run what takes milliseconds, and what waits for models."""
    found: dict[bytes, Method] = {}
    for api, members in _CONTROL.items():
        for name, is_change, is_slow in members:
            kind = getattr(service_pb2, f"{name}Request")
            handle = unary(kind, getattr(control, _snake(name)), slow if is_slow else quick)
            found[_path(name)] = Method(handle, api, is_change)
    # Nothing that is busy must keep a probe from finding out how the server is.
    for name in ("ServerLive", "ServerReady"):
        kind = getattr(service_pb2, f"{name}Request")
        found[_path(name)] = Method(unary(kind, getattr(control, _snake(name))), "health")
    check = unary(health.HealthCheckRequest, control.check)
    found[f"/{health.SERVICE}/Check".encode()] = Method(check, "health")
    found[_path("ModelInfer")] = Method(inference.handle, "inference")
    found[_path("ModelStreamInfer")] = Method(inference.handle_stream, "inference")
    return found


def _path(name: str) -> bytes:
    return f"/{_SERVICE}/{name}".encode()


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).removeprefix("_")
