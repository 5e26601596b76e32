"""The methods of the service: their handlers, the threads that these run on, and the API that each belongs to."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from google.protobuf.message import DecodeError

from moonpool.ipc.errors import Closed
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.model.protobuf import BadProtobuf, service_messages
from moonpool.runtime.server.grpc.call import GrpcCall, Handler, Method
from moonpool.runtime.server.grpc.control import GrpcControl
from moonpool.runtime.server.grpc.inference import GrpcInference
from moonpool.runtime.server.grpc.reflection import HEALTH_SERVICE, HealthCheckRequest
from moonpool.runtime.server.grpc.status import UNREADABLE, Status, status_of
from moonpool.runtime.server.grpc.stream import Streams
from moonpool.runtime.server.grpc.wire import SMALL_BYTES, parse

kserve = service_messages()
SERVICE = "inference.GRPCInferenceService"
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
# No busy thread must keep a probe waiting.
_ON_LOOP = ("ServerLive", "ServerReady")
# All RPCs with one message in each direction.
UNARY = ("ModelInfer", *_ON_LOOP, *(name for members in _CONTROL.values() for name, _, _ in members))


def methods(
    control: GrpcControl, inference: GrpcInference, streams: Streams, quick: Executor, slow: Executor
) -> dict[bytes, Method]:
    """Return all methods by their paths. `quick` runs work of milliseconds, `slow` work that waits for models."""
    found: dict[bytes, Method] = {}
    for api, members in _CONTROL.items():
        for name, is_change, is_slow in members:
            kind = getattr(kserve, f"{name}Request")
            handle = _unary(kind, getattr(control, _snake(name)), slow if is_slow else quick)
            found[path_of(name)] = Method(handle, api, is_change)
    for name in _ON_LOOP:
        kind = getattr(kserve, f"{name}Request")
        found[path_of(name)] = Method(_unary(kind, getattr(control, _snake(name))), "health")
    check = _unary(HealthCheckRequest, control.check)
    found[f"/{HEALTH_SERVICE}/Check".encode()] = Method(check, "health")
    place = inference.place
    found[path_of("ModelInfer")] = Method(inference.handle, "inference", place=place)
    found[path_of("ModelStreamInfer")] = Method(streams.handle, "inference", place=place)
    return found


def path_of(name: str) -> bytes:
    return f"/{SERVICE}/{name}".encode()


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).removeprefix("_")


def _unary(kind: Any, answer: Callable[[Any], Any], executor: Executor | None = None) -> Handler:
    """Return a handler that gives a message of `kind` to `answer`, and sends the result to the client.

    `answer` runs on a thread of `executor`. Without one it runs on the loop's thread and must not block. An error that
    it raises becomes the status.
    """

    def handle(call: GrpcCall) -> None:
        call.receive(lambda data: received(call, data))

    def received(call: GrpcCall, data: bytes | None) -> None:
        if data is None:
            call.fail(UNREADABLE)
        elif executor is None and len(data) > SMALL_BYTES:
            # Reading it would keep other clients waiting.
            text = f"the {kind.DESCRIPTOR.name} has {len(data)} bytes, and {SMALL_BYTES} is the most"
            call.fail(Status("INVALID_ARGUMENT", text))
        elif executor is None:
            respond(call, data)
        else:
            try:
                executor.submit(respond, call, data)
            except Closed:
                call.fail(Status("UNAVAILABLE", "the server is stopping"))
            except OutOfThreads as error:
                call.fail(status_of(error))

    def respond(call: GrpcCall, data: bytes) -> None:
        try:
            call.reply(answer(parse(kind, data)).SerializeToString())
        except (BadProtobuf, DecodeError):
            call.fail(UNREADABLE)
        except Exception as error:
            call.fail(status_of(error))

    return handle
