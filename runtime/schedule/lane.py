"""The lane of one model version: the way of every request from its caller into a batch, to an instance, and back.

Theory of operation. `Lane` has what every request passes: taking it in, the queue, sending, reading the answer,
counting, and the outcomes. `Scheduler`, which derives from it, has what is seldom. `Execution` is one batch, from the
moment it is sent until its requests have outcomes, and `ThreadWaiter` is a caller that waits on its thread.

This module and those that it calls for usual requests (`batcher`, `request_queue`, `statistics`, the port) are
compiled as they are, where there is a compiler. `lane.pxd` has the types, and no module has a second definition. A
compiled method is one instruction as far as signal handlers and other threads are concerned, except where it calls
what is not compiled: the hooks at the end of `Lane`, backends, and waiters that are no `ThreadWaiter`. `IS_COMPILED`
tells. A method that no class overrides is called by its class (`Lane.settle(self, …)`), which spares the compiled form
a search for one that does.

One lock, `_lock`, guards everything that a lane holds: the queue, the instances, the executions, the order of
outcomes, and the statistics, except those of single responses, which only the reactor counts. It is held for
bookkeeping only. Sending a batch, reading an answer and handing out outcomes happen without it, as they call backends
and callers. `on_lost`, `ModelInstance.recycle` and `note` may be called with the lock held, so they must not block and
must not call the scheduler. Traced requests get the times of their batch there, too. Their tensors become text, and
the model's part of their traces ends, which may write a file, without the lock.

*Instances.* An instance is in one place at a time. It is idle (`_idle`; the last one was busy last and has warm
caches), or in the hands of somebody who called `take` (`_taken`), or it executes (`_busy`), or the scheduler does not
have it, because it starts, broke or left. After a change that may let a batch go (a request or an instance comes, a
sequence goes on) a thread asks the queue for batches (`_form`): the same thread, or the reactor if that thread must
not. If the queue keeps requests back for a larger batch, it names a time, and the reactor looks again at that time. A
request that may go at once is not queued, and the queue is not asked while it could only say that nothing goes
(`RequestQueue.may_form`), which also spares the reactor a wake-up for each request of an interruptible thread.

*Who drives an execution.* One party at a time drives it: it waits until the answer can be read, and then calls
`finish`, for all callers in the batch. That party is a thread that waits for an outcome anyway, an event loop, or the
reactor (docs/decisions/0003). The caller whose `submit` sent the batch gets it as the driver. For any other batch,
`appoint` offers it to the callers in it, in turn, and to the reactor if none of them takes it. A party that takes an
offer has to `claim` it, and only one claim after each `offer` succeeds. A thread claims before it waits. An event loop
claims when the answer can be read, since a loop may stop for good at any time; the supervisor looks every few seconds
and gives the reactor what nobody has claimed for a second (`Supervisor.rescue`). A driver that has to go (its time is
over, its task is cancelled) gives the execution to the reactor. `claim` needs no lock: an append to a list is atomic,
and the party that is first in the list has won.

*Threads that wait.* Such a thread blocks on a bare lock, its bell, which `resolve` and `appoint` release. It wakes up
for its outcome, or to drive an execution. A bell that rings already is left alone, so one wake-up may mean both, and
the thread looks at both. While it is awake, as it drives one step of a chain after the other, nobody rings: it looks
before it blocks. Each side writes first and reads second: `resolve` and `appoint` set what they have for the thread and
then read `_is_awake`, while the thread clears `_is_awake` and then reads what they have set. An appointment can come
while the thread leaves, because its time is over, a signal handler raised, or its outcome came apart from the batch.
Each side then writes first and reads second: the thread sets `_gone` and then looks at `_execution` or cancels its
request, while `appoint` sets `_execution` and then looks at `_gone`. If the thread is gone, `appoint` claims the
execution itself, to learn whether the thread took it, and if not, offers it to the next caller.

*Signals.* Python runs signal handlers on the main thread, between any two instructions, and a handler may raise. A
request of that thread must then be neither lost nor driven twice, and requests of others must not notice. So no step
of a lane in Python runs there. A compiled step does what is usual, and the reactor does all else, while the thread
waits on a bare lock (`enter`, `_send`, `_lose`, `finish`). What remains for the thread is to wait, and to hold an
execution between two steps:

- the execution itself says who drives it (`_drivers`) and how far it is (`is_sent`, `answers`, `is_lost`);
- a thread that is interrupted, anywhere from `enter` on, appends its `leave` to what the reactor runs soon. That
  append is one instruction, so a second signal cannot prevent it. If one cuts the wake-up that follows, the reactor
  looks within seconds. `leave` finds the executions that have the request, and `abandon` goes on from there;
- an instance enters its next place before it leaves the last one, as an allocation of memory may fail in between. The
  instance is then in two places, and `settle`, which the reactor runs for the caller that left, expects that. An
  instance in no place would be lost for ever.

A process whose handlers never raise says so (`trusted_handlers`): a server, whose event loop is its main thread.

*Callers' code.* Every outcome of a batch is given to its caller, whatever the one before it raised, as by `all_of`;
the first error is raised after that. A waiter runs no code of a user and takes no lock of one. Futures have both, so
`Deliveries` has threads for them.

*Lost answers.* If an instance breaks, or a signal handler raises while its answer is read, nobody knows what the stub
did, and the instance counts as lost (`_lose`). Responses that come for that batch afterwards are ignored (`is_lost`).
The supervisor learns of the loss before the execution leaves `_busy`: an unload that waits for the instance to be idle
must find the recovery. Requests that did not reach the instance are queued again, others are the supervisor's to fail
or to retry.
"""

from __future__ import annotations

import select
from _thread import allocate_lock, get_ident
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import monotonic, monotonic_ns, time_ns

from moonpool.ipc.errors import MoonpoolError, PeerGone
from moonpool.ipc.port import RuntimePort
from moonpool.runtime.arguments import LONGEST_S, check_timeout
from moonpool.runtime.errors import BackendError, ModelUnavailable, QueueFull, RequestTimedOut, own
from moonpool.runtime.model.backend import Model, ModelInstance, Pending
from moonpool.runtime.model.request import Answer, Deferral, InferenceRequest, Outcome, Response, Waiter
from moonpool.runtime.observe.metric_families import reason_of
from moonpool.runtime.observe.metrics_options import duration_bounds_ns
from moonpool.runtime.observe.statistics import Statistics
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.threads import INTERRUPTIBLE, CountingCondition, is_interruptible
from moonpool.runtime.schedule.ordering import Departures
from moonpool.runtime.schedule.request_queue import Permits, Rejected, RequestQueue, check_many, queue_for

IS_COMPILED = not __file__.endswith(".py")
# About what it takes to hand out the outcomes of a large batch.
SLOW_NS = 1_000_000
# The refusal of a scheduler that sleeps. Nobody ever gets it.
ASLEEP = ModelUnavailable("the model is asleep")
Pair = tuple[InferenceRequest, Outcome | None]
# Gets the error, the names of instance and request, and the number of requests that ended with it.
Note = Callable[[BaseException | str, str, str, int], None]
# Seconds that an interrupted caller waits until the reactor has taken its request back. It goes on after that in any
# case.
LEAVE_S = 1.0


def _may_block(waiter: Waiter) -> bool:
    """Return True if a backend that blocks may execute on the thread of this caller.

    If another thread has to send the batch, a caller that leaves could not take it back. The queue can.
    """
    return waiter.may_block and not waiter.interruptible


def nobody_listens(*_: object) -> None:
    """Stand in for `Lane.note` and `Lane.wanted` until somebody sets them."""


class Lane:
    """The queue of one model version, its instances, and what every request passes. Any thread may call any method."""

    def __init__(self, model: Model, reactor: Reactor) -> None:
        """Make an empty lane, which refuses requests until the model is ready.

        Raises `LoadFailed` and `InvalidRequest` for invalid initial states, `ConfigError` for invalid buckets.
        """
        config = model.config
        batching = config.dynamic_batching or config.sequence_batching
        self._decoupled = config.decoupled
        self.name = config.name
        self.reactor = reactor
        self._lock = allocate_lock()
        # Bound once: these are called for every request.
        self._acquire, self._release = self._lock.acquire, self._lock.release
        self._changed = CountingCondition(self._lock)
        self._queue = queue_for(model)
        self.statistics = Statistics(model.name, str(model.version), duration_bounds_ns(config.raw))
        # Gets every request that ends with an error while its caller waits for it.
        self.note: Note = nobody_listens
        self._is_in_order = batching is not None and batching.preserve_ordering
        self._departures: Departures[InferenceRequest, Outcome | None] = Departures(in_order=self._is_in_order)
        # False where a subclass has its say in each outcome, as a cache has.
        self._is_plain = True
        # None if instances execute without permits.
        self.permits: Permits | None = None
        self.is_atomic = self._is_compiled()
        self._idle: list[ModelInstance] = []
        self._taken: set[ModelInstance] = set()
        self._busy: dict[ModelInstance, Execution] = {}
        self._refusal: MoonpoolError | None = ModelUnavailable(f"Request for model '{model.name}' which is loading")
        self._wake_at_ns: int | None = None
        # Called for each request while the model sleeps, with the lock held.
        self.wanted: Callable[[], object] = nobody_listens
        # About the least time that an instance needs for a batch, as the drivers see it.
        self.pace_ns = 0

    def _is_compiled(self) -> bool:
        """Return True if `submit` and `settle` call nothing of this model's that is not compiled.

        `is_atomic` keeps it.
        """
        queue = self._queue
        is_plain = type(queue) is RequestQueue and not queue.has_times and not self._is_in_order
        return IS_COMPILED and is_plain and self._is_plain and self.permits is None

    # Down

    def infer(self, request: InferenceRequest, timeout_s: float | None = None) -> Outcome:
        """Submit a request, and wait for its outcome on this thread, for so many seconds.

        Raises what `submit` raises, `InvalidRequest` and `RequestTimedOut`.
        """
        if timeout_s is None:
            waiter, deadline = ThreadWaiter(), None
        else:
            if type(timeout_s) is not float or not 0.0 <= timeout_s <= LONGEST_S:
                check_timeout(timeout_s)
            waiter, deadline = PunctualWaiter(), monotonic() + timeout_s
        request.waiter = waiter
        try:
            return waiter.wait(deadline, self.enter(request))
        except BaseException:
            # In one instruction: another signal may follow.
            self.reactor.soon.append(partial(self._leave, request))
            self.reactor.flush(LEAVE_S)
            raise

    def _leave(self, request: InferenceRequest) -> None:
        """Cancel the request of a thread that has left. On the reactor's thread."""
        request.waiter.leave()  # type: ignore[attr-defined]
        self.leave(request)

    def enter(self, request: InferenceRequest) -> Execution | None:
        """Do what `submit` does, for a caller on any thread.

        The caller must `leave` if this is interrupted by a signal handler.
        """
        if self.is_atomic or not is_interruptible():
            return self.submit(request)
        return self.reactor.ask(partial(self.submit, request))

    def submit(self, request: InferenceRequest) -> Execution | None:
        """Take a request in. Returns an execution, claimed, that the caller should drive, if there is one.

        Not for a thread on which signal handlers run, for which there is `enter`.

        Raises `QueueFull`, `ModelUnavailable`, and `InvalidRequest` if the model is decoupled and the caller takes one
        response only.
        """
        if self._decoupled:
            check_many(self.name, request)
        waiter, idle, queue = request.waiter, self._idle, self._queue
        execution = None
        self._acquire()
        try:
            if self._refusal is not None:
                self._refuse()
            request.queued_ns = now_ns = monotonic_ns()
            is_free = self.permits is None and idle and queue.lets_past(request)
            if is_free and (not idle[-1].blocks or _may_block(waiter)):
                # In this order an error in between leaves the instance in two places, and not in none.
                execution = self._start(idle[-1], [request], now_ns, waiter)
                idle.pop()
            else:
                Lane._let_wait(self, request, now_ns)
                if self.permits is None and not queue.may_form(idle):
                    return None
                started, rejected = Lane._form(self, now_ns)
        finally:
            self._release()
        if execution is None:
            return Lane._launch(self, started, rejected, request)
        return execution if Lane._send(self, execution, request) else None

    def _let_wait(self, request: InferenceRequest, now_ns: int) -> None:
        """Let a request wait. If the queue is full, count the request as rejected, and raise. Needs the lock."""
        try:
            self._queue.add(request, now_ns)
        except QueueFull as error:
            self.note(error, "", request.request_id, 1)
            now_ms = time_ns() // 1_000_000
            self.statistics.record_failures(now_ms, 1, 0, reason_of(error))
            raise

    def _refuse(self) -> None:
        """Raise the refusal, or, if the model sleeps, have it woken for the request. Needs the lock."""
        if self._refusal is ASLEEP:
            self.wanted()
        elif self._refusal is not None:
            raise own(self._refusal)

    def _form(self, now_ns: int) -> tuple[list[Execution], Rejected]:
        """Start what the queue and the permits let start now; the caller launches it. Needs the lock."""
        permits = self.permits
        return Lane._form_in(self, self._idle, now_ns) if permits is None else permits.form(now_ns)

    def _form_in(self, idle: Sequence[ModelInstance], now_ns: int) -> tuple[list[Execution], Rejected]:
        """Start what the queue wants to start in some of the idle instances. Needs the lock."""
        queue = self._queue
        if not queue.may_form(idle):
            return [], []
        started: list[Execution] = []
        if not queue.has_times:
            # Nothing to decide: what waits goes, as long as there are instances. The last one has everything in its
            # caches.
            place = len(idle)
            while queue.count and place:
                place -= 1
                instance = idle[place]
                started.append(self._start(instance, queue.take(now_ns), now_ns, None))
                self._idle.remove(instance)
            return started, []
        batches, rejected, wake_at_ns = queue.form(now_ns, idle)
        # If the reactor looks earlier anyway, it finds out then when to look again.
        if wake_at_ns is not None and wake_at_ns < (self._wake_at_ns or wake_at_ns + 1):
            self._wake_at_ns = wake_at_ns
            self.reactor.call_at(wake_at_ns / 1e9, self._wake)
        for instance, batch in batches:
            started.append(self._start(instance, batch, now_ns, None))
            self._idle.remove(instance)
        return started, rejected

    def _start(self, instance: ModelInstance, batch: list[InferenceRequest], now_ns: int, driver: object) -> Execution:
        execution = Execution.__new__(Execution)
        execution.begin(self, instance, batch, now_ns, driver)
        self._busy[instance] = execution
        if self._is_in_order:
            self._departures.started(batch)
        if self._decoupled:
            responded_ns = monotonic_ns()
            for request in batch:
                request.responded_ns = responded_ns
        return execution

    def _wake(self) -> None:
        # The clock of the timer may be a little early. Looking sets another timer then.
        self._wake_at_ns = None
        self.look()

    def look(self) -> None:
        """Start the batches that can be formed now. Not for a thread on which signal handlers run."""
        with self._lock:
            started, rejected = self._form(monotonic_ns())
        self._launch(started, rejected, None)

    def _launch(
        self, executions: list[Execution], rejected: Rejected, mine: InferenceRequest | None
    ) -> Execution | None:
        """Send batches and find drivers for them. Returns, claimed, the one that has `mine`."""
        own: Execution | None = None
        # As in `all_of`: they are of different owners.
        first: BaseException | None = None
        if rejected and is_interruptible():
            self.reactor.call_soon(partial(self._reject, rejected))
        elif rejected:
            try:
                self._reject(rejected)
            except BaseException as error:
                first = error
        for execution in executions:
            try:
                if mine is not None and mine in execution.requests:
                    if self._start_mine(execution, mine):
                        own = execution
                elif execution.instance.blocks:
                    self._send_apart(execution)
                elif Lane._send(self, execution, None):
                    execution.appoint()
            except BaseException as error:
                first = first or error
                # In one instruction: another signal may follow.
                self.reactor.soon.append(partial(execution.abandon, None))
                self.reactor.wake()
        if first is not None:
            raise first
        return own

    def _start_mine(self, execution: Execution, mine: InferenceRequest) -> bool:
        """Send a batch with the calling thread's request. Returns True if that thread is to drive it."""
        waiter = mine.waiter
        if execution.instance.blocks and not _may_block(waiter):
            self._send_apart(execution)
            return False
        if not Lane._send(self, execution, mine):
            return False
        execution.reserve(waiter)
        return True

    def _send(self, execution: Execution, mine: InferenceRequest | None) -> bool:
        """Give a batch to its instance. Returns False if nobody has to wait for the answer.

        `mine` is the request of the calling thread, if the batch has it.
        """
        port = execution.instance.port
        if port is not None:
            try:
                if port.put(execution.requests):
                    execution.sent(port.link, port)
                    return True
            except BaseException as error:  # a signal handler raised: nobody knows what was sent
                execution.is_lost = True
                self._lose(execution, error, delivered=True)
                raise
        if not is_interruptible():
            return self._send_anything(execution, mine)
        if mine is not None:
            return self.reactor.ask(partial(self._send_anything, execution, mine))
        self.reactor.call_soon(partial(self._launch, [execution], [], None))
        return False

    # Up

    def finish(self, execution: Execution, interruptible: bool = False) -> None:
        """Read the answer of an execution that the caller has claimed, and hand out the outcomes.

        On an `interruptible` thread the reactor does so, where anything is not usual.
        """
        if self._busy.get(execution.instance) is not execution:
            return  # it was taken from an interrupted thread, and is finished
        if interruptible and not IS_COMPILED:
            execution.drive_in_reactor()
            return
        answered_ns = monotonic_ns()
        answers = None
        try:
            if execution.port is not None:
                answers = execution.port.take(execution.requests)
            if answers is None and not interruptible:
                answers = execution.pending.finish(execution.requests)
        except BaseException as error:
            execution.is_lost = True
            delivered = not isinstance(error, PeerGone) or error.was_taken
            self._lose(execution, error, delivered=delivered)
            # What is not moonpool's own error comes from a signal handler, if any runs on this thread.
            if not isinstance(error, MoonpoolError if interruptible else Exception):
                raise
            return
        if answers is None:
            execution.drive_in_reactor()
            return
        execution.answers = answers
        Lane.settle(self, execution, answers, answered_ns, interruptible)

    def settle(
        self, execution: Execution, answers: Sequence[Answer], answered_ns: int = 0, interruptible: bool = False
    ) -> None:
        """Free the instance, hand out the outcomes, and start the next batch; of a slow instance before the outcomes.

        `answered_ns` is the time of the answer, 0 for now. On an `interruptible` thread the reactor does so, where
        anything is not usual.
        """
        now_ns = monotonic_ns()
        answered_ns = answered_ns or now_ns
        if interruptible and not self._settles_here(execution):
            self.reactor.call_soon(partial(self.settle, execution, answers, answered_ns))
            return
        requests, instance, queue = execution.requests, execution.instance, self._queue
        if queue.states is not None and len(answers) == len(requests):
            # Without the lock, as states may be large. They are put in the place of the last ones below.
            pairs = zip(requests, answers, strict=True)
            answers = [queue.states.accept(request, answer) for request, answer in pairs]
        started: list[Execution] = []
        rejected: Rejected = []
        # In order, the outcomes of other batches may leave as well.
        resolved: Iterable[Pair] | None = None
        self._acquire()
        try:
            if self._busy.get(instance) is not execution:
                return
            answers = execution.record(answers, answered_ns, now_ns)
            if execution.has_deferred or queue.keeps_sequences:
                pairs = zip(requests, answers, strict=True)
                answers = [queue.answered(request, answer, now_ns) for request, answer in pairs]
            # It is idle already if a signal handler raised right after this.
            if instance not in self._idle:
                if instance.broken is None and instance.accepts and instance.served < instance.serves_until:
                    if queue.keeps_sequences:
                        queue.join(instance, now_ns)
                    self._idle.append(instance)
                else:
                    self._put_aside(instance)
            del self._busy[instance]
            if self.permits is not None or queue.may_form(self._idle):
                started, rejected = Lane._form(self, now_ns)
            if execution.has_deferred or self._is_in_order:
                resolved = self._settled(execution, answers, now_ns)
            elif not self._is_plain:
                resolved = zip(requests, answers, strict=True)  # type: ignore[arg-type]
            if self._changed.waiting:
                self._changed.notify_all()
        finally:
            self._release()
        if execution.has_traces:
            self._end_traced(execution, partial(self._tell, requests, answers, resolved))
            Lane._launch(self, started, rejected, None)
            return
        has_next = bool(started or rejected)
        # A quick instance is woken last. Where there are few processors, it would take this one, while callers wait for
        # outcomes that they could have already; and they may be back in time for the next batch.
        if has_next and now_ns - execution.sent_ns > SLOW_NS:
            has_next = False
            try:
                Lane._launch(self, started, rejected, None)
            except BaseException:
                Lane._tell(self, requests, answers, resolved)
                raise
        try:
            Lane._tell(self, requests, answers, resolved)
        except BaseException:
            if has_next:
                Lane._launch(self, started, rejected, None)
            raise
        if has_next:
            Lane._launch(self, started, rejected, None)

    def _settles_here(self, execution: Execution) -> bool:
        """Return True if nothing in the end of a batch is lost where a signal handler raises on this thread."""
        instance = execution.instance
        if not self.is_atomic or instance.broken is not None or not instance.accepts:
            return False
        if instance.served + len(execution.requests) >= instance.serves_until:
            return False
        for request in execution.requests:
            if request.trace is not None:
                return False
            waiter = request.waiter
            if not isinstance(waiter, ThreadWaiter) and not waiter.may_be_told_again:
                return False
        return True

    def _tell(
        self, requests: Sequence[InferenceRequest], answers: Sequence[Answer], resolved: Iterable[Pair] | None
    ) -> None:
        """Give callers the outcomes of a batch: these answers, or what is `resolved`. Without the lock."""
        if resolved is not None:
            self._hand_out(resolved)
            return
        first: BaseException | None = None
        for i in range(len(requests)):
            request = requests[i]
            if request.left:
                continue
            waiter = request.waiter
            if isinstance(waiter, ThreadWaiter):
                thread = waiter
                thread.resolve(answers[i])  # type: ignore[arg-type]
                continue
            try:
                waiter.resolve(answers[i])  # type: ignore[arg-type]
            except BaseException as error:
                first = first or error
                # A signal handler may have cut it.
                if waiter.may_be_told_again:
                    self.reactor.soon.append(partial(waiter.resolve, answers[i]))  # type: ignore[arg-type]
                    self.reactor.wake()
        if first is not None:
            raise first

    def keep_pace(self, execution: Execution) -> None:
        """Learn from an execution whose answer has arrived how quick the model is. For the driver."""
        took_ns = monotonic_ns() - execution.sent_ns
        # A busy driver comes late to an answer, so the least times say most. A model that gets slow is noticed after
        # some.
        self.pace_ns += min(0, took_ns - self.pace_ns) or (took_ns - self.pace_ns) // 8

    def executes(self, execution: Execution) -> bool:
        """Return True until an execution is settled or lost."""
        return self._busy.get(execution.instance) is execution

    # Hooks for what is seldom

    def leave(self, request: InferenceRequest) -> None:
        """Cancel a request for the caller that waited, wherever a signal handler raised in it."""
        raise NotImplementedError

    def lose_interrupted(self, execution: Execution) -> None:
        """Give up an execution whose driver was interrupted while it sent the batch or read the answer."""
        raise NotImplementedError

    def _send_apart(self, execution: Execution) -> None:
        """Have another thread give a batch to an instance that blocks."""
        raise NotImplementedError

    def _send_anything(self, execution: Execution, mine: InferenceRequest | None) -> bool:
        """Do what `_send` does, for a batch that no port takes. Not for a thread on which signal handlers run."""
        raise NotImplementedError

    def _end_traced(self, execution: Execution, tell: Callable[[], object]) -> None:
        """Call `tell` between the two parts of the end of traces, whatever one of the three raises."""
        raise NotImplementedError

    def _reject(self, rejected: Rejected) -> None:
        """Give requests that wait no longer their errors."""
        raise NotImplementedError

    def _lose(self, execution: Execution, error: BaseException, *, delivered: bool) -> None:
        """Give up an execution whose instance broke."""
        raise NotImplementedError

    def _put_aside(self, instance: ModelInstance) -> None:
        """Take in an instance that broke, drains, or is due to be recycled. Needs the lock."""
        raise NotImplementedError

    def _settled(self, execution: Execution, answers: Sequence[Answer], now_ns: int) -> Iterable[Pair]:
        """Return the outcomes of a batch that may leave now, and note requests that it left open. Needs the lock."""
        raise NotImplementedError

    def _hand_out(self, pairs: Iterable[Pair]) -> None:
        """Give callers the outcomes that may leave. Without the lock."""
        raise NotImplementedError


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
        "port",
        "requests",
        "scheduler",
        "sent_ns",
        "started_ns",
    )

    def begin(
        self,
        scheduler: Lane,
        instance: ModelInstance,
        requests: list[InferenceRequest],
        started_ns: int,
        driver: object,
    ) -> None:
        """Set all attributes.

        `driver` sends the batch and is going to drive it; if it is None, the sender appoints a driver.
        """
        self.scheduler = scheduler
        self.instance = instance
        self.requests = requests
        self.started_ns = self.sent_ns = started_ns
        # Who has the answer, from the time at which it is sent.
        self.pending: Pending = None  # type: ignore[assignment]
        # The end of the work channel on which a usual batch went, which then has the answer, too.
        self.port: RuntimePort | None = None
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

    def sent(self, pending: Pending, port: RuntimePort | None = None) -> None:
        """Note that the instance has the batch, and who will have the answer."""
        self.sent_ns = monotonic_ns()
        self.pending, self.port = pending, port
        self.is_sent = True
        for request in self.requests:
            # Its caller left or cancelled before the instance had it.
            if (request.left or request.is_cancelled) and not request.fills_place:
                self.instance.backend.cancel(self.instance, request)

    @property
    def wanted_count(self) -> int:
        """The number of its requests that somebody waits for."""
        return sum(not (request.left or request.fills_place) for request in self.requests)

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
            waiter = request.waiter
            if isinstance(waiter, ThreadWaiter):
                thread = waiter
                if thread.appoint(self):
                    return
            elif waiter.appoint(self):
                return
        if self.claim(self.scheduler):
            self.drive_in_reactor()

    def reserve(self, by: object) -> None:
        """Make `by` the driver of an execution that was never offered."""
        self._drivers = [by]

    def abandon(self, by: object) -> None:
        """Go on without `by`, which may have been interrupted at any point of sending, waiting or reading.

        This is the one place where an execution is taken over whose driver was interrupted. Calling it twice does no
        harm.
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

    def drive(self, deadline: float | None, interruptible: bool) -> None:
        """Wait for the answer on this thread, which has claimed the execution, and finish it.

        `interruptible` says that signal handlers run on this thread. At `deadline`, or when a signal handler raises,
        the reactor takes over, and the exception goes on.
        """
        if interruptible and not IS_COMPILED:
            # This thread would have to leave the answer to the reactor all the same.
            self.drive_in_reactor()
            return
        port = self.port
        is_alone = len(self.requests) == 1 and not len(self.scheduler._queue)
        try:
            if deadline is not None and self._took_until(deadline, is_alone):
                pass
            elif port is None or not (port.wait_alone() if is_alone else port.wait()):
                self.pending.wait()
        except PeerGone:
            pass  # `finish` meets it again
        except BaseException:
            self.drive_in_reactor()
            raise
        self.scheduler.finish(self, interruptible)

    def _took_until(self, deadline: float, is_alone: bool) -> bool:
        """Wait for the answer. Returns True if it is received, too. Raises `RequestTimedOut`, never early."""
        port = self.port
        if port is not None:
            came = port.wait_until(int(deadline * 1e9) + 1, is_alone)
            if came is not None:
                if not came:
                    raise RequestTimedOut("Request timeout expired")
                return True
        poll = select.poll()
        poll.register(self.pending.fileno(), select.POLLIN)
        while True:
            left_s = deadline - monotonic()
            # poll counts whole milliseconds.
            if not poll.poll(max(0.0, left_s) * 1000 + 0.999):
                raise RequestTimedOut("Request timeout expired")
            if self.is_ready():
                return False

    def is_ready(self) -> bool:
        """Return True if the answer can be read, when the descriptor was readable.

        That of a stub may be so for nothing.
        """
        is_ready: Callable[[], bool] | None = getattr(self.pending, "is_ready", None)
        return is_ready is None or is_ready()

    def drive_in_reactor(self) -> None:
        """Let the reactor go on with it: wait for the answer, or hand out what was read.

        For the driver; calling it twice does no harm.
        """
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

    def record(self, answers: Sequence[Answer], answered_ns: int, now_ns: int) -> Sequence[Answer]:
        """Count the batch in the statistics. Returns the answers, with an error in place of each invalid one.

        As in Triton, requests that the batch leaves open succeeded in execute. Needs the lane's lock.
        """
        requests, statistics = self.requests, self.scheduler.statistics
        input_ns, output_ns = self.sent_ns - self.started_ns, now_ns - answered_ns
        infer_ns = answered_ns - self.sent_ns
        if len(answers) != len(requests):
            error = BackendError(f"{len(answers)} responses to {len(requests)} requests")
            answers = [error] * len(requests)
        by_duration, summaries = statistics.by_duration, statistics.summaries
        good = rows = total_rows = success_ns = queue_ns = filled = 0
        bad = False
        for i in range(len(requests)):
            request, answer = requests[i], answers[i]
            total_rows += request.batch_size
            sums = request.durations_ns
            if sums is not None:
                sums[0] += input_ns
                sums[1] += infer_ns
                sums[2] += output_ns
            if request.trace is not None:
                self.has_traces = True
                request.trace.executed(answer, request.queued_ns, self.started_ns, self.sent_ns, answered_ns, now_ns)
            if request.fills_place:
                filled += 1
                self.has_deferred = self.has_deferred or isinstance(answer, Deferral)
            elif type(answer) is Response or isinstance(answer, _GOOD):
                good += 1
                rows += request.batch_size
                taken_ns = now_ns - request.queued_ns
                success_ns += taken_ns
                queue_ns += self.started_ns - request.queued_ns
                by_duration[bisect_left(statistics.bounds_ns, taken_ns)] += 1
                if summaries is not None:
                    summaries.request.add(taken_ns)
                    summaries.queue.add(self.started_ns - request.queued_ns)
                if type(answer) is not Response:
                    self.has_deferred = True
            else:
                bad = True
        self.instance.served += len(requests) - filled
        now_ms = time_ns() // 1_000_000
        statistics.record_batch(now_ms, total_rows, good, rows, success_ns, queue_ns, input_ns, infer_ns, output_ns)
        if bad:
            given: Sequence[object] = answers
            answers = [each if isinstance(each, _ANSWERS) else no_answer(each) for each in given]
            self._record_failures(answers, now_ms, now_ns)
        return answers

    def _record_failures(self, answers: Sequence[Answer], now_ms: int, now_ns: int) -> None:
        scheduler = self.scheduler
        for request, answer in zip(self.requests, answers, strict=True):
            if isinstance(answer, BaseException) and not request.fills_place:
                fail_ns = now_ns - request.queued_ns
                scheduler.statistics.record_failures(now_ms, 1, fail_ns, reason_of(answer))
                if not request.left:
                    scheduler.note(answer, self.instance.name, request.request_id, 1)


class ThreadWaiter:
    """A thread that blocks until its outcome is there: a `Waiter`, whose head says what each method is for."""

    __slots__ = ("_bell", "_execution", "_gone", "_is_awake", "interruptible", "outcome")
    may_block = may_be_told_again = True
    takes_many = False

    def __init__(self) -> None:
        # The bell. A bare lock is the cheapest thing that a thread can wait on with a time limit.
        self._bell = bell = allocate_lock()
        bell.acquire()
        self._execution: Execution | None = None
        # It looks for an outcome and an execution before it blocks.
        self._is_awake = True
        self._gone = False
        # As in `is_interruptible`.
        self.interruptible = get_ident() == INTERRUPTIBLE[0]
        self.outcome: Outcome | None = None

    def gather(self, scheduler: Lane, request: InferenceRequest) -> bool:  # noqa: ARG002
        return False

    def respond(self, outcome: Outcome) -> None:
        raise NotImplementedError

    def resolve(self, outcome: Outcome | None) -> None:
        self.outcome = outcome
        self._ring()

    def appoint(self, execution: Execution) -> bool:
        self._execution = execution
        if self._gone and execution.claim(object()):
            # The thread left just before, and did not see the execution. Another one may be appointed.
            self._execution = None
            execution.offer()
            return False
        self._ring()
        return True

    def _ring(self) -> None:
        if self._is_awake:
            return
        try:
            self._bell.release()
        except RuntimeError:  # it rings already
            return

    def wait(self, deadline: float | None, own: Execution | None) -> Outcome:
        """Block until the outcome is there. Drives `own`, and executions that this thread is appointed to.

        Raises `RequestTimedOut` at `deadline` (seconds of `time.monotonic`).
        """
        if own is not None:
            own.drive(deadline, self.interruptible)
        while self.outcome is None:
            execution = self._execution
            if execution is None:
                self._sleep(deadline)
                continue
            self._execution = None
            if execution.claim(self):
                execution.drive(deadline, self.interruptible)
        self._gone = True
        if self._execution is not None and self._execution.claim(self):
            # The outcome came apart from the batch, and before this thread knew that it drives it.
            self._execution.appoint()
        return self.outcome

    def _sleep(self, deadline: float | None) -> None:
        """Block until the bell rings, unless there is a word already. Raises `RequestTimedOut` at the deadline."""
        self._is_awake = False
        if self.outcome is None and self._execution is None:
            if deadline is None:
                self._bell.acquire()
            elif not self._bell.acquire(True, max(0.0, deadline - monotonic())):
                raise RequestTimedOut("Request timeout expired")
        self._is_awake = True

    def leave(self) -> None:
        """Take no appointment any more. For the thread that waited."""
        self._gone = True


class PunctualWaiter(ThreadWaiter):
    """A thread that blocks until a time at most, and so cannot execute in a backend that blocks."""

    __slots__ = ()
    may_block = False


_GOOD = (Response, Deferral)
_ANSWERS = (*_GOOD, BaseException)


def no_answer(answer: object) -> MoonpoolError:
    return BackendError(
        f"the backend answered with {type(answer).__name__}; it must return a Pending, or a list "
        "with a Response or an exception for each request"
    )
