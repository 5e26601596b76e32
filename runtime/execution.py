"""One batch inside one instance, from the moment it was sent to the moment its requests have outcomes.

Exactly one party drives an execution: the thread of a caller, an event loop, or the reactor. It waits until the
answer can be read and then calls `finish`. An execution is offered to a party with `Waiter.appoint`, and
whoever wins `claim` has it.

A signal handler may raise anywhere in the main thread. Then what that thread drove must neither be lost nor be
driven by two, so at every moment it stands written who drives (`_drivers`) and how far it is: not sent,
sent, answered (`answers`). `abandon` goes on from there.
"""

from __future__ import annotations

import select
import time
from bisect import bisect_left
from typing import TYPE_CHECKING

from moonpool.ipc.errors import PeerGone
from moonpool.runtime.errors import BackendError, RequestTimedOut
from moonpool.runtime.model_metrics import reason_of
from moonpool.runtime.request import Deferral, Response
from moonpool.runtime.statistics import DURATION_BOUNDS_NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.ipc.errors import MoonpoolError
    from moonpool.runtime.backend import ModelInstance, Pending
    from moonpool.runtime.request import Answer, InferenceRequest, RequestTrace
    from moonpool.runtime.scheduler import Scheduler


# About what it takes to hand out the outcomes of a large batch.
_SLOW_NS = 1_000_000


class Execution:
    """A batch that was handed to an instance, which will answer later."""

    __slots__ = (
        "_drivers",
        "answers",
        "has_deferred",
        "instance",
        "is_lost",
        "is_sent",
        "pending",
        "requests",
        "scheduler",
        "sent_ns",
        "started_ns",
    )

    def __init__(
        self,
        scheduler: Scheduler,
        instance: ModelInstance,
        requests: list[InferenceRequest],
        started_ns: int,
        driver: object = None,
    ) -> None:
        """`driver` is whoever sends it, if that one is to drive it, too."""
        self.scheduler = scheduler
        self.instance = instance
        self.requests = requests
        self.started_ns = started_ns
        self.sent_ns = started_ns
        self.pending: Pending
        self.is_sent = False
        # Its instance broke: what the instance still says of its requests comes too late.
        self.is_lost = False
        self.answers: Sequence[Answer] | None = None
        # Whether some of its requests have no outcome yet.
        self.has_deferred = False
        # Who drives is the first of them; where there is none it may be claimed.
        self._drivers: list[object] = [driver]

    def take(self, result: object) -> Sequence[Answer] | None:
        """What the backend's execute returned: the answers, or None where they are pending now."""
        self.sent_ns = time.monotonic_ns()
        if isinstance(result, list):
            return result
        if hasattr(result, "finish"):
            self.pending = result  # type: ignore[assignment]
            self.is_sent = True
            self._cancel_left()
            return None
        return [_no_answer(result)] * len(self.requests)

    def _cancel_left(self) -> None:
        """Cancel requests whose askers left or cancelled before the instance had them."""
        for request in self.requests:
            if (request.left or request.is_cancelled) and not request.fills_place:
                self.instance.backend.cancel(self.instance, request)

    def began_before(self, time_ns: int) -> bool:
        """Whether the instance came to this batch before that time, and not only the batch to the instance."""
        began_ns = self.instance.backend.began_ns(self.instance, self.started_ns)
        return began_ns is not None and began_ns < time_ns

    def claim(self, by: object) -> bool:
        """Whether `by` drives it from now on. True once after each `offer`.

        Two threads must not claim for the same `by` at the same time.
        """
        drivers = self._drivers
        if drivers:
            return False
        drivers.append(by)
        return drivers[0] is by

    @property
    def is_offered(self) -> bool:
        """Whether it could be claimed at this moment."""
        return not self._drivers

    def offer(self) -> None:
        """Whoever has it gives it up: the execution can be claimed by another."""
        self._drivers = []

    def appoint(self) -> None:
        """Whoever has it offers it to the callers of its requests; where none takes it, the reactor drives."""
        self.offer()
        for request in self.requests:
            if request.waiter.appoint(self):
                return
        if self.claim(self.scheduler):
            self.drive_in_reactor()

    def reserve(self, by: object) -> None:
        """Whoever has it, as it was never offered, gives it to `by`."""
        self._drivers = [by]

    def abandon(self, by: object) -> None:
        """`by`, who may have been interrupted anywhere, drives no longer; it goes on without."""
        drivers = self._drivers
        if not (drivers and drivers[0] is by) and not self.claim(by):
            return
        answers = self.answers
        if not self.is_sent:
            error = BackendError("whoever was about to send the request was interrupted")
            answers = [error] * len(self.requests)
        if answers is None:
            self.drive_in_reactor()
        else:
            self.scheduler.reactor.call_soon(lambda: self.scheduler.settle(self, answers))

    def drive(self, deadline: float | None, *, interruptible: bool) -> None:
        """Wait for the answer on this thread, which has claimed it, and finish.

        `interruptible` says that signal handlers run on this thread. At `deadline`, or when a signal handler raises, the reactor takes over and the exception goes on.
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
        self.scheduler.finish(self, interruptible=interruptible)

    def _wait_until(self, deadline: float) -> None:
        poll = select.poll()
        poll.register(self.pending.fileno(), select.POLLIN)
        left_s = deadline - time.monotonic()
        # poll counts whole milliseconds; a request is never cut off early.
        if not poll.poll(max(0.0, left_s) * 1000 + 0.999):
            raise RequestTimedOut("Request timeout expired")

    def drive_in_reactor(self) -> None:
        """Let the reactor, for which it is claimed, wait for the answer. Twice is as good as once."""
        reactor = self.scheduler.reactor
        self._drivers = [reactor]
        if reactor.is_here and not self.pending.is_received():
            self._wait_in_reactor()
        else:
            reactor.call_soon(self._wait_in_reactor)

    def _wait_in_reactor(self) -> None:
        if self.scheduler.executes(self):
            if self.pending.is_received():
                self.finish()
            else:
                self.scheduler.reactor.watch_once(self.pending.fileno(), self.finish)

    def finish(self) -> None:
        """Read the answer, which is there, and give every request its outcome."""
        self.scheduler.finish(self)

    def was_slow(self, now_ns: int) -> bool:
        """Whether its instance should have the next batch before anything else is done.

        One that is quick is woken last: where there are few processors, it would take this one, while callers
        wait for what they could have already; and they may be back for the next batch.
        """
        return now_ns - self.sent_ns > _SLOW_NS

    def record(self, answers: Sequence[Answer], answered_ns: int, now_ns: int) -> Sequence[Answer]:
        """Count a batch; returns its answers, with an error for each that is none.

        Requests that are answered later count as Triton counts them: they succeeded in execute.
        """
        requests, statistics = self.requests, self.scheduler.statistics
        if len(answers) != len(requests):
            error = BackendError(f"{len(answers)} responses to {len(requests)} requests")
            answers = [error] * len(requests)
        by_duration, summaries = statistics.by_duration, statistics.summaries
        now_ms = time.time_ns() // 1_000_000
        good = rows = total_rows = success_ns = queue_ns = filled = 0
        bad = False
        for request, answer in zip(requests, answers, strict=True):
            total_rows += request.batch_size
            if request.trace is not None:
                self._tell(request.trace, request, answer, answered_ns, now_ns)
            if request.fills_place:
                filled += 1
                self.has_deferred = self.has_deferred or isinstance(answer, Deferral)
            elif isinstance(answer, (Response, Deferral)):
                good += 1
                rows += request.batch_size
                taken_ns = now_ns - request.queued_ns
                success_ns += taken_ns
                queue_ns += self.started_ns - request.queued_ns
                by_duration[bisect_left(DURATION_BOUNDS_NS, taken_ns)] += 1
                if summaries is not None:
                    summaries.request.add(taken_ns)
                    summaries.queue.add(self.started_ns - request.queued_ns)
                if not isinstance(answer, Response):
                    self.has_deferred = True
            else:
                bad = True
        self.instance.served += len(requests) - filled
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
        if bad:
            given: Sequence[object] = answers
            answers = [each if isinstance(each, _ANSWERS) else _no_answer(each) for each in given]
            self._record_failures(answers, now_ms, now_ns)
        return answers

    def _tell(
        self,
        trace: RequestTrace,
        request: InferenceRequest,
        answer: Answer,
        answered_ns: int,
        now_ns: int,
    ) -> None:
        trace.executed(
            answer, request.queued_ns, self.started_ns, self.sent_ns, answered_ns, now_ns
        )

    def _record_failures(self, answers: Sequence[Answer], now_ms: int, now_ns: int) -> None:
        outcomes = self.scheduler.outcomes
        for request, answer in zip(self.requests, answers, strict=True):
            if isinstance(answer, BaseException) and not request.fills_place:
                fail_ns = now_ns - request.queued_ns
                outcomes.statistics.record_failures(now_ms, 1, fail_ns, reason_of(answer))
                if not request.left:
                    outcomes.note(answer, self.instance.name, request.request_id, 1)


_ANSWERS = (Response, BaseException, Deferral)


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
