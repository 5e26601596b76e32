"""Takes instances that have served long enough out of service, when nobody is harmed by it."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.runtime.backend import ModelInstance
    from moonpool.runtime.limits.recycling import Recycling
    from moonpool.runtime.scheduler import Scheduler
    from moonpool.runtime.seat import Seat

_log = logging.getLogger("moonpool")
# How long an instance that is to be recycled waits for requests that it has yet to answer.
_OPEN_S = 30.0
_STAYS_OPEN = "[%s] is not recycled yet: requests are open that have not ended in %g s"


class Hands(Protocol):
    """Who has the instances: their supervisor."""

    recycling: Recycling

    @property
    def is_stopping(self) -> bool:
        """Whether all instances are about to end."""

    def begin(self, seat: Seat, act: Callable[[], None], name: str) -> bool:
        """Act on a thread that has the instance in its hand; False where there is none to be had."""

    def withdraw(self, instance: ModelInstance, timeout_s: float) -> bool:
        """As `Backend.withdraw`."""

    def renew(self, seat: Seat) -> None:
        """End a process that is well, and start another one."""


class Recycler:
    """Of one model version. Its methods are called by the scheduler, and by backends through their instances."""

    def __init__(self, hands: Hands, scheduler: Scheduler) -> None:
        self._hands = hands
        self._scheduler = scheduler
        self._recycling = hands.recycling

    def watch(self, seat: Seat) -> None:
        """Hear of what this instance has done and become."""
        instance = seat.instance
        instance.recycle = partial(self._take, seat)
        instance.report_grown = partial(self._grown, instance)
        instance.report_worn = partial(self._worn, instance)
        instance.report_served = partial(self._served, instance)

    def _grown(self, instance: ModelInstance, rss_bytes: int) -> None:
        self._recycling.outgrown(instance, rss_bytes)
        self._ask_for(instance)

    def _worn(self, instance: ModelInstance, given_bytes: int) -> None:
        self._recycling.worn(instance, given_bytes)
        self._ask_for(instance)

    def _served(self, instance: ModelInstance, requests: int) -> None:
        instance.served += requests
        self._ask_for(instance)

    def _ask_for(self, instance: ModelInstance) -> None:
        # If it executes, it is asked for when it comes back.
        if instance.served >= instance.serves_until and self._scheduler.take(instance):
            self._scheduler.add(instance)

    def _take(self, seat: Seat, leave_room: Callable[[ModelInstance], bool]) -> bool:
        """Whether an instance that has served long enough is in hand now. The scheduler's lock is held."""
        instance = seat.instance
        if self._hands.is_stopping or not self._recycling.take_turn(instance):
            return False
        if not leave_room(instance):  # sequences in it end first; no other one begins
            return False
        return self._hands.begin(seat, partial(self._recycle, seat), "recycle")

    def _recycle(self, seat: Seat) -> None:
        instance, end_s = seat.instance, time.monotonic() + _OPEN_S
        if not self._scheduler.wait_closed(instance, end_s) or not self._hands.withdraw(
            instance, max(0.0, end_s - time.monotonic())
        ):
            _log.warning(_STAYS_OPEN, instance.name, _OPEN_S)
            self._recycling.postpone(instance)
        elif instance.broken is None and not self._hands.is_stopping:
            self._hands.renew(seat)
            self._recycling.end_turn(instance)
            return
        self._recycling.end_turn(instance)
        self._scheduler.add(instance)
