"""Waiting for a condition under a deadline: what tests do instead of sleeping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """A moment on the monotonic clock that several waits can share."""

    def __init__(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s
        self.timeout_s = timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, 0 once the deadline has passed; fit to be a timeout argument."""
        return max(0.0, self._end_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.remaining_s == 0.0


def wait_until(condition: Callable[[], T], timeout_s: float | Deadline = 60.0, what: str = "the condition") -> T:
    """Asks until the answer is true, and returns that answer.

    Fails the test with `what` and the last answer when the deadline passes first; the condition
    is asked at least once, and once more after the deadline, so a stalled machine is no failure.
    """
    deadline = timeout_s if isinstance(timeout_s, Deadline) else Deadline(timeout_s)
    pause_s = 0.0002
    while True:
        was_over = deadline.is_over
        answer = condition()
        if answer:
            return answer
        if was_over:
            raise AssertionError(f"waited {deadline.timeout_s:g} s for {what}; the last answer was {answer!r}")
        time.sleep(min(pause_s, deadline.remaining_s))
        pause_s = min(pause_s * 1.5, 0.02)


def is_blocked(thread: threading.Thread) -> bool:
    """Return True if a thread of this process waits in the kernel."""
    with open(f"/proc/self/task/{thread.native_id}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"
