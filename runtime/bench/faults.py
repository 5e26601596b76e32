"""Faults under load: instances that are killed or stopped while a model is measured, and how long it takes to recover.

Theory of operation. `FaultInjector` has one thread, which waits on an event between two faults, and asks the subject for the
processes of its instances. Only that thread writes `outcomes` until it has ended; `close` ends it and waits for it. A subject's
`instance_pids` is called from this thread while windows are measured on another one, so it must not use their connections.

A process may end, and its number be used again, between the list and the signal. So a pidfd is opened first, and the list is
read again: if the number is still in it, the pidfd is that instance's.
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

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.process.threads import start_thread

# How often the instances are looked at while one is expected back.
_LOOK_S = 0.01
# After so long, an instance does not come back.
_GIVE_UP_S = 120.0


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """One fault; `recovered_s` is the time until as many instances as before were ready, None if that did not happen."""

    recovered_s: float | None


class FaultInjector:
    """Sends a signal to one instance of a model every so many seconds. A context manager; `outcomes` is complete at its end."""

    def __init__(
        self, instance_pids: Callable[[], Sequence[int]], every_s: float, number: int
    ) -> None:
        """`instance_pids` returns the processes of the instances that are ready; `number` is SIGKILL or SIGSTOP."""
        self.outcomes: list[FaultOutcome] = []
        self._pids = instance_pids
        self._every_s = every_s
        self._number = number
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
        if kind is not None or self._number == signal.SIGSTOP:
            self._abandon.set()
        self._thread.join()
        # Nothing stays stopped behind us.
        for pidfd in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)
        self._stopped.clear()

    def check(self) -> None:
        """Raise what has kept the thread from its work, if anything has."""
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        try:
            while not self._stop.wait(self._every_s):
                self._harm_one()
        except MoonpoolError as error:
            self._failure = error

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
            signal.pidfd_send_signal(pidfd, self._number)
            if self._number == signal.SIGSTOP:
                self._stopped.append(os.dup(pidfd))
        except ProcessLookupError:
            return
        finally:
            os.close(pidfd)
        begin_s = time.monotonic()
        while time.monotonic() - begin_s < _GIVE_UP_S:
            now = self._pids()
            if pid not in now and len(now) >= len(before):
                self.outcomes.append(FaultOutcome(time.monotonic() - begin_s))
                return
            if self._abandon.wait(_LOOK_S):
                return
        self.outcomes.append(FaultOutcome(None))

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for a result."""
        known = [each.recovered_s for each in self.outcomes if each.recovered_s is not None]
        return {
            "kind": "stopped" if self._number == signal.SIGSTOP else "killed",
            "every_s": self._every_s,
            "count": len(self.outcomes),
            "not_recovered": len(self.outcomes) - len(known),
            "recovered_s": {"median": statistics.median(known), "max": max(known)}
            if known
            else None,
        }
