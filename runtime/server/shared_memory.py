"""The shared memory that clients register by name: POSIX objects of theirs, read and written by descriptor.

Theory of operation. The server never maps memory of a client. A client may truncate its object at any time, and then an
access to a mapping is SIGBUS, the end of the server, while `preadv` and `pwritev` just move fewer bytes. Objects that
only the server's own user can truncate may be lent to stubs, which map them: a process that could harm a stub that way
could as well signal it.

`_lock` guards the table: names are unique, and the limits hold, also when clients register at once. Requests find their
region without it, since a dictionary may be read meanwhile. A region that is unregistered leaves the table, and its
descriptor is closed when the last reference goes: requests that read it hold one, and so does every lease, until the
stub has answered. So nothing is ever read from a descriptor that already means another file.

All sizes are checked against the region before anything is copied, and against the object when it is used, as it may
have shrunk.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import stat
import threading
from collections.abc import Collection, Sequence
from typing import Any

from numpy.typing import NDArray

from moonpool.ipc.errors import MoonpoolError, OutOfMemory
from moonpool.ipc.memory import ALIGNMENT, Lease
from moonpool.ipc.messages import size_of
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.stubs.regions import ClientRegion

# The name of one file in /dev/shm. Semaphores lie there, too, and are no regions.
_KEY = re.compile(r"/?(?!sem\.)(?!\.{1,2}$)[^/\0]{1,250}")
_MAX_REGIONS = 10_000
# Each region is a descriptor, and others need most of them.
_PART_OF_DESCRIPTORS = 8
_MAX_NAME_BYTES = 4096
# A stub keeps a descriptor or two of each region that is lent to it.
_MAX_LENT = 256
# Smaller tensors are copied faster than they are lent.
LEAST_LENT_BYTES = 64 << 10
_WRITTEN_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class SharedMemoryError(MoonpoolError):
    """A region that cannot be registered, or is not registered."""

    def __init__(self, what: str, code: str = "INVALID_ARG") -> None:
        super().__init__(what)
        self.code = code


class _Region:
    """A registered part of an object. Closed when the last request that uses it is done."""

    __slots__ = ("fd", "key", "lent", "name", "offset", "size_bytes")

    def __init__(self, name: str, key: str, offset: int, size_bytes: int, fd: int) -> None:
        self.name = name
        self.key = key
        self.offset = offset
        self.size_bytes = size_bytes
        self.fd = fd
        # The object from its beginning to the region's end, if stubs may have it.
        self.lent: ClientRegion | None = None

    def present_bytes(self) -> int:
        """Return the size of the object at this moment."""
        # Nobody uses the place in the file, and `fstat` takes six times as long.
        return os.lseek(self.fd, 0, os.SEEK_END)

    def lender(self, offset: int, size_bytes: int) -> ClientRegion | None:
        """Return what lends a part of the object to stubs; None if it must be copied, or is better copied."""
        is_worth_it = size_bytes >= LEAST_LENT_BYTES and not offset % ALIGNMENT
        return self.lent if is_worth_it else None

    def __del__(self) -> None:
        os.close(self.fd)
        if self.lent is not None:
            self.lent.close()


def _most_regions() -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return _MAX_REGIONS
    return min(_MAX_REGIONS, descriptors // _PART_OF_DESCRIPTORS)


def _keep(_: object) -> None:
    """Do nothing when a lease ends: it only keeps its token alive."""


class SystemSharedMemory:
    """The regions of all clients, by the names that they gave them. Thread-safe."""

    def __init__(self, allowed_uids: Collection[int] = (), *, is_enabled: bool = True) -> None:
        """Objects must belong to the user that this process runs as, or to one of `allowed_uids`.

        Unless `is_enabled`, nothing can be registered, unregistered or used.
        """
        self._is_enabled = is_enabled
        self._allowed_uids = {os.geteuid(), *allowed_uids}
        self._lock = threading.Lock()
        self._regions: dict[str, _Region] = {}

    def check_enabled(self) -> None:
        """Raise `SharedMemoryError` unless clients may use memory of their own, of any kind."""
        if not self._is_enabled:
            raise SharedMemoryError(
                "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.",
                "UNAVAILABLE",
            )

    def register(self, name: str, key: str, offset: int, size_bytes: int) -> None:
        """Let `name` stand for `size_bytes` bytes of the object `key`, from `offset` on.

        Raises `SharedMemoryError` for a name that is taken, and for an object that does not exist, belongs to another
        user, or is smaller. Raises as `check_enabled`, too.
        """
        self.check_enabled()
        if not (type(name) is str and name):
            raise SharedMemoryError("a shared memory region must have a name")
        if size_of(name) > _MAX_NAME_BYTES:
            raise SharedMemoryError(
                f"the name of a shared memory region has at most {_MAX_NAME_BYTES} bytes: {name[:80]!r}..."
            )
        if min(offset, size_bytes) < 0:
            raise SharedMemoryError(
                f"shared memory region '{name}' cannot have the offset {offset} and {size_bytes} bytes"
            )
        with self._lock:
            if name in self._regions:
                raise SharedMemoryError(f"shared memory region '{name}' already in manager", "ALREADY_EXISTS")
            if len(self._regions) >= _most_regions():
                raise SharedMemoryError(
                    f"{len(self._regions)} regions are registered: unregister some, or have the server started with a "
                    "higher limit of open files (ulimit -n)",
                    "UNAVAILABLE",
                )
            region = _Region(name, key, offset, size_bytes, self._open(name, key))
            self._check_size(region)
            self._let_lend(region)
            self._regions[name] = region

    def _let_lend(self, region: _Region) -> None:
        """Allow lending, if nobody but the server's own user can truncate the object."""
        status = os.fstat(region.fd)
        if status.st_uid != os.geteuid() or status.st_mode & _WRITTEN_BY_OTHERS:
            return
        end = region.offset + region.size_bytes
        if end and sum(each.lent is not None for each in self._regions.values()) < _MAX_LENT:
            with contextlib.suppress(OSError, OutOfMemory):
                region.lent = ClientRegion(end, os.dup(region.fd))

    def _open(self, name: str, key: str) -> int:
        """Open the object, without following symbolic links."""
        if not _KEY.fullmatch(key):
            raise SharedMemoryError(
                f"shared memory region '{name}': {key!r:.80} is not the name of a shared memory object"
            )
        try:
            # As shm_open of the C library does.
            fd = os.open(f"/dev/shm/{key.removeprefix('/')}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (OSError, ValueError):
            raise SharedMemoryError(f"Unable to open shared memory region: '{key}'", "INTERNAL") from None
        try:
            self._check_owner(key, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_owner(self, key: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in self._allowed_uids:
            raise SharedMemoryError(
                f"shared memory object '{key}' belongs to user {status.st_uid}; the server takes those of "
                f"{', '.join(map(str, sorted(self._allowed_uids)))}"
            )
        if not status.st_mode & stat.S_IWUSR:
            raise SharedMemoryError(f"shared memory object '{key}' cannot be written by its owner")

    @staticmethod
    def _check_size(region: _Region) -> None:
        size_bytes = region.present_bytes()
        if region.offset + region.size_bytes > size_bytes:
            raise SharedMemoryError(
                f"failed to register shared memory region '{region.name}': it ends "
                f"at byte {region.offset + region.size_bytes}, and the object '{region.key}' has {size_bytes}"
            )

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all of them. An unknown name is no error. Raises as `check_enabled`."""
        self.check_enabled()
        with self._lock:
            if name:
                self._regions.pop(name, None)
            else:
                self._regions.clear()

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """List the regions, or the one of that name: name, key, offset, byte_size. Raises `SharedMemoryError`."""
        with self._lock:
            regions = list(self._regions.values()) if not name else [self._find(name, "system ")]
        return [{"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.size_bytes} for r in regions]

    def _find(self, name: str, kind: str = "") -> _Region:
        region = self._regions.get(name)
        if region is None:
            raise SharedMemoryError(f"Unable to find {kind}shared memory region: '{name}'", "NOT_FOUND")
        return region

    def _place(self, name: str, offset: int, size_bytes: int) -> tuple[_Region, int]:
        if not self._is_enabled:
            self.check_enabled()
        region = self._regions.get(name) or self._find(name)
        if not 0 <= offset < region.size_bytes:
            raise InvalidRequest(f"Invalid offset for shared memory region: '{name}'")
        if not 0 <= offset <= offset + size_bytes <= region.size_bytes:
            raise InvalidRequest(f"Invalid offset + byte size for shared memory region: '{name}'")
        return region, region.offset + offset

    def check(self, name: str, offset: int, size_bytes: int) -> None:
        """Raise `SharedMemoryError` or `InvalidRequest` unless these bytes lie in the region."""
        self._place(name, offset, size_bytes)

    def can_lend(self, name: str, offset: int, size_bytes: int) -> bool:
        """Return whether `lease` would lend these bytes."""
        region = self._regions.get(name)
        return region is not None and region.lender(region.offset + offset, size_bytes) is not None

    def lease(self, name: str, offset: int, size_bytes: int) -> Lease | None:
        """Lend these bytes, for stubs to read or write in place; None if they must be copied.

        The array stands for the bytes and does not contain them: do not read it. Raises as `read`.
        """
        region, at = self._place(name, offset, size_bytes)
        lender = region.lender(at, size_bytes)
        if lender is None:
            return None
        if region.present_bytes() < at + size_bytes:
            raise _cut_short(region)
        # The lease refers to the region, and keeps its descriptor open.
        return lender.lease(at, size_bytes, _keep, region)

    def read(self, name: str, offset: int, into: NDArray[Any]) -> None:
        """Fill a contiguous array from the region. Raises as `check`, and `InvalidRequest` if the object was
        truncated.
        """
        region, at = self._place(name, offset, into.nbytes)
        left = into.reshape(-1).view("u1").data if into.nbytes else memoryview(b"")
        while left:
            count = os.preadv(region.fd, [left], at)
            if not count:
                raise _cut_short(region)
            left, at = left[count:], at + count

    def write(self, name: str, offset: int, parts: Sequence[memoryview]) -> None:
        """Write parts into the region, one after another. Raises as `read`."""
        size_bytes = sum(len(part) for part in parts)
        region, at = self._place(name, offset, size_bytes)
        # Writing beyond the end would make the object longer, with pages that nobody has asked for.
        if region.present_bytes() < at + size_bytes:
            raise _cut_short(region)
        for part in parts:
            while part:
                count = os.pwritev(region.fd, [part], at)
                part, at = part[count:], at + count


def _cut_short(region: _Region) -> InvalidRequest:
    return InvalidRequest(
        f"shared memory region '{region.name}': the object '{region.key}' is shorter now than it was registered"
    )
