"""The scheduler of one model version: its lane, and all that is seldom there.

Theory of operation. `lane.py` explains the lock, the instances, and who drives what. `on_lost` and
`ModelInstance.recycle` take the supervisor's locks, which are therefore taken inside the lane's and never the other
way round.

*Open requests.* A model may answer a request apart from its batch. Those responses arrive on another channel, so the
last one can come before the answer to the batch. `OpenRequests` knows both orders and counts a request once. A model
may also leave a request open for ever. So a request counts as a use of the model while its caller waits, and no longer:
otherwise a model could keep itself awake.

*Sleep.* A model that sleeps has no instances. `doze` takes them out, if nobody waits for anything, in the same hold of
the lock after which requests meet the refusal `ASLEEP`. A model that is awake pays nothing for that: a caller who finds
a refusal looks which one it is. For `ASLEEP` the request is queued, and `wanted` is called, with the lock held, until
`open`. So no request is lost between the two, in either order.

*Order of closing.* `refuse` ends what comes in, `wait_empty` waits for what is here, and `drop` fails what is left when
the time is over. The instances stop after that, and a last `drop` fails what was queued again in between. Requests
whose callers have all left are waited for only `ABANDONED_S`, in which a model that looks at `is_cancelled` can end
well. `hurry` ends these waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from operator import call
from time import monotonic_ns, time_ns
from typing import Any

from moonpool.ipc.errors import MoonpoolError, PeerGone, RemoteProtocolError
from moonpool.ipc.messages import AGAIN as _AGAIN
from moonpool.runtime.errors import BackendError, CallerInterrupted, ModelUnavailable, all_of
from moonpool.runtime.model.backend import Model, ModelInstance
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import AGAIN, LATER, Answer, Deferral, InferenceRequest, Outcome, Response
from moonpool.runtime.observe.metric_families import reason_of
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.threads import is_interruptible
from moonpool.runtime.schedule.lane import ASLEEP, LEAVE_S, SLOW_NS, Execution, Lane, Pair, no_answer
from moonpool.runtime.schedule.request_queue import OpenRequests, Rejected, check_many
from moonpool.runtime.schedule.sequence_states import SequenceStates

_LEFT = ModelUnavailable("the caller left")
# The time that an instance which is to end has for requests that nobody waits for any more. It is over before anybody
# is told that an end takes long (`process/parallel.py`).
ABANDONED_S = 0.9


def _resolve(request: InferenceRequest, outcome: Outcome | None) -> None:
    if not request.left:
        request.waiter.resolve(outcome)


def _broken(instance: ModelInstance, error: Exception) -> MoonpoolError:
    """Return what callers get if a backend raised something else than moonpool's errors."""
    wrapped = BackendError(f"executing in {instance.name} failed: {error!r}")
    wrapped.__cause__ = error
    return wrapped


def _taken(execution: Execution, result: object) -> Sequence[Answer] | None:
    """Take in what the backend's `execute` returned. Returns the answers, or None if they are pending."""
    if not isinstance(result, list):
        if hasattr(result, "finish"):
            execution.sent(result)  # type: ignore[arg-type]
            return None
        result = [no_answer(result)] * len(execution.requests)
    execution.sent_ns = monotonic_ns()
    return result


class Scheduler(Lane):
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
        """`on_lost` gets instances that broke, and the requests in them. It must not block, and must not call the
        scheduler.

        Raises `LoadFailed` and `InvalidRequest` for invalid initial states, `ConfigError` for invalid buckets.
        """
        super().__init__(model, reactor)
        self._executor, self._on_lost = executor, on_lost
        self.backlog_bytes = model.options.backlog_bytes
        self.open_requests = OpenRequests()
        self._hurries = False

    def submit_soon(self, requests: list[InferenceRequest]) -> None:
        """Have the reactor call `submit_all`. It takes the requests out of the list, so calling this twice does no
        harm.
        """
        self.reactor.call_soon(lambda: self._submit_taken(requests))

    def _submit_taken(self, requests: list[InferenceRequest]) -> None:
        taken = []
        while requests:
            taken.append(requests.pop(0))
        if taken:
            self.submit_all(taken)

    @property
    def limited(self) -> Sequence[Any]:
        """The permits that a request may wait for while others have the resources (`rate_limiter.py`)."""
        return () if self.permits is None else (self.permits,)

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
            now_ns = monotonic_ns()
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
        self._launch(started, rejected, None)
        self._hand_out(refused)

    def _add(self, request: InferenceRequest, now_ns: int) -> None:
        if self._decoupled:
            check_many(self.name, request)
        if self._refusal is not None:
            self._refuse()
        request.queued_ns = now_ns
        self._let_wait(request, now_ns)

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
            now_ns = monotonic_ns()
            was_queued = self._queue.remove(request, now_ns)
            resolved: Iterable[Pair] = ()
            if was_queued:
                now_ms, fail_ns = time_ns() // 1_000_000, now_ns - request.queued_ns
                self.statistics.record_failures(now_ms, 1, fail_ns, "CANCELED")
                resolved = self._departures.done([request], [_LEFT])
            inside, instance = self._find(request)
            self.open_requests.desert(request, now_ns)
            self._changed.notify_all()
        self._hand_out(resolved)
        if instance is not None:
            instance.backend.cancel(instance, request)
        if was_queued and self._queue.keeps_sequences:
            self.reactor.call_soon(self.look)
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

    def _settled(self, execution: Execution, answers: Sequence[Answer], now_ns: int) -> Iterable[Pair]:
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

    def lose_interrupted(self, execution: Execution) -> None:
        """Give up an execution whose driver was interrupted while it sent the batch or read the answer. Does no harm
        after `_lose`.
        """
        if self.executes(execution):
            self._lose(execution, CallerInterrupted("a signal handler raised"), delivered=True)

    def _lose(self, execution: Execution, error: BaseException, *, delivered: bool) -> None:
        """Give up an execution whose instance broke. If its requests were not `delivered`, queue them again."""
        if is_interruptible():
            # A compiled step does this. What it meets beside moonpool's own errors comes from a signal handler.
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
            self._queue.leave(instance, monotonic_ns())
        self._on_lost(instance, requests if delivered else [], error)
        with self._lock:
            # It may be restarted and busy again by now.
            if self._busy.get(instance) is execution:
                del self._busy[instance]
            self._changed.notify_all()
        self.reactor.call_soon(self.look)
        if not delivered:
            self.retry(requests)

    def retry(self, requests: Sequence[InferenceRequest]) -> None:
        """Queue requests again that an instance could not answer. The reactor starts their batches."""
        refused: Rejected = []
        with self._lock:
            now_ns = monotonic_ns()
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
        self.reactor.call_soon(self.look)
        self._launch([], refused, None)

    # Outcomes

    def _hand_out(self, pairs: Iterable[Pair]) -> None:
        """Give callers the outcomes that may leave. Without the lock, as callers run code of their own."""
        self._departures.leave(pairs, _resolve)

    def _send_apart(self, execution: Execution) -> None:
        try:
            self._executor.submit(self._send_there, execution)
        except MoonpoolError as error:  # there is no thread, or the runtime ends
            outcomes = [error] * len(execution.requests)
            self.reactor.call_soon(partial(self.settle, execution, outcomes))

    def _send_there(self, execution: Execution) -> None:
        self._send(execution, None)

    def _send_anything(self, execution: Execution, mine: InferenceRequest | None) -> bool:
        instance = execution.instance
        try:
            result = instance.backend.model_instance_execute(instance, execution.requests)
            answers = _taken(execution, result)
        except (PeerGone, RemoteProtocolError) as error:
            self._lose(execution, error, delivered=False)
            return False
        except Exception as error:
            outcome = error if isinstance(error, MoonpoolError) else _broken(instance, error)
            outcomes = [outcome] * len(execution.requests)
            # Not on this stack: settling starts the next batch, which may fail here again.
            self.reactor.call_soon(partial(self.settle, execution, outcomes))
            return False
        except BaseException as error:  # a backend may raise SystemExit: nobody knows what was sent
            self._lose(execution, error, delivered=True)
            raise
        if answers is None:
            return True
        if mine is not None or instance.blocks:
            self.settle(execution, answers)
        else:  # settling starts the next batch, which may be answered here at once, too
            self.reactor.call_soon(partial(self.settle, execution, answers))
        return False

    def _end_traced(self, execution: Execution, tell: Callable[[], object]) -> None:
        traces = [each.trace for each in execution.requests if each.trace is not None]
        steps: list[Callable[[], object]] = [each.answered for each in traces]
        # Before the callers have the answers: they may write into them. The end may write a file.
        all_of(call, [*steps, tell, *(each.settled for each in traces)])

    def _reject(self, rejected: Rejected) -> None:
        all_of(lambda pair: self.fail([pair[0]], pair[1]), rejected)

    def fail(self, requests: Sequence[InferenceRequest], error: MoonpoolError) -> None:
        """Give an error to requests that are neither queued nor in an instance any more."""
        if not requests:
            return
        now_ns = monotonic_ns()
        fail_ns = sum(now_ns - request.queued_ns for request in requests)
        for request in requests:
            if not request.left:
                self.note(error, "", request.request_id, 1)
        with self._lock:
            now_ms = time_ns() // 1_000_000
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

    def respond(self, instance: ModelInstance, request: InferenceRequest, outcome: Outcome | None, flags: int) -> None:
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
            self.look()

    def _count_response(self, request: InferenceRequest, outcome: Outcome | None) -> None:
        now_ns = monotonic_ns()
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

    def _end(self, instance: ModelInstance, request: InferenceRequest, answer: Answer | None) -> None:
        """End an open request, or put it back into the queue if it is to be scheduled again."""
        with self._lock:
            execution = self._busy.get(instance)
            is_executing = execution is not None and not execution.is_lost and request in execution.requests
            if not self.open_requests.end(request, is_executing=is_executing):
                return  # it was given up, as its model was being unloaded
            now_ns = monotonic_ns()
            if isinstance(answer, Deferral):
                answer = self._queue.answered(request, answer, now_ns)
            else:
                self._queue.ended(request, now_ns)
            self._changed.notify_all()
            if isinstance(answer, Deferral):
                return
            if isinstance(answer, BaseException) and not request.fills_place:
                now_ms = time_ns() // 1_000_000
                fail_ns = now_ns - request.queued_ns
                self.statistics.record_failures(now_ms, 1, fail_ns, reason_of(answer))
            resolved = self._departures.done([request], [answer])
        self._hand_out(resolved)

    # Opening and closing

    def open(self) -> None:
        """Accept requests from now on."""
        with self._lock:
            self._refusal = None

    def doze(self) -> bool:
        """Take all instances out, if nobody waits for anything here: no request, no sequence. Requests that come from
        now on wait, and wake the model.

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
            self._queue.close(monotonic_ns())
            self._changed.notify_all()
        self.reactor.call_soon(self.look)

    def drop(self, error: MoonpoolError) -> None:
        """Fail all requests that are queued or open."""
        with self._lock:
            dropped = self._queue.drain(monotonic_ns()) + self.open_requests.take()
            self._changed.notify_all()
        self.fail(dropped, error)

    def watch(self, tell: Callable[[], object]) -> Callable[[], None]:
        """Call `tell` whenever a request may have left or an instance has changed, until the function is called that
        this returns.

        `tell` must be quick, and take no lock under which anybody calls a scheduler: the scheduler's lock is held.
        """
        return self._changed.watch(tell)

    def wait_empty(self, deadline: float) -> bool:
        """Wait until no request is queued, executing or open. Returns False if somebody still waits for one at the
        deadline.

        Requests that nobody waits for have `ABANDONED_S` at most.
        """

        def is_empty() -> bool:
            return not len(self._queue) and not self._busy and not len(self.open_requests)

        return self._wait_for(is_empty, lambda: bool(self.wanted_count), deadline)

    def _wait_for(self, is_over: Callable[[], bool], is_wanted: Callable[[], bool], deadline: float | None) -> bool:
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
        self.look()

    def _hand_back(self, instance: ModelInstance) -> None:
        """Make an instance idle, unless it broke meanwhile, drains, or is due to be recycled. Needs the lock."""
        if instance.broken is None and instance.accepts and instance.served < instance.serves_until:
            if self._queue.keeps_sequences:
                self._queue.join(instance, monotonic_ns())
            self._idle.append(instance)
        else:
            self._put_aside(instance)

    def _put_aside(self, instance: ModelInstance) -> None:
        if instance.broken is not None:
            self._queue.leave(instance, monotonic_ns())
            self._on_lost(instance, [], instance.broken)
        elif instance.accepts and not instance.leaves(self._queue.retire):
            if self._queue.keeps_sequences:
                self._queue.join(instance, monotonic_ns())
            self._idle.append(instance)

    def report(self, instance: ModelInstance, error: BaseException) -> None:
        """Note that an instance broke. If it is idle, it is lost now, otherwise when it is handed back."""
        with self._lock:
            instance.broken = error
            self._changed.notify_all()
            if instance in self._idle:
                self._idle.remove(instance)
                self._queue.leave(instance, monotonic_ns())
                self._on_lost(instance, [], error)
                if self._queue.keeps_sequences:
                    self.reactor.call_soon(self.look)

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
            self._queue.leave(instance, monotonic_ns())
            self._on_lost(instance, [], error)
            self._changed.notify_all()

    def retire(self, instance: ModelInstance) -> bool:
        """Take an instance out for good. Returns False if it executes, or is lost already."""
        self._changed.wait_for(lambda: instance not in self._taken, None)
        return self.take(instance)

    def forget(self, instance: ModelInstance) -> None:
        """Take out an instance that has ended. Sequences that had begun in it are lost."""
        if self.permits is not None:
            self.permits.leave([instance])
        with self._lock:
            self._queue.leave(instance, monotonic_ns())
            self._changed.notify_all()
        self.look()

    def reconfigure(self, config: ModelConfig) -> None:
        """Let requests wait as another configuration says, which differs in delays and queue policies alone."""
        with self._lock:
            self._queue.reconfigure(config)
            self.is_atomic = self._is_compiled()
        self.look()

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
        """True if a request is inside for which somebody waits, or a sequence. Without the lock it may be wrong the
        next moment.
        """
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
        """Return the instances that execute nothing, and whose requests are all open and without a caller since that
        time.
        """
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
        inside = sum(len(each.requests) for each in self.executing_since(monotonic_ns() + 1))
        return self.queued + inside + len(self.open_requests)

    @property
    def executing(self) -> int:
        """The number of instances that execute."""
        return len(self._busy)
