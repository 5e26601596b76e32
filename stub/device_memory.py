"""Memory on devices that one peer and the stub have in common: who allocates where, and what waits for what.

Theory of operation. Blocks, places and arenas are as in ordinary memory, one arena for each device. In addition
there is a `Lane` for each device, on which all that we copy there is queued. Work on a device is not done when the call that asked for it
returns, so whoever names a block in a message, or gives one back, publishes before, and whoever is told receives; then the device
itself keeps the order. EVENT tells each end what to wait for: the runtime says it first, at the latest when it sends
the first region on that device.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, cast
from weakref import ref

from moonpool.ipc.arena import Arena
from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import Lane
from moonpool.ipc.cuda.region import DeviceLease, DeviceRegion
from moonpool.ipc.errors import CudaError, OutOfMemory, RemoteProtocolError
from moonpool.ipc.messages import Kind
from moonpool.stub.device_tensor import DeviceTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from moonpool.ipc.arena import Block
    from moonpool.ipc.memory import Lease, Region

# The runtime sends EVENT before the message that needs it; the wait covers threads' switching.
_ARRIVAL_S = 30.0
# Leases that are remembered before those that are gone are looked for.
_FEW = 64


class DeviceMemory:
    """Any thread may call any method, but for the arenas, whose user takes turns."""

    def __init__(self, grow: Callable[[int, int], Region], tell: Callable[..., None]) -> None:
        """`grow` gets a region of a size in bytes on a device, `tell` sends a control message."""
        self._grow = grow
        self._tell = tell
        self._arenas: dict[int, Arena] = {}
        self._lanes: dict[int, Lane] = {}
        # The devices of which EVENT has come.
        self._met: set[int] = set()
        self._changed = threading.Condition()
        self._is_deserted = False
        # The streams that touched blocks which are about to be named, by device.
        self._touched: dict[int, set[int]] = {}
        # Those that live, and some that are gone.
        self._leases: list[ref[DeviceLease]] = []
        self._most_leases = _FEW

    # Order

    def lane(self, ordinal: int) -> Lane:
        """Where our work on a device is queued. Raises `CudaUnavailable`, `CudaError`."""
        lane = self._lanes.get(ordinal)
        if lane is None:
            with self._changed:
                lane = self._lanes.get(ordinal)
                if lane is None:
                    lane = self._lanes[ordinal] = Lane(device(ordinal))
        return lane

    def meet(self, ordinal: int, handle: bytes) -> None:
        """The peer's event, which is answered with ours; empty where it cannot be, or, said once more, ours could not be opened.

        On the control thread.
        """
        lane = self.lane(ordinal)
        try:
            lane.meet(handle)
        except (CudaError, OutOfMemory):  # each waits for its own work then
            lane.meet(b"")
        if ordinal in self._met:
            return
        self._tell(Kind.EVENT, ordinal, lane.handle)
        with self._changed:
            self._met.add(ordinal)
            self._changed.notify_all()

    def receive(self, ordinal: int) -> Lane:
        """After a message that names or gives back blocks on a device; waits for EVENT where the message overtook it."""
        if ordinal not in self._met:
            with self._changed:
                self._changed.wait_for(
                    lambda: ordinal in self._met or self._is_deserted, _ARRIVAL_S
                )
                if ordinal not in self._met:
                    raise RemoteProtocolError(f"device {ordinal} was named before its EVENT")
        lane = self._lanes[ordinal]
        lane.receive()
        return lane

    def order(self, leases: Iterable[Lease | DeviceLease]) -> None:
        """After a message that named these blocks: those on devices are not touched before they may be."""
        for lease in leases:
            if isinstance(lease, DeviceLease):
                lease.lane = self.receive(lease.mapping.device.ordinal)
                self.remember(lease)

    def tensor(
        self, name: str, datatype: int, shape: tuple[int, ...], lease: DeviceLease, offset: int
    ) -> DeviceTensor:
        """A tensor in a block that the runtime lent."""
        return DeviceTensor.over(name, DeviceArray.over(lease, offset, datatype, shape))

    def remember(self, lease: DeviceLease) -> None:
        """Let `lease_at` find it, as long as it lives."""
        with self._changed:
            self._leases.append(ref(lease))
            if len(self._leases) > self._most_leases:
                self._leases = [known for known in self._leases if known() is not None]
                self._most_leases = max(_FEW, 2 * len(self._leases))

    def lease_at(self, address: int, size_bytes: int) -> DeviceLease | None:
        """The living lease that this memory is in, if any: others make arrays of our blocks, and hand them back."""
        for known in self._leases.copy():
            lease = known()
            if lease is not None:
                start = address - lease.address
                if start >= 0 and start + size_bytes <= lease.size:
                    return lease
        return None

    def touch(self, lease: DeviceLease) -> None:
        """The next message names this block: whoever used it did so before."""
        streams = lease.streams
        if streams:
            with self._changed:
                ordinal = lease.mapping.device.ordinal
                self._touched.setdefault(ordinal, set()).update(streams)

    def publish(self) -> None:
        """Before a message that names blocks on any device, or gives them back."""
        touched = self._touched
        if touched:
            with self._changed:
                touched, self._touched = self._touched, {}
        for ordinal, lane in self._lanes.copy().items():
            lane.publish(touched.get(ordinal, ()))

    @property
    def is_waited_for(self) -> bool:
        """Whether something is kept only until a device is done with it."""
        lanes = self._lanes.copy().values()
        return any(lane.keeps or lane.device.dying for lane in lanes)

    def tidy(self) -> None:
        """Let go of what devices are done with."""
        for lane in self._lanes.copy().values():
            lane.let_go()
            lane.device.tidy()

    # Blocks; the caller has the turn

    def arena(self, ordinal: int) -> Arena:
        """Where blocks on a device are allocated."""
        arena = self._arenas.get(ordinal)
        if arena is None:
            arena = Arena(lambda size_bytes: self._grow(size_bytes, ordinal))
            self._arenas[ordinal] = arena
        return arena

    def arenas(self) -> list[Arena]:
        """Those that there are."""
        return list(self._arenas.values())

    @property
    def has_grown(self) -> bool:
        """Whether any device has more than its first region."""
        return any(arena.has_grown for arena in self.arenas())

    def region(self, region_id: int) -> Region | None:
        """The region of that number, if blocks are allocated in it."""
        for arena in self.arenas():
            region = arena.region(region_id)
            if region is not None:
                return region
        return None

    def find(self, region_id: int, offset: int) -> Block | None:
        """The block in use that begins there, if one does."""
        for arena in self.arenas():
            block = arena.find(region_id, offset)
            if block is not None:
                return block
        return None

    def release(self, block: Block) -> None:
        """One holder less."""
        region = cast(DeviceRegion, block.region)
        self._arenas[region.device.ordinal].release(block)

    # The end

    def finish(self) -> None:
        """Wait until devices have done what the peer may wait for: with this process its events would be gone."""
        for lane in self._lanes.copy().values():
            with suppress(CudaError):  # a device that has failed does nothing more
                lane.finish()

    def desert(self) -> None:
        """The peer is gone: nobody is to wait for it."""
        with self._changed:
            self._is_deserted = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of all; arrays of the model's stay valid."""
        for arena in self.arenas():
            for region in arena.regions():
                region.close()
        for lane in self._lanes.copy().values():
            lane.close()


def adopt(region_id: int, size_bytes: int, ordinal: int, fd: int, handle: bytes) -> DeviceRegion:
    """A region that the runtime made. Owns `fd` (-1: none) at once, also when it raises."""
    region = DeviceRegion.adopt(region_id, size_bytes, device(ordinal), fd, handle)
    region.forget_fd()
    return region
