"""The stub's end of the calls channel: what is held is given back, whatever crosses what."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import pytest

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import encode
from moonpool.ipc.conversation import Overflow
from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.messages import Kind
from moonpool.stub.calls import Calls
from moonpool.stub.preferred_memory import MemoryType, PreferredMemory
from moonpool.stub.request import InferenceRequest
from moonpool.stub.stub_host import StubHost


class NoMemory(Overflow):
    """Regions in which there is no room."""

    def __init__(self) -> None:
        self.returned: deque[object] = deque()

    def hold(self, blocks: object) -> None: ...

    def publish(self) -> None: ...

    def store(self, packet: bytes) -> tuple[int, int, int]:
        raise OutOfMemory(f"no room for {len(packet)} bytes")


@pytest.fixture
def ends() -> Iterator[tuple[Calls, Channel]]:
    ours, theirs = Channel.pair()
    peer = Channel(theirs)
    yield Calls(ours, cast(Any, NoMemory())), peer
    ours.close()
    peer.close()


def test_what_was_let_go_of_is_not_forgotten_where_a_request_cannot_be_sent(
    ends: tuple[Calls, Channel],
) -> None:
    calls, _ = ends
    control = cast(Any, type("Control", (), {"metric_changes": None}))
    host = StubHost(calls, cast(Any, NoMemory()), control, "m")
    host.serves = True
    calls.give_back((1, 64))
    request = InferenceRequest(model_name="x" * 100_000, inputs=[], requested_output_names=["Y"])
    response = cast(Any, host.infer(request, False))
    assert "no room for" in response.error().message()
    assert calls.take_let_go() == [(1, 64)]


@pytest.mark.parametrize("number", [-1, 4096])
def test_a_device_that_no_message_has_room_for_is_an_error_of_the_request(
    ends: tuple[Calls, Channel], number: int
) -> None:
    control = cast(Any, type("Control", (), {"metric_changes": None}))
    host = StubHost(ends[0], cast(Any, NoMemory()), control, "m")
    host.serves = True
    wish = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_GPU, number)
    request = InferenceRequest(
        model_name="b", inputs=[], requested_output_names=["Y"], preferred_memory=wish
    )
    response = cast(Any, host.infer(request, False))
    wrong = f"the device of the preferred_memory of the request cannot be {number}"
    assert wrong in response.error().message()


def test_a_reply_that_crosses_the_end_of_its_call_is_let_go_of(
    ends: tuple[Calls, Channel],
) -> None:
    calls, peer = ends
    call = calls.open()

    class Crossed(deque[Any]):
        def append(self, fields: Any) -> None:
            calls.abandon(call)
            super().append(fields)

    call.inbox = Crossed()
    peer.send(encode(Kind.REPLY, call.number, True, [], [[1, 64, 64]], [], None, None))
    calls._receive()
    assert calls.take_let_go() == [(1, 64)]
    assert not call.inbox
