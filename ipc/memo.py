"""A bounded cache for results that many messages share."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """A dictionary of results that is cleared when it is full.

    Peers and callers choose the keys, so it must not grow with the messages that they send. As thread-safe as a
    dictionary: at worst two threads compute the same result.
    """

    def __init__(self, most: int = 256) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: K, value: V) -> V:
        """Remember a result, and return it."""
        if len(self) >= self._most:
            self.clear()
        self[key] = value
        return value
