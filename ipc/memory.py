"""The memory contract: regions that hold tensor bytes, and leases on blocks of them.

A *region* is one piece of memory that two processes see. Its writer cuts it into *blocks*
(`ipc.arena`), and messages name a block by region id, offset and size. The reader opens a block as
a *lease*: an array whose last view, when it is collected, releases the block to its writer.

`ipc.region` has shared memory, and `ipc.cuda.region` memory of devices. `tests/heap_region.py` has ordinary memory for
tests. Add every new kind of memory to `tests/ipc/test_memory_contract.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from mmap import mmap
from typing import Union

import numpy as np

from moonpool.ipc.errors import Closed

Buffer = Union[mmap, bytearray]

ALIGNMENT = 64
# Models lend their tensors to each other from this size on. A smaller array is copied, which costs less than a message
# about its region, and keeps the rows of a batch together.
SHARED_BYTES = 64 * 1024
_BYTE = np.dtype("u1")


class Lease(np.ndarray):
    """The bytes of one block: `uint8`, one-dimensional. Every tensor in the block is a view of it.

    `give_back` is called with `token` exactly once, in the thread that drops the last view, possibly in
    the middle of a garbage collection. So it must neither block nor take a lock; as a rule it is `deque.append`.
    """

    # numpy keeps an array in the chain of `.base` of its views if it is of a subclass and its own base is no array. It
    # would skip a plain array, and the lease would end too early.
    __slots__ = ("give_back", "offset", "region", "token")

    give_back: Callable[[object], object]
    token: object
    # The region that it lies in; None for other memory.
    region: Region | None
    offset: int

    def __del__(self) -> None:
        try:
            give_back = self.give_back
        except AttributeError:  # a slice of a lease, which holds no block
            return
        give_back(self.token)

    def again(self, size_bytes: int, give_back: Callable[[object], object], token: object) -> Lease:
        """Return another lease on the first bytes of this one, even if its region was closed.

        The new lease does not keep this one alive. `token` may.
        """
        lease = Lease((size_bytes,), _BYTE, self.base, self.offset)
        lease.give_back = give_back
        lease.token = token
        lease.region = self.region
        lease.offset = self.offset
        return lease


class Region(ABC):
    """A piece of memory of fixed size. A writer that needs more makes another region."""

    __slots__ = ("buffer", "id", "size_bytes")

    id: int
    size_bytes: int
    # All of it, as `np.ndarray(buffer=...)` takes it; None after `close`. Views of it keep it mapped.
    buffer: Buffer | None

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self.buffer is None

    def memory(self) -> memoryview:
        """Return all of it, writable. Raises `Closed` after `close`."""
        return memoryview(self._open())

    def _open(self) -> Buffer:
        if self.buffer is None:
            raise Closed(f"region {self.id} was closed")
        return self.buffer

    def lease(self, offset: int, size_bytes: int, give_back: Callable[[object], object], token: object) -> Lease:
        """Return a lease on a block. The memory stays mapped while the lease lives, even after `close`.

        The caller has checked offset and size against `size_bytes`. numpy checks them again and raises
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
        """Close the region. May be called many times. Living leases stay valid."""


def lease_of(array: np.ndarray) -> Lease | None:
    """Return the lease of which `array` is a view, or None if it lies in ordinary memory."""
    base: object = array.base
    while isinstance(base, np.ndarray):
        # Slices and copies of a lease are of the same class, but hold no block and have no token.
        if type(base) is Lease and hasattr(base, "token"):
            return base
        base = base.base
    return None


def is_lendable(array: np.ndarray) -> bool:
    """Return False if an array lies in memory of its own, or is a small output of a model. It is then copied for the
    next one.

    Memory that callers and clients write into themselves is lent, whatever its size.
    """
    lease = lease_of(array)
    if lease is None:
        return False
    # The token of an output is its place.
    return array.nbytes >= SHARED_BYTES or type(lease.token) is not tuple


def offset_in(lease: Lease, array: np.ndarray) -> int:
    """Return the offset in `lease` of the bytes of `array`, which is a view of it."""
    if array.nbytes == lease.nbytes:
        return 0  # all of it; a look at the addresses takes much longer
    return int(array.__array_interface__["data"][0] - lease.__array_interface__["data"][0])
