"""Which instance of a model has served long enough and is started anew, one of them at a time."""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.runtime.backend import ModelInstance
    from moonpool.runtime.config_options import ModelOptions

REASONS = ("requests", "rss")


class Recycling:
    """Decides; the supervisor acts. Any thread may call any method; none blocks.

    An instance whose turn it is not serves on: where several are due, the others are there meanwhile.
    """

    def __init__(self, options: ModelOptions) -> None:
        self._requests = options.recycle_requests
        self._rss_bytes = options.recycle_rss_bytes
        self._lock = threading.Lock()
        self._whose_turn: ModelInstance | None = None
        self._grown: dict[ModelInstance, int] = {}
        # How often and why each was recycled: (name, reason).
        self.counts: Counter[tuple[str, str]] = Counter()

    def begin(self, instance: ModelInstance) -> None:
        """An instance has a new process."""
        with self._lock:
            self._grown.pop(instance, None)
            instance.served = 0
            instance.serves_until = math.inf if self._requests is None else self._requests

    def outgrown(self, instance: ModelInstance, rss_bytes: int) -> None:
        """Its process has more memory than it may keep."""
        with self._lock:
            self._grown[instance] = rss_bytes
            instance.serves_until = 0

    def postpone(self, instance: ModelInstance) -> None:
        """It could not be had; it serves as many requests again, and is asked for then."""
        with self._lock:
            self._grown.pop(instance, None)
            instance.serves_until = math.inf
            if self._requests is not None:
                instance.serves_until = instance.served + self._requests

    def take_turn(self, instance: ModelInstance) -> bool:
        """Whether it is, or was already, the one that leaves."""
        with self._lock:
            if self._whose_turn is None:
                self._whose_turn = instance
            return self._whose_turn is instance

    def end_turn(self, instance: ModelInstance) -> None:
        """It is back, or lost."""
        with self._lock:
            if self._whose_turn is instance:
                self._whose_turn = None

    def recycled(self, instance: ModelInstance) -> None:
        """Count it: it is out of service."""
        with self._lock:
            reason = "rss" if instance in self._grown else "requests"
            self.counts[instance.name, reason] += 1

    def why(self, instance: ModelInstance) -> str:
        """Why it is recycled, in words, with the option that asks for it."""
        with self._lock:
            grown = self._grown.get(instance)
        if grown is None:
            limit = f"MOONPOOL_RECYCLE_REQUESTS is {self._requests}"
            return f"it has executed {instance.served} requests; {limit}"
        limit = f"MOONPOOL_RECYCLE_RSS_BYTES is {self._rss_bytes}"
        return f"its process has grown to {grown} bytes; {limit}"
