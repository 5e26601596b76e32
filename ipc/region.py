"""Regions in shared memory: sealed memfds.

A memfd has no name that anyone could guess, does not count against `/dev/shm`, and is gone with the
last process that has it. It is sealed against shrinking and growing, so that a peer cannot make the
next access of the other side a SIGBUS. All its pages are allocated when it is made, after a look at how much
memory is left. So exhaustion is an error at that moment, and not a signal later. Nothing limits a memfd, and
`fallocate` would go on until the kernel kills a process for its memory.

Theory of operation. A region has two resources that end at different times: the descriptor, which is sent to
peers, and the map, in which arrays lie.

- `_sharing` guards the descriptor. A thread that sends it (`share`) and a thread that closes it (`forget_fd`,
  `surrender`, `close`) would race otherwise: the number of a closed descriptor may already be another file, which would
  then go to a stub. `send` runs under the lock, so it must not block.
- The map needs no lock. `close` drops the reference to it, and the last array over it unmaps it. It must not be
  unmapped earlier: a caller may still hold an array. numpy holds no buffer of the `mmap`, so `mmap.close()` would
  succeed, and the next access to such an array would be a SIGSEGV.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.errors import OutOfMemory, RemoteProtocolError
from moonpool.ipc.extension import is_wanted, load_if_there
from moonpool.ipc.memory import Buffer, Region
from moonpool.ipc.signals import pass_on

# fcntl has these names from Python 3.9 on, but only if it was built against a recent libc.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW
# A large region is made for a tensor that is about to be written. To map all its pages at once
# takes a fifth of the time of a page fault for each.
_LARGE = 2 << 20
_SMALL = 16 << 10
_SHARED = mmap.MAP_SHARED
_PRESENT = _SHARED | getattr(mmap, "MAP_POPULATE", 0)  # from Python 3.10 on


if TYPE_CHECKING:
    Copy = Callable[[Buffer, int, np.ndarray], None]


def _quick_copy() -> Copy | None:
    """Return the copy in C++; None if it was not built, is for another interpreter, or is not wanted."""
    module = load_if_there("moonpool.ipc._copy") if is_wanted() else None
    return None if module is None else module.copy


_copy = _quick_copy()


class Map(mmap.mmap):
    """The memory of a region, mapped into this process."""

    # Called once, right before the memory is unmapped with the last view of it, in any thread.
    before_unmap: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.before_unmap is not None:
            self.before_unmap()


class SharedRegion(Region):
    """A sealed memfd, mapped for reading and writing."""

    __slots__ = ("_sharing", "fd", "is_private")

    # True if no process but its two ends may see it.
    is_private: bool

    def __init__(self, region_id: int, size_bytes: int, fd: int) -> None:
        """Map `fd` and own it from now on. It stays open until `close`, so that it can be sent to a peer."""
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
        """Make a new region. Raises `OutOfMemory` if the machine has not enough memory."""
        return cls(region_id, size_bytes, set_aside(region_id, size_bytes))

    @classmethod
    def adopt(cls, region_id: int, size_bytes: int, fd: int) -> SharedRegion:
        """Map a region that the peer made and sent. Owns `fd` at once, even if it raises.

        Raises `RemoteProtocolError` if the file is not sealed or not of that size.
        """
        try:
            seals = fcntl.fcntl(fd, _GET_SEALS)
            size = os.fstat(fd).st_size
        except OSError as error:
            os.close(fd)
            raise RemoteProtocolError(f"region {region_id} is not a memfd: {error}") from error
        if seals & _SEALS != _SEALS or size != size_bytes:
            os.close(fd)
            raise RemoteProtocolError(
                f"region {region_id} has {size} bytes and seals {seals:#x}; "
                f"{size_bytes} bytes and seals {_SEALS:#x} were announced"
            )
        return cls(region_id, size_bytes, fd)

    def write(self, offset: int, array: np.ndarray) -> None:
        write_into(self.buffer or self._open(), offset, array)

    def share(self, send: Callable[[SharedRegion], object]) -> bool:
        """Call `send`, which sends the descriptor to a peer. After `close`, does nothing and returns False.

        `send` must not block, because the region cannot be closed meanwhile.
        """
        with self._sharing:
            if self.fd < 0:
                return False
            send(self)
            return True

    def forget_fd(self) -> None:
        """Close the descriptor and keep the map. The region can no longer be sent."""
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
        # Not mmap.close(), which would unmap memory under living leases. The last of them unmaps it.
        self.buffer = None
        self.forget_fd()


def write_into(buffer: Buffer, offset: int, array: np.ndarray) -> None:
    """Copy the bytes of an array, in C order, to a place in shared memory."""
    size_bytes = array.nbytes
    if size_bytes <= _SMALL:
        # It takes a quarter of numpy's time, but keeps the interpreter's lock.
        try:
            buffer[offset : offset + size_bytes] = array  # type: ignore[call-overload]
            return
        except ValueError:  # the array is not contiguous
            pass
    elif _copy is not None:
        try:
            _copy(buffer, offset, array)
            return
        except (BufferError, ValueError) as error:
            # It is not contiguous, or of a type without buffers.
            pass_on(error)
    np.ndarray(array.shape, array.dtype, buffer, offset)[...] = array


def set_aside(region_id: int, size_bytes: int) -> int:
    """Make a sealed memfd of this size with all its pages, and return its descriptor. Raises `OutOfMemory`."""
    fd = -1
    try:
        fd = os.memfd_create(f"moonpool-{region_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fill(fd, size_bytes)
        fcntl.fcntl(fd, _ADD_SEALS, _SEALS)
    except (OSError, OverflowError) as error:
        if fd >= 0:
            os.close(fd)
        raise OutOfMemory(f"cannot set aside {size_bytes} bytes of shared memory: {error}") from error
    except OutOfMemory:
        os.close(fd)
        raise
    return fd


def fill(fd: int, size_bytes: int) -> None:
    """Allocate all pages of a memfd. Raises `OutOfMemory`, OSError."""
    # fallocate alone would go on until the kernel kills a process for the memory.
    room = headroom_bytes()
    if room is not None and size_bytes > room:
        raise OutOfMemory(f"cannot set aside {size_bytes} bytes of shared memory: {room} bytes are left")
    os.posix_fallocate(fd, 0, size_bytes)


def empty(fd: int, size_bytes: int) -> bool:
    """Give the pages of a memfd back to the machine, even if it is mapped. Returns False if the kernel cannot."""
    try:
        with mmap.mmap(fd, size_bytes, _SHARED) as pages:
            # The kernel makes a hole in the file, which only F_SEAL_WRITE would forbid.
            pages.madvise(mmap.MADV_REMOVE)
    except (OSError, ValueError):
        return False
    return True


# The files with the limit and the usage of a control group, and the line of memory.stat with the
# cache that the kernel would give up; for versions 2 and 1.
_VERSIONS = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# Version 1 has a number for "no limit": the largest whole number of pages.
_UNLIMITED_BYTES = 1 << 60


def headroom_bytes(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes that machine and control groups leave to this process, less a sixteenth.

    None if the system does not tell. It is an estimate, as other processes take memory at the same time.
    """
    rooms = [_machine(proc), *_groups(proc, cgroups)]
    known = [room for room in rooms if room is not None]
    if not known:
        return None
    least = max(0, min(known))
    return least - least // 16


def _machine(proc: str) -> int | None:
    lines = _table(f"{proc}/meminfo")
    available = lines.get("MemAvailable:")
    return None if available is None else (available + lines.get("SwapFree:", 0)) * 1024


def _groups(proc: str, cgroups: str) -> list[int | None]:
    """Return the room in each group of this process and in those above."""
    rooms = []
    for line in _text(f"{proc}/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for folder, limit, usage, cache in _VERSIONS:
            if folder in controllers.split(","):
                # The path may be the host's, while the container has mounted the group itself. Then only the last step
                # up finds files.
                while True:
                    base = os.path.join(cgroups, folder, path.strip("/"))
                    rooms.append(_group(base, limit, usage, cache))
                    if path in ("", "/"):
                        break
                    path = os.path.dirname(path)
    return rooms


def _group(base: str, limit: str, usage: str, cache: str) -> int | None:
    try:
        allowed = int(_text(f"{base}/{limit}"))
        used = int(_text(f"{base}/{usage}"))
    except ValueError:  # "max", or no such file
        return None
    if allowed >= _UNLIMITED_BYTES:
        return None
    return allowed - used + _table(f"{base}/memory.stat").get(cache, 0)


def _table(path: str) -> dict[str, int]:
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
