"""Reads bytes as a row of choices, so that a fuzzer can make structured input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_EDGES = (0, 1, 2, 3, 4, 8, 16, 31, 32, 33, 64, 255, 256, 4096, 65535, 65536, 2**31, 2**32, 2**40)
_ENDS = (2**62, 2**63 - 1, 2**63, 2**64 - 1)


class Choices:
    """Takes its choices from the beginning of the data. After the end, each choice is zero."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        """Return True if any data is left."""
        return self._at < len(self._data)

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def of(self, things: Sequence[T]) -> T:
        return things[self.byte() % len(things)]

    def number(self, *likely: int) -> int:
        """Choose one of these numbers, a bound of a number's range, or any small number."""
        kind = self.byte()
        if likely and kind < 160:
            return likely[kind % len(likely)]
        if kind < 240:
            return (*_EDGES, *_ENDS)[kind % (len(_EDGES) + len(_ENDS))]
        return self.byte() << 8 | self.byte()

    def some(self, most: int = 3) -> range:
        """Return a range of a chosen length."""
        return range(self.byte() % (most + 1))

    def take(self, size: int) -> bytes:
        self._at += size
        return self._data[self._at - size : self._at]

    def rest(self) -> bytes:
        return self.take(max(0, len(self._data) - self._at))
