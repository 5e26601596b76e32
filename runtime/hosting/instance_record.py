"""The record that a supervisor keeps of an instance."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from moonpool.runtime.model.backend import ModelInstance
from moonpool.runtime.model.states import INSTANCE, Machine


class InstanceRecord:
    """An instance, its state, its deaths and its restarts. The supervisor explains who may change it."""

    def __init__(self, instance: ModelInstance, deaths: int) -> None:
        self.instance = instance
        self.machine = Machine(instance.name, INSTANCE, time.monotonic())
        self.deaths_s: deque[float] = deque(maxlen=deaths)
        self.restarts = 0
        # Starts in a row that failed for lack of descriptors, memory or processes. They count as no deaths.
        self.shortages = 0
        # The time at which the process that is to be replaced broke.
        self.broken_ns = 0
        # The thread that has the instance, to recover or to recycle it.
        self.recovery: threading.Thread | None = None
        # Set once the instance is to end for good: it is not started again.
        self.stopping = threading.Event()
        # True while the model's `sleep` or `wake` runs in it.
        self.is_in_hook = False
        # A recovery for which no thread could be started yet.
        self.unrecovered: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"<{self.machine!r} restarts={self.restarts}>"
