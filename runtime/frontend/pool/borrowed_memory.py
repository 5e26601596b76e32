"""Shared memory for stubs that a front end gets from the main process, which counts what all processes give to each stub.

Theory of operation. The thread that needs a region asks for it and waits; it may be the reactor's. So only the thread that
listens to the directory takes the answers. If an answer comes after its asker has given up, the memory goes back.
When a front end ends, the main process gives up its regions by itself.
"""

from __future__ import annotations

import itertools
import os
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.allotment import next_number
from moonpool.runtime.frontend.pool.messages import Word

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.ipc.messages import Side

# Setting memory aside takes a millisecond for every few megabytes.
_ANSWER_S = 10.0
# Size, descriptor, and the reason if there is no descriptor.
_Answer = tuple[int, int, str]
_Place = tuple[int, int, int, int]


class MemoryDesk:
    """Asks the main process. `answered` is for the thread of the directory, the rest for any other."""

    def __init__(self, tell: Callable[..., None]) -> None:
        """`tell` sends a message to the main process."""
        self._tell = tell
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, SimpleQueue[_Answer]] = {}
        self._given_up: dict[int, _Place] = {}

    def ask(self, place: _Place, present_bytes: int, needed_bytes: int) -> tuple[int, int]:
        """Ask for a region; return its size and descriptor. Raises `OutOfMemory`.

        Its place is the model, the stub or 0, the writer and the region's number.
        """
        question = next(self._numbers)
        answers = self._waiting[question] = SimpleQueue()
        self._tell(Word.MEMORY, question, *place, present_bytes, needed_bytes)
        try:
            size_bytes, fd, why = answers.get(timeout=_ANSWER_S)
        except Empty:
            with self._lock:
                if self._waiting.pop(question, None) is not None:
                    self._given_up[question] = place
                    raise OutOfMemory("the main process set no memory aside in time") from None
            size_bytes, fd, why = answers.get()
        if fd < 0:
            raise OutOfMemory(why)
        return size_bytes, fd

    def answered(self, fds: list[int], question: int, size_bytes: int, why: str) -> None:
        """Take in SET_ASIDE. Owns the descriptors."""
        with self._lock:
            answers = self._waiting.pop(question, None)
            place = self._given_up.pop(question, None)
        fd = fds[0] if fds else -1
        if answers is not None:
            answers.put((size_bytes, fd, why))
        elif fd >= 0:
            os.close(fd)
            if place is not None:
                self.give_back(place)

    def give_back(self, place: _Place) -> None:
        """Give back a region in which nothing lies any more."""
        self._tell(Word.RETURNED, *place)


class BorrowedMemory:
    """A `RegionSource` of one stub, or of the callers of a model where `stub` is 0."""

    def __init__(
        self, desk: MemoryDesk, model: int, stub: int, writer: Side, limit_bytes: int | None
    ) -> None:
        self.limit_bytes = limit_bytes
        self._desk = desk
        self._key = model, stub, int(writer)

    def region(self, present_bytes: int, needed_bytes: int) -> SharedRegion:
        """As `RegionSource.region`; waits for the main process."""
        number = next_number()
        file = self._desk.ask((*self._key, number), present_bytes, needed_bytes)
        return SharedRegion(number, *file)

    def retire(self, region: SharedRegion) -> None:
        """As `RegionSource.retire`."""
        region.close()
        self._desk.give_back((*self._key, region.id))

    def close(self) -> None:
        """Do nothing: when the main process hears of the end, it takes back what is left."""
