"""Memory of a client that the runtime lends: the model works on inputs and writes outputs where the client has them.

The model gets inputs through a private mapping: what it writes there stays with this process. The mapping serves
batch after batch, as finding its pages takes longer than copying what lies in them. So, when a batch is over,
pages that were written to are dropped, and the next batch sees the client's again. What the model keeps
becomes its own: the client may write there as soon as it has its answer.

The client may also cut its memory short. Then an access ends this process by SIGBUS, and the runtime does not count that as a
death of the model.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.memory import Region

if TYPE_CHECKING:
    from typing import Callable

    from moonpool.ipc.memory import Lease

_PAGE = mmap.PAGESIZE
_PAGEMAP = "/proc/self/pagemap"
# Private, and without memory set aside for writing to all of it: MAP_NORESERVE.
_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
# MADV_POPULATE_WRITE, from Linux 5.14 on.
_POPULATE_WRITE = 23
# An entry of /proc/PID/pagemap has 8 bytes. In the last one: the page is there, in memory or swapped out; and it is
# a page of a file.
_PRESENT, _SWAPPED, _OF_FILE = 0x80, 0x40, 0x20
_NOT_OWN = bytes(each for each in range(256) if each & _OF_FILE or not each & (_PRESENT | _SWAPPED))


class CutShort(RemoteProtocolError):
    """The object is shorter than it was when the client registered it, and is not mapped yet."""


class LentRegion(Region):
    """One object of a client's. For the main thread of the stub, but for `close`."""

    __slots__ = ("_address", "_fd", "_inputs", "_pagemap_fd", "_targets")

    def __init__(self, region_id: int, size_bytes: int, fd: int) -> None:
        """Own `fd` from now on, until `close`."""
        self.id = region_id
        self.size_bytes = size_bytes
        self._fd = fd
        self.buffer = None
        self._inputs: mmap.mmap | None = None
        self._address = 0
        self._targets: mmap.mmap | None = None
        self._pagemap_fd = -1
        with contextlib.suppress(OSError):  # then all pages are dropped each time
            self._pagemap_fd = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)

    def _map(self, flags: int) -> mmap.mmap:
        try:
            return mmap.mmap(self._fd, self.size_bytes, flags)
        except (OSError, ValueError) as error:
            is_cut = os.fstat(self._fd).st_size < self.size_bytes
            raise (CutShort if is_cut else RemoteProtocolError)(
                f"{self.size_bytes} bytes of a client's shared memory cannot be mapped: {error}"
            ) from error

    def lease(
        self, offset: int, size_bytes: int, give_back: Callable[[object], object], token: object
    ) -> Lease:
        """An input. Raises `RemoteProtocolError` where the object is shorter than it was."""
        if self.buffer is None:
            self.buffer = self._inputs = inputs = self._map(_PRIVATE)
            self._address = np.frombuffer(inputs, np.uint8).__array_interface__["data"][0]
        lease = super().lease(offset, size_bytes, give_back, token)
        # Nobody else sees this mapping: what lies in it cannot be named to others.
        lease.region = None
        return lease

    def write(self, offset: int, array: np.ndarray) -> None:
        """Put an output where the client finds it. Raises as `lease`."""
        if self._targets is None:
            self._targets = self._map(mmap.MAP_SHARED)
        np.ndarray(array.shape, array.dtype, self._targets, offset)[...] = array

    def renew(self, blocks: list[tuple[int, int]]) -> None:
        """The batch is over that had these blocks (offset, size), and nothing of them was kept."""
        for offset, size_bytes in blocks:
            begin = offset // _PAGE * _PAGE
            end = offset + size_bytes
            if self._inputs is not None and self._is_changed(begin, end):
                self._inputs.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def give_up(self, blocks: list[tuple[int, int]]) -> None:
        """The model has kept some of these blocks (offset, size): all of them become its own."""
        inputs, self.buffer, self._inputs = self._inputs, None, None
        if inputs is None:
            return
        for offset, size_bytes in blocks:
            begin = offset // _PAGE * _PAGE
            try:
                inputs.madvise(_POPULATE_WRITE, begin, offset + size_bytes - begin)
            except OSError:
                pages = np.frombuffer(inputs, np.uint8)[begin : offset + size_bytes : _PAGE]
                np.bitwise_or(pages, 0, out=pages)

    def _is_changed(self, begin: int, end: int) -> bool:
        """Whether there are pages of this process's own, or this cannot be found out."""
        pages = (end - begin + _PAGE - 1) // _PAGE
        try:
            entries = os.pread(self._pagemap_fd, 8 * pages, (self._address + begin) // _PAGE * 8)
        except OSError:
            return True
        return len(entries) != 8 * pages or bool(entries[7::8].translate(None, _NOT_OWN))

    def close(self) -> None:
        self.buffer = self._inputs = self._targets = None
        for fd in (self._fd, self._pagemap_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._pagemap_fd = -1
