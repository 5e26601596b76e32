"""The shared memory that one process is given in one direction, by whichever process of the runtime gives it.

Theory of operation. A process that was sent a region can keep it: it copies the descriptor or leaves the file mapped, says that it
does not use the region any more, and asks for another one. No limit of the kernel counts such memory. So whatever a
contained process was ever sent counts here until the process ends. A region that comes back is emptied, which gives its
pages back to the machine also where somebody has them mapped, and its file is given again, under another number, before a
new one is made. Of files that come back a few are kept; the others are closed and still count. A process that is not contained could
have any memory without this, so only what it uses counts, and what comes back of it is closed.

Only what comes back region by region is emptied and given again: whoever gives a region back knows that nothing lies in it. A front end
that has ended knows nothing any more. An honest model may have kept inputs in its memory, or may still write an answer there; so no
such file is touched. The kernel frees it when the process lets go of it.

An honest process of varying needs may so come to its limit with files of which none is large enough. Then it `is_worn`:
the next process will have the room that this one has lost.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from moonpool.ipc.arena import growth_bytes
from moonpool.ipc.errors import Closed, OutOfMemory
from moonpool.ipc.region import SharedRegion, empty, fill, set_aside

if TYPE_CHECKING:
    from collections.abc import Hashable

# Files that nobody uses at the moment; each is a descriptor of this process.
_MOST_SPARES = 8
# A file that is larger than what is wanted by more than this would set aside too much.
_LOOSE_FIT = 4
_numbers = itertools.count(1)


def next_number() -> int:
    """A number that no other region of this process has."""
    return next(_numbers)


class RegionSource(Protocol):
    """Where regions for one process come from, and go when nothing lies in them. Any thread may call any method."""

    # The most that there may be; None where there is no limit. Of each device there may be as much beside.
    limit_bytes: int | None

    def region(self, present_bytes: int, needed_bytes: int) -> SharedRegion:
        """Another region, of which the process does not know; the caller owns it. Raises `OutOfMemory`, `Closed`.

        `present_bytes` is what the caller has in use.
        """

    def retire(self, region: SharedRegion) -> None:
        """Nothing lies in a region, and nothing will: close it. The process may have kept what it was sent."""

    def close(self) -> None:
        """The process has ended, or nobody here gives it anything any more."""


class _File(NamedTuple):
    size_bytes: int
    fd: int


class Allotment:
    """All that one process is given in one direction. Any thread may call any method."""

    def __init__(self, limit_bytes: int | None, *, is_contained: bool) -> None:
        self.limit_bytes = limit_bytes
        self._is_contained = is_contained
        self._lock = threading.Lock()
        # All that was ever given, and how much of that nobody uses.
        self._given_bytes = self._idle_bytes = 0
        # By size, the smallest first.
        self._spares: list[_File] = []
        # What other processes of the runtime give, by who they are and their number for the region.
        self._elsewhere: dict[tuple[Hashable, int], _File] = {}
        self._is_closed = False
        # Whether something was refused that a new process could have.
        self.is_worn = False

    @property
    def given_bytes(self) -> int:
        """What the process was ever sent, and may still have."""
        return self._given_bytes

    def region(self, present_bytes: int, needed_bytes: int) -> SharedRegion:
        """As `RegionSource.region`."""
        number = next_number()
        file = self._take(number, present_bytes, needed_bytes)
        try:
            return SharedRegion(number, *file)
        except (
            OutOfMemory
        ):  # and its descriptor is closed; the process may have the file of an earlier time
            with self._lock:
                self._idle_bytes += file.size_bytes
            raise

    def retire(self, region: SharedRegion) -> None:
        """As `RegionSource.retire`."""
        self._put(_File(region.size_bytes, region.surrender()))

    def give_elsewhere(
        self, owner: Hashable, number: int, present_bytes: int, needed_bytes: int
    ) -> tuple[int, int]:
        """As `region`, for another process of the runtime: size and descriptor, which the caller owns."""
        file = self._take(number, present_bytes, needed_bytes)
        try:
            with self._lock:
                if self._is_closed:
                    raise Closed("the process has ended")
                fd = os.dup(file.fd)
                self._elsewhere[owner, number] = file
                return file.size_bytes, fd
        except Closed:
            self._put(file)
            raise
        except OSError as error:  # this process has no descriptor to spare
            self._put(file)
            raise OutOfMemory(f"cannot hand on shared memory: {error}") from error

    def take_back(self, owner: Hashable, number: int) -> None:
        """The other process has retired a region. Nothing happens where it has none of that number."""
        with self._lock:
            file = self._elsewhere.pop((owner, number), None)
        if file is not None:
            self._put(file)

    def abandon(self, owner: Hashable) -> None:
        """The other process is gone, or gives nothing any more. What lies in its regions stays as it is."""
        with self._lock:
            keys = [key for key in self._elsewhere if key[0] == owner]
            files = [self._elsewhere.pop(key) for key in keys]
            self._idle_bytes += sum(file.size_bytes for file in files)
        for file in files:
            os.close(file.fd)

    def _take(self, number: int, present_bytes: int, needed_bytes: int) -> _File:
        """A file with all its pages, for the caller. Raises `OutOfMemory`, `Closed`."""
        with self._lock:
            if self._is_closed:
                raise Closed("the process has ended")
            spare = self._fitting_spare(present_bytes, needed_bytes)
            if spare is None:
                size_bytes = self._room(present_bytes, needed_bytes)
                # Counted before it is there: others ask at the same time.
                self._given_bytes += size_bytes
        # Not under the lock: this takes a millisecond for every few megabytes.
        if spare is None:
            try:
                return _File(size_bytes, set_aside(number, size_bytes))
            except OutOfMemory:
                with self._lock:
                    self._given_bytes -= size_bytes
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
        """The size of a new file. Raises `OutOfMemory`."""
        in_use_bytes = self._given_bytes - self._idle_bytes
        counted_bytes = self._given_bytes if self._is_contained else in_use_bytes
        others_bytes = max(0, counted_bytes - present_bytes)
        try:
            return growth_bytes(present_bytes, needed_bytes, self.limit_bytes, others_bytes)
        except OutOfMemory:
            self.is_worn |= needed_bytes <= (self.limit_bytes or 0) - in_use_bytes
            raise

    def _put(self, file: _File) -> None:
        """A file that nobody uses any more."""
        # Also where it is closed at once: the process may have kept it, and its pages with it.
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
        """The process has ended. Regions that are out stay valid."""
        with self._lock:
            self._is_closed = True
            files = [*self._spares, *self._elsewhere.values()]
            self._spares.clear()
            self._elsewhere.clear()
        for file in files:
            os.close(file.fd)
