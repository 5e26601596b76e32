"""Lanes: work in several streams happens in order although nobody waits for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.gpu.cards import Fake, settle
from tests.gpu.late import SIZE, block, fill, fill_at_once, host_waits, peek

from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import DeviceLane, lane_of
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.ipc.errors import CudaError
from moonpool.ipc.region import SharedRegion


@pytest.fixture
def lane(region: DeviceRegion) -> Iterator[DeviceLane]:
    made = DeviceLane(region.device)
    yield made
    made.close()


@pytest.fixture
def stream(region: DeviceRegion) -> Iterator[int]:
    made = region.device.new_stream()
    yield made
    region.device.finish(made)
    region.device.close_stream(made)


@pytest.mark.usefixtures("very_late")
def test_work_is_late_so_that_what_is_not_ordered_shows(region: DeviceRegion, stream: int) -> None:
    fill(region, 7, stream)
    assert peek(region) == 0

    region.device.finish(stream)
    assert peek(region) == 7


def test_a_stream_waits_for_another_one_and_nobody_else_does(region: DeviceRegion, stream: int) -> None:
    other = region.device.new_stream()
    fill(region, 7, stream)
    waits = host_waits(region.device)

    region.device.order(stream, other)
    fill_at_once(region, 8, other)

    assert host_waits(region.device) == waits
    region.device.finish(other)
    assert peek(region) == 8
    region.device.close_stream(other)


def test_publish_comes_after_the_named_streams(region: DeviceRegion, lane: DeviceLane, stream: int) -> None:
    fill(region, 7, stream)

    lane.publish([stream])
    lane.finish()

    assert peek(region) == 7


def test_publish_comes_after_the_streams_of_dropped_leases(region: DeviceRegion, lane: DeviceLane, stream: int) -> None:
    lease = block(region, lane)
    lease.use(stream)
    fill(region, 7, stream)
    del lease

    lane.publish()
    lane.finish()

    assert peek(region) == 7


def test_a_stream_that_enters_a_lease_comes_after_all_others(
    region: DeviceRegion, lane: DeviceLane, stream: int
) -> None:
    other = region.device.new_stream()
    lease = block(region, lane)
    lease.use(stream)
    fill(region, 7, stream)

    lease.use(other)
    region.device.finish(other)

    assert peek(region) == 7
    region.device.close_stream(other)


def test_a_block_that_is_used_again_waits_for_its_last_user(
    region: DeviceRegion, lane: DeviceLane, stream: int
) -> None:
    other = region.device.new_stream()
    lease = block(region, lane)
    lease.use(stream)
    fill(region, 7, stream)
    del lease
    again = block(region, lane)

    again.use(other)
    fill_at_once(region, 8, other)
    region.device.finish(stream)
    region.device.finish(other)

    assert peek(region) == 8
    region.device.close_stream(other)


def test_a_copy_of_the_lane_s_own_into_a_block_waits_for_its_last_user(
    region: DeviceRegion, lane: DeviceLane, stream: int
) -> None:
    lease = block(region, lane)
    lease.use(stream)
    fill(region, 7, stream)
    fill(region, 6, stream)
    del lease
    again = block(region, lane)

    again.use(lane.stream)
    fill_at_once(region, 8, lane.stream)
    lane.finish()
    region.device.finish(stream)

    assert peek(region) == 8


def test_a_lane_follows_another_one(region: DeviceRegion, lane: DeviceLane) -> None:
    other = DeviceLane(region.device)
    fill(region, 7, other.stream)

    lane.follow(other)
    lane.finish()

    assert peek(region) == 7


def test_publishing_waits_where_events_are_not_shared(region: DeviceRegion, lane: DeviceLane) -> None:
    lane.meet(b"")
    fill(region, 7, lane.stream)

    lane.publish()

    assert lane.handle == b""
    assert peek(region) == 7


@pytest.mark.promise("Device memory", "A peer sees bytes that were …")
@pytest.mark.usefixtures("very_late")
def test_publishing_does_not_wait_where_events_are_shared(region: DeviceRegion, lane: DeviceLane) -> None:
    waits = host_waits(region.device)
    fill(region, 7, lane.stream)

    lane.publish()

    assert host_waits(region.device) == waits
    assert peek(region) == 0
    lane.finish()


def test_where_events_cannot_be_made_for_others_there_is_no_handle(fake: Fake) -> None:
    program = """
        from moonpool.ipc.cuda.device import device
        from moonpool.ipc.cuda.lane import DeviceLane
        lane = DeviceLane(device(0))
        print(lane.handle, len(DeviceLane(device(0), shares_events=False).handle))
        """

    assert fake.run(program, FAKE_CUDA_NO_EVENTS=1) == "b'' 0"


@pytest.mark.parametrize("handle", [b"x" * 64, b"x" * 63, b"x"])
def test_a_handle_that_is_no_event_s_is_refused(lane: DeviceLane, handle: bytes) -> None:
    with pytest.raises(CudaError):
        lane.meet(handle)

    lane.meet(b"")
    lane.publish()


def test_copies_from_and_to_ordinary_memory_wait_unless_told_not_to(region: DeviceRegion, lane: DeviceLane) -> None:
    there = np.arange(SIZE, dtype=np.uint8)
    back = np.zeros(SIZE, np.uint8)

    lane.from_host(region.address, there)
    lane.to_host(back, region.address)

    assert back.tolist() == there.tolist()


@pytest.mark.usefixtures("very_late")
def test_a_copy_into_pinned_memory_is_done_after_finish(region: DeviceRegion, lane: DeviceLane) -> None:
    shared = SharedRegion.create(8, 1 << 16)
    assert region.device.pin(shared)
    assert region.device.pin(shared)
    fill(region, 7, lane.stream)
    back = np.ndarray((SIZE,), np.uint8, shared.memory())

    lane.to_host(back, region.address, wait=False)
    assert not back.any()
    lane.finish()
    assert (back == 7).all()

    address = back.__array_interface__["data"][0]
    del back
    shared.close()
    with region.device as here, pytest.raises(CudaError):
        here.driver.cuMemHostUnregister(address)


@pytest.mark.usefixtures("very_late")
def test_a_kept_source_is_released_when_the_copy_is_done(region: DeviceRegion, lane: DeviceLane) -> None:
    class Source:
        """Something to be kept."""

    source = Source()
    gone = weakref.ref(source)
    fill(region, 7, lane.stream)
    lane.keep(source)
    del source
    lane.publish()
    assert gone() is not None

    lane.finish()
    lane.publish()
    assert gone() is None


def test_the_stream_of_a_lane_lives_as_long_as_leases_that_used_it(region: DeviceRegion) -> None:
    lane = DeviceLane(region.device)
    stream = lane.stream
    lease = block(region)
    lease.use(stream)
    assert lane_of(stream) is lane
    del lane
    assert lane_of(stream) is not None

    del lease
    region.close()
    settle(region.device)
    assert lane_of(stream) is None


@pytest.mark.promise(
    "Device memory",
    "Memory is unmapped when all that was queued for it is done, and nobody waits for that (fake driver).",
)
@pytest.mark.usefixtures("very_late")
def test_memory_is_unmapped_when_all_that_was_queued_for_it_is_done(fake_region: DeviceRegion) -> None:
    region, lane = fake_region, DeviceLane(fake_region.device)
    here, address = region.device, region.address
    lease = block(region, lane)
    array = DeviceArray.over(lease, 0, 2, (SIZE,))
    fill(region, 7, lane.stream)
    region.close()
    del lease, array

    here.tidy()
    assert len(here.dying) == 1
    assert _is_mapped(address)
    settle(here)
    assert not _is_mapped(address)
    lane.close()


def _is_mapped(address: int) -> bool:
    starts = (line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines())
    return f"{address:x}" in starts


def test_a_stream_that_was_destroyed_too_early_breaks_nobody_else_s_work(fake_region: DeviceRegion) -> None:
    """The fake driver notices the destroyed stream. A real one takes any address for a stream."""
    region, lane = fake_region, DeviceLane(fake_region.device)
    destroyed = region.device.new_stream()
    first, second = block(region, lane), block(region)
    first.use(destroyed)
    second.use(destroyed)
    region.device.close_stream(destroyed)
    del first, second

    lane.publish()
    region.close()
    settle(region.device)
    assert not region.device.dying
    lane.close()


def test_a_lease_that_is_collected_together_with_its_lane_gives_its_memory_back(fake: Fake) -> None:
    where = device(0)

    def live_after_a_cycle() -> dict[str, int]:
        lane, region = DeviceLane(where), DeviceRegion.create(9, SIZE, where)
        cycle: list[object] = [lane, block(region, lane)]
        cycle.append(cycle)
        region.close()
        del lane, region, cycle
        gc.collect()
        settle(where)
        live = fake.live()
        del live["events"]
        return live

    first = live_after_a_cycle()

    assert live_after_a_cycle() == first
