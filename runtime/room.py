"""What is copied out of the memory of a stub, for as long as it is needed."""

from __future__ import annotations

import threading

from moonpool.runtime.errors import ModelUnavailable


class Room:
    """Of one stub, by the numbers of what it has asked. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}

    @property
    def taken_bytes(self) -> int:
        """All copies together."""
        return sum(self._taken.copy().values())

    def take(self, number: int, size_bytes: int, most_bytes: int) -> None:
        """Count a copy that is about to be made, beside what was counted for that number.

        Raises `ModelUnavailable` where there were too many with it. One may be larger than all may be, but only alone.
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

    def has(self, number: int) -> bool:
        """Whether anything is counted for that number."""
        return number in self._taken

    def give_back(self, number: int) -> None:
        """What was asked under that number is answered."""
        with self._lock:
            self._taken.pop(number, None)
