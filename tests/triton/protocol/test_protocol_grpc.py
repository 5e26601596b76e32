"""Both servers answer the same calls over gRPC in the same way: messages, codes, texts, streams and their ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from tests.triton.protocol import grpc_cases
from tests.triton.protocol.comparing import message, words
from tests.triton.protocol.conftest import Server, Servers
from tests.triton.protocol.grpc_cases import Call
from tests.triton.protocol.known import difference
from tests.waiting import wait_until
from tritonclient.grpc import service_pb2, service_pb2_grpc

pytestmark = [pytest.mark.triton, pytest.mark.usefixtures("region")]

TIMEOUT_S = 60.0
TABLES = {
    "which": grpc_cases.WHICH,
    "inference": grpc_cases.INFERENCE,
    "datatypes": grpc_cases.DATATYPES,
    "control": grpc_cases.CONTROL,
}
CASES = [
    pytest.param(f"gRPC {table}: {name}", calls, id=f"{table}: {name}"[:100])
    for table, cases in TABLES.items()
    for name, calls in cases
]
STREAMS = [pytest.param(*stream, id=stream[0][:100]) for stream in grpc_cases.STREAMS]


def _answer(server: Server, call: Call) -> Any:
    """The message as plain values, or the code and the text of the error."""
    method, request = call
    stub = service_pb2_grpc.GRPCInferenceServiceStub(server.channel)
    if method == "SystemSharedMemoryUnregister":
        found = wait_until(lambda: _forgotten(stub, request), TIMEOUT_S, "the region to be gone")
        assert found is not None
        return found[0]
    answer = _asked(stub, call)
    if method == "RepositoryModelUnload":
        wait_until(lambda: not _is_leaving(stub, request.model_name), TIMEOUT_S, "it to be gone")
    return answer


def _asked(stub: Any, call: Call) -> Any:
    method, request = call
    try:
        return message(getattr(stub, method)(request, timeout=TIMEOUT_S))
    except grpc.RpcError as error:
        return error.code().name, words(error.details() or "")


def _is_leaving(stub: Any, model: str) -> bool:
    """Return true while a model is being unloaded. Several answers are right until then."""
    index = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=TIMEOUT_S)
    return any(each.name == model and each.state == "UNLOADING" for each in index.models)


def _forgotten(stub: Any, request: Any) -> tuple[Any] | None:
    """Unregister, and return the answer if the region is gone, all of them for an empty name.

    A tritonserver refuses this, or does nothing, while a request still holds the region, maybe after its answer.
    """
    answer = _asked(stub, ("SystemSharedMemoryUnregister", request))
    if isinstance(answer, tuple) and "unregister" in answer[1]:
        return None
    wanted = service_pb2.SystemSharedMemoryStatusRequest()
    kept = stub.SystemSharedMemoryStatus(wanted, timeout=TIMEOUT_S).regions
    return None if (request.name in kept if request.name else kept) else (answer,)


def _responses(server: Server, requests: Sequence[Any], metadata: Sequence[tuple[str, str]]) -> Any:
    """All messages of a stream, and how it ended. The next request waits for the answer to the last."""
    answered = threading.Semaphore(0)

    def asking() -> Iterator[Any]:
        for index, request in enumerate(requests):
            if index:
                answered.acquire(timeout=TIMEOUT_S)
            yield request

    stub = service_pb2_grpc.GRPCInferenceServiceStub(server.channel)
    found: list[Any] = []
    call = stub.ModelStreamInfer(asking(), metadata=metadata, timeout=TIMEOUT_S)
    try:
        for response in call:
            found.append(message(response))
            answered.release()
    except grpc.RpcError:
        pass
    answered.release(len(requests) + 1)
    return found, call.code().name, words(call.details() or "")


def _check(case: str, ours: Any, theirs: Any) -> None:
    known = difference(case)
    if known is None:
        assert ours == theirs
    else:
        assert ours != theirs, f"no longer different: {known}"


@pytest.mark.promise("What the server bears, and whom it answers like", "moonpool answers over HTTP and …")
@pytest.mark.parametrize(("case", "calls"), CASES)
def test_both_answer_alike(servers: Servers, case: str, calls: list[Call]) -> None:
    theirs = servers.recorded(
        repr([(method, message(asked)) for method, asked in calls]),
        lambda triton: [_answer(triton, call) for call in calls],
    )
    ours = [_answer(servers.moonpool, call) for call in calls]

    _check(case, ours, theirs)


@pytest.mark.promise("What the server bears, and whom it answers like", "moonpool answers over HTTP and …")
@pytest.mark.parametrize(("name", "requests", "metadata"), STREAMS)
def test_both_stream_alike(
    servers: Servers, name: str, requests: list[Any], metadata: Sequence[tuple[str, str]]
) -> None:
    theirs = servers.recorded(
        repr(([message(each) for each in requests], metadata)), lambda triton: _responses(triton, requests, metadata)
    )
    ours = _responses(servers.moonpool, requests, metadata)

    _check(f"gRPC stream: {name}", ours, theirs)


@pytest.mark.promise("gRPC", "Reflection is off unless it …")
@pytest.mark.parametrize(
    "path",
    [
        "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "inference.GRPCInferenceService/Nope",
        "nope.Service/ModelInfer",
    ],
)
def test_both_lack_the_same_methods(servers: Servers, path: str) -> None:
    def answer(server: Server) -> tuple[str, str]:
        call = server.channel.stream_stream(f"/{path}")(iter([b""]), timeout=TIMEOUT_S)
        return call.code().name, call.details()

    assert answer(servers.moonpool) == servers.recorded(path, answer) == ("UNIMPLEMENTED", "")
