"""Runtime and stub exchange messages about devices, and the runtime refuses those of a stub that lies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from tests.gpu.cards import Fake
from tests.waiting import wait_until

from moonpool.ipc.errors import CudaUnavailable, RemoteProtocolError
from moonpool.runtime.stubs import devices as module
from moonpool.runtime.stubs.devices import Lanes

pytestmark = pytest.mark.promise(
    "GPUs in the runtime",
    "A stub that lies about events or devices is refused or ended. The runtime waits for a silent "
    "stub only for a limited time, and not at all if other stubs would have to wait.",
)


class Ends:
    """Lanes to a stub that says nothing by itself."""

    def __init__(self, gpus: tuple[int, ...] | None = None) -> None:
        # The messages that the reading thread will read. None if another thread reads.
        self.to_read: list[Callable[[], object]] | None = None
        self.told: list[tuple[int, bytes]] = []
        self.lanes = Lanes(lambda number, handle: self.told.append((number, handle)), self.read_event, gpus)

    def read_event(self) -> bool:
        if self.to_read:
            self.to_read.pop(0)()
        return self.to_read is not None


@pytest.fixture
def ends(fake: Fake) -> Iterator[Ends]:  # noqa: ARG001 - has to be there
    ends = Ends()
    yield ends
    ends.lanes.close()


def test_a_stub_that_sees_some_devices_numbers_those(fake: Fake) -> None:  # noqa: ARG001
    lanes = Ends((3, 5)).lanes

    assert [lanes.number_of(gpu) for gpu in (3, 5, 0)] == [0, 1, None]
    assert [lanes.gpu_of(number) for number in (0, 1)] == [3, 5]
    assert [lanes.nearest(gpu) for gpu in (5, 0)] == [5, 3]
    with pytest.raises(RemoteProtocolError, match="device 2 is not one of the stub's"):
        lanes.gpu_of(2)
    with pytest.raises(ValueError, match="does not see device 0"):
        lanes.lane(0)


@pytest.mark.promise(
    "GPUs in the runtime",
    "No events are shared with a contained stub: the runtime's driver reads nothing that the stub "
    "wrote, and no stream waits for it.",
)
def test_with_a_contained_stub_no_events_are_shared(fake: Fake) -> None:  # noqa: ARG001
    ends = Ends((0,))
    ends.lanes.lane(0)

    assert ends.told == [(0, b"")]
    with pytest.raises(RemoteProtocolError, match="a contained stub shares no events"):
        ends.lanes.meet(0, bytes(64))
    ends.lanes.meet(0, b"")
    ends.lanes.close()


def test_the_stub_is_told_of_a_lane_once(ends: Ends) -> None:
    lane = ends.lanes.lane(0)

    assert ends.lanes.lane(0) is lane
    assert ends.told == [(0, lane.handle)]
    with pytest.raises(CudaUnavailable, match="device 9 cannot be used"):
        ends.lanes.lane(9)


def test_a_receive_waits_until_the_stub_s_event_is_known(ends: Ends) -> None:
    ends.lanes.lane(0)
    received = threading.Thread(target=ends.lanes.receive, name="receives")
    received.start()

    assert received.is_alive()
    ends.lanes.meet(0, b"")

    received.join(60)
    assert not received.is_alive()


def test_a_stub_that_never_says_its_event_is_not_waited_for_for_ever(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ARRIVAL_S", 0.01)
    ends.lanes.lane(0)

    with pytest.raises(RemoteProtocolError, match="did not send its EVENT"):
        ends.lanes.receive()


def test_the_reading_thread_does_not_wait_for_a_missing_event(ends: Ends) -> None:
    ends.lanes.lane(0)
    ends.to_read = []

    ends.lanes.receive()

    with pytest.raises(RemoteProtocolError, match="a block on device 0 ahead of its EVENT"):
        ends.lanes.met(0)


def test_the_reading_thread_handles_an_event_that_has_arrived(ends: Ends) -> None:
    lane = ends.lanes.lane(0)
    # The messages before the event have to be received as well.
    ends.to_read = [*[ends.lanes.receive] * 200, lambda: ends.lanes.meet(0, b"")]

    ends.lanes.receive()

    assert ends.lanes.met(0) is lane


def test_a_wait_ends_when_the_stub_is_gone(ends: Ends) -> None:
    ends.lanes.lane(0)
    waiting = threading.Thread(target=ends.lanes.receive, name="receives")
    waiting.start()

    ends.lanes.close()

    wait_until(lambda: not waiting.is_alive(), what="the wait to end")


def test_an_event_is_told_once_and_only_where_it_was_asked_for(ends: Ends) -> None:
    with pytest.raises(RemoteProtocolError, match="unasked"):
        ends.lanes.meet(0, b"")
    ends.lanes.lane(0)
    ends.lanes.meet(0, b"")
    with pytest.raises(RemoteProtocolError, match="unasked"):
        ends.lanes.meet(0, b"")


def test_an_event_that_is_none_is_done_without_and_the_stub_is_told(ends: Ends) -> None:
    lane = ends.lanes.lane(0)

    ends.lanes.meet(0, bytes(64))

    assert ends.told[1:] == [(0, b"")]
    assert lane.handle == b""
    ends.lanes.publish()
    ends.lanes.receive()
