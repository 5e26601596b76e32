"""The scheduler of one model version: requests wait, form batches, execute in instances, and get their outcomes.

Theory of operation.

One lock, `_lock`, guards everything that a `Scheduler` holds: the queue, the instances, the executions, the requests
that are open, the order of outcomes, and the statistics, except those of single responses, which only the reactor
counts. It is held for bookkeeping only. Sending a batch, reading an answer and handing out outcomes happen without it,
as they call backends and callers. `on_lost`, `ModelInstance.recycle` and `note` may be called with the lock held, so they
must not block and must not call the scheduler. The first two take the supervisor's locks, which are therefore taken inside
this one and never the other way round. Traced requests get the times of their batch there, too. `settled` ends the model's part
of their traces, which may write a file, so it follows without the lock.

*Instances.* An instance is in one place at a time. It is idle (`_idle`; the last one was busy last and has warm
caches), or in the hands of somebody who called `take` (`_taken`), or it executes (`_busy`), or the scheduler does not
have it, because it starts, broke or left. After a change that may let a batch go (a request or an instance comes, a sequence
goes on) a thread asks the queue for batches (`_form`): the same thread, or the reactor if that thread must not. If the queue keeps requests back for a larger batch, it
names a time, and the reactor looks again at that time.

Most requests find an idle instance, or wait behind others that all instances are busy with, and get one plain response. They must not pay
for what is seldom. So a request that may go at once is not queued; the queue is not asked while it could only say that
nothing goes (`RequestQueue.may_form`), which also spares the reactor a wake-up for each request of an interruptible thread; and
a batch of one request is counted in one step (`Statistics.record_alone`).

*Who drives an execution.* An `Execution` is one batch, from the moment it is sent until its requests have outcomes. One
party at a time drives it: it waits until the answer can be read, and then calls `finish`, for all callers in the
batch. That party is a thread that waits for an outcome anyway, an event loop, or the reactor
(docs/decisions/0003). The caller whose `submit` sent the batch gets it as the driver. For any other batch, `appoint`
offers it to the callers in it, in turn, and to the reactor if none of them takes it. A party that takes an offer has
to `claim` it, and only one claim after each `offer` succeeds. A thread claims before it waits. An event loop claims
when the answer can be read, since a loop may stop for good at any time; the supervisor looks every few seconds and gives
the reactor what nobody has claimed for a second (`Supervisor.rescue`). A driver that has to go (its time is over, its task is cancelled) gives the execution to the
reactor. `claim` needs no lock: an append to a list is atomic, and the party that is first in the list has won.

*Signals.* Python runs signal handlers on the main thread, between any two instructions, and a handler may raise. A
request of that thread must then be neither lost nor driven twice, and requests of others must not notice. So:

- the execution itself says who drives it (`_drivers`) and how far it is (`is_sent`, `answers`), and `abandon` goes on
  from there when the interrupted caller leaves;
- an instance enters its next place before it leaves the last one. `submit`, for an idle instance, and `settle` may be
  interrupted in between. The instance is then in two places, and `settle`, which the reactor runs for the caller that
  left, expects that. An instance in no place would be lost for ever;
- an interruptible thread does nothing for others. If a batch would have to be formed, or has requests of others,
  the reactor does that work.

*Lost answers.* If an instance breaks, or a signal handler raises while its answer is being read, nobody knows what the
stub did, and the instance counts as lost (`_lose`). Responses that come for that batch afterwards are ignored
(`is_lost`). The supervisor learns of the loss before the execution leaves `_busy`: an unload that waits for the
instance to be idle must find the recovery. Requests that did not reach the instance are queued again, others are the
supervisor's to fail or to retry.

*Open requests.* A model may answer a request apart from its batch. Those responses arrive on another channel, so the last
one can come before the answer to the batch. `OpenRequests` knows both orders and counts a request once.

*Order of closing.* `refuse` ends what comes in, `wait_empty` waits for what is here, and `drop` fails what is left when
the time is over. The instances stop after that, and a last `drop` fails what was queued again in between.
"""

from __future__ import annotations

import select
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

from moonpool.ipc.errors import MoonpoolError, PeerGone, RemoteProtocolError
from moonpool.ipc.messages import AGAIN as _AGAIN
from moonpool.runtime.errors import (
    BackendError,
    InvalidRequest,
    ModelUnavailable,
    RequestTimedOut,
    own,
)
from moonpool.runtime.model.backend import Model, ModelInstance, Pending
from moonpool.runtime.model.request import (
    AGAIN,
    LATER,
    Answer,
    Deferral,
    InferenceRequest,
    Outcome,
    Response,
)
from moonpool.runtime.observe.metric_families import reason_of
from moonpool.runtime.observe.statistics import (
    DURATION_BOUNDS_NS,
    Counts,
    Statistics,
    add_counts,
    take_counts,
)
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.schedule.ordering import Departures
from moonpool.runtime.schedule.request_queue import OpenRequests, Rejected, queue_for

Pair = tuple[InferenceRequest, Outcome | None]
# Gets the error, the names of instance and request, and the number of requests that ended with it.
Note = Callable[[BaseException | str, str, str, int], None]

# About what it takes to hand out the outcomes of a large batch.
_SLOW_NS = 1_000_000
_LEFT = ModelUnavailable("the caller left")


class CountingCondition:
    """A condition that counts who waits. Usually nobody does, and then `notify_all` costs nothing."""

    def __init__(self, lock: threading.Lock) -> None:
        self._condition = threading.Condition(lock)
        # The number of threads that wait.
        self.waiting = 0

    def notify_all(self) -> None:
        """Wake all who wait. Needs the lock."""
        if self.waiting:
            self._condition.notify_all()

    def wait_for(self, condition: Callable[[], bool], deadline: float | None) -> bool:
        """Wait until `condition`, which is called with the lock held. Returns False at the deadline."""
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with self._condition:
            self.waiting += 1
            try:
                return self._condition.wait_for(condition, timeout_s)
            finally:
                self.waiting -= 1


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
        scheduler: Scheduler,
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

    def began_before(self, time_ns: int) -> bool:
        """Return True if the instance began to execute this batch before that time.

        A batch that was sent by then may still wait in the stub behind a batch of another process.
        """
        began_ns = self.instance.backend.began_ns(self.instance, self.started_ns)
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
        """Go on without `by`, which may have been interrupted at any point of sending, waiting or reading."""
        drivers = self._drivers
        if not (drivers and drivers[0] is by) and not self.claim(by):
            return
        answers = self.answers
        if not self.is_sent:
            error = BackendError("the thread that was about to send the request was interrupted")
            answers = [error] * len(self.requests)
        if answers is None:
            self.drive_in_reactor()
        else:
            self.scheduler.reactor.call_soon(lambda: self.scheduler.settle(self, answers))

    def drive(self, deadline: float | None, *, interruptible: bool) -> None:
        """Wait for the answer on this thread, which has claimed the execution, and finish it.

        `interruptible` says that signal handlers run on this thread. At `deadline`, or when a signal handler raises,
        the reactor takes over, and the exception goes on.
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
        """Let the reactor wait for the answer. For the driver; calling it twice does no harm."""
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
        """Read the answer, which has arrived, and give every request its outcome. For the driver."""
        self.scheduler.finish(self)

    # Its end

    def was_slow(self, now_ns: int) -> bool:
        """Return True if the instance gets its next batch before anything else is done.

        A quick instance is woken last. Where there are few processors, it would take this one, while callers wait for
        outcomes that they could have already; and they may be back in time for the next batch.
        """
        return now_ns - self.sent_ns > _SLOW_NS

    def record(self, answers: Sequence[Answer], answered_ns: int, now_ns: int) -> Sequence[Answer]:
        """Count the batch in the statistics. Returns the answers, with an error in place of each invalid one.

        As in Triton, requests that the batch leaves open succeeded in execute. Needs the scheduler's lock.
        """
        requests, statistics = self.requests, self.scheduler.statistics
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
                by_duration[bisect_left(DURATION_BOUNDS_NS, taken_ns)] += 1
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

    def end_traces(self) -> None:
        """End the model's part of the requests' traces. This may write a file, so no lock may be held."""
        if self.has_traces:
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


def _broken(instance: ModelInstance, error: Exception) -> MoonpoolError:
    """Return what callers get if a backend raised something else than moonpool's errors."""
    wrapped = BackendError(f"executing in {instance.name} failed: {error!r}")
    wrapped.__cause__ = error
    return wrapped


def _nobody_listens(*_: object) -> None:
    """Stand in for `Scheduler.note` until somebody sets it."""


def _resolve(request: InferenceRequest, outcome: Outcome | None) -> None:
    if not request.left:
        request.waiter.resolve(outcome)


class Scheduler:
    """Holds the queue of one model version, forms batches, and gives them to idle instances.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        model: Model,
        reactor: Reactor,
        executor: Executor,
        on_lost: Callable[[ModelInstance, list[InferenceRequest], BaseException], None],
    ) -> None:
        """`on_lost` gets instances that broke, and the requests in them. It must not block, and must not call the scheduler."""
        config = model.config
        batching = config.dynamic_batching or config.sequence_batching
        self._name, self._decoupled = config.name, config.decoupled
        self.reactor = reactor
        self._executor, self._on_lost = executor, on_lost
        self._lock = threading.Lock()
        self._changed = CountingCondition(self._lock)
        self._queue = queue_for(config)
        self.statistics = Statistics(model.name, str(model.version))
        # Gets every request that ends with an error while its caller waits for it.
        self.note: Note = _nobody_listens
        self.open_requests = OpenRequests()
        self._departures: Departures[InferenceRequest, Outcome | None] = Departures(
            in_order=batching is not None and batching.preserve_ordering
        )
        self._idle: list[ModelInstance] = []
        self._taken: set[ModelInstance] = set()
        self._busy: dict[ModelInstance, Execution] = {}
        self._refusal: MoonpoolError | None = ModelUnavailable(
            f"Request for model '{model.name}' which is loading"
        )
        self._wake_at_ns: int | None = None

    # Requests

    def submit(self, request: InferenceRequest) -> Execution | None:
        """Take a request in. Returns an execution, claimed, that the caller should drive, if there is one.

        Raises `QueueFull`, `ModelUnavailable`, and `InvalidRequest` if the model is decoupled and the caller takes one
        response only.
        """
        if self._decoupled and not request.waiter.takes_many:
            raise InvalidRequest(
                f"model '{self._name}' is decoupled: it may give any number of responses, so they "
                "have to be taken from a stream"
            )
        waiter, idle, queue = request.waiter, self._idle, self._queue
        execution = None
        with self._lock:
            if self._refusal is not None:
                raise own(self._refusal)
            request.queued_ns = now_ns = time.monotonic_ns()
            # If another thread has to send the batch, an interrupted caller could not take it back. The queue can.
            if idle and queue.lets_past(request) and (waiter.may_block or not idle[-1].blocks):
                # In this order a thread that is interrupted in between leaves the instance in two places, and not in none.
                execution = self._start(idle[-1], [request], now_ns, waiter)
                idle.pop()
            else:
                queue.add(request, now_ns)
                if not queue.may_form(idle):
                    return None
                if waiter.interruptible:
                    # A batch of other callers must not be in the hands of a thread that may be stopped anywhere.
                    self.reactor.call_soon(self._look)
                    return None
                started, rejected = self._form(now_ns)
        if execution is None:
            return self._launch(started, rejected, request)
        return execution if self._send(execution, request) else None

    def leave(self, request: InferenceRequest) -> None:
        """Cancel a request for the thread that waited, wherever a signal handler raised in it."""
        for execution in self.cancel(request):
            execution.abandon(request.waiter)

    def cancel(self, request: InferenceRequest) -> list[Execution]:
        """Drop a queued request, or ignore the outcome of an executing one. Returns the executions that have it."""
        with self._lock:
            request.left = True
            now_ns = time.monotonic_ns()
            was_queued = self._queue.remove(request, now_ns)
            resolved: Iterable[Pair] = ()
            if was_queued:
                now_ms, fail_ns = time.time_ns() // 1_000_000, now_ns - request.queued_ns
                self.statistics.record_failures(now_ms, 1, fail_ns, "CANCELED")
                resolved = self._departures.done([request], [_LEFT])
            inside, instance = self._find(request)
            self._changed.notify_all()
        self._hand_out(resolved)
        if instance is not None:
            instance.backend.cancel(instance, request)
        if was_queued and self._queue.keeps_sequences:
            self.reactor.call_soon(self._look)
        return inside

    def tell_cancelled(self, request: InferenceRequest) -> None:
        """Set the flag that lets the model stop, now or when it gets the request. Responses are still received."""
        with self._lock:
            request.is_cancelled = True
            _, instance = self._find(request)
        if instance is not None:
            instance.backend.cancel(instance, request)

    def _find(self, request: InferenceRequest) -> tuple[list[Execution], ModelInstance | None]:
        """Return the executions that have a request, and the instance that is to answer it. Needs the lock."""
        inside = [each for each in self._busy.values() if request in each.requests]
        return inside, inside[0].instance if inside else self.open_requests.instance_of(request)

    # Batches

    def _form(self, now_ns: int) -> tuple[list[Execution], Rejected]:
        """Start what the queue wants to start now; the caller launches it. Needs the lock."""
        if not self._queue.may_form(self._idle):
            return [], []
        batches, rejected, wake_at_ns = self._queue.form(now_ns, self._idle)
        # If the reactor looks earlier anyway, it finds out then when to look again.
        if wake_at_ns is not None and wake_at_ns < (self._wake_at_ns or wake_at_ns + 1):
            self._wake_at_ns = wake_at_ns
            self.reactor.call_at(wake_at_ns / 1e9, self._wake)
        started = []
        for instance, batch in batches:
            started.append(self._start(instance, batch, now_ns))
            self._idle.remove(instance)
        return started, rejected

    def _start(
        self,
        instance: ModelInstance,
        batch: list[InferenceRequest],
        now_ns: int,
        driver: object = None,
    ) -> Execution:
        execution = Execution(self, instance, batch, now_ns, driver)
        self._busy[instance] = execution
        if self._departures.in_order:
            self._departures.started(batch)
        if self._decoupled:
            responded_ns = time.monotonic_ns()
            for request in batch:
                request.responded_ns = responded_ns
        return execution

    def _wake(self) -> None:
        # The clock of the timer may be a little early. Looking sets another timer then.
        self._wake_at_ns = None
        self._look()

    def _look(self) -> None:
        """Start the batches that can be formed now."""
        with self._lock:
            started, rejected = self._form(time.monotonic_ns())
        self._launch(started, rejected)

    def _launch(
        self,
        executions: list[Execution],
        rejected: Rejected,
        mine: InferenceRequest | None = None,
    ) -> Execution | None:
        """Send batches and find drivers for them. Returns, claimed, the one that has `mine`."""
        for request, error in rejected:
            self.fail([request], error)
        own = None
        may_block = mine is not None and mine.waiter.may_block
        for execution in executions:
            is_own = mine is not None and mine in execution.requests
            if execution.instance.blocks and not (is_own and may_block):
                self._send_apart(execution)
            elif self._send(execution, mine if is_own else None):
                if is_own and mine is not None:
                    execution.reserve(mine.waiter)
                    own = execution
                else:
                    execution.appoint()
        return own

    def _send_apart(self, execution: Execution) -> None:
        """Have another thread give a batch to an instance that blocks."""
        try:
            self._executor.submit(self._send, execution)
        except MoonpoolError as error:  # there is no thread, or the runtime ends
            outcomes = [error] * len(execution.requests)
            self.reactor.call_soon(lambda: self.settle(execution, outcomes))

    def _send(self, execution: Execution, mine: InferenceRequest | None = None) -> bool:
        """Give a batch to its instance. Returns False if nobody has to wait for the answer.

        `mine` is the request of the calling thread, if the batch has it.
        """
        instance = execution.instance
        try:
            result = instance.backend.model_instance_execute(instance, execution.requests)
            answers = execution.take(result)
        except (PeerGone, RemoteProtocolError) as error:
            self._lose(execution, error, delivered=False)
            return False
        except Exception as error:
            outcome = error if isinstance(error, MoonpoolError) else _broken(instance, error)
            outcomes = [outcome] * len(execution.requests)
            # Not on this stack: settling starts the next batch, which may fail here again.
            self.reactor.call_soon(lambda: self.settle(execution, outcomes))
            return False
        except BaseException as error:  # a signal handler raised: nobody knows what was sent
            self._lose(execution, error, delivered=True)
            raise
        if answers is None:
            return True
        if mine is not None or instance.blocks:
            interruptible = mine is not None and mine.waiter.interruptible
            self.settle(execution, answers, interruptible=interruptible)
        else:  # settling starts the next batch, which may be answered here at once, too
            self.reactor.call_soon(lambda: self.settle(execution, answers))
        return False

    def finish(self, execution: Execution, *, interruptible: bool = False) -> None:
        """Read the answer of an execution that the caller has claimed, and hand out the outcomes."""
        if self._busy.get(execution.instance) is not execution:
            return  # it was taken from an interrupted thread, and is finished
        answered_ns = time.monotonic_ns()
        try:
            execution.answers = execution.pending.finish(execution.requests)
        except BaseException as error:
            self._lose(execution, error, delivered=True)
            if not isinstance(error, Exception):  # a signal handler raised, the answer is lost
                raise
            return
        self.settle(execution, execution.answers, answered_ns, interruptible=interruptible)

    def settle(
        self,
        execution: Execution,
        answers: Sequence[Answer],
        answered_ns: int | None = None,
        *,
        interruptible: bool = False,
    ) -> None:
        """Free the instance, hand out the outcomes, and start the next batch; of a slow instance before the outcomes.

        An interruptible thread does so only if that concerns nobody else. Otherwise the reactor does.
        """
        requests, instance, queue = execution.requests, execution.instance, self._queue
        now_ns = time.monotonic_ns()
        with self._lock:
            if self._busy.get(instance) is not execution:
                return
            if interruptible and (
                len(requests) > 1
                or len(queue)
                or queue.keeps_sequences
                or self._departures.in_order
            ):
                answered_ns = answered_ns or now_ns
                self.reactor.call_soon(lambda: self.settle(execution, answers, answered_ns))
                return
            answers = execution.record(answers, answered_ns or now_ns, now_ns)
            if execution.has_deferred or queue.keeps_sequences:
                pairs = zip(requests, answers, strict=True)
                answers = [queue.answered(request, answer, now_ns) for request, answer in pairs]
            # It is idle already if a signal handler raised right after this.
            if instance not in self._idle:
                self._hand_back(instance)
            del self._busy[instance]
            started, rejected = self._form(now_ns)
            if execution.has_deferred or self._departures.in_order:
                resolved = self._settled(execution, answers)
            else:
                resolved = zip(requests, answers, strict=True)  # type: ignore[arg-type]
            if self._changed.waiting:
                self._changed.notify_all()
        has_next = bool(started or rejected)
        if has_next and execution.was_slow(now_ns):
            self._launch(started, rejected)
            has_next = False
        try:
            self._hand_out(resolved)
        finally:
            if has_next:
                self._launch(started, rejected)
            if execution.has_traces:
                execution.end_traces()

    def _settled(self, execution: Execution, answers: Sequence[Answer]) -> Iterable[Pair]:
        """Return the outcomes of a batch that may leave now, and note requests that it left open. Needs the lock."""
        done: list[InferenceRequest] = []
        outcomes: list[Outcome | None] = []
        for request, answer in zip(execution.requests, answers, strict=True):
            if answer is LATER:
                self.open_requests.open(request, execution.instance)
            elif answer is not AGAIN:
                done.append(request)
                outcomes.append(answer)  # type: ignore[arg-type]
        return self._departures.done(done, outcomes)

    def executes(self, execution: Execution) -> bool:
        """Return True until an execution is settled or lost."""
        return self._busy.get(execution.instance) is execution

    def _lose(self, execution: Execution, error: BaseException, *, delivered: bool) -> None:
        """Give up an execution whose instance broke. If its requests were not `delivered`, queue them again."""
        instance, requests = execution.instance, execution.requests
        with self._lock:
            execution.is_lost = True
            requests = self.open_requests.without_ended(requests)
            self._queue.leave(instance, time.monotonic_ns())
        self._on_lost(instance, requests if delivered else [], error)
        with self._lock:
            # It may be restarted and busy again by now.
            if self._busy.get(instance) is execution:
                del self._busy[instance]
            self._changed.notify_all()
        self.reactor.call_soon(self._look)
        if not delivered:
            self.retry(requests)

    def retry(self, requests: Sequence[InferenceRequest]) -> None:
        """Queue requests again that an instance could not answer. The reactor starts their batches."""
        refused: Rejected = []
        with self._lock:
            now_ns = time.monotonic_ns()
            refusal = self._refusal or _LEFT
            for request in requests:
                request.attempts += 1
                try:
                    if self._refusal is not None or request.left:
                        raise refusal
                    self._queue.add(request, now_ns)
                except MoonpoolError as error:
                    refused.append((request, error))
        # This thread may be an interruptible one, which found that its instance is gone.
        self.reactor.call_soon(self._look)
        self._launch([], refused)

    # Outcomes

    def _hand_out(self, pairs: Iterable[Pair]) -> None:
        """Give callers the outcomes that may leave. Without the lock, as callers run code of their own."""
        if self._departures.in_order:
            self._departures.leave(pairs, _resolve)
            return
        for request, outcome in pairs:
            if not request.left:
                request.waiter.resolve(outcome)

    def fail(self, requests: Sequence[InferenceRequest], error: MoonpoolError) -> None:
        """Give an error to requests that are neither queued nor in an instance any more."""
        if not requests:
            return
        now_ns = time.monotonic_ns()
        fail_ns = sum(now_ns - request.queued_ns for request in requests)
        for request in requests:
            if not request.left:
                self.note(error, "", request.request_id, 1)
        with self._lock:
            now_ms = time.time_ns() // 1_000_000
            self.statistics.record_failures(now_ms, len(requests), fail_ns, reason_of(error))
            resolved = self._departures.done(requests, [error] * len(requests))
        self._hand_out(resolved)

    def fail_open(self, instance: ModelInstance, error: MoonpoolError) -> None:
        """Give an error to the open requests of an instance that is gone."""
        with self._lock:
            lost = self.open_requests.take(instance)
            self._changed.notify_all()
        self.fail(lost, error)

    def respond(
        self,
        instance: ModelInstance,
        request: InferenceRequest,
        outcome: Outcome | None,
        flags: int,
    ) -> None:
        """Take a response that comes apart from the answer to its batch, the flag that no more come, or both.

        On the reactor's thread. Raises `RemoteProtocolError` for a response that the model may not give.
        """
        if self._decoupled:
            self._count_response(request, outcome)
        if outcome is not None:
            # If a sender was dropped before the last flag, that is an error even after a response.
            is_failure = flags and isinstance(outcome, BaseException)
            if request.responses and not self._decoupled and not is_failure:
                raise RemoteProtocolError("a second response of a model that is not decoupled")
            request.responses += 1
            if isinstance(outcome, BaseException) and not request.left:
                self.note(outcome, instance.name, request.request_id, 1)
            if request.trace is not None:
                request.trace.responded(outcome)
        if not flags:
            if not self._decoupled:
                request.response = outcome
            elif outcome is not None and not request.left:
                request.waiter.respond(outcome)
            return
        if not self._decoupled:
            outcome = request.response if outcome is None else outcome
            if outcome is None and flags != _AGAIN:
                raise RemoteProtocolError("the end of a request that had no response")
        # A model that gives one response has nothing to come back for once it has given it.
        is_over = flags != _AGAIN or (outcome is not None and not self._decoupled)
        self._end(instance, request, outcome if is_over else AGAIN)
        if self._queue.keeps_sequences:
            self._look()

    def _count_response(self, request: InferenceRequest, outcome: Outcome | None) -> None:
        now_ns = time.monotonic_ns()
        if outcome is None:
            kind = "empty_response"
        elif request.left:
            kind = "cancel"
        else:
            kind = "fail" if isinstance(outcome, BaseException) else "success"
        responses = self.statistics.responses
        responses.record(request.responses, kind, now_ns - request.responded_ns)
        request.responded_ns = now_ns
        if not request.responses:
            responses.first.add(now_ns - request.queued_ns)

    def _end(
        self, instance: ModelInstance, request: InferenceRequest, answer: Answer | None
    ) -> None:
        """End an open request, or put it back into the queue if it is to be scheduled again."""
        with self._lock:
            execution = self._busy.get(instance)
            is_executing = (
                execution is not None and not execution.is_lost and request in execution.requests
            )
            if not self.open_requests.end(request, is_executing=is_executing):
                return  # it was given up, as its model was being unloaded
            now_ns = time.monotonic_ns()
            if isinstance(answer, Deferral):
                answer = self._queue.answered(request, answer, now_ns)
            else:
                self._queue.ended(request, now_ns)
            self._changed.notify_all()
            if isinstance(answer, Deferral):
                return
            if isinstance(answer, BaseException) and not request.fills_place:
                now_ms = time.time_ns() // 1_000_000
                fail_ns = now_ns - request.queued_ns
                self.statistics.record_failures(now_ms, 1, fail_ns, reason_of(answer))
            resolved = self._departures.done([request], [answer])
        self._hand_out(resolved)

    def take_counts(self) -> Counts | None:
        """Return what was counted since the last call, and begin at zero again. None if nothing was counted."""
        with self._lock:
            return take_counts(self.statistics)

    def add_counts(self, counts: Counts) -> None:
        """Add counts of another process. Raises ValueError if they do not have the form of `take_counts`."""
        with self._lock:
            add_counts(self.statistics, counts)

    # Opening and closing

    def open(self) -> None:
        """Accept requests from now on."""
        with self._lock:
            self._refusal = None

    def refuse(self, error: MoonpoolError) -> None:
        """Accept no more requests; queued ones stay."""
        with self._lock:
            self._refusal = error
            self._queue.close(time.monotonic_ns())
            self._changed.notify_all()
        self.reactor.call_soon(self._look)

    def drop(self, error: MoonpoolError) -> None:
        """Fail all requests that are queued or open."""
        with self._lock:
            dropped = self._queue.drain(time.monotonic_ns()) + self.open_requests.take()
            self._changed.notify_all()
        self.fail(dropped, error)

    def wait_empty(self, deadline: float) -> bool:
        """Wait until no request is queued, executing or open. Returns False at the deadline."""
        return self._changed.wait_for(
            lambda: not len(self._queue) and not self._busy and not len(self.open_requests),
            deadline,
        )

    # Instances

    def add(self, instance: ModelInstance) -> None:
        """Take in an instance that is ready, or was taken."""
        with self._lock:
            self._taken.discard(instance)
            self._hand_back(instance)
            self._changed.notify_all()
        self._look()

    def _hand_back(self, instance: ModelInstance) -> None:
        """Make an instance idle, unless it broke meanwhile, drains, or is due to be recycled. Needs the lock."""
        if instance.broken is not None:
            self._queue.leave(instance, time.monotonic_ns())
            self._on_lost(instance, [], instance.broken)
        elif instance.accepts and (
            instance.served < instance.serves_until or not instance.leaves(self._queue.retire)
        ):
            if self._queue.keeps_sequences:
                self._queue.join(instance, time.monotonic_ns())
            self._idle.append(instance)

    def report(self, instance: ModelInstance, error: BaseException) -> None:
        """Note that an instance broke. If it is idle, it is lost now, otherwise when it is handed back."""
        with self._lock:
            instance.broken = error
            self._changed.notify_all()
            if instance in self._idle:
                self._idle.remove(instance)
                self._queue.leave(instance, time.monotonic_ns())
                self._on_lost(instance, [], error)

    def take(self, instance: ModelInstance) -> bool:
        """Take an instance out if it is idle. The caller must soon `add` or `lose` it."""
        with self._lock:
            if instance not in self._idle:
                return False
            self._idle.remove(instance)
            self._taken.add(instance)
            return True

    def lose(self, instance: ModelInstance, error: BaseException) -> None:
        """Note that an instance broke after `take`."""
        with self._lock:
            self._taken.discard(instance)
            self._queue.leave(instance, time.monotonic_ns())
            self._on_lost(instance, [], error)
            self._changed.notify_all()

    def retire(self, instance: ModelInstance) -> bool:
        """Take an instance out for good. Returns False if it executes, or is lost already."""
        self._changed.wait_for(lambda: instance not in self._taken, None)
        return self.take(instance)

    def wait_idle(self, instance: ModelInstance, deadline: float | None) -> bool:
        """Wait until an instance executes nothing. Returns False at the deadline."""
        return self._changed.wait_for(lambda: instance not in self._busy, deadline)

    def wait_closed(self, instance: ModelInstance, deadline: float | None) -> bool:
        """Wait until an instance has no open request, or broke. Returns False at the deadline."""
        has_open = self.open_requests.has
        return self._changed.wait_for(
            lambda: instance.broken is not None or not has_open(instance), deadline
        )

    def executing_since(self, started_ns: int) -> list[Execution]:
        """Return the executions that were started before that time and are not settled."""
        with self._lock:
            return [each for each in self._busy.values() if each.started_ns < started_ns]

    @property
    def queued(self) -> int:
        """The number of requests that wait for an instance."""
        return len(self._queue)

    @property
    def unplaced(self) -> int:
        """The number of requests that any instance could take; with sequences, the number of those without a slot."""
        return self._queue.unplaced

    @property
    def executing(self) -> int:
        """The number of instances that execute."""
        return len(self._busy)
