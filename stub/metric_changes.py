"""Changes of metrics on their way to the runtime: gathered without a lock, sent together."""

from __future__ import annotations

import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

from moonpool.ipc.messages import MAX_METRIC_CHANGES
from moonpool.ipc.metric_kinds import INCREMENT, OBSERVE, SET
from moonpool.stub import threads

if TYPE_CHECKING:
    from typing import Callable

    # Number of the metric, operation, value, how many times.
    Row = tuple[int, int, float, int]

# How long changes that no response follows wait for others to go with.
_GATHER_S = 0.05
# From so many on, whoever makes another adds them up.
_MANY = 1 << 16


class MetricChanges:
    """Takes changes from any thread, at any moment; also from finalizers that interrupt it."""

    def __init__(self, send: Callable[[list[Row], list[int]], object]) -> None:
        """`send` hands rows, and the numbers of what nobody refers to any more, to the runtime."""
        self._send = send
        # Whether `flush` may have anything to do: models without metrics come by all the time.
        self.are_made = False
        self._new: deque[tuple[int, int, float]] = deque()
        self._dropped: deque[int] = deque()
        self._sums: dict[int, tuple[int, float]] = {}
        self._observed: dict[tuple[int, float], int] = {}
        # A finalizer may interrupt whoever has it.
        self._lock = threading.RLock()
        # A queue of this kind may be put into from anywhere.
        self._wishes: SimpleQueue[None] = SimpleQueue()
        self._is_wished = False
        self._sender: threading.Thread | None = None

    def add(self, metric: int, operation: int, value: float) -> None:
        """Apply an operation to a metric, soon."""
        self._new.append((metric, operation, value))
        self.are_made = True
        self._wish()
        if len(self._new) >= _MANY and self._lock.acquire(blocking=False):
            try:
                self._add_up()
            finally:
                self._lock.release()

    def drop(self, metric: int) -> None:
        """Let go of a metric, after all its changes."""
        self._dropped.append(metric)
        self._wish()

    def _wish(self) -> None:
        if not self._is_wished:
            self._is_wished = True
            self._wishes.put(None)

    def start(self) -> None:
        """Send from now on what no `flush` sends, on a thread of its own."""
        with self._lock:
            self.are_made = True
            if self._sender is None:
                self._sender = threads.start(self._run, "moonpool-metrics")

    def _run(self) -> None:
        while True:
            self._wishes.get()
            time.sleep(_GATHER_S)
            # In this order: what comes from here on wishes again.
            self._is_wished = False
            self.flush()

    def flush(self) -> None:
        """Send all that was added before, or wait for whoever does so."""
        if not self.are_made:
            return
        with self._lock:
            # What is dropped from here on may have changes that are not added up yet.
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            self._add_up()
            sums, self._sums = self._sums, {}
            observed, self._observed = self._observed, {}
            rows: list[Row] = [(m, op, value, 1) for m, (op, value) in sums.items()]
            rows += [(m, OBSERVE, value, n) for (m, value), n in observed.items()]
            while rows or dropped:
                chunk, rows = rows[:MAX_METRIC_CHANGES], rows[MAX_METRIC_CHANGES:]
                gone = [] if rows else dropped[:MAX_METRIC_CHANGES]
                dropped = dropped[len(gone) :]
                self._send(chunk, gone)

    def _add_up(self) -> None:
        sums, observed = self._sums, self._observed
        for _ in range(len(self._new)):
            metric, operation, value = self._new.popleft()
            if operation == OBSERVE:
                observed[metric, value] = observed.get((metric, value), 0) + 1
            elif operation == SET:
                sums[metric] = (SET, value)
            else:
                before, amount = sums.get(metric, (INCREMENT, 0.0))
                sums[metric] = (before, amount + value)
