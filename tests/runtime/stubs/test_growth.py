"""Every stub that asks for memory gets an answer, or sees the end of its channel."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.refused_threads import refuse_threads
from tests.runtime.scripted import Pair, y

from moonpool.ipc.errors import OutOfMemory, RemoteProtocolError
from moonpool.ipc.messages import NO_DEVICE, Kind
from moonpool.runtime.model.budgets import RELEASE_AT
from moonpool.runtime.stubs import devices
from moonpool.runtime.stubs.allotment import Allotment
from moonpool.runtime.stubs.growth import Growth
from moonpool.stub.peers import regions
from moonpool.stub.peers.regions import Regions

pytestmark = pytest.mark.promise(
    "At the limits",
    "A stub that asks for memory gets an answer, however long that takes, or sees the end of its "
    "channel. A stub whose messages cannot be read is ended, and no request waits for it for "
    "ever.",
)


class Stub:
    """A stub, and the messages that are sent to it."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.channel = SimpleNamespace(wake=lambda: self.heard.put(("the end",)))
        self.link = self._link()
        self.growth = Growth(self.link, self, None)  # type: ignore[arg-type]

    def send(self, *message: Any) -> None:
        self.heard.put(message)

    def _link(self) -> Any:
        return SimpleNamespace(
            take_released=lambda _: [],
            response_regions={},
            new_answers=Allotment(None, is_contained=False).region,
            add_answers=lambda region: region.close(),
            send_region=lambda *_: self.send(Kind.REGION),
        )


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def stub() -> Stub:
    return Stub()


def test_a_stub_for_which_there_is_no_thread_is_refused_and_may_ask_again(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        stub.growth.grow(1, NO_DEVICE)
    kind, why = stub.heard.get(timeout=60)
    assert kind == Kind.REFUSED
    assert "can't start new thread" in why

    stub.growth.grow(1, NO_DEVICE)
    assert stub.heard.get(timeout=60) == (Kind.REGION,)


def test_a_stub_that_cannot_be_answered_hears_of_the_end(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise ValueError("as planned")

    stub.link.new_answers = fail
    stub.growth.grow(1, NO_DEVICE)
    assert stub.heard.get(timeout=60) == ("the end",)
    assert "as planned" in caplog.text


def test_an_answer_that_takes_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "_ARRIVAL_S", 0.0)

    def send(kind: Kind, *_: object, **__: object) -> None:
        assert kind == Kind.GROW
        threading.Timer(0.05, asker.refuse, ["there is none"]).start()

    asker = Regions(send)
    with pytest.raises(OutOfMemory, match="there is none"):
        asker.allocate(1)


@pytest.mark.promise("Containment", "No message of a stub …")
def test_a_stub_that_does_not_read_the_answer_is_ended_and_the_log_says_nothing(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def send(*_: Any) -> None:
        raise RemoteProtocolError("the stub does not read its control channel")

    monkeypatch.setattr(stub, "send", send)
    stub.growth.grow(1 << 62, NO_DEVICE)
    assert stub.heard.get(timeout=60) == ("the end",)

    with pytest.raises(RemoteProtocolError, match="does not read"):
        stub.growth.check()
    assert caplog.records == []


def test_many_blocks_that_callers_have_dropped_are_given_back_without_a_batch(pair: Pair, stub: Stub) -> None:
    requests = pair.execute(*[[0.0]] * RELEASE_AT)
    blocks = [pair.peer.place([0.0]) for _ in requests]
    pair.peer.answer(blocks, [[y(1, number)] for number in range(RELEASE_AT)])
    pair.finish(requests)

    Growth(pair.link, cast(Any, stub), None).release_many()
    kind, places = stub.heard.get_nowait()
    assert kind == Kind.RELEASE
    assert sorted(map(list, places)) == sorted(block[:2] for block in blocks)


@pytest.mark.parametrize(("is_private", "counted"), [(True, 1 << 21), (False, 0)])
def test_memory_of_a_device_that_a_contained_stub_retired_counts(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, is_private: bool, counted: int
) -> None:
    asked: list[int] = []

    def refuse(present: int, needed: int, limit: int | None, gpu: int, others: int) -> None:
        del present, needed, limit, gpu
        asked.append(others)
        raise OutOfMemory("asked")

    monkeypatch.setattr(devices, "new_device_region", refuse)
    device = SimpleNamespace(ordinal=3)
    retired = SimpleNamespace(handle=b"", is_private=is_private, device=device, size_bytes=1 << 21, close=lambda: None)
    stub.link.device_answers = {7: retired}
    stub.link.open_lanes = lambda: SimpleNamespace(gpu_of=lambda number: number, lane=lambda _: None)

    stub.growth.retire(7)
    stub.growth.grow(1, 3)

    assert stub.heard.get(timeout=60) == (Kind.REFUSED, "asked")
    assert asked == [counted]
