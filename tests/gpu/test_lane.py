"""Lanes: work in two streams, and in two processes, happens in order although nobody waits for it.

The fake driver starts work late here, so what is not ordered goes wrong every time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gpu.cards import Fake, settle
from tests.waiting import wait_until

from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import Lane, lane_of
from moonpool.ipc.cuda.region import DeviceLease, DeviceRegion
from moonpool.ipc.errors import CudaError
from moonpool.ipc.region import SharedRegion

SIZE = 4096
DELAY_US = 20_000
LATE = str(DELAY_US)


@pytest.fixture
def late(fake: Fake) -> Fake:
    """The fake driver, whose work starts late."""
    fake.delay(DELAY_US)
    return fake


@pytest.fixture
def region(late: Fake) -> Iterator[DeviceRegion]:
    late.delay(0)
    made = DeviceRegion.create(7, SIZE, device(0))
    late.delay(DELAY_US)
    yield made
    made.close()
    settle(device(0))


@pytest.fixture
def lane(region: DeviceRegion) -> Iterator[Lane]:
    made = Lane(region.device)
    yield made
    made.close()


@pytest.fixture
def stream(region: DeviceRegion) -> Iterator[int]:
    made = region.device.new_stream()
    yield made
    region.device.finish(made)
    region.device.close_stream(made)


def fill(region: DeviceRegion, value: int, stream: int) -> None:
    """Queue what sets the first bytes of a region."""
    with region.device as here:
        here.driver.cuMemsetD8Async(region.address, value, SIZE, stream)


def peek(region: DeviceRegion) -> int:
    """The first byte as it is now: memory of the fake is the processor's."""
    return ctypes.c_uint8.from_address(region.address).value


def nobody(_: object) -> None:
    """Takes back a block."""


def block(region: DeviceRegion, lane: Lane | None = None) -> DeviceLease:
    return region.lease(0, SIZE, nobody, "block", lane)


def test_work_is_late_so_that_what_is_not_ordered_shows(region: DeviceRegion, stream: int) -> None:
    fill(region, 7, stream)
    assert peek(region) == 0

    region.device.finish(stream)
    assert peek(region) == 7


def test_a_stream_waits_for_another_one_and_nobody_else_does(
    region: DeviceRegion, stream: int, late: Fake
) -> None:
    other = region.device.new_stream()
    fill(region, 7, stream)
    waits = late.calls("cuEventSynchronize") + late.calls("cuStreamSynchronize")

    region.device.order(stream, other)
    fill(region, 8, other)

    assert late.calls("cuEventSynchronize") + late.calls("cuStreamSynchronize") == waits
    region.device.finish(other)
    assert peek(region) == 8
    region.device.close_stream(other)


def test_what_is_published_comes_after_the_streams_that_are_named(
    region: DeviceRegion, lane: Lane, stream: int
) -> None:
    fill(region, 7, stream)

    lane.publish([stream])
    lane.finish()

    assert peek(region) == 7


def test_what_is_published_comes_after_the_streams_of_leases_that_are_gone(
    region: DeviceRegion, lane: Lane, stream: int
) -> None:
    lease = block(region, lane)
    lease.use(stream)
    fill(region, 7, stream)
    del lease

    lane.publish()
    lane.finish()

    assert peek(region) == 7


def test_whoever_enters_a_lease_comes_after_all_that_used_it(
    region: DeviceRegion, lane: Lane, stream: int
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
    region: DeviceRegion, lane: Lane, stream: int
) -> None:
    other = region.device.new_stream()
    lease = block(region, lane)
    lease.use(stream)
    fill(region, 7, stream)
    del lease
    again = block(region, lane)

    again.use(other)
    fill(region, 8, other)
    region.device.finish(stream)
    region.device.finish(other)

    assert peek(region) == 8
    region.device.close_stream(other)


def test_a_lane_follows_another_one(region: DeviceRegion, lane: Lane) -> None:
    other = Lane(region.device)
    fill(region, 7, other.stream)

    lane.follow(other)
    lane.finish()

    assert peek(region) == 7


def test_publishing_waits_where_events_are_not_shared(region: DeviceRegion, lane: Lane) -> None:
    lane.meet(b"")
    fill(region, 7, lane.stream)

    lane.publish()

    assert lane.handle == b""
    assert peek(region) == 7


def test_publishing_does_not_wait_where_events_are_shared(
    region: DeviceRegion, lane: Lane, late: Fake
) -> None:
    waits = late.calls("cuEventSynchronize")
    fill(region, 7, lane.stream)

    lane.publish()

    assert late.calls("cuEventSynchronize") == waits
    assert peek(region) == 0
    lane.finish()


def test_where_events_cannot_be_made_for_others_there_is_no_handle(late: Fake) -> None:
    program = """
        from moonpool.ipc.cuda.device import device
        from moonpool.ipc.cuda.lane import Lane
        lane = Lane(device(0))
        print(lane.handle, len(Lane(device(0), shares_events=False).handle))
        """

    assert late.run(program, FAKE_CUDA_NO_EVENTS=1) == "b'' 0"


@pytest.mark.parametrize("handle", [b"x" * 64, b"x" * 63, b"x"])
def test_a_handle_that_is_no_event_s_is_refused(lane: Lane, handle: bytes) -> None:
    with pytest.raises(CudaError):
        lane.meet(handle)

    lane.meet(b"")
    lane.publish()


def test_copies_from_and_to_ordinary_memory_wait_unless_told_not_to(
    region: DeviceRegion, lane: Lane
) -> None:
    there = np.arange(SIZE, dtype=np.uint8)
    back = np.zeros(SIZE, np.uint8)

    lane.from_host(region.address, there)
    lane.to_host(back, region.address)

    assert back.tolist() == there.tolist()


def test_a_copy_into_pinned_memory_is_done_after_finish(
    region: DeviceRegion, lane: Lane, late: Fake
) -> None:
    shared = SharedRegion.create(8, 1 << 16)
    assert region.device.pin(shared)
    assert region.device.pin(shared)
    fill(region, 7, lane.stream)
    back = np.ndarray((SIZE,), np.uint8, shared.memory())

    lane.to_host(back, region.address, wait=False)
    assert not back.any()
    lane.finish()
    assert (back == 7).all()

    pinned = late.live()["ranges"]
    del back
    shared.close()
    assert late.live()["ranges"] == pinned - 1


def test_what_is_kept_is_let_go_of_when_the_copy_is_done(region: DeviceRegion, lane: Lane) -> None:
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
    lane = Lane(region.device)
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


def test_memory_is_unmapped_when_all_that_was_queued_for_it_is_done(
    region: DeviceRegion, lane: Lane
) -> None:
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


def _is_mapped(address: int) -> bool:
    starts = (line.split("-")[0] for line in Path("/proc/self/maps").read_text().splitlines())
    return f"{address:x}" in starts


# Two processes. The other one is a program that gets the descriptor of a region and the handle of an event, and says what it is told.

PEER = """
import ctypes, os, socket
import numpy as np
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import Lane
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.errors import MoonpoolError

SIZE = 4096
if sys.argv[2] != "0":
    os.setgroups([])
    os.setresgid(*[int(sys.argv[2])] * 3)
    os.setresuid(*[int(sys.argv[2])] * 3)
end = socket.socket(fileno=int(sys.argv[1]))
packet, fds, _, _ = socket.recv_fds(end, 4096, 1)
size, handle, memory = eval(packet)
here = device(0)
region = DeviceRegion.adopt(7, size, here, fds[0] if fds else -1, memory)
lane = Lane(here)
try:
    lane.meet(handle)
except MoonpoolError:
    lane.meet(b"")
stream = here.new_stream()
end.send(lane.handle)

def fill(value, stream):
    with here:
        here.driver.cuMemsetD8Async(region.address, value, SIZE, stream)

def first():
    return ctypes.c_uint8.from_address(region.address).value

while True:
    words = end.recv(4096)
    if not words:
        break
    end.send(repr(eval(words)).encode())
"""


class Peer:
    """The other process."""

    def __init__(self, region: DeviceRegion, environment: dict[str, str], user: int) -> None:
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.settimeout(40)
        self.lane = Lane(region.device)
        lines = f"import sys\nsys.path[:] = {sys.path!r}\n{PEER}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", lines, str(theirs.fileno()), str(user)],
            pass_fds=[theirs.fileno()], env=environment,
        )  # fmt: skip
        theirs.close()
        said = repr((region.size_bytes, self.lane.handle, region.handle)).encode()
        fds = [region.fd] if region.fd >= 0 else []
        region.share(lambda _: socket.send_fds(self._end, [said], fds))
        self.handle = self._end.recv(4096)

    def does(self, what: str) -> Any:
        """Let it do something, and say what comes of it. It may not wait for ever."""
        self._end.send(textwrap.dedent(what).encode())
        return eval(self._end.recv(4096))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self._end.close()
        self.process.wait(30)
        self.lane.close()


@pytest.fixture
def peer_of(late: Fake) -> Iterator[Callable[..., Peer]]:
    with contextlib.ExitStack() as stack:

        def start(region: DeviceRegion, user: int = 0, **settings: object) -> Peer:
            environment = late.environment(FAKE_CUDA_DELAY_US=LATE, **settings)
            peer = Peer(region, environment, user)
            stack.callback(peer.close)
            return peer

        yield start


def test_a_peer_sees_the_bytes_after_it_received(
    region: DeviceRegion, peer_of: Callable[..., Peer]
) -> None:
    peer = peer_of(region)
    peer.lane.meet(peer.handle)

    fill(region, 7, peer.lane.stream)
    peer.lane.publish()
    assert peer.does("first()") == 0
    peer.does("(lane.receive(), lane.enter(stream), here.finish(stream))")

    assert peer.does("first()") == 7


def test_what_is_given_back_is_written_to_after_the_peer_read_it(
    region: DeviceRegion, peer_of: Callable[..., Peer]
) -> None:
    peer = peer_of(region)
    peer.lane.meet(peer.handle)
    region.write(0, np.full(SIZE, 7, np.uint8))

    # It reads late, and gives the block back at once.
    peer.does(
        "(globals().update(seen=np.zeros(SIZE, np.uint8)), lane.enter(stream), "
        "[here.copy(region.address + SIZE, region.address, SIZE, stream)], lane.publish([stream]))"
    )
    peer.lane.receive()
    fill(region, 8, peer.lane.stream)
    peer.lane.finish()

    assert peek(region) == 8
    assert region.read(SIZE, 4) == b"\x07" * 4


def test_both_wait_where_one_cannot_open_the_other_s_event(
    region: DeviceRegion, peer_of: Callable[..., Peer]
) -> None:
    peer = peer_of(region, FAKE_CUDA_NO_EVENTS=1)
    assert peer.handle == b""
    peer.lane.meet(peer.handle)

    fill(region, 7, peer.lane.stream)
    peer.lane.publish()
    assert peer.does("first()") == 7

    peer.does("(fill(8, stream), lane.publish([stream]))")
    assert peek(region) == 8


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")
def test_a_peer_of_another_user_gets_the_memory_and_both_wait(
    region: DeviceRegion, peer_of: Callable[..., Peer]
) -> None:
    peer = peer_of(region, user=65534)
    assert peer.handle == b""
    peer.lane.meet(peer.handle)

    fill(region, 7, peer.lane.stream)
    peer.lane.publish()
    peer.does("lane.receive(), here.finish(lane.stream)")

    assert peer.does("first()") == 7


def test_memory_outlives_the_peer_that_was_killed_with_it_open(
    region: DeviceRegion, peer_of: Callable[..., Peer]
) -> None:
    peer = peer_of(region)
    peer.lane.meet(peer.handle)
    peer.does("(fill(7, lane.stream), lane.publish(), lane.finish())")
    peer.kill()

    peer.lane.receive()
    peer.lane.finish()

    assert region.read(0, 4) == b"\x07" * 4


def test_the_lane_of_a_peer_that_died_at_work_holds_up_no_other_lane(
    region: DeviceRegion, peer_of: Callable[..., Peer]
) -> None:
    peer, other = peer_of(region), peer_of(region)
    for each in (peer, other):
        each.lane.meet(each.handle)
    peer.does("(fill(7, lane.stream), lane.publish())")
    peer.lane.receive()
    peer.kill()

    other.does("(fill(8, lane.stream), lane.publish())")
    other.lane.receive()
    other.lane.finish()

    assert peek(region) == 8


def test_memory_of_the_older_kind_is_opened_once_by_its_handle(
    late: Fake, peer_of: Callable[..., Peer]
) -> None:
    late.delay(0)
    device(0).has_descriptors = False
    region = DeviceRegion.create(7, SIZE, device(0))
    assert (region.fd, len(region.handle)) == (-1, 64)
    late.delay(DELAY_US)
    peer = peer_of(region)
    peer.lane.meet(peer.handle)

    fill(region, 7, peer.lane.stream)
    peer.lane.publish()
    peer.does("(lane.receive(), here.finish(lane.stream))")

    assert peer.does("first()") == 7
    peer.close()
    region.close()


def test_a_region_of_another_size_or_device_is_not_adopted(fake: Fake) -> None:
    words = fake.run(
        """
        import os
        from moonpool.ipc.cuda.device import device
        from moonpool.ipc.cuda.region import DeviceRegion
        from moonpool.ipc.errors import RemoteProtocolError
        made = DeviceRegion.create(7, 4096, device(0))
        before = len(os.listdir("/proc/self/fd"))
        for ordinal, size in ((1, made.size_bytes), (0, 2 * made.size_bytes), (0, 4096), (0, 0)):
            try:
                DeviceRegion.adopt(7, size, device(ordinal), os.dup(made.fd), b"")
            except RemoteProtocolError as error:
                print(str(error).split(":")[0])
        try:
            DeviceRegion.adopt(7, 4096, device(0), os.memfd_create("other"), b"")
        except RemoteProtocolError as error:
            print(str(error).split(":")[0])
        print(len(os.listdir("/proc/self/fd")) - before)
        """,
        FAKE_CUDA_DEVICES=2,
    )

    assert words.splitlines() == [
        "region 7 is no memory of 2097152 bytes on device 1",
        "region 7 is no memory of 4194304 bytes on device 0",
        "region 7 is no memory of 4096 bytes on device 0",
        "region 7 is no memory of 0 bytes on device 0",
        "region 7 is no memory of 4096 bytes on device 0",
        "0",
    ]


def test_a_device_that_is_full_says_so_and_goes_on(fake: Fake) -> None:
    words = fake.run(
        """
        from moonpool.ipc.cuda.device import device
        from moonpool.ipc.cuda.region import DeviceRegion
        from moonpool.ipc.errors import OutOfMemory
        first = DeviceRegion.create(1, 4 << 20, device(0))
        try:
            DeviceRegion.create(2, 6 << 20, device(0))
        except OutOfMemory as error:
            print(error)
        first.close()
        print(DeviceRegion.create(3, 6 << 20, device(0)).size_bytes)
        """,
        FAKE_CUDA_MEMORY_BYTES=8 << 20,
    )

    assert words.splitlines() == [
        "cannot set aside 6291456 bytes on device 0: 4194304 of its 8388608 bytes are free (the device "
        "is out of memory; cuMemCreate: out of memory (CUDA_ERROR_OUT_OF_MEMORY, 2))",
        "6291456",
    ]


def test_a_process_without_descriptors_left_makes_no_region_and_keeps_none(fake: Fake) -> None:
    words = fake.run(
        """
        import os, resource
        from moonpool.ipc.cuda.device import device
        from moonpool.ipc.cuda.region import DeviceRegion
        from moonpool.ipc.errors import MoonpoolError
        device(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        regions = []
        try:
            while True:
                regions.append(DeviceRegion.create(len(regions), 4096, device(0)))
        except MoonpoolError as error:
            print(type(error).__name__)
        for region in regions:
            region.close()
        count = len(regions)
        del region, regions
        device(0).tidy()
        print(count > 5, len(os.listdir("/proc/self/fd")) < 10, device(0).memory_info())
        """
    )

    assert words.splitlines() == ["OutOfMemory", "True True (1073741824, 1073741824)"]


def test_many_threads_order_and_copy_at_the_same_time(fake: Fake) -> None:
    fake.delay(200)
    here = device(0)
    region = DeviceRegion.create(7, 1 << 20, here)
    wrong: list[int] = []

    def work(number: int) -> None:
        lane, offset = Lane(here), number * 8192
        for turn in range(20):
            lease = region.lease(offset, 4096, nobody, turn, lane)
            lane.from_host(lease.address, np.full(4096, turn, np.uint8), wait=False)
            lane.publish()
            seen = DeviceArray.over(lease, 0, 2, (4096,)).to_host()
            if not (seen == turn).all():
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    region.close()
    settle(here)


def test_a_thousand_rounds_leave_nothing_behind(fake: Fake) -> None:
    here = device(0)
    lane = Lane(here)
    region = DeviceRegion.create(7, 1 << 20, here)

    def round_trip() -> None:
        lease = region.lease(0, 4096, nobody, "block", lane)
        array = DeviceArray.over(lease, 0, 11, (16,))
        again = DeviceArray.of(array.__dlpack__(stream=1))
        assert again is not None
        again.to_host()
        lane.publish()
        lane.receive()

    round_trip()
    live, fds = fake.live(), len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        round_trip()

    assert fake.live() == live
    assert len(os.listdir("/proc/self/fd")) == fds
    region.close()
    lane.close()
    wait_until(lambda: here.tidy() or not here.dying)
