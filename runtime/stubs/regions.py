"""Shared memory that callers and clients write into themselves, and that stubs then read without a copy.

Theory of operation. `CallerMemory` has one lock around its arena and its regions. A block is free again when the last
array in it is collected. That may happen on any thread, also in the garbage collector while the same thread holds the
lock. So a lease takes no lock: it appends its block to `_returned`, and the next `empty` or `tidy` frees what is there.
`close` closes the regions; each stays mapped until the last array in it is gone.

`ClientRegion` maps nothing of the client's. See there.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.arena import Arena, Block, Idle, Keep
from moonpool.ipc.errors import Closed, OutOfMemory
from moonpool.ipc.memory import Lease, lease_of
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.model import budgets
from moonpool.runtime.stubs.allotment import Allotment, next_number

if TYPE_CHECKING:
    from moonpool.ipc.cuda.array import DeviceArray
    from moonpool.ipc.cuda.region import DeviceLease
    from moonpool.runtime.stubs.devices import DeviceCallerMemory


class CallerMemory:
    """The memory in which `Runtime.empty` makes arrays. All stubs of the model may read them. Thread-safe.

    A region is sent to a stub when a request first lies in it. Any of the model's processes may keep what it was
    sent, so all regions of a contained model count until the model is unloaded.
    """

    def __init__(self, limit_bytes: int | None, *, is_contained: bool = False) -> None:
        self._limit_bytes = limit_bytes
        self._allotment = Allotment(limit_bytes, is_contained=is_contained)
        self._lock = threading.Lock()
        self._regions: dict[int, SharedRegion] = {}
        # The memory on devices, by their numbers.
        self._on_devices: dict[int, DeviceCallerMemory] = {}
        self._arena = Arena(self._create)
        # Blocks whose arrays are gone, appended by the thread that dropped the last view.
        self._returned: deque[object] = deque()
        self.give_back: Callable[[object], object] = self._returned.append
        self._closed = False
        self._idle = Idle(Keep(budgets.KEEP_FIRST_MS / 1000, budgets.KEEP_MS / 1000))

    def _create(self, needed_bytes: int) -> SharedRegion:
        region = self._allotment.region(self._arena.size_bytes, needed_bytes)
        self._regions[region.id] = region
        return region

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], size_bytes: int) -> NDArray[np.generic]:
        """Return an array with any content. Raises `OutOfMemory`, `Closed`."""
        with self._lock:
            if self._closed:
                raise Closed("the model was unloaded")
            self._collect()
            try:
                block = self._arena.allocate(size_bytes)
            except OutOfMemory:
                # What is kept for later may make room.
                if not self._give_up(list(self._arena.idle())):
                    raise
                block = self._arena.allocate(size_bytes)
        lease = block.region.lease(block.offset, block.size_bytes, self.give_back, block)
        return np.ndarray(shape, dtype, lease)

    def _collect(self) -> None:
        while self._returned:
            block: Block = self._returned.popleft()  # type: ignore[assignment]
            self._arena.release(block)

    def find(self, lease: Lease) -> tuple[SharedRegion, Block] | None:
        """Return the region and the block of a lease of this memory, None for any other lease."""
        if lease.give_back is not self.give_back:
            return None
        block: Block = lease.token  # type: ignore[assignment]
        return self._regions[block.region.id], block

    def on_device(self, gpu: int) -> DeviceCallerMemory:
        """Return the memory for callers on a device. Raises `CudaUnavailable`, `CudaError`, `Closed`."""
        from moonpool.runtime.stubs.devices import DeviceCallerMemory

        with self._lock:
            if self._closed:
                raise Closed("the model was unloaded")
            memory = self._on_devices.get(gpu)
            if memory is None:
                memory = self._on_devices[gpu] = DeviceCallerMemory(self._limit_bytes, gpu)
            return memory

    def own(self, array: DeviceArray) -> DeviceArray:
        """Return the array as one of `on_device` if it lies in that memory, else as it is."""
        memory = self._on_devices.get(array.device.ordinal)
        found = None if memory is None or array.lease is not None else memory.lease_over(array)
        return found or array

    def has_on_device(self, lease: DeviceLease) -> bool:
        """Return True if a lease is of this memory on a device."""
        return any(memory.gave(lease) for memory in self._on_devices.copy().values())

    def tidy(self, now_s: float) -> None:
        """Give up regions that were empty for their time, except the first. `now_s` is of a monotonic clock."""
        with self._lock:
            self._collect()
            self._give_up([region_id for _, region_id in self._idle.over([self._arena], now_s)])

    def _give_up(self, regions: Sequence[int]) -> bool:
        """Give up these idle regions. Returns False if there are none."""
        for region_id in regions:
            self._arena.retire(region_id)
            self._allotment.retire(self._regions.pop(region_id))
        return bool(regions)

    def __contains__(self, region_id: object) -> bool:
        return region_id in self._regions

    @property
    def size_bytes(self) -> int:
        """The size of all regions together."""
        return self._arena.size_bytes

    @property
    def counted_bytes(self) -> int:
        """The bytes that count for the model."""
        return self._allotment.counted_bytes

    def close(self) -> None:
        """Close the regions. Arrays that callers hold stay valid."""
        with self._lock:
            self._closed = True
            for region in self._regions.values():
                region.close()
            for memory in self._on_devices.values():
                memory.close()
            self._allotment.close()


_STAND_IN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class ClientRegion(SharedRegion):
    """A shared memory object of a client, known by its descriptor. Stubs work in it; this process never reads or writes
    it.

    The client may truncate the object at any time, and a process that touches a page that is gone gets SIGBUS. So this
    process maps anonymous memory of the same size in its place. Arrays there have addresses and read as zeros.
    """

    __slots__ = ("file",)

    def __init__(self, size_bytes: int, fd: int) -> None:
        """Own `fd` until `close`, even if this raises `OutOfMemory`."""
        self.id = next_number()
        self.size_bytes = size_bytes
        self.fd = fd
        self.is_private = False
        self._sharing = threading.Lock()
        self.buffer = None
        status = os.fstat(fd)
        # The identity of the object: clients may register the same one twice.
        self.file = (status.st_dev, status.st_ino)
        try:
            self.buffer = mmap.mmap(-1, size_bytes, _STAND_IN, mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise OutOfMemory(f"cannot set aside {size_bytes} addresses: {error}") from error


def overlap(array: NDArray[Any], target: Lease) -> bool:
    """Return True if an array and a lease have bytes of a client's object in common."""
    lease = lease_of(array)
    ours, theirs = None if lease is None else lease.region, target.region
    return (
        lease is not None
        and isinstance(ours, ClientRegion)
        and isinstance(theirs, ClientRegion)
        and ours.file == theirs.file
        and lease.offset < target.offset + target.size
        and target.offset < lease.offset + lease.size
    )


def is_clients(array: NDArray[Any]) -> bool:
    """Return True if an array stands for memory of a client."""
    lease = lease_of(array)
    return lease is not None and type(lease.region) is ClientRegion
