"""What waits for the clients of all streams together, who do not read it."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Backlog(Generic[T]):
    """Counts it by stream. Any thread may call any method."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._total_bytes = 0
        self._of: dict[T, int] = {}

    def change(self, stream: T, by_bytes: int) -> None:
        """So much more waits, or less."""
        with self._lock:
            self._total_bytes += by_bytes
            left = self._of.pop(stream, 0) + by_bytes
            if left:
                self._of[stream] = left

    def most(self) -> T | None:
        """Where it is too much: the stream for which the most waits."""
        if self._total_bytes <= self._most_bytes:
            return None
        with self._lock:
            return max(self._of, key=self._of.__getitem__, default=None)
