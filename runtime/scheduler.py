"""Requests of one model version on their way into its instances.

The scheduler holds what waits and the idle instances under one lock, asks the waiting room what to do whenever
either changes, and starts what it says. Callers, event loops and the reactor carry the executions out
(`runtime.execution`).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError, PeerGone, RemoteProtocolError
from moonpool.runtime.changes import Changes
from moonpool.runtime.errors import InvalidRequest, ModelUnavailable, own
from moonpool.runtime.execution import Execution, broken
from moonpool.runtime.outcomes import Outcomes
from moonpool.runtime.sequence_room import room_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from moonpool.runtime.backend import Model, ModelInstance
    from moonpool.runtime.reactor import Reactor
    from moonpool.runtime.request import Answer, InferenceRequest
    from moonpool.runtime.waiting_room import Rejected


class Scheduler:
    """All methods may be called from any thread."""

    def __init__(
        self,
        model: Model,
        reactor: Reactor,
        executor: Executor,
        on_lost: Callable[[ModelInstance, list[InferenceRequest], BaseException], None],
    ) -> None:
        """`on_lost`, which must not block, is told of instances that broke, and the requests in them."""
        config = model.config
        self._name, self._decoupled = config.name, config.decoupled
        self.reactor = reactor
        self._executor, self._on_lost = executor, on_lost
        self._lock = threading.Lock()
        self._changes = Changes(self._lock)
        self._room = room = room_for(config)
        self.outcomes = Outcomes(model, self._changes, self._is_executing, room, self._look)
        self.statistics = self.outcomes.statistics
        self._idle: list[ModelInstance] = []
        # Neither idle nor busy: somebody has them for a moment.
        self._taken: set[ModelInstance] = set()
        self._busy: dict[ModelInstance, Execution] = {}
        self._refusal: MoonpoolError | None = ModelUnavailable(
            f"Request for model '{model.name}' which is loading"
        )
        self._wake_at_ns: int | None = None

    # Requests

    def submit(self, request: InferenceRequest) -> Execution | None:
        """Take a request in. Returns an execution, claimed, that the caller should drive, if there is one.

        Raises `QueueFull`, `ModelUnavailable`, and `InvalidRequest` for a decoupled model and a caller of one.
        """
        if self._decoupled and not request.waiter.takes_many:
            raise InvalidRequest(
                f"model '{self._name}' is decoupled: it may give any number of responses, so they "
                "have to be taken from a stream"
            )
        with self._lock:
            if self._refusal is not None:
                raise own(self._refusal)
            now_ns = time.monotonic_ns()
            request.queued_ns = now_ns
            if self._idle and self._room.lets_past(request):
                # In this order an interrupted thread leaves no instance behind that nobody knows of.
                instance = self._idle[-1]
                driver = None if instance.blocks else request.waiter
                started = [self._start(instance, [request], now_ns, driver)]
                self._idle.pop()
                rejected: Rejected = []
            else:
                self._room.add(request, now_ns)
                if request.waiter.interruptible:
                    # Requests of others must not be in the hand of a thread that may be stopped anywhere.
                    self.reactor.call_soon(self._look)
                    return None
                started, rejected = self._form(now_ns)
        return self._launch(started, rejected, request)

    def leave(self, request: InferenceRequest) -> None:
        """The caller waits no more. For the thread that waited, wherever a signal handler raised in it."""
        for execution in self.cancel(request):
            execution.abandon(request.waiter)

    def cancel(self, request: InferenceRequest) -> list[Execution]:
        """Drop a queued request, or ignore the outcome of an executing one; returns what it executes in."""
        with self._lock:
            request.left = True
            was_queued = self._room.remove(request, time.monotonic_ns())
            released = self.outcomes.withdrawn(request) if was_queued else []
            inside = [each for each in self._busy.values() if request in each.requests]
            instance = inside[0].instance if inside else self.outcomes.open.instance_of(request)
            self._changes.tell()
        self.outcomes.leave(released)
        if instance is not None:
            instance.backend.cancel(instance, request)
        if was_queued and self._room.keeps_sequences:
            self.reactor.call_soon(self._look)
        return inside

    def tell_cancelled(self, request: InferenceRequest) -> None:
        """Set the flag that lets the model stop, now or when it gets the request. Its responses go on."""
        with self._lock:
            request.is_cancelled = True
            inside = [each.instance for each in self._busy.values() if request in each.requests]
            instance = inside[0] if inside else self.outcomes.open.instance_of(request)
        if instance is not None:
            instance.backend.cancel(instance, request)

    def _form(self, now_ns: int) -> tuple[list[Execution], Rejected]:
        """What to do now; with the lock held."""
        batches, rejected, wake_at_ns = self._room.form(now_ns, self._idle)
        # Where the reactor comes by earlier anyway, it finds out then when to come again.
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
        self.outcomes.started(batch)
        return execution

    def _wake(self) -> None:
        # The clock of the timer may be a little early; looking then sets another one.
        self._wake_at_ns = None
        self._look()

    def _look(self) -> None:
        """See whether a batch can be formed."""
        with self._lock:
            started, rejected = self._form(time.monotonic_ns())
        self._launch(started, rejected)

    # Executions

    def _launch(
        self,
        executions: list[Execution],
        rejected: Rejected,
        mine: InferenceRequest | None = None,
    ) -> Execution | None:
        """Send batches; returns, claimed, the one that holds `mine`. Others find a driver."""
        for request, error in rejected:
            self.outcomes.fail([request], error)
        own = None
        may_block = mine is not None and mine.waiter.may_block
        for execution in executions:
            is_own = mine is not None and mine in execution.requests
            if execution.instance.blocks and not (is_own and may_block):
                self._executor.submit(self._send, execution)
            elif self._send(execution, is_own=is_own):
                if is_own and mine is not None:
                    execution.reserve(mine.waiter)
                    own = execution
                else:
                    execution.appoint()
        return own

    def _send(self, execution: Execution, *, is_own: bool = False) -> bool:
        """Give a batch to its instance; False where that was the end of it already."""
        instance = execution.instance
        try:
            answers = execution.take(instance.execute(execution.requests))
        except (PeerGone, RemoteProtocolError) as error:
            self._lose(execution, error, delivered=False)
            return False
        except Exception as error:
            outcome = error if isinstance(error, MoonpoolError) else broken(instance, error)
            outcomes = [outcome] * len(execution.requests)
            # Not from here: settling starts the next batch, and that may fail here again.
            self.reactor.call_soon(lambda: self.settle(execution, outcomes))
            return False
        except BaseException as error:  # a signal handler raised: who knows what was sent
            self._lose(execution, error, delivered=True)
            raise
        if answers is None:
            return True
        if is_own or instance.blocks:
            self.settle(execution, answers)
        else:  # settling starts the next batch, and that may be answered here at once, too
            self.reactor.call_soon(lambda: self.settle(execution, answers))
        return False

    def finish(self, execution: Execution, *, interruptible: bool = False) -> None:
        """Read the answer of an execution that the caller has claimed, and hand out the outcomes."""
        if not self.executes(execution):  # whoever took it from an interrupted thread finished it
            return
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
        """The instance is free again: hand out the outcomes and start the next batch; a slow one's before that.

        An interruptible thread does so only where nobody else is concerned, else the reactor does.
        """
        requests, instance, room = execution.requests, execution.instance, self._room
        now_ns = time.monotonic_ns()
        with self._lock:
            if self._busy.get(instance) is not execution:
                return
            if interruptible and (
                len(requests) > 1 or len(room) or room.keeps_sequences or self.outcomes.in_order
            ):
                self.reactor.call_soon(lambda: self.settle(execution, answers, answered_ns))
                return
            answers = execution.record(answers, answered_ns or now_ns, now_ns)
            if execution.has_deferred or room.keeps_sequences:
                pairs = zip(requests, answers, strict=True)
                answers = [room.answered(request, answer, now_ns) for request, answer in pairs]
            # It is there already where a signal handler raised right after this.
            if instance not in self._idle:
                self._hand_back(instance)
            del self._busy[instance]
            started, rejected = self._form(now_ns)
            resolved = self.outcomes.settled(execution, answers)
            self._changes.tell()
        if execution.was_slow(now_ns):
            self._launch(started, rejected)
            started, rejected = [], []
        try:
            self.outcomes.leave(resolved)
        finally:
            self._launch(started, rejected)

    def executes(self, execution: Execution) -> bool:
        return self._busy.get(execution.instance) is execution

    def _is_executing(self, instance: ModelInstance, request: InferenceRequest) -> bool:
        execution = self._busy.get(instance)
        return execution is not None and not execution.is_lost and request in execution.requests

    def _lose(self, execution: Execution, error: BaseException, *, delivered: bool) -> None:
        """The instance broke. What it had not been given yet is queued again."""
        instance, requests = execution.instance, execution.requests
        with self._lock:
            execution.is_lost = True
            requests = self.outcomes.open.without_ended(requests)
            self._room.leave(instance, time.monotonic_ns())
        self._on_lost(instance, requests if delivered else [], error)
        with self._lock:
            # It may be restarted and busy again by now.
            if self._busy.get(instance) is execution:
                del self._busy[instance]
            self._changes.tell()
        self.reactor.call_soon(self._look)
        if not delivered:
            self.retry(requests)

    def retry(self, requests: Sequence[InferenceRequest]) -> None:
        """Queue requests again that an instance could not answer."""
        refused: Rejected = []
        with self._lock:
            now_ns = time.monotonic_ns()
            refusal = self._refusal or _LEFT
            for request in requests:
                request.attempts += 1
                try:
                    if self._refusal is not None or request.left:
                        raise refusal
                    self._room.add(request, now_ns)
                except MoonpoolError as error:
                    refused.append((request, error))
            started, rejected = self._form(now_ns)
        self._launch(started, rejected + refused)

    # Instances

    def open(self) -> None:
        """Accept requests from now on."""
        with self._lock:
            self._refusal = None

    def refuse(self, error: MoonpoolError) -> None:
        """Accept no more requests; what is queued stays."""
        with self._lock:
            self._refusal = error
            self._room.close(time.monotonic_ns())
            self._changes.tell()
        self.reactor.call_soon(self._look)

    def drop(self, error: MoonpoolError) -> None:
        """Fail everything that is queued or open."""
        with self._lock:
            dropped = self._room.drain(time.monotonic_ns()) + self.outcomes.open.take()
            self._changes.tell()
        self.outcomes.fail(dropped, error)

    def add(self, instance: ModelInstance) -> None:
        """An instance that is ready."""
        with self._lock:
            self._taken.discard(instance)
            self._hand_back(instance)
            self._changes.tell()
        self._look()

    def _hand_back(self, instance: ModelInstance) -> None:
        if instance.broken is not None:
            self._room.leave(instance, time.monotonic_ns())
            self._on_lost(instance, [], instance.broken)
        elif instance.accepts and not instance.leaves(self._room.retire):
            self._room.join(instance, time.monotonic_ns())
            self._idle.append(instance)

    def report(self, instance: ModelInstance, error: BaseException) -> None:
        """An instance broke; it is lost where it is idle, else when it is handed back."""
        with self._lock:
            instance.broken = error
            self._changes.tell()
            if instance in self._idle:
                self._idle.remove(instance)
                self._room.leave(instance, time.monotonic_ns())
                self._on_lost(instance, [], error)

    def take(self, instance: ModelInstance) -> bool:
        """Take an instance out if it is idle; whoever takes it must soon `add` or `lose` it."""
        with self._lock:
            if instance not in self._idle:
                return False
            self._idle.remove(instance)
            self._taken.add(instance)
            return True

    def lose(self, instance: ModelInstance, error: BaseException) -> None:
        """An instance broke in the hand of whoever took it."""
        with self._lock:
            self._taken.discard(instance)
            self._room.leave(instance, time.monotonic_ns())
            self._on_lost(instance, [], error)
            self._changes.tell()

    def retire(self, instance: ModelInstance) -> bool:
        """Take an instance out for good; False where it executes, or is lost already."""
        self._changes.wait_for(lambda: instance not in self._taken, None)
        return self.take(instance)

    def wait_empty(self, deadline: float) -> bool:
        """Wait until nothing is queued, executes or is open; False at the deadline."""
        return self._changes.wait_for(
            lambda: not len(self._room) and not self._busy and not len(self.outcomes.open),
            deadline,
        )

    def wait_idle(self, instance: ModelInstance, deadline: float | None) -> bool:
        """Wait until an instance executes nothing; False at the deadline."""
        return self._changes.wait_for(lambda: instance not in self._busy, deadline)

    def wait_closed(self, instance: ModelInstance, deadline: float | None) -> bool:
        """Wait until no request of an instance is open, or it broke; False at the deadline."""
        has_open = self.outcomes.open.has
        return self._changes.wait_for(
            lambda: instance.broken is not None or not has_open(instance), deadline
        )

    def executing_since(self, started_ns: int) -> list[Execution]:
        """What was started before that time and is not finished."""
        with self._lock:
            return [each for each in self._busy.values() if each.started_ns < started_ns]

    @property
    def queued(self) -> int:
        """How many requests wait for an instance."""
        return len(self._room)

    @property
    def executing(self) -> int:
        """How many instances execute."""
        return len(self._busy)


_LEFT = ModelUnavailable("the caller left")
