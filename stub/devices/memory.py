"""Shares memory on devices with one peer: allocates blocks, and orders the work of both processes on them.

Theory of operation. Blocks, places and arenas work as in ordinary memory, with one arena for each device. In addition
each device has a `DeviceLane`, in which all copies of ours are queued. When a call returns, the device may not have
done the work yet. So a process that names a block in a message, or gives one back, calls `publish` before it sends,
and the process that gets the message calls `receive` before it touches the block. `publish` records an event after
all work so far, `receive` makes the device wait for the peer's event: the device keeps the order, and no thread
waits. EVENT carries the handles of these events. The runtime sends its own first, at the latest with the first region
on that device, and the stub answers with its own.

`_changed`, a condition, guards the tables, and wakes a thread that waits in `receive` because a message overtook its
EVENT. The arenas have no lock here: their user holds the turn of `Regions`. Dictionaries that another thread may fill
are copied before a loop.

Order of closing: `finish` waits for the device before the process ends, because the peer's device may wait for events
that would be gone with this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import cast
from weakref import ref

from moonpool.ipc.arena import Arena, Block
from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import DeviceLane
from moonpool.ipc.cuda.region import DeviceLease, DeviceRegion
from moonpool.ipc.errors import CudaError, OutOfMemory, RemoteProtocolError
from moonpool.ipc.memory import Lease, Region
from moonpool.ipc.messages import Kind
from moonpool.stub.pb_utils.device_tensor import DeviceTensor

# The runtime sends EVENT before the message that needs it. The wait covers the switch between threads.
_ARRIVAL_S = 30.0
# From so many remembered leases on, dead ones are removed.
_FEW = 64


class DeviceMemory:
    """Shares the memory of all devices with one peer. Any thread may call any method, but for those that use the
    arenas.
    """

    def __init__(self, grow: Callable[[int, int], Region], send: Callable[..., None]) -> None:
        """Take `grow`, which asks for a region of a size in bytes on a device, and `send`, which sends a control
        message.
        """
        self._grow = grow
        self._send = send
        self._arenas: dict[int, Arena] = {}
        self._lanes: dict[int, DeviceLane] = {}
        # Devices whose EVENT has come.
        self._met: set[int] = set()
        self._changed = threading.Condition()
        # By device: the streams that touched blocks which the next message names.
        self._touched: dict[int, set[int]] = {}
        # References to all living leases, and to some dead ones.
        self._leases: list[ref[DeviceLease]] = []
        self._most_leases = _FEW

    # Order

    def lane(self, ordinal: int) -> DeviceLane:
        """Return the lane of a device. Raises `CudaUnavailable`, `CudaError`."""
        lane = self._lanes.get(ordinal)
        if lane is None:
            with self._changed:
                lane = self._lanes.get(ordinal)
                if lane is None:
                    lane = self._lanes[ordinal] = DeviceLane(device(ordinal))
        return lane

    def meet(self, ordinal: int, handle: bytes) -> None:
        """Take the peer's event and answer with ours. On the control thread.

        An empty handle says that the peer has no event; in a second EVENT, that the peer could not open ours.
        """
        lane = self.lane(ordinal)
        try:
            lane.meet(handle)
        except (CudaError, OutOfMemory):  # without events, each side waits for its own work
            lane.meet(b"")
        if ordinal in self._met:
            return
        self._send(Kind.EVENT, ordinal, lane.handle)
        with self._changed:
            self._met.add(ordinal)
            self._changed.notify_all()

    def receive(self, ordinal: int) -> DeviceLane:
        """Order our work after the peer's. To be called after a message that names or gives back blocks on a device."""
        if ordinal not in self._met:
            with self._changed:
                self._changed.wait_for(lambda: ordinal in self._met, _ARRIVAL_S)
                if ordinal not in self._met:
                    raise RemoteProtocolError(f"device {ordinal} was named before its EVENT")
        lane = self._lanes[ordinal]
        lane.receive()
        return lane

    def order(self, leases: Iterable[Lease | DeviceLease]) -> None:
        """Order our work after the peer's for all of these blocks that lie on devices."""
        for lease in leases:
            if isinstance(lease, DeviceLease):
                lease.lane = self.receive(lease.mapping.device.ordinal)
                self.remember(lease)

    def tensor(self, name: str, datatype: int, shape: tuple[int, ...], lease: DeviceLease, offset: int) -> DeviceTensor:
        """Make a tensor over a block that the runtime lent."""
        return DeviceTensor.over(name, DeviceArray.over(lease, offset, datatype, shape))

    def remember(self, lease: DeviceLease) -> None:
        """Let `lease_at` find it, as long as it lives."""
        with self._changed:
            self._leases.append(ref(lease))
            if len(self._leases) > self._most_leases:
                self._leases = [known for known in self._leases if known() is not None]
                self._most_leases = max(_FEW, 2 * len(self._leases))

    def lease_at(self, address: int, size_bytes: int) -> DeviceLease | None:
        """Return the living lease that holds this memory, if any. Libraries hand our blocks back as arrays of their
        own.
        """
        for known in self._leases.copy():
            lease = known()
            if lease is not None:
                start = address - lease.address
                if start >= 0 and start + size_bytes <= lease.size:
                    return lease
        return None

    def touch(self, lease: DeviceLease) -> None:
        """Note that the next message names this block, so that `publish` waits for the streams that used it."""
        streams = lease.streams
        if streams:
            with self._changed:
                ordinal = lease.mapping.device.ordinal
                self._touched.setdefault(ordinal, set()).update(streams)

    def publish(self) -> None:
        """Record our work so far for the peer. To be called before a message that names or gives back blocks."""
        touched = self._touched
        if touched:
            with self._changed:
                touched, self._touched = self._touched, {}
        for ordinal, lane in self._lanes.copy().items():
            lane.publish(touched.get(ordinal, ()))

    @property
    def is_waited_for(self) -> bool:
        """Return whether anything is kept only until a device is done with it."""
        lanes = self._lanes.copy().values()
        return any(lane.keeps or lane.device.dying for lane in lanes)

    def tidy(self) -> None:
        """Release what devices are done with."""
        for lane in self._lanes.copy().values():
            lane.release()
            lane.device.tidy()

    # Blocks; the caller holds the turn of `Regions`

    def arena(self, ordinal: int) -> Arena:
        """Return the arena of a device, made at the first call."""
        arena = self._arenas.get(ordinal)
        if arena is None:
            arena = Arena(lambda size_bytes: self._grow(size_bytes, ordinal))
            self._arenas[ordinal] = arena
        return arena

    def arenas(self) -> list[Arena]:
        """Return all arenas."""
        return list(self._arenas.values())

    @property
    def has_grown(self) -> bool:
        """Return whether any device has more than its first region."""
        return any(arena.has_grown for arena in self.arenas())

    def region(self, region_id: int) -> Region | None:
        """Return the region of that number, if this side allocates in it."""
        for arena in self.arenas():
            region = arena.region(region_id)
            if region is not None:
                return region
        return None

    def find(self, region_id: int, offset: int) -> Block | None:
        """Return the block in use that begins at this place, if one does."""
        for arena in self.arenas():
            block = arena.find(region_id, offset)
            if block is not None:
                return block
        return None

    def release(self, block: Block, *steps: Callable[[], object]) -> None:
        """Drop one holder of a block, and take further steps at once with that, as `Arena.release`."""
        region = cast(DeviceRegion, block.region)
        self._arenas[region.device.ordinal].release(block, *steps)

    # The end

    def finish(self) -> None:
        """Wait for all our work on devices, whose events would go with this process."""
        for lane in self._lanes.copy().values():
            with suppress(CudaError):  # a device that has failed does nothing more
                lane.finish()


def adopt(region_id: int, size_bytes: int, ordinal: int, fd: int, handle: bytes) -> DeviceRegion:
    """Adopt a region that the runtime made. Takes over `fd` (-1: none) at once, even if it raises."""
    region = DeviceRegion.adopt(region_id, size_bytes, device(ordinal), fd, handle)
    region.forget_fd()
    return region
