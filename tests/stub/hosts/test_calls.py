"""Tests that calls give back all memory, whichever messages cross."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from tests.refused_threads import refuse_threads

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import calls_codec, encode
from moonpool.ipc.conversation import Overflow
from moonpool.ipc.errors import LocalProtocolError, OutOfMemory
from moonpool.ipc.messages import LONG, MAX_CALL_BYTES, SHORT, Details, Kind, Side
from moonpool.stub.hosts.calls import Calls
from moonpool.stub.hosts.runtime_host import StubHost
from moonpool.stub.pb_utils.errors import ErrorCode, TritonModelException
from moonpool.stub.pb_utils.request import InferenceRequest, InferenceTrace
from moonpool.stub.pb_utils.tensor import MemoryType, PreferredMemory, Tensor

pytestmark = pytest.mark.promise("Requests between models", "A value that cannot be …")

X = Tensor("X", np.zeros(1, np.float32))


class NoMemory(Overflow):
    """Stands for regions without room."""

    def __init__(self) -> None:
        self.returned: deque[object] = deque()

    def hold(self, blocks: object) -> None: ...

    def publish(self) -> None: ...

    def indirect(self, packet: bytes, most_bytes: int = sys.maxsize, _: object = None) -> bytes:
        return super().indirect(packet, most_bytes)

    def store(self, packet: bytes) -> tuple[int, int, int]:
        raise OutOfMemory(f"no room for {len(packet)} bytes")


@pytest.fixture
def ends() -> Iterator[tuple[Calls, Channel]]:
    ours, theirs = Channel.pair()
    peer = Channel(theirs)
    yield Calls(ours, cast(Any, NoMemory())), peer
    ours.close()
    peer.close()


@pytest.fixture
def host(ends: tuple[Calls, Channel]) -> StubHost:
    control = cast(Any, type("Control", (), {"metric_changes": None}))
    host = StubHost(ends[0], cast(Any, NoMemory()), control, "m")
    host.serves = True
    return host


def test_releases_are_not_forgotten_when_a_request_cannot_be_sent(ends: tuple[Calls, Channel], host: StubHost) -> None:
    calls, _ = ends
    calls.give_back((1, 64))
    request = InferenceRequest(model_name="x" * 100_000, inputs=[], requested_output_names=["Y"])
    response = cast(Any, host.infer(request, False))
    assert "no room for" in response.error().message()
    assert calls.take_released() == [(1, 64)]


@pytest.mark.promise(
    "At the limits",
    "A value that does not fit into a message is an error of the request, the call or the load, and the model lives.",
)
@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"model_name": "m" * (LONG + 1)}, "the model_name of the request cannot be 'mmm"),
        ({"model_version": -2}, "the model_version of the request cannot be -2"),
        ({"request_id": "i" * (LONG + 1)}, "the request_id of the request cannot be 'iii"),
        ({"correlation_id": "c" * (SHORT + 1)}, "the correlation_id of the request cannot be 'ccc"),
        ({"trace": InferenceTrace("t" * (SHORT + 1))}, "the trace of the request cannot be 'ttt"),
        ({"trace": InferenceTrace(cast(Any, 5))}, "the trace of the request cannot be 5"),
        ({"parameters": dict.fromkeys(map(str, range(4097)), 1)}, "4097 parameters, and 4096 is"),
        ({"inputs": [X] * 65537}, "65537 inputs, and 65536 is the most"),
        ({"requested_output_names": ["Y"] * 65537}, "65537 requested outputs, and 65536 is"),
        ({"requested_output_names": ["Y" * (LONG + 1)]}, "the name of a requested output of the request cannot be"),
        ({"inputs": [Tensor("X" * (LONG + 1), X.as_numpy())]}, "the name of an input has more than"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_value_that_fits_no_message_is_an_error_of_the_request(
    host: StubHost, fields: dict[str, Any], wrong: str
) -> None:
    request = InferenceRequest(**{"model_name": "b", "inputs": [], "requested_output_names": ["Y"], **fields})

    response = cast(Any, host.infer(request, False))

    assert wrong in response.error().message()
    assert response.error().code() == ErrorCode.INVALID_ARG


@pytest.mark.promise(
    "At the limits", "A model cannot send on a request that it got, and the error says how to make a new one."
)
def test_a_request_that_the_model_was_given_cannot_be_sent_on(host: StubHost) -> None:
    details = Details("", 0, 0, 0, 0, None)
    request = InferenceRequest.from_wire(details, ["Y"], [], (cast(Any, None), 1, 0))

    with pytest.raises(TritonModelException, match="names no model: make one with"):
        host.infer(request, False)


@pytest.mark.parametrize("number", [-1, 4096])
def test_a_device_that_no_message_has_room_for_is_an_error_of_the_request(host: StubHost, number: int) -> None:
    wish = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_GPU, number)
    request = InferenceRequest(model_name="b", inputs=[], requested_output_names=["Y"], preferred_memory=wish)
    response = cast(Any, host.infer(request, False))
    wrong = f"the device of the preferred_memory of the request cannot be {number}"
    assert wrong in response.error().message()


def test_a_reply_that_crosses_the_end_of_its_call_is_let_go_of(ends: tuple[Calls, Channel]) -> None:
    calls, peer = ends
    call = calls.open()
    calls.begin(call, Kind.IS_MODEL_READY, "m", "")

    class Crossed(deque[Any]):
        def append(self, fields: Any) -> None:
            calls.abandon(call)
            super().append(fields)

    call.inbox = Crossed()
    peer.send(encode(Kind.REPLY, call.number, True, [], [[1, 64, 64]], [], None, None))
    calls._receive()
    assert calls.take_released() == [(1, 64)]
    assert not call.inbox


def test_a_call_that_no_thread_reads_for_is_not_open(
    ends: tuple[Calls, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch)
    calls, _ = ends
    with pytest.raises(RuntimeError, match="can't start new thread"):
        calls.open(notify=lambda: None)


class Memory(NoMemory):
    """Stands for regions with room for anything."""

    def store(self, packet: bytes) -> tuple[int, int, int]:
        return 1, 0, len(packet)


def test_a_request_that_is_larger_than_the_runtime_reads_is_not_sent() -> None:
    ours, theirs = Channel.pair()
    calls, peer = Calls(ours, cast(Any, Memory())), Channel(theirs)
    try:
        with pytest.raises(LocalProtocolError, match="bytes beside its tensors; 16777216 is the"):
            calls.send(Kind.INFER, 1, "x" * (MAX_CALL_BYTES + 1))
        # Only memory limits the size of a load.
        calls.send(Kind.LOAD_MODEL, 2, "m", "", [["file:1/model.py", bytes(MAX_CALL_BYTES + 1)]])
        kind, *_, size_bytes = calls_codec(Side.RUNTIME).decode(peer.receive())
        assert (kind, size_bytes > MAX_CALL_BYTES) == (Kind.INDIRECT, True)
    finally:
        ours.close()
        peer.close()
