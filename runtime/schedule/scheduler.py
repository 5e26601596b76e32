"""The scheduler of one model version: requests wait, form batches, execute in instances, and get their outcomes.

Theory of operation.

One lock, `_lock`, guards everything that a `Scheduler` holds: the queue, the instances, the executions, the requests
that are open, the order of outcomes, and the statistics, except those of single responses, which only the reactor
counts. It is held for bookkeeping only. Sending a batch, reading an answer and handing out outcomes happen without it,
as they call backends and callers. `on_lost`, `ModelInstance.recycle` and `note` may be called with the lock held, so they
must not block and must not call the scheduler. The first two take the supervisor's locks, which are therefore taken inside
this one and never the other way round. Traced requests get the times of their batch there, too. Their tensors become text, and
the model's part of their traces ends, which may write a file, without the lock.

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
request of that thread must then be neither lost nor driven twice, and requests of others must not notice. So no step of a scheduler in
Python runs there. The quick forms are single instructions as far as handlers are concerned. They do what is usual, and the reactor does all
else, while the thread waits on a bare lock (`enter`, `_send`, `_lose`, `finish`). What remains for the thread is to wait, and to hold an execution between two
forms:

- the execution itself says who drives it (`_drivers`) and how far it is (`is_sent`, `answers`, `is_lost`);
- a thread that is interrupted, anywhere from `enter` on, appends its `leave` to what the reactor runs soon. That append is one instruction,
  so a second signal cannot prevent it. If one cuts the wake-up that follows, the reactor looks within seconds. `leave` finds the executions that have the request, and `abandon` goes on from there;
- an instance enters its next place before it leaves the last one, also in the forms, as an allocation of memory may fail in between. The instance is then in two places, and
  `settle`, which the reactor runs for the caller that left, expects that. An instance in no place would be lost for ever.

A process whose handlers never raise says so (`trusted_handlers`): a server, whose event loop is its main thread.

*Callers' code.* Every outcome of a batch is given to its caller, whatever the one before it raised (`all_of`); the first error is raised after that. A waiter
runs no code of a user and takes no lock of one. Futures have both, so `Deliveries` has threads for them.

*Lost answers.* If an instance breaks, or a signal handler raises while a form that reads its answer calls Python, nobody knows what the
stub did, and the instance counts as lost (`_lose`). Responses that come for that batch afterwards are ignored
(`is_lost`). The supervisor learns of the loss before the execution leaves `_busy`: an unload that waits for the
instance to be idle must find the recovery. Requests that did not reach the instance are queued again, others are the
supervisor's to fail or to retry.

*Open requests.* A model may answer a request apart from its batch. Those responses arrive on another channel, so the last
one can come before the answer to the batch. `OpenRequests` knows both orders and counts a request once. A model may also leave a request open for
ever. So a request counts as a use of the model while its caller waits, and no longer: otherwise a model could keep itself awake.

*Sleep.* A model that sleeps has no instances. `doze` takes them out, if nobody waits for anything, in the same hold of the lock after which requests
meet the refusal `ASLEEP`. A model that is awake pays nothing for that: a caller who finds a refusal looks which one it is. For `ASLEEP` the request is queued, and
`wanted` is called, with the lock held, until `open`. So no request is lost between the two, in either order.

*Order of closing.* `refuse` ends what comes in, `wait_empty` waits for what is here, and `drop` fails what is left when
the time is over. The instances stop after that, and a last `drop` fails what was queued again in between. Requests whose callers have
all left are waited for only `ABANDONED_S`, in which a model that looks at `is_cancelled` can end well. `hurry` ends these waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Literal

from moonpool.ipc.errors import MoonpoolError, PeerGone, RemoteProtocolError
from moonpool.ipc.messages import AGAIN as _AGAIN
from moonpool.runtime.errors import (
    BackendError,
    CallerInterrupted,
    ModelUnavailable,
    QueueFull,
    all_of,
    own,
)
from moonpool.runtime.model.backend import Model, ModelInstance
from moonpool.runtime.model.config.model import ModelConfig
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
from moonpool.runtime.observe.metrics_options import duration_bounds_ns
from moonpool.runtime.observe.statistics import (
    Counts,
    Statistics,
    add_counts,
    take_counts,
)
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.threads import CountingCondition, is_interruptible
from moonpool.runtime.quick import forms, learn
from moonpool.runtime.schedule.execution import SLOW_NS, Execution
from moonpool.runtime.schedule.ordering import Departures
from moonpool.runtime.schedule.request_queue import OpenRequests, Rejected, check_many, queue_for
from moonpool.runtime.schedule.sequence_states import SequenceStates

# The refusal of a scheduler that sleeps. Nobody ever gets it.
ASLEEP = ModelUnavailable("the model is asleep")
Pair = tuple[InferenceRequest, Outcome | None]
# Gets the error, the names of instance and request, and the number of requests that ended with it.
Note = Callable[[BaseException | str, str, str, int], None]

_LEFT = ModelUnavailable("the caller left")
# The time that an instance which is to end has for requests that nobody waits for any more. It is over before anybody is told that an
# end takes long (`process/parallel.py`).
ABANDONED_S = 0.9
# Seconds that an interrupted caller waits until the reactor has taken its request back. It goes on after that in any case.
LEAVE_S = 1.0


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


def call(step: Callable[[], object]) -> None:
    """Call it. For `all_of`."""
    step()


class Scheduler:
    """Holds the queue of one model version, forms batches, and gives them to idle instances.

    All methods may be called from any thread.
    """

    # Where quick forms find them. There may be others.
    __slots__ = ("__dict__", "__weakref__", "_busy", "_changed", "_decoupled", "_departures", "_idle", "_lock", "_queue", "_refusal", "reactor", "statistics")  # fmt: skip

    def __init__(
        self,
        model: Model,
        reactor: Reactor,
        executor: Executor,
        on_lost: Callable[[ModelInstance, list[InferenceRequest], BaseException], None],
    ) -> None:
        """`on_lost` gets instances that broke, and the requests in them. It must not block, and must not call the scheduler.

        Raises `LoadFailed` and `InvalidRequest` for invalid initial states, `ConfigError` for invalid buckets.
        """
        config = model.config
        batching = config.dynamic_batching or config.sequence_batching
        self._decoupled = config.decoupled
        self.name, self.backlog_bytes = config.name, model.options.backlog_bytes
        self.reactor = reactor
        self._executor, self._on_lost = executor, on_lost
        self._lock = threading.Lock()
        self._changed = CountingCondition(self._lock)
        self._queue = queue_for(model)
        bounds_ns = duration_bounds_ns(config.raw)
        self.statistics = Statistics(model.name, str(model.version), bounds_ns)
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
        # Called for each request while the model sleeps, with the lock held.
        self.wanted: Callable[[], object] = _nobody_listens
        self._hurries = False
        # About the least time that an instance needs for a batch, as the drivers see it.
        self.pace_ns = 0

    # Requests

    def enter(self, request: InferenceRequest) -> Execution | None:
        """Do what `submit` does, for a caller on any thread. The caller must `leave` if this is interrupted by a signal handler."""
        if not is_interruptible():
            return self.submit(request)
        usual: Execution | Literal[False] | None = (
            False if forms is None else forms.submit(self, request)
        )
        return self.reactor.ask(partial(self.submit, request)) if usual is False else usual

    def submit(self, request: InferenceRequest) -> Execution | None:
        """Take a request in. Returns an execution, claimed, that the caller should drive, if there is one.

        Not for a thread on which signal handlers run.

        Raises `QueueFull`, `ModelUnavailable`, and `InvalidRequest` if the model is decoupled and the caller takes one
        response only.
        """
        if forms is not None:
            usual: Execution | Literal[False] | None = forms.submit(self, request)
            if usual is not False:
                return usual
        if self._decoupled:
            check_many(self.name, request)
        waiter, idle, queue = request.waiter, self._idle, self._queue
        execution = None
        with self._lock:
            if self._refusal is not None:
                self._refuse()
            request.queued_ns = now_ns = time.monotonic_ns()
            # If another thread has to send the batch, a caller that leaves could not take it back. The queue can.
            may_block = waiter.may_block and not waiter.interruptible
            if idle and queue.lets_past(request) and (may_block or not idle[-1].blocks):
                # In this order an error in between leaves the instance in two places, and not in none.
                execution = self._start(idle[-1], [request], now_ns, waiter)
                idle.pop()
            else:
                self._let_wait(request, now_ns)
                if not queue.may_form(idle):
                    return None
                started, rejected = self._form(now_ns)
        if execution is None:
            return self._launch(started, rejected, request)
        return execution if self._send(execution, request) else None

    def submit_soon(self, requests: list[InferenceRequest]) -> None:
        """Have the reactor call `submit_all`. It takes the requests out of the list, so calling this twice does no harm."""
        self.reactor.call_soon(lambda: self._submit_taken(requests))

    def _submit_taken(self, requests: list[InferenceRequest]) -> None:
        taken = []
        while requests:
            taken.append(requests.pop(0))
        if taken:
            self.submit_all(taken)

    @property
    def limited(self) -> Sequence[Any]:
        """The schedulers whose instances a request may wait for while others have their resources (`rate_limiter.py`)."""
        return ()

    @property
    def has_idle(self) -> bool:
        """If an instance is idle at the moment."""
        return bool(self._idle)

    def submit_all(self, requests: Sequence[InferenceRequest]) -> None:
        """Take in requests that came together, so that they share batches. What `submit` raises becomes their outcome.

        A slow model's idle instances share them: together they are done before one of them would be.
        """
        waiting = [each for each in requests if not each.left]
        started: list[Execution] = []
        rejected: Rejected = []
        refused: Rejected = []
        with self._lock:
            now_ns = time.monotonic_ns()
            parts = len(self._idle) if self.pace_ns > SLOW_NS else 1
            share = -(-len(waiting) // max(1, parts)) or 1
            for start in range(0, len(waiting), share):
                for request in waiting[start : start + share]:
                    try:
                        self._add(request, now_ns)
                    except MoonpoolError as error:
                        refused.append((request, error))
                formed, expired = self._form(now_ns)
                started += formed
                rejected += expired
        self._launch(started, rejected)
        self._hand_out(refused)

    def keep_pace(self, execution: Execution) -> None:
        """Learn from an execution whose answer has arrived how quick the model is. For the driver."""
        took_ns = time.monotonic_ns() - execution.sent_ns
        # A busy driver comes late to an answer, so the least times say most. A model that gets slow is noticed after some.
        self.pace_ns += min(0, took_ns - self.pace_ns) or (took_ns - self.pace_ns) // 8

    def _add(self, request: InferenceRequest, now_ns: int) -> None:
        if self._decoupled:
            check_many(self.name, request)
        if self._refusal is not None:
            self._refuse()
        request.queued_ns = now_ns
        self._let_wait(request, now_ns)

    def _let_wait(self, request: InferenceRequest, now_ns: int) -> None:
        """Let a request wait. If the queue is full, count the request as rejected, and raise. Needs the lock."""
        try:
            self._queue.add(request, now_ns)
        except QueueFull as error:
            self.note(error, "", request.request_id, 1)
            now_ms = time.time_ns() // 1_000_000
            self.statistics.record_failures(now_ms, 1, 0, reason_of(error))
            raise

    def _refuse(self) -> None:
        """Raise the refusal, or, if the model sleeps, have it woken for the request. Needs the lock."""
        if self._refusal is ASLEEP:
            self.wanted()
        elif self._refusal is not None:
            raise own(self._refusal)

    def leave(self, request: InferenceRequest) -> None:
        """Cancel a request for the caller that waited, wherever a signal handler raised in it.

        Not for a thread on which signal handlers run: see `leave_soon`.
        """
        for execution in self.cancel(request):
            execution.abandon(request.waiter)

    def leave_soon(self, request: InferenceRequest) -> None:
        """Do what `leave` does, for a caller on any thread."""
        if is_interruptible():
            self.reactor.soon.append(lambda: self.leave(request))
            self.reactor.flush(LEAVE_S)
        else:
            self.leave(request)

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
            self.open_requests.desert(request, now_ns)
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
        return self._form_in(self._idle, now_ns)

    def _form_in(
        self, idle: Sequence[ModelInstance], now_ns: int
    ) -> tuple[list[Execution], Rejected]:
        """Start what the queue wants to start in some of the idle instances. Needs the lock."""
        if not self._queue.may_form(idle):
            return [], []
        batches, rejected, wake_at_ns = self._queue.form(now_ns, idle)
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
        own: list[Execution] = []

        def start(execution: Execution) -> None:
            is_own = mine is not None and mine in execution.requests
            may_block = mine is not None and mine.waiter.may_block and not mine.waiter.interruptible
            if execution.instance.blocks and not (is_own and may_block):
                self._send_apart(execution)
            elif self._send(execution, mine if is_own else None):
                if is_own and mine is not None:
                    execution.reserve(mine.waiter)
                    own.append(execution)
                else:
                    execution.appoint()

        try:
            all_of(lambda pair: self.fail([pair[0]], pair[1]), rejected)
        finally:
            all_of(start, executions)
        return own[0] if own else None

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
        if is_interruptible():  # a quick form has met something unusual
            return self.reactor.ask(partial(self._send, execution, mine))
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
        except BaseException as error:  # a backend may raise SystemExit: nobody knows what was sent
            self._lose(execution, error, delivered=True)
            raise
        if answers is None:
            return True
        if mine is not None or instance.blocks:
            self.settle(execution, answers)
        else:  # settling starts the next batch, which may be answered here at once, too
            self.reactor.call_soon(lambda: self.settle(execution, answers))
        return False

    def finish(self, execution: Execution, *, interruptible: bool = False) -> None:
        """Read the answer of an execution that the caller has claimed, and hand out the outcomes.

        On an `interruptible` thread a quick form does so, or the reactor.
        """
        if forms is not None and forms.finish(self, execution, interruptible):
            return
        if interruptible:
            execution.drive_in_reactor()
            return
        if self._busy.get(execution.instance) is not execution:
            return  # it was taken from an interrupted thread, and is finished
        answered_ns = time.monotonic_ns()
        try:
            execution.answers = execution.pending.finish(execution.requests)
        except BaseException as error:
            delivered = not isinstance(error, PeerGone) or error.was_taken
            self._lose(execution, error, delivered=delivered)
            if not isinstance(error, Exception):
                raise
            return
        self.settle(execution, execution.answers, answered_ns)

    def settle(
        self,
        execution: Execution,
        answers: Sequence[Answer],
        answered_ns: int | None = None,
        *,
        interruptible: bool = False,
    ) -> None:
        """Free the instance, hand out the outcomes, and start the next batch; of a slow instance before the outcomes.

        On an `interruptible` thread the reactor does all of it.
        """
        if interruptible:
            at_ns = answered_ns or time.monotonic_ns()
            self.reactor.call_soon(lambda: self.settle(execution, answers, at_ns))
            return
        requests, instance, queue = execution.requests, execution.instance, self._queue
        if queue.states is not None and len(answers) == len(requests):
            # Without the lock, as states may be large. They are put in the place of the last ones below.
            pairs = zip(requests, answers, strict=True)
            answers = [queue.states.accept(request, answer) for request, answer in pairs]
        now_ns = time.monotonic_ns()
        with self._lock:
            if self._busy.get(instance) is not execution:
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
                resolved = self._settled(execution, answers, now_ns)
            else:
                resolved = zip(requests, answers, strict=True)  # type: ignore[arg-type]
            if self._changed.waiting:
                self._changed.notify_all()
        steps: list[Callable[[], object]] = [partial(self._hand_out, resolved)]
        if execution.has_traces:
            # Before the callers have the answers: they may write into them.
            steps.insert(0, execution.trace_answers)
        if started or rejected:
            launch = partial(self._launch, started, rejected)
            steps.insert(0 if execution.was_slow(now_ns) else len(steps), launch)
        if execution.has_traces:
            steps.append(execution.end_traces)
        all_of(call, steps)

    def _settled(
        self, execution: Execution, answers: Sequence[Answer], now_ns: int
    ) -> Iterable[Pair]:
        """Return the outcomes of a batch that may leave now, and note requests that it left open. Needs the lock."""
        done: list[InferenceRequest] = []
        outcomes: list[Outcome | None] = []
        for request, answer in zip(execution.requests, answers, strict=True):
            if answer is LATER:
                self.open_requests.open(request, execution.instance, now_ns)
            elif answer is not AGAIN:
                done.append(request)
                outcomes.append(answer)  # type: ignore[arg-type]
        return self._departures.done(done, outcomes)

    def executes(self, execution: Execution) -> bool:
        """Return True until an execution is settled or lost."""
        return self._busy.get(execution.instance) is execution

    def lose_interrupted(self, execution: Execution) -> None:
        """Give up an execution whose driver was interrupted while it sent the batch or read the answer. Does no harm after `_lose`."""
        if self.executes(execution):
            self._lose(execution, CallerInterrupted("a signal handler raised"), delivered=True)

    def _lose(self, execution: Execution, error: BaseException, *, delivered: bool) -> None:
        """Give up an execution whose instance broke. If its requests were not `delivered`, queue them again."""
        if is_interruptible():
            # A form does this. What it meets beside moonpool's own errors comes from a signal handler.
            if not isinstance(error, MoonpoolError):
                error = CallerInterrupted(f"a signal handler raised {error!r}")
            self.reactor.call_soon(lambda: self._lose(execution, error, delivered=delivered))
            return
        if not self.executes(execution):
            return
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
            for request in requests:
                request.attempts += 1
                try:
                    if request.left:
                        raise _LEFT
                    if self._refusal is not None:
                        self._refuse()
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
        else:
            all_of(lambda pair: _resolve(*pair), pairs)

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
            self._changed.notify_all()
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
        states = self._queue.states
        if states is not None and isinstance(outcome, Response):
            outcome = states.accept(request, outcome)
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

    def doze(self) -> bool:
        """Take all instances out, if nobody waits for anything here: no request, no sequence. Requests that come from now on wait, and wake
        the model.

        Returns False, and changes nothing, if somebody waits. Requests whose callers have left may be in the instances
        (`has_begun`).
        """
        with self._lock:
            if self.is_used or self._taken or self._refusal is not None:
                return False
            for instance in self._idle:
                self._queue.retire(instance)
            self._idle.clear()
            self._refusal = ASLEEP
            return True

    def sleep(self) -> None:
        """Let requests wait, and wake the model, from now on. It has no instances."""
        with self._lock:
            self._refusal = ASLEEP

    def rest(self, error: MoonpoolError) -> None:
        """Fail the requests that wait in a model without instances with this error, and refuse others with it."""
        with self._lock:
            self._refusal = error
        self.drop(error)

    @property
    def is_asleep(self) -> bool:
        """True while requests have to wake the model."""
        return self._refusal is ASLEEP

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

    def watch(self, tell: Callable[[], object]) -> Callable[[], None]:
        """Call `tell` whenever a request may have left or an instance has changed, until the function is called that this returns.

        `tell` must be quick, and take no lock under which anybody calls a scheduler: the scheduler's lock is held.
        """
        return self._changed.watch(tell)

    def wait_empty(self, deadline: float) -> bool:
        """Wait until no request is queued, executing or open. Returns False if somebody still waits for one at the deadline.

        Requests that nobody waits for have `ABANDONED_S` at most.
        """

        def is_empty() -> bool:
            return not len(self._queue) and not self._busy and not len(self.open_requests)

        return self._wait_for(is_empty, lambda: bool(self.wanted_count), deadline)

    def _wait_for(
        self, is_over: Callable[[], bool], is_wanted: Callable[[], bool], deadline: float | None
    ) -> bool:
        """Wait until `is_over`, or `ABANDONED_S` from the moment when the work is not `is_wanted` any more.

        Returns False at the deadline, and after `hurry`, while it is wanted.
        """
        self._changed.wait_for(lambda: self._hurries or is_over() or not is_wanted(), deadline)
        end = time.monotonic() + ABANDONED_S
        end = end if deadline is None else min(end, deadline)
        self._changed.wait_for(lambda: self._hurries or is_over(), end)
        return is_over() or not is_wanted()

    def hurry(self) -> None:
        """Let all waits for requests end now, those that begin later, too. For a model that is to end soon."""
        with self._lock:
            self._hurries = True
            self._changed.notify_all()

    @property
    def wanted_count(self) -> int:
        """The number of requests inside that somebody waits for. Needs the lock, or may be wrong the next moment."""
        executing = sum(execution.wanted_count for execution in list(self._busy.values()))
        return len(self._queue) + executing + self.open_requests.wanted_count()

    def is_abandoned(self, instance: ModelInstance) -> bool:
        """Return True if an instance executes a batch that nobody waits for any more, or the model is to end soon."""
        with self._lock:
            execution = self._busy.get(instance)
            return self._hurries or (execution is not None and not execution.wanted_count)

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
                if self._queue.keeps_sequences:
                    self.reactor.call_soon(self._look)

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

    def forget(self, instance: ModelInstance) -> None:
        """Take out an instance that has ended. Sequences that had begun in it are lost."""
        with self._lock:
            self._queue.leave(instance, time.monotonic_ns())
            self._changed.notify_all()
        self._look()

    def reconfigure(self, config: ModelConfig) -> None:
        """Let requests wait as another configuration says, which differs in delays and queue policies alone."""
        with self._lock:
            self._queue.reconfigure(config)
        self._look()

    def wait_idle(self, instance: ModelInstance, deadline: float | None) -> bool:
        """Wait until an instance executes nothing. Returns False at the deadline."""
        return self._changed.wait_for(lambda: instance not in self._busy, deadline)

    def wait_closed(self, instance: ModelInstance, deadline: float | None) -> bool:
        """Wait until an instance has no open request, or broke. Returns as `wait_empty` does."""
        is_open = self.open_requests

        def is_over() -> bool:
            return instance.broken is not None or not is_open.has(instance)

        return self._wait_for(is_over, lambda: bool(is_open.wanted_count(instance)), deadline)

    @property
    def is_used(self) -> bool:
        """True if a request is inside for which somebody waits, or a sequence. Without the lock it may be wrong the next moment."""
        return bool(self.wanted_count) or self._queue.has_sequences

    @property
    def has_begun(self) -> bool:
        """True if instances have requests, which they execute or keep open, whether or not their callers have left."""
        return bool(self._busy or len(self.open_requests))

    def forget_deserted(self) -> None:
        """Forget the open requests of a model whose instances have ended after `doze`. Nobody waits for them."""
        with self._lock:
            gone = self.open_requests.take()
        self.fail(gone, _LEFT)

    def deserted_since(self, time_ns: int) -> list[ModelInstance]:
        """Return the instances that execute nothing, and whose requests are all open and without a caller since that time."""
        with self._lock:
            instances = self.open_requests.deserted_since(time_ns)
            return [each for each in instances if each not in self._busy]

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
    def states(self) -> SequenceStates | None:
        """The states of sequences that are kept for the model; None if it has none."""
        return self._queue.states

    @property
    def in_flight(self) -> int:
        """The number of requests that have no outcome yet: queued, executing or open."""
        inside = sum(len(each.requests) for each in self.executing_since(time.monotonic_ns() + 1))
        return self.queued + inside + len(self.open_requests)

    @property
    def executing(self) -> int:
        """The number of instances that execute."""
        return len(self._busy)


learn(CountingCondition)
learn(Scheduler)
