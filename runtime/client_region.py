"""Memory of a client that is lent to stubs as it is: they look at it and write to it, and this process does neither."""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.memory import lease_of
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.allotment import next_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moonpool.ipc.memory import Lease

_STAND_IN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class ClientRegion(SharedRegion):
    """An object of a client's by its descriptor.

    The client may cut it short at any time, and whoever looks at what is gone ends. So its place in this
    process is taken by memory that nothing was ever written to: arrays in it have addresses, and are zero.
    """

    __slots__ = ("file",)

    def __init__(self, size_bytes: int, fd: int) -> None:
        """Own `fd` from now on, until `close`; also where this raises `OutOfMemory`."""
        self.id = next_number()
        self.size_bytes = size_bytes
        self.fd = fd
        self.is_private = False
        self._sharing = threading.Lock()
        self.buffer = None
        status = os.fstat(fd)
        # Which object it is: others may be registered for the same one.
        self.file = (status.st_dev, status.st_ino)
        try:
            self.buffer = mmap.mmap(-1, size_bytes, _STAND_IN, mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            os.close(fd)
            raise OutOfMemory(f"cannot set aside {size_bytes} addresses: {error}") from error


def overlap(one: Lease, other: Lease) -> bool:
    """Whether two leases have bytes of a client's object in common."""
    ours, theirs = one.region, other.region
    return (
        isinstance(ours, ClientRegion)
        and isinstance(theirs, ClientRegion)
        and ours.file == theirs.file
        and one.offset < other.offset + other.size
        and other.offset < one.offset + one.size
    )


def is_clients(array: NDArray[Any]) -> bool:
    """Whether an array stands for memory of a client."""
    lease = lease_of(array)
    return lease is not None and type(lease.region) is ClientRegion
