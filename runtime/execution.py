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
from moonpool.runtime.errors import BackendError, RequestTimedOut
from moonpool.runtime.request import Response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.ipc.errors import MoonpoolError
    from moonpool.runtime.backend import ModelInstance, Pending
    from moonpool.runtime.request import InferenceRequest, Outcome
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
        # Nobody's to drive before there is an answer to wait for.
        self._claims: list[Execution] = []

    def take(self, result: object) -> Sequence[Outcome] | None:
        """What the backend's execute returned: the outcomes, or None where they are pending now."""
        if isinstance(result, list):
            return result
        if hasattr(result, "finish"):
            self.pending = result  # type: ignore[assignment]
            return None
        return [_no_answer(result)] * len(self.requests)

    def claim(self) -> bool:
        """Whether the caller is the one that drives it from now on. True once after each `offer`."""
        try:
            self._claims.pop()
        except IndexError:
            return False
        return True

    @property
    def is_offered(self) -> bool:
        """Whether it could be claimed at this moment."""
        return bool(self._claims)

    def offer(self) -> None:
        """Whoever has it gives it up: the execution can be claimed by another."""
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
        if self.pending.is_received():
            self.scheduler.reactor.call_soon(self.finish)
        else:
            self.scheduler.reactor.watch_once(self.pending.fileno(), self.finish)

    def finish(self) -> None:
        """Read the answer, which is there, and give every request its outcome."""
        self.scheduler.finish(self)

    def record(
        self, outcomes: Sequence[Outcome], answered_ns: int, now_ns: int
    ) -> Sequence[Outcome]:
        """Count a batch; returns its outcomes, with an error for each that is none."""
        requests, statistics = self.requests, self.scheduler.statistics
        now_ms = time.time_ns() // 1_000_000
        good = rows = total_rows = success_ns = queue_ns = fail_ns = 0
        for request, outcome in zip(requests, outcomes, strict=True):
            total_rows += request.batch_size
            if isinstance(outcome, Response):
                good += 1
                rows += request.batch_size
                success_ns += now_ns - request.queued_ns
                queue_ns += self.started_ns - request.queued_ns
            else:
                fail_ns += now_ns - request.queued_ns
        sent_ns = self.sent_ns
        statistics.record_batch(
            now_ms,
            total_rows,
            good,
            rows,
            success_ns,
            queue_ns,
            sent_ns - self.started_ns,
            answered_ns - sent_ns,
            now_ns - answered_ns,
        )
        if good < len(requests):
            statistics.record_failures(now_ms, len(requests) - good, fail_ns)
            given: Sequence[object] = outcomes
            return [each if isinstance(each, _OUTCOMES) else _no_answer(each) for each in given]
        return outcomes


_OUTCOMES = (Response, BaseException)


def _no_answer(answer: object) -> MoonpoolError:
    return BackendError(
        f"the backend answered with {type(answer).__name__}; it must return a Pending, or a list "
        "with a Response or an exception for each request"
    )


def broken(instance: ModelInstance, error: Exception) -> MoonpoolError:
    """What callers get where a backend raised something else than moonpool's errors."""
    wrapped = BackendError(f"executing in {instance.name} failed: {error!r}")
    wrapped.__cause__ = error
    return wrapped
