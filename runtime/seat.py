"""A model instance as its supervisor has it."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from moonpool.runtime.states import INSTANCE, Machine

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from moonpool.runtime.backend import ModelInstance


class Seat:
    """An instance, where it is in its life, and when it died."""

    def __init__(self, instance: ModelInstance, deaths: int) -> None:
        self.instance = instance
        self.machine = Machine(instance.name, INSTANCE, time.monotonic())
        self.deaths_s: deque[float] = deque(maxlen=deaths)
        self.restarts = 0
        # Starts in a row that failed for want of descriptors, memory or processes. They are no deaths.
        self.shortages = 0
        # When the process that is to be replaced broke.
        self.broken_ns = 0
        self.recovery: threading.Thread | None = None
        # What a recovery is to do for which no thread could be started yet.
        self.unrecovered: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<{self.machine!r} restarts={self.restarts}>"
