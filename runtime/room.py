"""Bounds the copies of messages that lay in the memory of a stub."""

from __future__ import annotations

import threading

from moonpool.runtime.errors import ModelUnavailable


class Room:
    """The copies for one stub, by the numbers of its questions. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}

    @property
    def taken_bytes(self) -> int:
        """The bytes of all copies together."""
        return sum(self._taken.copy().values())

    def take(self, number: int, size_bytes: int, most_bytes: int) -> None:
        """Count a copy before it is made, beside others with that number.

        Raises `ModelUnavailable` if all copies together would have more than `most_bytes`. One may be larger, but only alone.
        """
        with self._lock:
            own_bytes = self._taken.get(number, 0)
            others_bytes = sum(self._taken.values()) - own_bytes
            if others_bytes and others_bytes + own_bytes + size_bytes > most_bytes:
                raise ModelUnavailable(
                    f"messages of this model that are not answered yet take {others_bytes} bytes already; "
                    f"with this one they would be more than {most_bytes}"
                )
            self._taken[number] = own_bytes + size_bytes

    def give_back(self, number: int) -> None:
        """Forget the copies of a question that is answered."""
        with self._lock:
            self._taken.pop(number, None)
