"""The runtime's side of memory on devices: regions of stubs, and where callers write."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from moonpool.ipc.arena import Arena, growth_bytes
from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import Lane
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.ipc.errors import Closed
from moonpool.runtime.allotment import next_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.ipc.arena import Block
    from moonpool.ipc.cuda.region import DeviceLease


def new_device_region(
    present_bytes: int, needed_bytes: int, limit_bytes: int | None, gpu: int, others_bytes: int = 0
) -> DeviceRegion:
    """A region on a device, where memory is given out in large pieces. The figures are as for `growth_bytes`.

    Raises `OutOfMemory`, `CudaUnavailable`, `CudaError`.
    """
    where = device(gpu)
    size_bytes = growth_bytes(present_bytes, where.rounded(needed_bytes), limit_bytes, others_bytes)
    size_bytes -= size_bytes % where.granularity_bytes
    return DeviceRegion.create(next_number(), size_bytes, where)


class DeviceCallerMemory:
    """Where `Runtime.empty` puts arrays on one device: all stubs of the model that see it may use them. Thread-safe."""

    def __init__(self, limit_bytes: int | None, gpu: int) -> None:
        """Raises `CudaUnavailable`, `CudaError`."""
        self._limit_bytes = limit_bytes
        self._gpu = gpu
        self._lock = threading.Lock()
        self._regions: list[DeviceRegion] = []
        self._arena = Arena(self._create)
        # It has no peer: it orders those who have a block one after the other.
        self._lane = Lane(device(gpu), shares_events=False)
        # Blocks whose arrays are gone, appended by whichever thread dropped the last of them.
        self._returned: deque[object] = deque()
        self._give_back: Callable[[object], object] = self._returned.append
        self._is_closed = False

    def _create(self, needed_bytes: int) -> DeviceRegion:
        region = new_device_region(
            self._arena.size_bytes, needed_bytes, self._limit_bytes, self._gpu
        )
        self._regions.append(region)
        return region

    def empty(self, shape: tuple[int, ...], datatype: int, size_bytes: int) -> DeviceArray:
        """An array of whatever was there before; `datatype` is a code of `ipc.tensors`.

        Raises `OutOfMemory`, `CudaError`, `Closed`.
        """
        with self._lock:
            if self._is_closed:
                raise Closed("the model was unloaded")
            while self._returned:
                returned: Block = self._returned.popleft()  # type: ignore[assignment]
                self._arena.release(returned)
            block = self._arena.allocate(size_bytes)
        region: DeviceRegion = block.region  # type: ignore[assignment]
        lease = region.lease(block.offset, block.size_bytes, self._give_back, block, self._lane)
        return DeviceArray.over(lease, 0, datatype, shape)

    def lease_over(self, array: DeviceArray) -> DeviceArray | None:
        """What a library has made of one of ours, as one of ours that keeps the same block; None for anything else."""
        with self._lock:
            for block in self._arena.blocks():
                region: DeviceRegion = block.region  # type: ignore[assignment]
                start = region.address + block.offset
                if (
                    start <= array.address
                    and array.address + array.nbytes <= start + block.size_bytes
                ):
                    block.holds += 1
                    break
            else:
                return None
        lease = region.lease(block.offset, block.size_bytes, self._give_back, block, self._lane)
        if array.stream:
            lease.use(array.stream)
        return DeviceArray.over(lease, array.address - start, array.datatype, array.shape)

    def gave(self, lease: DeviceLease) -> bool:
        """Whether a lease is one of `empty`'s."""
        return lease.give_back is self._give_back

    @property
    def size_bytes(self) -> int:
        """All regions together."""
        return self._arena.size_bytes

    def close(self) -> None:
        """Let go of the regions; arrays that are out stay valid."""
        with self._lock:
            self._is_closed = True
            for region in self._regions:
                region.close()
            self._lane.close()
