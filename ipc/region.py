"""Regions in shared memory: sealed memfds.

A memfd has no name that anyone could guess, does not count against `/dev/shm`, and is gone with the
last process that has it. It is sealed against shrinking and growing, so that a peer cannot make the
other side's next access a SIGBUS, and all of it is allocated when it is made, after a look at how much
memory is left, so that a machine that is out of memory says so then and with an error.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from typing import TYPE_CHECKING

from moonpool.ipc.errors import OutOfMemory, RemoteProtocolError
from moonpool.ipc.headroom import headroom_bytes
from moonpool.ipc.memory import Region

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

# fcntl has these names from Python 3.9 on, but only where it was built against a recent libc.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW
# A large region is made for a tensor that is about to be written. Having all its pages mapped at once
# takes a fifth of the time that it takes to find them missing one by one.
_LARGE = 2 << 20
_SMALL = 16 << 10
_SHARED = mmap.MAP_SHARED
_PRESENT = _SHARED | getattr(mmap, "MAP_POPULATE", 0)  # from Python 3.10 on


class Map(mmap.mmap):
    """The memory of a region at an address of this process."""

    # Called once, right before the memory is unmapped: with the last view of it, in any thread.
    before_unmap: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.before_unmap is not None:
            self.before_unmap()


class SharedRegion(Region):
    """A sealed memfd, mapped for reading and writing."""

    __slots__ = ("_sharing", "fd", "is_private")

    # Whether nobody but its two ends may see it.
    is_private: bool

    def __init__(self, region_id: int, size_bytes: int, fd: int) -> None:
        """Map `fd` and own it from now on; it stays open until `close`, to be sent to a peer."""
        self.id = region_id
        self.size_bytes = size_bytes
        self.fd = fd
        self.is_private = False
        self._sharing = threading.Lock()
        self.buffer = None
        try:
            self.buffer = Map(fd, size_bytes, _SHARED if size_bytes < _LARGE else _PRESENT)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise OutOfMemory(f"cannot map {size_bytes} bytes of shared memory: {error}") from error

    @classmethod
    def create(cls, region_id: int, size_bytes: int) -> SharedRegion:
        """A new region. Raises `OutOfMemory` where the machine has not that much."""
        return cls(region_id, size_bytes, set_aside(region_id, size_bytes))

    @classmethod
    def adopt(cls, region_id: int, size_bytes: int, fd: int) -> SharedRegion:
        """A region that the peer made and sent. Owns `fd` at once, also when it raises.

        Raises `RemoteProtocolError` where it is not sealed or not of that size.
        """
        try:
            seals = fcntl.fcntl(fd, _GET_SEALS)
            size = os.fstat(fd).st_size
        except OSError as error:
            os.close(fd)
            raise RemoteProtocolError(f"region {region_id} is no memfd: {error}") from error
        if seals & _SEALS != _SEALS or size != size_bytes:
            os.close(fd)
            raise RemoteProtocolError(
                f"region {region_id} has {size} bytes and seals {seals:#x}; "
                f"{size_bytes} bytes and seals {_SEALS:#x} were announced"
            )
        return cls(region_id, size_bytes, fd)

    def write(self, offset: int, array: np.ndarray) -> None:
        size_bytes = array.nbytes
        if size_bytes <= _SMALL:
            # A quarter of the time that numpy takes for it, but no other thread runs meanwhile.
            try:
                buffer = self.buffer or self._open()
                buffer[offset : offset + size_bytes] = array  # type: ignore[call-overload]
                return
            except ValueError:  # it is not contiguous
                pass
        super().write(offset, array)

    def share(self, send: Callable[[SharedRegion], object]) -> bool:
        """Let `send` hand the descriptor to a peer; False, and nothing is done, after `close`.

        `send` must not block: nobody can close the region meanwhile.
        """
        with self._sharing:
            if self.fd < 0:
                return False
            send(self)
            return True

    def forget_fd(self) -> None:
        """Close the descriptor and keep the map: nobody else is to be sent this region."""
        with self._sharing:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1

    def surrender(self) -> int:
        """Close the region and return its descriptor, which the caller owns; -1 if the region was closed before."""
        self.buffer = None
        with self._sharing:
            fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        # numpy holds no buffer, so mmap.close() would unmap under living leases; dropping the object
        # unmaps with the last of them.
        self.buffer = None
        self.forget_fd()


def set_aside(region_id: int, size_bytes: int) -> int:
    """The descriptor of a new memfd of this size, sealed, with all its pages. Raises `OutOfMemory`."""
    fd = -1
    try:
        fd = os.memfd_create(f"moonpool-{region_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fill(fd, size_bytes)
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    except (OSError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise OutOfMemory(
            f"cannot set aside {size_bytes} bytes of shared memory: {error}"
        ) from error
    except OutOfMemory:
        os.close(fd)
        raise
    return fd


def fill(fd: int, size_bytes: int) -> None:
    """Set aside all pages of a memfd. Raises `OutOfMemory`, OSError."""
    # Nothing limits a memfd: fallocate goes on until the kernel kills somebody for the memory.
    room = headroom_bytes()
    if room is not None and size_bytes > room:
        raise OutOfMemory(
            f"cannot set aside {size_bytes} bytes of shared memory: {room} bytes are left"
        )
    os.posix_fallocate(fd, 0, size_bytes)


def empty(fd: int, size_bytes: int) -> bool:
    """Give the pages of a memfd back to the machine, even if it is mapped somewhere; False if the kernel cannot."""
    try:
        with mmap.mmap(fd, size_bytes, _SHARED) as pages:
            # The kernel makes a hole in the file: F_SEAL_WRITE alone would forbid that.
            pages.madvise(mmap.MADV_REMOVE)
    except (OSError, ValueError):
        return False
    return True
