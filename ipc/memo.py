"""What was worked out before, so that it is not worked out again for every message."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """A dictionary of results that forgets everything when it is full.

    Peers and callers decide what is in it, so it must not grow with what they send. As thread-safe as a
    dictionary: at worst two threads work the same thing out.
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
