"""The runtime's side of shared memory: the regions of one stub, and those that callers write into themselves."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.arena import Arena
from moonpool.ipc.errors import Closed
from moonpool.runtime.allotment import Allotment

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from moonpool.ipc.arena import Block
    from moonpool.ipc.cuda.array import DeviceArray
    from moonpool.ipc.cuda.region import DeviceLease
    from moonpool.ipc.memory import Lease
    from moonpool.ipc.region import SharedRegion
    from moonpool.runtime.allotment import RegionSource
    from moonpool.runtime.device_regions import DeviceCallerMemory

_KEEP_S = 5.0


class CallerMemory:
    """Where `Runtime.empty` puts arrays: all stubs of the model may read them. Thread-safe.

    Regions are sent to a stub when a request first lies in them. Any of the model's processes may keep what it was
    sent, so all regions of a contained model count until the model is unloaded.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        *,
        is_contained: bool = False,
        source: RegionSource | None = None,
    ) -> None:
        """`source` is given if another process counts the model's memory, and is owned from now on."""
        self._limit_bytes = limit_bytes
        self.source = source or Allotment(limit_bytes, is_contained=is_contained)
        self._lock = threading.Lock()
        self._regions: dict[int, SharedRegion] = {}
        # The same on devices, by their numbers.
        self._on_devices: dict[int, DeviceCallerMemory] = {}
        self._arena = Arena(self._create)
        # Blocks whose arrays are gone, appended by whichever thread dropped the last view.
        self._returned: deque[object] = deque()
        self.give_back: Callable[[object], object] = self._returned.append
        self._closed = False
        # Regions that hold nothing: how often they had been used, and since when it was not more.
        self._idle: dict[int, tuple[int, float]] = {}

    def _create(self, needed_bytes: int) -> SharedRegion:
        region = self.source.region(self._arena.size_bytes, needed_bytes)
        self._regions[region.id] = region
        return region

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[np.generic], size_bytes: int
    ) -> NDArray[np.generic]:
        """An array whose bytes are whatever was there before. Raises `OutOfMemory`, `Closed`."""
        with self._lock:
            if self._closed:
                raise Closed("the model was unloaded")
            self._collect()
            block = self._arena.allocate(size_bytes)
        lease = block.region.lease(block.offset, block.size_bytes, self.give_back, block)
        return np.ndarray(shape, dtype, lease)

    def _collect(self) -> None:
        while self._returned:
            block: Block = self._returned.popleft()  # type: ignore[assignment]
            self._arena.release(block)

    def find(self, lease: Lease) -> tuple[SharedRegion, Block] | None:
        """The region and block of a lease of ours, None for one of somebody else's."""
        if lease.give_back is not self.give_back:
            return None
        block: Block = lease.token  # type: ignore[assignment]
        return self._regions[block.region.id], block

    def on_device(self, gpu: int) -> DeviceCallerMemory:
        """The same on a device. Raises `CudaUnavailable`, `CudaError`, `Closed`."""
        from moonpool.runtime.device_regions import DeviceCallerMemory

        with self._lock:
            if self._closed:
                raise Closed("the model was unloaded")
            memory = self._on_devices.get(gpu)
            if memory is None:
                memory = self._on_devices[gpu] = DeviceCallerMemory(self._limit_bytes, gpu)
            return memory

    def own(self, array: DeviceArray) -> DeviceArray:
        """An array as one that `on_device` gave, where it lies in that memory; else as it is."""
        memory = self._on_devices.get(array.device.ordinal)
        found = None if memory is None or array.lease is not None else memory.lease_over(array)
        return found or array

    def has_on_device(self, lease: DeviceLease) -> bool:
        """Whether a lease is one of ours on a device."""
        return any(memory.gave(lease) for memory in self._on_devices.copy().values())

    def tidy(self, now_s: float) -> None:
        """Give up regions beyond the first that nothing has lain in for a while."""
        with self._lock:
            self._collect()
            idle = self._arena.idle()
            for region_id, uses in idle.items():
                before, since_s = self._idle.get(region_id, (uses, now_s))
                if before != uses:
                    since_s = now_s
                elif now_s - since_s >= _KEEP_S:
                    self._arena.retire(region_id)
                    self.source.retire(self._regions.pop(region_id))
                    continue
                self._idle[region_id] = (uses, since_s)
            self._idle = {key: value for key, value in self._idle.items() if key in idle}

    def __contains__(self, region_id: object) -> bool:
        return region_id in self._regions

    @property
    def size_bytes(self) -> int:
        """All regions together."""
        return self._arena.size_bytes

    def close(self) -> None:
        """Let go of the regions; arrays that are out stay valid."""
        with self._lock:
            self._closed = True
            for region in self._regions.values():
                region.close()
            for memory in self._on_devices.values():
                memory.close()
            self.source.close()
