"""Device memory at an address of this process, and its end."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.ipc.cuda.device import Device
    from moonpool.ipc.cuda.lane import Lane


class Origin(IntEnum):
    """How the memory came here, which decides how it goes."""

    MAPPED = 1
    ALLOCATED = 2
    OPENED = 3


class Mapping:
    """Unmapped when nobody refers to it any more and all that was queued for it is done.

    To unmap memory that a kernel still touches breaks the context of the whole process. So what nobody refers to goes to the
    device's list, and `Device.tidy` unmaps it when it may.
    """

    def __init__(self, device: Device, address: int, size_bytes: int, origin: Origin) -> None:
        self.device = device
        self.address = address
        self.size_bytes = size_bytes
        self._origin = origin
        # All lanes that leases of it had.
        self.lanes: set[Lane] = set()
        # What stands for work of those who had leases without a lane, by device.
        self._marked: deque[tuple[Device, list[int]]] = deque()
        self._is_marked = False

    def wait_for(self, stream: int, lane: Lane | None) -> None:
        """What is queued by now on a stream, of a lane's or of the device, may touch the memory. Raises `CudaError`."""
        device = self.device if lane is None else lane.device
        self._marked.append((device, device.mark([stream])))

    def end(self) -> bool:
        """Unmap it; False, and it is still mapped, where work is queued that may touch it. For `Device.tidy`."""
        device = self.device
        if not self._is_marked:
            self._is_marked = True
            for lane in self.lanes:
                self.wait_for(lane.stream, lane)
        if not all(where.are_done(events) for where, events in self._marked):
            return False
        driver = device.driver
        with device:
            if self._origin is Origin.MAPPED:
                driver.cuMemUnmap(self.address, self.size_bytes)
                driver.cuMemAddressFree(self.address, self.size_bytes)
            elif self._origin is Origin.ALLOCATED:
                driver.cuMemFree_v2(self.address)
            else:
                driver.cuIpcCloseMemHandle(self.address)
        self.lanes.clear()
        return True

    def __del__(self) -> None:
        # It lives on in the list, and this is called once.
        if hasattr(self, "_is_marked"):
            self.device.dying.append(self)
