"""Bounds on responses that wait in this process for somebody slower: a client, a loop, or the next step of an ensemble.

Theory of operation. The tensors of a response lie in the memory of its instance, which has a limit of its own. But each
response also takes a kilobyte or more here, and a model may send a million of them that all name the same 64 bytes. The
channel of the model is read on nevertheless: it also brings the responses of others, which one slow reader must not
stop. So when too much waits for one request, that request ends with `BacklogFull`.

A backlog belongs to one request. One thread at a time adds to it and one takes from it, each in a number of its own,
so there is no lock: the reactor adds, and a lock that callers take too could be held by a thread whose signal handler
runs for long. Backlogs of more bytes than a request takes itself are in `_large`, whose operations are atomic. After
each MiB or so that has come for all of them, the thread that adds looks at their sum. If that is too much for this
process, the largest one ends. Threads that add at the same time may lose bytes of `_Look`, so that one looks a little
later. A finalizer may call `close`, which takes no lock either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from moonpool.runtime.errors import BacklogFull
from moonpool.runtime.model.request import Outcome, Response
from moonpool.runtime.process.usage import part_of_memory

RESPONSE_BYTES = 1 << 10
"""The memory that a response needs in this process, beside its tensors and parameters."""
# An array, its lease and its name.
_TENSOR_BYTES = 640
# A backlog with so much is compared with the others. A smaller one is no more than what its request takes anyway.
_LARGE_BYTES = 16 << 10
# They are compared after each so many bytes more.
_LOOK_BYTES = 1 << 20
_MOST_BYTES = part_of_memory(8, 4 << 30)
_large: dict[ResponseBacklog, None] = {}


class _Look:
    """The bytes that have come for large backlogs since these were compared last."""

    came_bytes = 0


class ResponseBacklog:
    """Counts the bytes of responses to one request that wait in this process."""

    __slots__ = ("__weakref__", "_end", "_limit_bytes", "_looked_bytes", "_name", "came_bytes", "taken_bytes")

    def __init__(self, name: str, limit_bytes: int, end: Callable[[BacklogFull], object]) -> None:
        """`limit_bytes` is the option of the model `name`. `end` ends the request, once, on any thread that adds to a
        backlog.
        """
        self._name = name
        self._limit_bytes = limit_bytes
        self._end: Callable[[BacklogFull], object] | None = end
        self.came_bytes = 0
        """Only the thread that adds may set it, and call `look` then."""
        self.taken_bytes = 0
        """Only the thread that takes may set it."""
        self._looked_bytes = 0

    @property
    def is_closed(self) -> bool:
        """True if the request has ended, or nobody waits for its responses."""
        return self._end is None

    @property
    def waiting_bytes(self) -> int:
        """The bytes that wait."""
        return self.came_bytes - self.taken_bytes

    def look(self) -> None:
        """End the request, or another one, if too much waits. To be called after bytes were added."""
        waiting_bytes = self.waiting_bytes
        if waiting_bytes > self._limit_bytes:
            self._give_up(
                f"{waiting_bytes} bytes of responses wait for a reader that is too slow, and MOONPOOL_BACKLOG_BYTES of "
                "model"
                f" '{self._name}' allows {self._limit_bytes}"
            )
        elif waiting_bytes > _LARGE_BYTES and self.came_bytes - self._looked_bytes > _LARGE_BYTES:
            _Look.came_bytes += self.came_bytes - self._looked_bytes
            self._looked_bytes = self.came_bytes
            _large[self] = None
            if self._end is None:  # it was closed meanwhile
                _large.pop(self, None)
            if _Look.came_bytes > _LOOK_BYTES:
                _Look.came_bytes = 0
                _relieve()

    def _give_up(self, why: str) -> None:
        end, self._end = self._end, None
        _large.pop(self, None)
        if end is not None:
            end(BacklogFull(why))

    def close(self) -> None:
        """Count no longer, as the request has ended. May be called many times, also by a finalizer."""
        self._end = None
        _large.pop(self, None)


def _relieve() -> None:
    """While too much waits in this process, end the request for which the most does."""
    large = {each: each.waiting_bytes for each in list(_large)}
    total_bytes = sum(large.values())
    while total_bytes > _MOST_BYTES:
        most = max(large, key=large.__getitem__)
        total_bytes -= large.pop(most)
        most._give_up(
            f"more than {_MOST_BYTES} bytes of responses wait for readers that are too slow, the most of them for this "
            "request to model"
            f" '{most._name}'; a lower MOONPOOL_BACKLOG_BYTES would end such requests earlier"
        )


def held_bytes(outcome: Outcome) -> int:
    """Return about the bytes that an outcome takes in this process, without the memory of its instance."""
    if not isinstance(outcome, Response):
        return RESPONSE_BYTES + sys.getsizeof(str(outcome))
    size_bytes = RESPONSE_BYTES + _TENSOR_BYTES * len(outcome.outputs)
    for array in outcome.outputs.values():
        if type(array) is np.ndarray and array.dtype.hasobject:
            size_bytes += array.nbytes + sum(map(sys.getsizeof, array.flat))
    if outcome.parameters:
        for name, value in outcome.parameters.items():
            size_bytes += sys.getsizeof(name) + sys.getsizeof(value) + 100
    return size_bytes
