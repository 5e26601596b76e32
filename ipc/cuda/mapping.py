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
        # All lanes that leases of it had, and streams of leases that had none.
        self.lanes: set[Lane] = set()
        self.touched: deque[tuple[int, Lane | None]] = deque()
        self._events: list[tuple[Device, list[int]]] | None = None

    def end(self) -> bool:
        """Unmap it; False, and it is still mapped, where work is queued that may touch it. For `Device.tidy`."""
        device = self.device
        if self._events is None:
            self._events = self._marked()
        if not all(where.are_done(events) for where, events in self._events):
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

    def _marked(self) -> list[tuple[Device, list[int]]]:
        """Events that stand for all that was queued by now and may touch the memory."""
        streams = set()
        for stream, lane in self.touched:
            if lane is None:
                streams.add(stream)
            else:
                self.lanes.add(lane)
        self.touched.clear()
        marked = [(self.device, self.device.mark(streams))]
        for lane in self.lanes:
            lane.gather()
            marked.append((lane.device, lane.device.mark([lane.stream])))
        return marked

    def __del__(self) -> None:
        # It lives on in the list, and this is called once.
        if hasattr(self, "touched"):
            self.device.dying.append(self)
