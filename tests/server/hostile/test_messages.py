"""Bytes over gRPC that are no message, or a message that lies, get a status, and nothing else happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.hostile.conftest import Target

from moonpool.runtime.conformance.messages import A, B, add_sub, repeat, request, tensor, told, typed
from moonpool.runtime.conformance.tensors import ONES

pytestmark = pytest.mark.usefixtures("target")
SERVICE = "/inference.GRPCInferenceService/"
TIMEOUT_S = 60.0
VALID: list[tuple[str, bytes]] = [
    ("ModelInfer", add_sub(request_id="1", priority=1, sequence_id="x").SerializeToString()),
    ("ModelInfer", request("add_sub", [typed("fp32_contents", [1.0] * 4, "INPUT0"), B]).SerializeToString()),
    ("ModelInfer", request("add_sub", [A, A, A], [ONES] * 3).SerializeToString()),
    ("RepositoryModelUnload", b"\n\0\x12\x04nope"),
    ("SystemSharedMemoryRegister", b"\n\1r\x12\2/x\x18\0 \1"),
    ("TraceSetting", b"\n\x12\n\ntrace_rate\x12\4\n\x0210"),
]


@pytest.fixture(scope="module")
def channel(shared: Target) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{shared.grpc_port}") as opened:
        grpc.channel_ready_future(opened).result(TIMEOUT_S)
        yield opened


def _asked(channel: grpc.Channel, method: str, message: bytes) -> tuple[grpc.StatusCode, str]:
    call: Any = channel.unary_unary(SERVICE + method)
    try:
        call(message, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


@pytest.mark.promise("What the server bears, and whom it answers like", "A request that is wrong in …")
@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(valid=st.sampled_from(VALID), where=st.floats(0, 1), gone=st.integers(0, 8), new=st.binary(max_size=12))
def test_wrong_messages_are_told(
    channel: grpc.Channel, valid: tuple[str, bytes], where: float, gone: int, new: bytes
) -> None:
    method, message = valid
    at = int(where * len(message))

    code, said = _asked(channel, method, message[:at] + new + message[at + gone :])

    assert code not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED), said
    assert "internal error" not in said


@pytest.mark.promise("What the server bears, and whom it answers like", "No shape, count, depth or length …")
@pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "A client gets the text of an error, or its beginning if it is long.",
)
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a huge shape", add_sub(tensor("INPUT0", shape=[2**62, 2**62]))),
        ("many dimensions", add_sub(tensor("INPUT0", shape=[1] * 100_000))),
        ("millions of dimensions", add_sub(tensor("INPUT0", shape=[1] * 3_000_000))),
        ("many inputs", request("add_sub", [A] * 10_000, [ONES] * 10_000)),
        ("many parameters", told(**{str(i): None for i in range(10_000)})),
        ("a long name", request("x" * 1_000_000, [])),
        ("a name with a NUL", request("add_sub\0", [])),
        ("a path", request("../../etc/passwd", [])),
        ("a long id", add_sub(request_id="x" * 1_000_000, raw=[])),
    ],
)
def test_sizes_that_nothing_has_are_refused(channel: grpc.Channel, what: str, message: Any) -> None:
    code, said = _asked(channel, "ModelInfer", message.SerializeToString())

    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), (what, said)


def test_streams_that_are_dropped_leave_nothing(channel: grpc.Channel) -> None:
    call: Any = channel.stream_stream(SERVICE + "ModelStreamInfer")
    for round_ in range(100):
        messages = [repeat(round_ % 3).SerializeToString(), b"\xff"][: 1 + round_ % 2]
        stream = call(iter(messages), timeout=TIMEOUT_S)
        if round_ % 4:
            with contextlib.suppress(grpc.RpcError):
                list(stream)
        stream.cancel()
