"""Harms stubs at random times: kills, stops and starves them, and sends them nonsense."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.chaos.figures import STUB, children_of, command
from tests.waiting import Deadline

# On average. On a busy machine a stub that was killed takes longer than this until it serves again.
BETWEEN_HARMS_S = 0.15


class Victim(NamedTuple):
    """A stub under harm. The pidfd refers to it even if its number was given to another process. `relieve` ends the
    harm.
    """

    pid: int
    pidfd: int

    def tell(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)


class Monkey:
    """Harms the stubs of process `pid`. No stub stays stopped or starved."""

    def __init__(
        self,
        pid: int,
        dice: random.Random,
        feed: Callable[[random.Random], bool] | None = None,
        spared: frozenset[int] = frozenset(),
    ) -> None:
        """`feed` sends a stub a malformed message, and returns False if there was no stub.

        `spared` are stubs of that process that belong to other tests.
        """
        self._pid, self._dice, self._feed = pid, dice, feed
        self._spared = spared
        # The stubs that are stopped or starved, each with the time and the way to relieve it.
        self._later: list[tuple[float, Callable[[], None], Victim]] = []
        self.harms: Counter[str] = Counter()

    def harm_for(self, seconds: float) -> None:
        """Do harm for so many seconds."""
        deadline = Deadline(seconds)
        never = threading.Event()
        try:
            while not deadline.is_over:
                pause_s = self._dice.expovariate(1 / BETWEEN_HARMS_S)
                never.wait(min(pause_s, deadline.remaining_s))
                self._relieve(time.monotonic())
                self._harm()
        finally:
            self._relieve(float("inf"))

    def _harm(self) -> None:
        harms: list[tuple[float, str, Callable[[Victim], None]]] = [
            (5, "killed", lambda victim: victim.tell(signal.SIGKILL)),
            (1, "crashed", lambda victim: victim.tell(signal.SIGSEGV)),
            (1, "told to end", lambda victim: victim.tell(signal.SIGTERM)),
            (4, "stopped", self._stop_it),
            (4, "starved", self._starve),
            (4, "fed", self._feed_it),
        ]
        ((_, name, harm),) = self._dice.choices(harms, [weight for weight, _, _ in harms])
        victim = self._choose()
        if victim is None:
            return
        harm(victim)
        self.harms[name] += 1
        if all(victim is not each for _, _, each in self._later):
            os.close(victim.pidfd)

    def _choose(self) -> Victim | None:
        children = set(children_of(self._pid)) - self._spared
        stubs = [pid for pid in children if STUB in command(pid)]
        if not stubs:
            return None
        pid = self._dice.choice(sorted(stubs))
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            # The process may have ended, and its number may belong to another one.
            if pid in children_of(self._pid):
                return Victim(pid, pidfd)
            os.close(pidfd)
        return None

    def _stop_it(self, victim: Victim) -> None:
        victim.tell(signal.SIGSTOP)
        until_s = time.monotonic() + self._dice.choice((0.005, 0.05, 0.3, 3.0)) * self._dice.random()
        self._later.append((until_s, lambda: victim.tell(signal.SIGCONT), victim))

    def _starve(self, victim: Victim) -> None:
        """Limit a stub to little more address space than it has; do nothing if the kernel refuses that."""
        with contextlib.suppress(OSError, ValueError):
            pages = int(Path(f"/proc/{victim.pid}/statm").read_text().split()[0])
            size = pages * resource.getpagesize() + self._dice.randrange(1 << 22)
            before = resource.prlimit(victim.pid, resource.RLIMIT_AS)
            resource.prlimit(victim.pid, resource.RLIMIT_AS, (size, before[1]))

            def feed() -> None:
                with contextlib.suppress(ProcessLookupError):
                    # This raises if the process is gone, because its number may belong to another one.
                    signal.pidfd_send_signal(victim.pidfd, 0)
                    try:
                        resource.prlimit(victim.pid, resource.RLIMIT_AS, before)
                    except PermissionError:  # the process has changed its user since
                        victim.tell(signal.SIGKILL)

            self._later.append((time.monotonic() + self._dice.random(), feed, victim))

    def _feed_it(self, victim: Victim) -> None:
        if self._feed is None or not self._feed(self._dice):
            victim.tell(signal.SIGKILL)

    def _relieve(self, now_s: float) -> None:
        due = [each for each in self._later if each[0] <= now_s]
        self._later = [each for each in self._later if each[0] > now_s]
        for _, relieve, victim in due:
            relieve()
            os.close(victim.pidfd)
