"""Keeps the memory in which a process allocates its tensors: the stub sets it, and elsewhere there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from moonpool.ipc.memory import Lease

if TYPE_CHECKING:
    from moonpool.ipc.cuda.lane import DeviceLane
    from moonpool.ipc.cuda.region import DeviceLease


class Devices(Protocol):
    """Orders the work on devices, and knows their blocks."""

    def lane(self, ordinal: int) -> DeviceLane: ...
    def lease_at(self, address: int, size_bytes: int) -> DeviceLease | None: ...


class Memory(Protocol):
    """Gives blocks of ordinary memory, and of the memory of devices."""

    def empty(self, size_bytes: int) -> Lease: ...
    def empty_on(self, device: int, size_bytes: int) -> DeviceLease: ...
    def on_devices(self) -> Devices: ...


_in_use: list[Memory | None] = [None]


def use_memory(memory: Memory | None) -> None:
    """Set the memory of this process."""
    _in_use[0] = memory


def memory_in_use() -> Memory | None:
    """Return the memory of this process, if any."""
    return _in_use[0]
