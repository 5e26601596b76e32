"""Which instance of a model has served long enough and is started anew, one of them at a time."""

from __future__ import annotations

import math
import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.runtime.backend import ModelInstance
    from moonpool.runtime.config_options import ModelOptions

REASONS = ("requests", "rss", "regions")


class Recycling:
    """Decides; the supervisor acts. Any thread may call any method; none blocks.

    An instance whose turn it is not serves on: where several are due, the others are there meanwhile.
    """

    def __init__(self, options: ModelOptions) -> None:
        self._requests = options.recycle_requests
        self._rss_bytes = options.recycle_rss_bytes
        self._region_limit_bytes = options.region_limit_bytes
        self._lock = threading.Lock()
        self._whose_turn: ModelInstance | None = None
        # Instances that are due for another reason than their requests, with the reason and its text.
        self._due: dict[ModelInstance, tuple[str, str]] = {}
        # How often and why each was recycled: (name, reason).
        self.counts: Counter[tuple[str, str]] = Counter()

    def begin(self, instance: ModelInstance) -> None:
        """An instance has a new process."""
        with self._lock:
            self._due.pop(instance, None)
            instance.served = 0
            instance.serves_until = math.inf if self._requests is None else self._requests

    def outgrown(self, instance: ModelInstance, rss_bytes: int) -> None:
        """Its process has more memory than it may keep."""
        limit = f"MOONPOOL_RECYCLE_RSS_BYTES is {self._rss_bytes}"
        self._make_due(instance, "rss", f"its process has grown to {rss_bytes} bytes; {limit}")

    def worn(self, instance: ModelInstance, given_bytes: int) -> None:
        """Its process was given so much shared memory over its life that it can be given no more."""
        limit = f"MOONPOOL_REGION_LIMIT_BYTES is {self._region_limit_bytes}"
        what = f"its process was given {given_bytes} bytes of shared memory, used or not"
        self._make_due(instance, "regions", f"{what}; {limit}")

    def _make_due(self, instance: ModelInstance, reason: str, why: str) -> None:
        with self._lock:
            self._due[instance] = reason, why
            instance.serves_until = 0

    def postpone(self, instance: ModelInstance) -> None:
        """It could not be had; it serves as many requests again, and is asked for then."""
        with self._lock:
            self._due.pop(instance, None)
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
            reason, _ = self._due.get(instance, ("requests", ""))
            self.counts[instance.name, reason] += 1

    def why(self, instance: ModelInstance) -> str:
        """Why it is recycled, in words, with the option that asks for it."""
        with self._lock:
            _, why = self._due.get(instance, ("", ""))
        limit = f"MOONPOOL_RECYCLE_REQUESTS is {self._requests}"
        return why or f"it has executed {instance.served} requests; {limit}"
