"""Regions in the memory of one process: the reference for the contract, and what tests use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.ipc.errors import Closed
from moonpool.ipc.memory import Lease, Region

if TYPE_CHECKING:
    from collections.abc import Callable


class HeapRegion(Region):
    """A region that only its own process can see."""

    __slots__ = ("_bytes",)

    def __init__(self, region_id: int, size_bytes: int) -> None:
        self.id = region_id
        self.size_bytes = size_bytes
        self._bytes: bytearray | None = bytearray(size_bytes)

    def _open(self) -> bytearray:
        if self._bytes is None:
            raise Closed(f"region {self.id} was closed")
        return self._bytes

    def memory(self) -> memoryview:
        return memoryview(self._open())

    def lease(
        self, offset: int, size_bytes: int, give_back: Callable[[object], object], token: object
    ) -> Lease:
        lease = Lease((size_bytes,), "u1", self._open(), offset)
        lease.give_back = give_back
        lease.token = token
        return lease

    def close(self) -> None:
        self._bytes = None
