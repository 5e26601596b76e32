"""The allotment of one process: the shared memory that all processes of the runtime together give it in one direction.

Theory of operation. A process that was sent a region can keep it: it copies the descriptor or leaves the file mapped,
says that it no longer uses the region, and asks for another one. No limit of the kernel counts such memory. So
everything that a contained process was ever sent counts here until the process ends. A region that comes back is
emptied, which gives its pages back to the machine even if they are still mapped somewhere. Its file is given again,
under another number, before a new one is made. A few of the files that come back are kept for that; the others are
closed and still count. A process that is not contained can take any memory without this, so only the memory that it
uses counts, and its files are closed when they come back.

The lock guards the figures and the lists of files. It is not held while pages are set aside, which takes a millisecond
for every few megabytes. So a new file is counted before it exists, and the count is taken back if that fails: otherwise
two threads could both get the last room.

The processes of a contained model share one limit (`ModelMemory`), since a configuration may ask for many of them.
Their allotments share its lock, too.

If the needs of an honest process vary, it may reach its limit while none of its files is large enough. Then it
`is_worn`: the next process will have the room that this one has lost.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from contextlib import suppress
from typing import NamedTuple

from moonpool.ipc.arena import growth_bytes
from moonpool.ipc.errors import Closed, OutOfMemory
from moonpool.ipc.region import SharedRegion, empty, fill, set_aside

# The most files that are kept unused. Each is a descriptor of this process.
_MOST_SPARES = 8
# A file may be so many times larger than what is wanted. A larger one would set aside too much.
_LOOSE_FIT = 4
_numbers = itertools.count(1)


def next_number() -> int:
    """Return a number that no other region of this process has."""
    return next(_numbers)


class _File(NamedTuple):
    size_bytes: int
    fd: int


class ModelMemory:
    """The shared memory of all processes of a contained model in one direction."""

    __slots__ = ("__weakref__", "given_bytes", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # What their allotments have given, of processes that have not ended.
        self.given_bytes = 0


class Allotment:
    """Makes regions for one process in one direction, and takes them back. Any thread may call any method."""

    def __init__(self, limit_bytes: int | None, *, is_contained: bool, of_model: ModelMemory | None = None) -> None:
        """With `of_model`, the limit is for all processes of a contained model together."""
        # The most bytes in use, None for no limit. Each device may have as much beside.
        self.limit_bytes = limit_bytes
        self._is_contained = is_contained
        self._of_model = of_model or ModelMemory()
        self._lock = self._of_model.lock
        # The bytes that were ever given, and those of them that are not in use.
        self._given_bytes = self._idle_bytes = 0
        # By size, the smallest first.
        self._spares: list[_File] = []
        # Files that a tritonserver has given, by its numbers for the regions.
        self._elsewhere: dict[int, _File] = {}
        self._is_closed = False
        # True once something was refused that a new process could have.
        self.is_worn = False

    @property
    def given_bytes(self) -> int:
        """The bytes that the process was ever sent, and may still have."""
        return self._given_bytes

    @property
    def counted_bytes(self) -> int:
        """The bytes that count for the process: all that a contained one was ever sent, of another one those in use."""
        return self._given_bytes - (0 if self._is_contained else self._idle_bytes)

    def region(self, present_bytes: int, needed_bytes: int) -> SharedRegion:
        """Make another region, which the caller owns and announces. Raises `OutOfMemory`, `Closed`.

        `present_bytes` is the memory that the caller has in use.
        """
        number = next_number()
        file = self._take(number, present_bytes, needed_bytes)
        try:
            return SharedRegion(number, *file)
        except OutOfMemory:
            # The descriptor is closed by now. The process may still have the file, from an earlier time.
            with self._lock:
                self._idle_bytes += file.size_bytes
            raise

    def retire(self, region: SharedRegion) -> None:
        """Take back a region in which nothing lies any more. The process may have kept it."""
        self._put(_File(region.size_bytes, region.surrender()))

    def give_elsewhere(self, number: int, present_bytes: int, needed_bytes: int) -> tuple[int, int]:
        """Make a region that a tritonserver gives. Returns its size, and a descriptor, which the caller owns.

        Raises `OutOfMemory`, `Closed`.
        """
        file = self._take(number, present_bytes, needed_bytes)
        try:
            with self._lock:
                if self._is_closed:
                    raise Closed("the process has ended")
                fd = os.dup(file.fd)
                self._elsewhere[number] = file
                return file.size_bytes, fd
        except Closed:
            self._put(file)
            raise
        except OSError as error:  # this process has no descriptor to spare
            self._put(file)
            raise OutOfMemory(f"cannot hand on shared memory: {error}") from error

    def take_back(self, number: int) -> None:
        """Take back a region that a tritonserver has retired. Nothing happens if it has none of that number."""
        with self._lock:
            file = self._elsewhere.pop(number, None)
        if file is not None:
            self._put(file)

    def _take(self, number: int, present_bytes: int, needed_bytes: int) -> _File:
        """Return a file with all its pages, for the caller. Raises `OutOfMemory`, `Closed`."""
        with self._lock:
            if self._is_closed:
                raise Closed("the process has ended")
            spare = self._fitting_spare(present_bytes, needed_bytes)
            if spare is None:
                size_bytes = self._room(present_bytes, needed_bytes)
                self._give(size_bytes)
        if spare is None:
            try:
                return _File(size_bytes, set_aside(number, size_bytes))
            except OutOfMemory:
                with self._lock:
                    if not self._is_closed:
                        self._give(-size_bytes)
                raise
        try:
            fill(spare.fd, spare.size_bytes)
        except (OutOfMemory, OSError) as error:
            self._put(spare)
            raise OutOfMemory(str(error)) from error
        return spare

    def _fitting_spare(self, present_bytes: int, needed_bytes: int) -> _File | None:
        at = bisect.bisect_left(self._spares, (needed_bytes,))
        if at == len(self._spares):
            return None
        spare = self._spares[at]
        loose_bytes = _LOOSE_FIT * max(present_bytes, needed_bytes)
        if spare.size_bytes > loose_bytes:
            with suppress(OutOfMemory):
                self._room(present_bytes, needed_bytes)
                return None
        self._idle_bytes -= spare.size_bytes
        return self._spares.pop(at)

    def _room(self, present_bytes: int, needed_bytes: int) -> int:
        """Return the size of a new file. Raises `OutOfMemory`."""
        given_bytes = self._of_model.given_bytes
        in_use_bytes = given_bytes - self._idle_bytes
        counted_bytes = given_bytes if self._is_contained else in_use_bytes
        others_bytes = max(0, counted_bytes - present_bytes)
        try:
            return growth_bytes(present_bytes, needed_bytes, self.limit_bytes, others_bytes)
        except OutOfMemory:
            self.is_worn |= needed_bytes <= (self.limit_bytes or 0) - in_use_bytes
            raise

    def _give(self, size_bytes: int) -> None:
        """Count what is given, or was not given after all. Needs the lock."""
        self._given_bytes += size_bytes
        self._of_model.given_bytes += size_bytes

    def _put(self, file: _File) -> None:
        """Keep or close a file that is not in use any more."""
        # Emptied even if it is closed at once: the process may have kept it, and its pages with it.
        is_empty = self._is_contained and file.fd >= 0 and empty(file.fd, file.size_bytes)
        unneeded = file.fd
        with self._lock:
            self._idle_bytes += file.size_bytes
            if is_empty and not self._is_closed:
                bisect.insort(self._spares, file)
                unneeded = self._spares.pop(0).fd if len(self._spares) > _MOST_SPARES else -1
        if unneeded >= 0:
            os.close(unneeded)

    def close(self) -> None:
        """Give nothing any more, and close all files that are not in use, since the process has ended or is not used
        any more. Regions in use stay valid.
        """
        with self._lock:
            if not self._is_closed:
                self._of_model.given_bytes -= self._given_bytes
            self._is_closed = True
            files = [*self._spares, *self._elsewhere.values()]
            self._spares.clear()
            self._elsewhere.clear()
        for file in files:
            os.close(file.fd)
