"""Device memory in two processes: each sees what the other did, in order, although nobody waits."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gpu.cards import Fake
from tests.gpu.late import SIZE, fill, fill_at_once, is_fake, peek

from moonpool.ipc.cuda import driver
from moonpool.ipc.cuda.device import Device
from moonpool.ipc.cuda.lane import DeviceLane
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.ipc.errors import CudaError

# The other process gets the descriptor of a region and the handle of an event, and runs the code that it is sent.
PEER = """
import os, socket
from tests.gpu import late as timing
from tests.gpu.late import SIZE, fill, fill_at_once, late, peek

if sys.argv[2] != "0":
    os.setgroups([])
    os.setresgid(*[int(sys.argv[2])] * 3)
    os.setresuid(*[int(sys.argv[2])] * 3)
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import DeviceLane
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.ipc.errors import MoonpoolError

end = socket.socket(fileno=int(sys.argv[1]))
packet, fds, _, _ = socket.recv_fds(end, 4096, 1)
size, handle, memory = eval(packet)
here = device(0)
region = DeviceRegion.adopt(7, size, here, fds[0] if fds else -1, memory)
lane = DeviceLane(here)
try:
    lane.meet(handle)
except MoonpoolError:
    lane.meet(b"")
stream = here.new_stream()
end.send(lane.handle or b"none")

def copy_late():
    with late(here, stream):
        here.copy(region.address + SIZE, region.address, SIZE, stream)

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
        self._end.settimeout(60)
        self.lane = DeviceLane(region.device)
        lines = f"import sys\nsys.path[:] = {sys.path!r}\n{PEER}"
        self.process = subprocess.Popen(
            [sys.executable, "-c", lines, str(theirs.fileno()), str(user)],
            pass_fds=[theirs.fileno()], env=environment,
        )  # fmt: skip
        theirs.close()
        said = repr((region.size_bytes, self.lane.handle, region.handle)).encode()
        fds = [region.fd] if region.fd >= 0 else []
        region.share(lambda _: socket.send_fds(self._end, [said], fds))
        said = self._end.recv(4096)
        self.handle = b"" if said == b"none" else said

    def does(self, what: str) -> Any:
        """Let it do something, and say what comes of it. It may not wait for ever."""
        self._end.send(textwrap.dedent(what).encode())
        return eval(self._end.recv(4096))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self._end.close()
        self.process.wait(60)
        self.lane.close()


@pytest.fixture
def peer_of() -> Iterator[Callable[..., Peer]]:
    with contextlib.ExitStack() as stack:

        def start(region: DeviceRegion, user: int = 0, **settings: object) -> Peer:
            environment = dict(os.environ)
            if is_fake(region.device):
                environment = Fake(Path(driver.LIBRARY)).environment(**settings)
            peer = Peer(region, environment, user)
            stack.callback(peer.close)
            return peer

        yield start


@pytest.mark.promise(
    "Device memory",
    "A peer sees bytes that were published after it received, and a block that was given back "
    "is written to after the peer has read it; nobody waits on the processor for that.",
)
@pytest.mark.usefixtures("very_late")
def test_a_peer_sees_the_bytes_after_it_received(region: DeviceRegion, peer_of: Callable[..., Peer]) -> None:
    peer = peer_of(region)
    peer.lane.meet(peer.handle)

    fill(region, 7, peer.lane.stream)
    peer.lane.publish()
    assert peer.does("peek(region)") == 0
    peer.does("(lane.receive(), lane.enter(stream), here.finish(stream))")

    assert peer.does("peek(region)") == 7


@pytest.mark.promise("Device memory", "A peer sees bytes that were …")
def test_a_released_block_is_written_after_the_peer_has_read_it(
    region: DeviceRegion, peer_of: Callable[..., Peer]
) -> None:
    peer = peer_of(region)
    peer.lane.meet(peer.handle)
    region.write(0, np.full(SIZE, 7, np.uint8))

    # The peer reads late, and gives the block back at once.
    peer.does("(lane.enter(stream), copy_late(), lane.publish([stream]))")
    peer.lane.receive()
    fill_at_once(region, 8, peer.lane.stream)
    peer.lane.finish()

    assert peek(region) == 8
    assert region.read(SIZE, 4) == b"\x07" * 4


@pytest.mark.promise(
    "Device memory",
    "Where two processes cannot share events, both wait for their own work before they send (fake driver).",
)
def test_both_wait_where_one_cannot_open_the_other_s_event(
    fake_region: DeviceRegion, peer_of: Callable[..., Peer]
) -> None:
    region = fake_region
    peer = peer_of(region, FAKE_CUDA_NO_EVENTS=1)
    assert peer.handle == b""
    peer.lane.meet(peer.handle)

    fill(region, 7, peer.lane.stream)
    peer.lane.publish()
    assert peer.does("peek(region)") == 7

    peer.does("(fill(region, 8, stream), lane.publish([stream]))")
    assert peek(region) == 8


@pytest.mark.promise("Device memory", "Where two processes cannot share events, …")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")
def test_a_peer_of_another_user_gets_the_memory_and_the_order(
    region: DeviceRegion, peer_of: Callable[..., Peer]
) -> None:
    peer = peer_of(region, user=65534)
    # It is not documented whether a card's driver lets the peer open the event. If it does not, both processes wait.
    assert peer.handle == b"" or not is_fake(region.device)
    peer.lane.meet(peer.handle)

    fill(region, 7, peer.lane.stream)
    peer.lane.publish()
    peer.does("lane.receive(), here.finish(lane.stream)")

    assert peer.does("peek(region)") == 7


@pytest.mark.promise(
    "Device memory",
    "Memory outlives a peer that is killed with it open, and a peer that is killed at work holds up no other one.",
)
def test_memory_outlives_the_peer_that_was_killed_with_it_open(
    region: DeviceRegion, peer_of: Callable[..., Peer]
) -> None:
    peer = peer_of(region)
    peer.lane.meet(peer.handle)
    peer.does("(fill(region, 7, lane.stream), lane.publish(), lane.finish())")
    peer.kill()

    peer.lane.receive()
    peer.lane.finish()

    assert region.read(0, 4) == b"\x07" * 4


@pytest.mark.promise("Device memory", "Memory outlives a peer that is …")
def test_the_lane_of_a_peer_that_died_at_work_holds_up_no_other_lane(
    region: DeviceRegion, peer_of: Callable[..., Peer]
) -> None:
    peer, other = peer_of(region), peer_of(region)
    for each in (peer, other):
        each.lane.meet(each.handle)
    peer.does("(fill(region, 7, lane.stream), lane.publish())")
    peer.lane.receive()
    peer.kill()

    other.does("(fill(region, 8, lane.stream), lane.publish())")
    other.lane.receive()
    other.lane.finish()

    assert peek(region) == 8


@pytest.mark.promise(
    "Device memory in a model",
    "If a process dies while the device writes a tensor for it, a reader of the tensor gets an "
    "error a second later, and does not wait.",
)
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_wait_for_a_peer_that_died_at_work_ends_with_an_error(
    fake_region: DeviceRegion, peer_of: Callable[..., Peer], when: str
) -> None:
    peer = peer_of(fake_region)
    peer.lane.meet(peer.handle)
    # On a busy machine it might be done before the process is killed.
    peer.does("setattr(timing, 'LATE_US', 60_000_000)")
    peer.does("(fill(region, 7, lane.stream), lane.publish())")
    peer.lane.receive()
    peer.kill()
    end = threading.Timer(0.2 if when == "meanwhile" else 0, peer.lane.close)
    end.start()

    with pytest.raises(CudaError, match="has died before"):
        peer.lane.reach()

    end.join()


@pytest.mark.promise("Device memory", "If a device can share memory by the older handles only, those are used.")
def test_memory_of_the_older_kind_is_opened_once_by_its_handle(gpu: Device, peer_of: Callable[..., Peer]) -> None:
    gpu.why_no_descriptors = "this test has none"
    region = DeviceRegion.create(7, SIZE, gpu)
    assert (region.fd, len(region.handle)) == (-1, 64)
    peer = peer_of(region)
    peer.lane.meet(peer.handle)

    fill(region, 7, peer.lane.stream)
    peer.lane.publish()
    peer.does("(lane.receive(), here.finish(lane.stream))")

    assert peer.does("peek(region)") == 7
    peer.close()
    region.close()
