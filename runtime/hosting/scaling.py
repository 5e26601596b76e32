"""Changes the instances of a model version while it serves.

Theory of operation. An update has two halves, and one thread runs both while it holds the model lock (`ModelRegistry`).

*First the new instances come* (`grow`), on threads of their own, beside those that serve. Each takes requests as soon
as it is ready, so nothing waits for anything that runs. If one does not start, those that did leave again, and nothing
has changed.

*Then the others go* (`shrink`). An instance that is to go leaves as one that is recycled does: when it comes back to
the scheduler, `ModelInstance.leaves` asks `_Leaving.take`, which runs under the scheduler's lock. Sequences in it end
first, and no other one begins in it. Then requests that it left open end. What has not ended
by the deadline is ended with the instance, as in an unload.

An instance that breaks meanwhile is not started again: the event `stopping` of its record is set before anything else.
It may also be on its way back from a restart, or be recycled by another thread. `_wait` therefore asks again after each
moment, until the instance has left or is in no condition to execute.

`matched` decides who stays. It is pure, and it moves as little as it can.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from moonpool.runtime.errors import ModelUnavailable
from moonpool.runtime.hosting.instance_record import InstanceRecord
from moonpool.runtime.model.backend import ModelInstance
from moonpool.runtime.model.config.model import InstanceGroup, RateLimits
from moonpool.runtime.model.states import InstanceState
from moonpool.runtime.schedule.scheduler import ABANDONED_S, Scheduler

# The interval in which an instance that is to leave is asked for again.
_AGAIN_S = 0.1


class InstanceSpec(NamedTuple):
    """An instance as a configuration asks for it. Those that differ in their names alone may stand in for each
    other.
    """

    name: str
    kind: str
    device_id: int
    rate_limits: RateLimits = RateLimits()
    host_policy: str = ""


def specs_of(groups: Sequence[InstanceGroup]) -> list[InstanceSpec]:
    """List the instances of placed groups, in order."""
    return [
        InstanceSpec(f"{group.name}_{number}", group.kind, device_id, group.rate_limits, group.host_policy)
        for group in groups
        for number, device_id in enumerate(device_id for device_id in group.gpus or (0,) for _ in range(group.count))
    ]


class Matching(NamedTuple):
    """The instances that stay, those that come, under names that no present one has, and those that go."""

    stay: list[InstanceSpec]
    come: list[InstanceSpec]
    go: list[InstanceSpec]


def matched(present: Sequence[InstanceSpec], wanted: Sequence[InstanceSpec]) -> Matching:
    """Decide which instances have to come and to go, so that those that are wanted are there. Names do not matter for
    that.
    """
    missing = Counter(spec[1:] for spec in wanted)
    names = {spec.name for spec in wanted}
    stay = []
    # Those whose names are wanted stay first, so that an update that is undone leaves no other names behind.
    for spec in sorted(present, key=lambda each: each.name not in names):
        if missing[spec[1:]]:
            missing[spec[1:]] -= 1
            stay.append(spec)
    go = [spec for spec in present if spec not in stay]
    taken = {spec.name for spec in present}
    come = []
    for spec in reversed(wanted):
        if missing[spec[1:]]:
            missing[spec[1:]] -= 1
            name = _free(spec.name, taken)
            taken.add(name)
            come.append(spec._replace(name=name))
    return Matching(stay, come[::-1], go)


def _free(name: str, taken: set[str]) -> str:
    """Return the name, or one with the next number that nobody has: an instance that goes may have it still."""
    if name not in taken:
        return name
    group, _, number = name.rpartition("_")
    return next(other for i in count(int(number) + 1) if (other := f"{group}_{i}") not in taken)


class InstanceStopper(Protocol):
    """The supervisor of the instances, as a leave needs it."""

    def stop(self, record: InstanceRecord) -> None:
        """End an instance that is out of service, or its recovery. One that still executes is ended."""


class Leave:
    """Takes one instance out of service without a loss, and ends it."""

    def __init__(self, owner: InstanceStopper, scheduler: Scheduler, record: InstanceRecord) -> None:
        self._owner = owner
        self._scheduler = scheduler
        self._record = record
        self._has_left = threading.Event()

    def act(self, deadline: float) -> None:
        """Wait until nothing is in the instance any more, then end it. What is in it at `deadline` fails. Blocks."""
        record, instance = self._record, self._record.instance
        record.stopping.set()
        instance.recycle = self._take
        self._wait(deadline)
        if self._has_left.is_set():
            self._scheduler.wait_closed(instance, deadline)
        self._owner.stop(record)
        self._scheduler.forget(instance)
        gone = ModelUnavailable(f"'{instance.name}' was removed before it had ended this request")
        self._scheduler.fail_open(instance, gone)

    def _wait(self, deadline: float) -> None:
        while self._record.machine.state in (InstanceState.READY, InstanceState.RECYCLING):
            self._record.instance.serves_until = -math.inf
            # If it executes, the scheduler asks when it comes back.
            if not self._has_left.is_set() and self._scheduler.take(self._record.instance):
                self._scheduler.add(self._record.instance)
            if self._scheduler.is_abandoned(self._record.instance):
                deadline = min(deadline, time.monotonic() + ABANDONED_S)
            left_s = deadline - time.monotonic()
            if self._has_left.wait(min(_AGAIN_S, max(0.0, left_s))) or left_s <= 0:
                return

    def _take(self, leave_room: Callable[[ModelInstance], bool]) -> bool:
        """Take the instance out of service if no sequence keeps it. Runs with the scheduler's lock held."""
        if not leave_room(self._record.instance):
            return False
        self._has_left.set()
        return True
