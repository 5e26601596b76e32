"""Lists all cases, each with the extension of the protocol that it is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from moonpool.runtime.conformance import grpc_calls, http_control, http_inference
from moonpool.runtime.conformance.asking import (
    SERVICE,
    AskedServer,
    answers_over_grpc,
    answers_over_http,
    call_of_nothing,
    stream,
)
from moonpool.runtime.conformance.wire import Http

Protocol = Literal["HTTP", "gRPC"]


@dataclass(frozen=True)
class Case:
    """Is a piece of a conversation whose answers are compared. What it changes in a server, it undoes."""

    name: str
    protocol: Protocol
    extension: str
    ask: Callable[[AskedServer], Any]
    """Returns the answers in a form that can be compared."""


_OVER_HTTP = {
    "success": ("core", http_inference.SUCCESS),
    "json": ("core", http_inference.WRONG_JSON),
    "tensors": ("core", http_inference.WRONG_TENSORS),
    "binary": ("binary data", http_inference.BINARY),
    "datatypes": ("core", http_inference.DATATYPES),
    "parameters": ("parameters", http_inference.PARAMETERS),
    "sequences": ("sequences", http_inference.SEQUENCES),
    "classes": ("classification", http_inference.CLASSES),
    "compression": ("compression", http_inference.COMPRESSION),
    "metadata": ("core", http_control.METADATA),
    "models": ("core", http_control.WHICH_MODEL),
    "generate": ("generate", http_control.GENERATE),
    "memory": ("shared memory", http_control.SHARED_MEMORY),
    "repository": ("model repository", http_control.REPOSITORY),
    "settings": ("trace", http_control.SETTINGS),
}
_OVER_GRPC = {
    "which": grpc_calls.WHICH,
    "inference": grpc_calls.INFERENCE,
    "datatypes": grpc_calls.DATATYPES,
    "control": grpc_calls.CONTROL,
}
# The extension of a request, by a piece of its path or by the beginning of its method. Others are of their table's.
_BY_PATH = {
    "/stats": "statistics",
    "/config": "model configuration",
    "/logging": "logging",
    "/trace/": "trace",
    "/repository/": "model repository",
    "sharedmemory": "shared memory",
}
_BY_METHOD = {
    "ModelStatistics": "statistics",
    "ModelConfig": "model configuration",
    "LogSettings": "logging",
    "TraceSetting": "trace",
    "Repository": "model repository",
    "SystemSharedMemory": "shared memory",
    "CudaSharedMemory": "shared memory",
}


# Methods that a server has only if it was asked for them, or never.
_UNKNOWN = (
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    f"{SERVICE}/Nope",
    "nope.Service/ModelInfer",
)


def all_cases() -> list[Case]:
    """Return all cases, in an order that matters: no request undoes that a model could not be loaded."""
    made = []
    for table, calls_of in _OVER_GRPC.items():
        for name, calls in calls_of:
            found = _of_calls(calls)
            made.append(Case(f"gRPC {table}: {name}", "gRPC", found, partial(answers_over_grpc, calls=calls)))
    for name, messages, metadata in grpc_calls.STREAMS:
        ask = partial(stream, messages=messages, metadata=metadata)
        made.append(Case(f"gRPC stream: {name}", "gRPC", "streams", ask))
    made += [Case(f"gRPC unknown: {each}", "gRPC", "core", partial(call_of_nothing, path=each)) for each in _UNKNOWN]
    for table, (extension, cases) in _OVER_HTTP.items():
        for name, requests in cases:
            found = _of_requests(requests, extension)
            made.append(Case(f"{table}: {name}", "HTTP", found, partial(answers_over_http, requests=requests)))
    return made


def _of_requests(requests: Sequence[Http], extension: str) -> str:
    if extension not in ("core", "trace", "model repository"):
        return extension
    paths = [each.path for each in requests]
    # The first request of a case may only prepare the others.
    return next((name for part, name in _BY_PATH.items() if any(part in path for path in paths)), extension)


def _of_calls(calls: Sequence[grpc_calls.Call]) -> str:
    methods = [method for method, _ in calls]
    return next((name for part, name in _BY_METHOD.items() if any(each.startswith(part) for each in methods)), "core")
