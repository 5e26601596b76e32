"""Starts the instances of a model anew that have served long enough, one at a time.

`Recycling` decides which instance is due, and whose turn it is. `Recycler` carries it out for the supervisor.

Theory of operation. An instance is due after so many requests, or when its process has too much memory or was given too
much shared memory. It is noticed when it comes back to the scheduler (`ModelInstance.leaves`), or, if it is idle, when
the backend reports. From then on:

- It takes the turn, of which a model has one. If another instance has it, this one serves on, so that the model is
  never without instances for this reason.
- Sequences in it end first, and no other one begins in it. It keeps the turn meanwhile.
- A thread takes the instance out of the scheduler's hands. It waits until the requests that the instance left open have
  ended. If that takes too long, the instance serves on and is due again later. Otherwise the supervisor ends the
  process and starts another one.
- If the instance breaks meanwhile, or all instances are to end, it goes back to the scheduler, which reports a broken
  one as lost. `Supervisor.lost` gives back the turn of an instance that breaks.

`Recycler._take` runs with the scheduler's lock held, so it only takes the locks of `Recycling` and of the supervisor,
and starts a thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol

from moonpool.runtime.hosting.instance_record import InstanceRecord
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import ModelInstance
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.schedule.scheduler import Scheduler

_log = RuntimeLog("moonpool")
REASONS = ("requests", "rss", "regions")
# The time that an instance which is to be recycled waits for requests that it has yet to answer.
_OPEN_S = 30.0
_STAYS_OPEN = "[%s] is not recycled yet: requests are open that have not ended in %g s"


class Recycling:
    """Decides which instance of a model is due, and which one leaves. Any thread may call any method; none blocks."""

    def __init__(self, options: ModelOptions) -> None:
        self._requests = options.recycle_requests
        self._rss_bytes = options.recycle_rss_bytes
        self._region_limit_bytes = options.region_limit_bytes
        self._lock = threading.Lock()
        self._whose_turn: ModelInstance | None = None
        # Instances that are due for another reason than their requests, with that reason and its text.
        self._due: dict[ModelInstance, tuple[str, str]] = {}
        # The number of times that an instance was recycled, by (name, reason).
        self.counts: Counter[tuple[str, str]] = Counter()

    def begin(self, instance: ModelInstance) -> None:
        """Count from zero: an instance has a new process."""
        with self._lock:
            self._due.pop(instance, None)
            instance.served = 0
            instance.serves_until = math.inf if self._requests is None else self._requests

    def outgrown(self, instance: ModelInstance, rss_bytes: int) -> None:
        """Make an instance due, as its process has more memory than it may keep."""
        limit = f"MOONPOOL_RECYCLE_RSS_BYTES is {self._rss_bytes}"
        self._make_due(instance, "rss", f"its process has grown to {rss_bytes} bytes; {limit}")

    def worn(self, instance: ModelInstance, given_bytes: int) -> None:
        """Make an instance due, as its process was given all the shared memory that it may get in its life."""
        limit = f"MOONPOOL_REGION_LIMIT_BYTES is {self._region_limit_bytes}"
        what = f"its process was given {given_bytes} bytes of shared memory, used or not"
        self._make_due(instance, "regions", f"{what}; {limit}")

    def _make_due(self, instance: ModelInstance, reason: str, why: str) -> None:
        with self._lock:
            self._due[instance] = reason, why
            instance.serves_until = 0

    def postpone(self, instance: ModelInstance) -> None:
        """Let an instance serve as many requests again before it is due."""
        with self._lock:
            self._due.pop(instance, None)
            instance.serves_until = math.inf
            if self._requests is not None:
                instance.serves_until = instance.served + self._requests

    def take_turn(self, instance: ModelInstance) -> bool:
        """Return True if an instance has the turn now, or had it already."""
        with self._lock:
            if self._whose_turn is None:
                self._whose_turn = instance
            return self._whose_turn is instance

    def end_turn(self, instance: ModelInstance) -> None:
        """Give back the turn of an instance, if it has it."""
        with self._lock:
            if self._whose_turn is instance:
                self._whose_turn = None

    def recycled(self, instance: ModelInstance) -> None:
        """Count an instance that is out of service."""
        with self._lock:
            reason, _ = self._due.get(instance, ("requests", ""))
            self.counts[instance.name, reason] += 1

    def why(self, instance: ModelInstance) -> str:
        """Return the reason to recycle an instance as a text, with the option that asks for it."""
        with self._lock:
            _, why = self._due.get(instance, ("", ""))
        limit = f"MOONPOOL_RECYCLE_REQUESTS is {self._requests}"
        return why or f"it has executed {instance.served} requests; {limit}"


class InstanceOwner(Protocol):
    """The supervisor of the instances, as a recycler needs it."""

    recycling: Recycling

    @property
    def is_stopping(self) -> bool:
        """True if all instances are about to end."""

    def begin(self, record: InstanceRecord, act: Callable[[], None], name: str) -> bool:
        """Call `act` on a thread that has the instance. Returns False if no thread can be started."""

    def renew(self, record: InstanceRecord) -> None:
        """End the process of a healthy instance, and start another one."""


class Recycler:
    """Recycles the instances of one model version, as the scheduler and the backend report on them."""

    def __init__(self, owner: InstanceOwner, scheduler: Scheduler) -> None:
        self._owner = owner
        self._scheduler = scheduler
        self._recycling = owner.recycling

    def watch(self, record: InstanceRecord) -> None:
        """Receive the reports of an instance."""
        instance = record.instance
        instance.recycle = partial(self._take, record)
        instance.report_grown = partial(self._grown, instance)
        instance.report_worn = partial(self._worn, instance)

    def _grown(self, instance: ModelInstance, rss_bytes: int) -> None:
        self._recycling.outgrown(instance, rss_bytes)
        self._ask_for(instance)

    def _worn(self, instance: ModelInstance, given_bytes: int) -> None:
        self._recycling.worn(instance, given_bytes)
        self._ask_for(instance)

    def _ask_for(self, instance: ModelInstance) -> None:
        # If the instance executes, the scheduler asks when it comes back.
        if instance.served >= instance.serves_until and self._scheduler.take(instance):
            self._scheduler.add(instance)

    def _take(self, record: InstanceRecord, leave_room: Callable[[ModelInstance], bool]) -> bool:
        """Take a due instance out of service if nothing keeps it. Runs with the scheduler's lock held."""
        instance = record.instance
        if self._owner.is_stopping or not self._recycling.take_turn(instance):
            return False
        if not leave_room(instance):  # sequences in it end first, and no other one begins
            return False
        return self._owner.begin(record, partial(self._recycle, record), "moonpool-recycle")

    def _recycle(self, record: InstanceRecord) -> None:
        instance = record.instance
        if not self._scheduler.wait_closed(instance, time.monotonic() + _OPEN_S):
            _log.warning(_STAYS_OPEN, instance.name, _OPEN_S)
            self._recycling.postpone(instance)
        elif instance.broken is None and not self._owner.is_stopping:
            self._owner.renew(record)
            self._recycling.end_turn(instance)
            return
        self._recycling.end_turn(instance)
        self._scheduler.add(instance)
