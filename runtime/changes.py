"""Waiting until something is so that changes under a lock."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Changes:
    """Wakes those who wait, of whom there seldom are any; `tell` then costs nothing."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock
        self._condition = threading.Condition(lock)
        self._waiting = 0

    def tell(self) -> None:
        """Something has changed. With the lock held."""
        if self._waiting:
            self._condition.notify_all()

    def wait_for(self, condition: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until `condition`, which is asked with the lock held; False at the deadline."""
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with self._condition:
            self._waiting += 1
            try:
                return self._condition.wait_for(condition, timeout_s)
            finally:
                self._waiting -= 1
