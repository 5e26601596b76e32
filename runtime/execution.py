"""One batch inside one instance, from the moment it was sent to the moment its requests have outcomes.

Exactly one party drives an execution: the thread of a caller, an event loop, or the reactor. It waits until the
answer can be read and then calls `finish`. An execution is offered to a party with `Waiter.appoint`, and
whoever wins `claim` has it.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

from moonpool.ipc.errors import PeerGone
from moonpool.runtime.errors import RequestTimedOut

if TYPE_CHECKING:
    from moonpool.runtime.backend import ModelInstance, Pending
    from moonpool.runtime.request import InferenceRequest
    from moonpool.runtime.scheduler import Scheduler


class Execution:
    """A batch that was handed to an instance, which will answer later."""

    __slots__ = ("_claims", "instance", "pending", "requests", "scheduler", "sent_ns", "started_ns")

    def __init__(
        self,
        scheduler: Scheduler,
        instance: ModelInstance,
        requests: list[InferenceRequest],
        started_ns: int,
    ) -> None:
        self.scheduler = scheduler
        self.instance = instance
        self.requests = requests
        self.started_ns = started_ns
        self.sent_ns = started_ns
        self.pending: Pending
        self._claims = [self]

    def claim(self) -> bool:
        """Whether the caller is the one that drives it from now on. True once after each `offer`."""
        try:
            self._claims.pop()
        except IndexError:
            return False
        return True

    def offer(self) -> None:
        """Give up a claim: the execution can be claimed by another."""
        self._claims.append(self)

    def drive(self, deadline: float | None) -> None:
        """Wait for the answer on this thread, which has claimed it, and finish.

        At `deadline`, or when a signal handler raises, the reactor takes over and the exception goes on.
        """
        try:
            if deadline is not None:
                self._wait_until(deadline)
            self.pending.wait()
        except PeerGone:
            pass  # `finish` meets it again
        except BaseException:
            self.drive_in_reactor()
            raise
        self.finish()

    def _wait_until(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self.pending.fileno(), select.POLLIN)
        left_s = deadline - time.monotonic()
        # poll counts whole milliseconds; a request is never cut off early.
        if not poll.poll(max(0.0, left_s) * 1000 + 0.999):
            raise RequestTimedOut("Request timeout expired")

    def drive_in_reactor(self) -> None:
        """Let the reactor, for which it is claimed, wait for the answer."""
        self.scheduler.reactor.watch_once(self.pending.fileno(), self.finish)

    def finish(self) -> None:
        """Read the answer, which is there, and give every request its outcome."""
        self.scheduler.finish(self)
