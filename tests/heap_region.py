"""Regions in the memory of one process: the reference for the contract, and what tests use."""

from __future__ import annotations

from moonpool.ipc.memory import Region


class HeapRegion(Region):
    """A region that only its own process can see."""

    __slots__ = ()

    def __init__(self, region_id: int, size_bytes: int) -> None:
        self.id = region_id
        self.size_bytes = size_bytes
        self.buffer = bytearray(size_bytes)

    def close(self) -> None:
        self.buffer = None
