"""Gets regions for a front end's stubs from the main process, which counts what all processes give to each stub.

Theory of operation. The thread that needs a region sends MEMORY and waits for the answer, and that thread may be the
reactor's. So the answers are taken by the thread that listens to the directory, and by no other: it never waits for a
region itself. `_lock` settles the race between an answer and its deadline. Either the asker still waits and gets the answer, or it has
noted its place in `_given_up` first, and the region goes straight back to the main process.
When a front end ends, the main process gives up all its regions by itself.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from moonpool.ipc.errors import OutOfMemory
from moonpool.ipc.messages import Side
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.server.pool.messages import Word
from moonpool.runtime.stubs.allotment import next_number

# The main process allocates all pages of a region, a millisecond for every few megabytes.
_ANSWER_S = 10.0
# Size, descriptor, and the reason if there is no descriptor.
_Answer = tuple[int, int, str]
_Place = tuple[int, int, int, int]


class MemoryClient:
    """Asks the main process for regions. `answered` is for the thread of the directory, the rest for any other thread."""

    def __init__(self, send: Callable[..., None]) -> None:
        """`send` sends a message to the main process."""
        self._send = send
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, SimpleQueue[_Answer]] = {}
        self._given_up: dict[int, _Place] = {}

    def ask(self, place: _Place, present_bytes: int, needed_bytes: int) -> tuple[int, int]:
        """Ask for a region; return its size and descriptor. Raises `OutOfMemory`.

        `place` is the model, the stub or 0, the writer and the region's number.
        """
        question = next(self._numbers)
        answers = self._waiting[question] = SimpleQueue()
        self._send(Word.MEMORY, question, *place, present_bytes, needed_bytes)
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
        self._send(Word.RETURNED, *place)


class BorrowedMemory:
    """A `RegionSource` for one stub, or, if `stub` is 0, for the callers of a model."""

    def __init__(
        self, client: MemoryClient, model: int, stub: int, writer: Side, limit_bytes: int | None
    ) -> None:
        self.limit_bytes = limit_bytes
        self._client = client
        self._key = model, stub, int(writer)

    def region(self, present_bytes: int, needed_bytes: int) -> SharedRegion:
        """Do as `RegionSource.region`; waits for the main process."""
        number = next_number()
        file = self._client.ask((*self._key, number), present_bytes, needed_bytes)
        return SharedRegion(number, *file)

    def retire(self, region: SharedRegion) -> None:
        """Do as `RegionSource.retire`."""
        region.close()
        self._client.give_back((*self._key, region.id))

    def close(self) -> None:
        """Do nothing: the main process takes back the rest when it notices the end of the stub or of this process."""
