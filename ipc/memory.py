"""The memory contract: regions that hold tensor bytes, and leases on blocks of them.

A *region* is one piece of memory that two processes see. Its writer cuts it into *blocks*
(`ipc.arena`); what travels is a ref, the triple (region id, offset, size). The reader opens a ref as
a *lease*: an array whose last view, when it is collected, gives the block back to its writer.

`ipc.region` has shared memory, `ipc.heap` has ordinary memory with the same contract for tests and for
use inside one process. Whoever adds a kind of memory runs `tests/ipc/test_memory_contract.py` on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.errors import Closed

if TYPE_CHECKING:
    from collections.abc import Callable
    from mmap import mmap
    from typing import Union

    Buffer = Union[mmap, bytearray]

ALIGNMENT = 64
_BYTE = np.dtype("u1")


class Lease(np.ndarray):
    """The bytes of one block: `uint8`, one-dimensional; every tensor in the block is a view of it.

    `give_back` is called with `token` once, by whichever thread drops the last view, possibly in
    the middle of a garbage collection; so it must not block nor take a lock: `deque.append`, as a rule.
    """

    # An array of a subclass of ndarray whose own base is no array stays in the chain of `.base` of
    # all that is viewed from it; a plain array would be skipped by numpy and the lease lost.
    __slots__ = ("give_back", "offset", "region", "token")

    give_back: Callable[[object], object]
    token: object
    # Where it lies; None for memory that is no region's.
    region: Region | None
    offset: int

    def __del__(self) -> None:
        try:
            give_back = self.give_back
        except AttributeError:  # a slice of a lease: only the lease itself holds the block
            return
        give_back(self.token)

    def again(self, size_bytes: int, give_back: Callable[[object], object], token: object) -> Lease:
        """Another lease on the first bytes of this one, also after its region was closed.

        It does not keep this one; `token` may.
        """
        lease = Lease((size_bytes,), _BYTE, self.base, self.offset)
        lease.give_back = give_back
        lease.token = token
        lease.region = self.region
        lease.offset = self.offset
        return lease


class Region(ABC):
    """A piece of memory of fixed size. Never resized: growth is another region."""

    __slots__ = ("buffer", "id", "size_bytes")

    id: int
    size_bytes: int
    # All of it, as what `np.ndarray(buffer=...)` takes; None after `close`. Views made of it keep it mapped.
    buffer: Buffer | None

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self.buffer is None

    def memory(self) -> memoryview:
        """All of it, writable. Raises `Closed` after `close`."""
        return memoryview(self._open())

    def _open(self) -> Buffer:
        if self.buffer is None:
            raise Closed(f"region {self.id} was closed")
        return self.buffer

    def lease(
        self, offset: int, size_bytes: int, give_back: Callable[[object], object], token: object
    ) -> Lease:
        """A lease on a block. The memory stays mapped while the lease lives, also after `close`.

        The caller has checked offset and size against `size_bytes`; numpy checks them again and raises
        TypeError. Raises `Closed` after `close`.
        """
        lease = Lease((size_bytes,), _BYTE, self.buffer or self._open(), offset)
        lease.give_back = give_back
        lease.token = token
        lease.region = self
        lease.offset = offset
        return lease

    def write(self, offset: int, array: np.ndarray) -> None:
        """Copy the bytes of an array, in C order, to `offset`, which the caller has checked.

        Raises `Closed` after `close`.
        """
        np.ndarray(array.shape, array.dtype, self._open(), offset)[...] = array

    @abstractmethod
    def close(self) -> None:
        """Let go of the region. May be called many times. Leases that are out stay valid."""


def lease_of(array: np.ndarray) -> Lease | None:
    """The lease that `array` is a view of, or None where it lies in ordinary memory."""
    base: object = array.base
    while isinstance(base, np.ndarray):
        # Slices and copies of a lease are of its class, but hold no block and have no token.
        if type(base) is Lease and hasattr(base, "token"):
            return base
        base = base.base
    return None


def offset_in(lease: Lease, array: np.ndarray) -> int:
    """Where the bytes of `array`, a view of `lease`, begin in it."""
    if array.nbytes == lease.nbytes:
        return 0  # all of it; to look at addresses takes much longer
    return int(array.__array_interface__["data"][0] - lease.__array_interface__["data"][0])
