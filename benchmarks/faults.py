"""Faults under load: instances that are killed or stopped while a model is measured, and how long it takes to recover.

Theory of operation. `FaultInjector` has one thread, which waits on an event between two faults, and asks the subject
for the processes of its instances. Only that thread writes `outcomes` until it has ended; `close` ends it and waits for
it. A subject's `instance_pids` and `answered` are called from this thread while windows are measured on another one, so
they must not use their connections. Only one instance fails at a time: the next fault begins when the last one is over.

A process may end, and its number be used again, between the list and the signal. So a pidfd is opened first, and the
list is read again: if the number is still in it, the pidfd is that instance's.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool import MoonpoolError
from moonpool.runtime.process.threads import start_thread

# How often the instances, or the count of requests, are looked at.
_LOOK_S = 0.02
# After so long, an instance does not come back; and if no requests come any more, after this.
_GIVE_UP_S = 120.0
_GIVE_UP_AFTER_END_S = 30.0


class NoCount(MoonpoolError):
    """A server without statistics cannot be harmed by a share of its requests."""

    code = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of fault, and when it happens: every so many seconds, or for a share of the requests."""

    # "killed", or "stopped" for SIGSTOP.
    kind: str
    every_s: float | None = None
    share: float | None = None
    # How long an instance stays stopped; None until the end of the measurement.
    for_s: float | None = None

    @property
    def signal(self) -> int:
        return signal.SIGKILL if self.kind == "killed" else signal.SIGSTOP


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """One fault; `recovered_s` is the time until as many instances as before were ready, None if that did not
    happen.
    """

    recovered_s: float | None


class FaultInjector:
    """Harms instances of a model while it is measured. A context manager; `outcomes` is complete at its end."""

    def __init__(
        self, fault: Fault, instance_pids: Callable[[], Sequence[int]], answered: Callable[[], int | None]
    ) -> None:
        """Take functions for any thread: the processes of the instances that are ready, and the requests answered so
        far, if known.
        """
        self.outcomes: list[FaultOutcome] = []
        self._fault = fault
        self._pids = instance_pids
        self._answered = answered
        # No more faults; and no more waiting for the last one's instance.
        self._stop, self._abandon = threading.Event(), threading.Event()
        self._stopped: list[int] = []
        self._failure: MoonpoolError | None = None
        self._thread = threading.Thread(target=self._work, name="moonpool-bench-faults")

    def __enter__(self) -> FaultInjector:
        start_thread(self._thread)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._stop.set()
        # A killed instance is waited for, since it comes back without load, too. A stopped one may never do.
        if kind is not None or self._fault.signal == signal.SIGSTOP:
            self._abandon.set()
        self._thread.join()
        # Nothing stays stopped behind us.
        self._continue()

    def check(self) -> None:
        """Raise what has kept the thread from its work, if anything has."""
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            while self._wait():
                self._harm_one()
        except MoonpoolError as error:
            self._failure = error

    def _wait(self) -> bool:
        """Wait for the time of the next fault; return False if there is to be none."""
        fault = self._fault
        if fault.share is None:
            return not self._stop.wait(fault.every_s)
        due = self._count() + 1 / fault.share
        while not self._stop.wait(_LOOK_S):
            if self._count() >= due:
                return True
        return False

    def _count(self) -> int:
        found = self._answered()
        if found is None:
            raise NoCount("the server does not tell how many requests it has answered: give a time")
        return found

    def _continue(self) -> None:
        for pidfd in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)
        self._stopped.clear()

    def _harm_one(self) -> None:
        before = self._pids()
        if not before:
            return
        pid = random.choice(before)
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            if pid not in self._pids():
                return
            signal.pidfd_send_signal(pidfd, self._fault.signal)
            if self._fault.signal == signal.SIGSTOP:
                self._stopped.append(os.dup(pidfd))
        except ProcessLookupError:
            return
        finally:
            os.close(pidfd)
        self._recover(pid, len(before))

    def _recover(self, pid: int, count: int) -> None:
        """Wait until as many instances as before are ready without this one, or until it was continued."""
        begin_s = time.monotonic()
        give_up_s, is_over = begin_s + _GIVE_UP_S, False
        while (now_s := time.monotonic()) < give_up_s:
            if self._stop.is_set() and not is_over:
                is_over, give_up_s = True, min(give_up_s, now_s + _GIVE_UP_AFTER_END_S)
            now = self._pids()
            if pid not in now and len(now) >= count:
                self._continue()
                self.outcomes.append(FaultOutcome(time.monotonic() - begin_s))
                return
            if self._fault.for_s is not None and now_s - begin_s >= self._fault.for_s:
                self._continue()
                # It may have been killed at the same moment; then the next one is waited for.
                if pid in self._pids():
                    self.outcomes.append(FaultOutcome(now_s - begin_s))
                    return
            if self._abandon.wait(_LOOK_S):
                return
        self.outcomes.append(FaultOutcome(None))

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for a result."""
        known = [each.recovered_s for each in self.outcomes if each.recovered_s is not None]
        return {
            "kind": self._fault.kind,
            "every_s": self._fault.every_s,
            "share": self._fault.share,
            "for_s": self._fault.for_s,
            "count": len(self.outcomes),
            "not_recovered": len(self.outcomes) - len(known),
            "recovered_s": {"median": statistics.median(known), "max": max(known)} if known else None,
        }
