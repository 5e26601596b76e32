"""One batch in one instance: who drives it, and what it counts when it ends.

Theory of operation. `schedule.scheduler` explains who drives an execution, and what happens if that party has to go. The scheduler's
lock is held where a docstring says so. An execution knows of its scheduler what `BatchOwner` names.
"""

from __future__ import annotations

import select
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

from moonpool.ipc.errors import MoonpoolError, PeerGone
from moonpool.runtime.errors import BackendError, RequestTimedOut
from moonpool.runtime.model.backend import ModelInstance, Pending
from moonpool.runtime.model.request import Answer, Deferral, InferenceRequest, Response
from moonpool.runtime.observe.metric_families import reason_of
from moonpool.runtime.observe.statistics import Statistics
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.quick import forms, learn

# About what it takes to hand out the outcomes of a large batch.
SLOW_NS = 1_000_000


class BatchOwner(Protocol):
    """The scheduler of a batch. `schedule.scheduler` says what each method is for."""

    reactor: Reactor
    statistics: Statistics
    note: Callable[[BaseException | str, str, str, int], None]

    def executes(self, execution: Execution) -> bool: ...
    def keep_pace(self, execution: Execution) -> None: ...
    def finish(self, execution: Execution, *, interruptible: bool = False) -> None: ...
    def settle(self, execution: Execution, answers: Sequence[Answer]) -> None: ...
    def lose_interrupted(self, execution: Execution) -> None: ...


class Execution:
    """One batch in one instance, from the moment it is sent until all its requests have an answer."""

    __slots__ = (
        "_drivers",
        "answers",
        "has_deferred",
        "has_traces",
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
        scheduler: BatchOwner,
        instance: ModelInstance,
        requests: list[InferenceRequest],
        started_ns: int,
        driver: object = None,
    ) -> None:
        """`driver` sends the batch and is going to drive it. If it is None, the sender appoints a driver."""
        self.scheduler = scheduler
        self.instance = instance
        self.requests = requests
        self.started_ns = started_ns
        self.sent_ns = started_ns
        self.pending: Pending
        self.is_sent = False
        # The instance broke. What it still says of these requests comes too late.
        self.is_lost = False
        self.answers: Sequence[Answer] | None = None
        # True if some of the requests stay open or are scheduled again.
        self.has_deferred = False
        # True if some of the requests are traced.
        self.has_traces = False
        # The first one drives. While the list is empty, anybody may claim the execution.
        self._drivers: list[object] = [driver]

    def take(self, result: object) -> Sequence[Answer] | None:
        """Take in what the backend's `execute` returned. Returns the answers, or None if they are pending."""
        self.sent_ns = time.monotonic_ns()
        if isinstance(result, list):
            return result
        if not hasattr(result, "finish"):
            return [_no_answer(result)] * len(self.requests)
        self.pending = result  # type: ignore[assignment]
        self.is_sent = True
        for request in self.requests:
            # Its caller left or cancelled before the instance had it.
            if (request.left or request.is_cancelled) and not request.fills_place:
                self.instance.backend.cancel(self.instance, request)
        return None

    @property
    def wanted_count(self) -> int:
        """The number of its requests that somebody waits for."""
        return sum(not (request.left or request.fills_place) for request in self.requests)

    @property
    def began_ns(self) -> int | None:
        """The time at which the instance began to execute this batch.

        None while it waits in the stub behind a batch of another process.
        """
        return self.instance.backend.began_ns(self.instance, self.started_ns)

    def began_before(self, time_ns: int) -> bool:
        """Return True if the instance began to execute this batch before that time."""
        began_ns = self.began_ns
        return began_ns is not None and began_ns < time_ns

    # Who drives

    def claim(self, by: object) -> bool:
        """Make `by` the driver. Returns True once after each `offer`.

        Two threads must not claim for the same `by` at the same time.
        """
        drivers = self._drivers
        if drivers:
            return False
        drivers.append(by)
        return drivers[0] is by

    @property
    def is_offered(self) -> bool:
        """True while the execution can be claimed."""
        return not self._drivers

    def offer(self) -> None:
        """Give the execution up, for another one to claim. For its driver."""
        self._drivers = []

    def appoint(self) -> None:
        """Offer the execution to the callers of its requests. If none takes it, the reactor drives. For its driver."""
        self.offer()
        for request in self.requests:
            if request.waiter.appoint(self):
                return
        if self.claim(self.scheduler):
            self.drive_in_reactor()

    def reserve(self, by: object) -> None:
        """Make `by` the driver of an execution that was never offered."""
        self._drivers = [by]

    def abandon(self, by: object) -> None:
        """Go on without `by`, which may have been interrupted at any point of sending, waiting or reading.

        This is the one place where an execution is taken over whose driver was interrupted. Calling it twice does no harm.
        """
        drivers = self._drivers
        # If the reactor drives, it may not know: `drive_in_reactor` names it first.
        if not (drivers and drivers[0] in (by, self.scheduler.reactor)) and not self.claim(by):
            return
        if self.is_lost:
            self.scheduler.lose_interrupted(self)
            return
        if not self.is_sent:
            error = BackendError("the thread that was about to send the request was interrupted")
            self.answers = [error] * len(self.requests)
        self.drive_in_reactor()

    def drive(self, deadline: float | None, *, interruptible: bool) -> None:
        """Wait for the answer on this thread, which has claimed the execution, and finish it.

        `interruptible` says that signal handlers run on this thread. At `deadline`, or when a signal handler raises,
        the reactor takes over, and the exception goes on.
        """
        if interruptible and forms is None:
            # This thread would have to leave the answer to the reactor all the same.
            self.drive_in_reactor()
            return
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
        while True:
            left_s = deadline - time.monotonic()
            # poll counts whole milliseconds; a request is never cut off early.
            if not poll.poll(max(0.0, left_s) * 1000 + 0.999):
                raise RequestTimedOut("Request timeout expired")
            if self.is_ready():
                return

    def is_ready(self) -> bool:
        """Return True if the answer can be read, when the descriptor was readable.

        That of a stub may be so for nothing.
        """
        is_ready: Callable[[], bool] | None = getattr(self.pending, "is_ready", None)
        return is_ready is None or is_ready()

    def drive_in_reactor(self) -> None:
        """Let the reactor go on with it: wait for the answer, or hand out what was read. For the driver; calling it twice does no harm."""
        reactor = self.scheduler.reactor
        self._drivers = [reactor]
        if reactor.is_here and self.answers is None and not self.pending.is_received():
            if self.scheduler.executes(self):
                reactor.arm(self.pending.fileno(), self.finish)
        else:
            reactor.call_soon(self._go_on_in_reactor)

    def _go_on_in_reactor(self) -> None:
        if not self.scheduler.executes(self):
            return
        if self.answers is not None:
            self.scheduler.settle(self, self.answers)
        elif self.pending.is_received():
            self.finish()
        else:
            self.scheduler.reactor.watch_once(self.pending.fileno(), self.finish)

    def finish(self) -> None:
        """Read the answer, which has arrived, and give every request its outcome. For the driver.

        If the descriptor was readable for nothing, the reactor goes on waiting.
        """
        if self.is_ready():
            self.scheduler.finish(self)
        else:
            self.scheduler.reactor.watch_once(self.pending.fileno(), self.finish)

    # Its end

    def was_slow(self, now_ns: int) -> bool:
        """Return True if the instance gets its next batch before anything else is done.

        A quick instance is woken last. Where there are few processors, it would take this one, while callers wait for
        outcomes that they could have already; and they may be back in time for the next batch.
        """
        return now_ns - self.sent_ns > SLOW_NS

    def record(self, answers: Sequence[Answer], answered_ns: int, now_ns: int) -> Sequence[Answer]:
        """Count the batch in the statistics. Returns the answers, with an error in place of each invalid one.

        As in Triton, requests that the batch leaves open succeeded in execute. Needs the scheduler's lock.
        """
        requests, statistics = self.requests, self.scheduler.statistics
        self._add_durations(answered_ns, now_ns)
        if len(requests) == 1 == len(answers) and type(answers[0]) is Response:
            request = requests[0]
            if request.trace is None and not request.fills_place:
                self.instance.served += 1
                rows, queued_ns = request.batch_size, request.queued_ns
                statistics.record_alone(
                    rows, queued_ns, self.started_ns, self.sent_ns, answered_ns, now_ns
                )
                return answers
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
                self.has_traces = True
                request.trace.executed(
                    answer, request.queued_ns, self.started_ns, self.sent_ns, answered_ns, now_ns
                )
            if request.fills_place:
                filled += 1
                self.has_deferred = self.has_deferred or isinstance(answer, Deferral)
            elif isinstance(answer, _GOOD):
                good += 1
                rows += request.batch_size
                taken_ns = now_ns - request.queued_ns
                success_ns += taken_ns
                queue_ns += self.started_ns - request.queued_ns
                by_duration[bisect_left(statistics.bounds_ns, taken_ns)] += 1
                if summaries is not None:
                    summaries.request.add(taken_ns)
                    summaries.queue.add(self.started_ns - request.queued_ns)
                if not isinstance(answer, Response):
                    self.has_deferred = True
            else:
                bad = True
        self.instance.served += len(requests) - filled
        input_ns, output_ns = self.sent_ns - self.started_ns, now_ns - answered_ns
        infer_ns = answered_ns - self.sent_ns
        statistics.record_batch(
            now_ms, total_rows, good, rows, success_ns, queue_ns, input_ns, infer_ns, output_ns
        )
        if bad:
            given: Sequence[object] = answers
            answers = [each if isinstance(each, _ANSWERS) else _no_answer(each) for each in given]
            self._record_failures(answers, now_ms, now_ns)
        return answers

    def _add_durations(self, answered_ns: int, now_ns: int) -> None:
        """Add the durations of the batch to those of each request that sums them up."""
        for request in self.requests:
            sums = request.durations_ns
            if sums is not None:
                sums[0] += self.sent_ns - self.started_ns
                sums[1] += answered_ns - self.sent_ns
                sums[2] += now_ns - answered_ns

    def trace_answers(self) -> None:
        """Add the answers to the requests' traces. This may take long, so no lock may be held."""
        for request in self.requests:
            if request.trace is not None:
                request.trace.answered()

    def end_traces(self) -> None:
        """End the model's part of the requests' traces. This may write a file, so no lock may be held."""
        for request in self.requests:
            if request.trace is not None:
                request.trace.settled()

    def _record_failures(self, answers: Sequence[Answer], now_ms: int, now_ns: int) -> None:
        scheduler = self.scheduler
        for request, answer in zip(self.requests, answers, strict=True):
            if isinstance(answer, BaseException) and not request.fills_place:
                fail_ns = now_ns - request.queued_ns
                scheduler.statistics.record_failures(now_ms, 1, fail_ns, reason_of(answer))
                if not request.left:
                    scheduler.note(answer, self.instance.name, request.request_id, 1)


_GOOD = (Response, Deferral)
_ANSWERS = (*_GOOD, BaseException)


def _no_answer(answer: object) -> MoonpoolError:
    return BackendError(
        f"the backend answered with {type(answer).__name__}; it must return a Pending, or a list "
        "with a Response or an exception for each request"
    )


learn(Execution)
