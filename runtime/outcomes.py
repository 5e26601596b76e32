"""Outcomes on their way to the callers: counted, once each, in the order that is asked for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError, RemoteProtocolError
from moonpool.ipc.messages import AGAIN as _AGAIN
from moonpool.runtime.counts import add_counts, take_counts
from moonpool.runtime.errors import ModelUnavailable
from moonpool.runtime.model_metrics import reason_of
from moonpool.runtime.open_requests import OpenRequests
from moonpool.runtime.ordering import Departures
from moonpool.runtime.request import AGAIN, LATER, Deferral
from moonpool.runtime.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from moonpool.runtime.backend import Model, ModelInstance
    from moonpool.runtime.changes import Changes
    from moonpool.runtime.counts import Counts
    from moonpool.runtime.execution import Execution
    from moonpool.runtime.request import Answer, InferenceRequest, Outcome
    from moonpool.runtime.waiting_room import WaitingRoom

    Pairs = list[tuple[InferenceRequest, Outcome | None]]
    # The error, the names of instance and request, and how many requests ended with it.
    Note = Callable[[BaseException | str, str, str, int], None]


class Outcomes:
    """What the scheduler does not hold any more but has to answer for.

    Methods that say so want the scheduler's lock held; the others take it. From any thread.
    """

    def __init__(
        self,
        model: Model,
        changes: Changes,
        is_executing: Callable[[ModelInstance, InferenceRequest], bool],
        room: WaitingRoom,
        look: Callable[[], None],
    ) -> None:
        """`look` is called after something has changed in the room."""
        config = model.config
        batching = config.dynamic_batching or config.sequence_batching
        in_order = batching is not None and batching.preserve_ordering
        self.statistics = Statistics(model.name, str(model.version))
        self.open = OpenRequests()
        self._departures: Departures[InferenceRequest, Outcome | None] = Departures(
            in_order=in_order
        )
        self._decoupled = config.decoupled
        self._changes = changes
        self._lock = changes.lock
        self._is_executing = is_executing
        self._room = room
        self._look = look
        # Hears of every request that ends with an error while somebody waits for it.
        self.note: Note = _ignored

    @property
    def in_order(self) -> bool:
        """Whether outcomes wait for those of earlier requests."""
        return self._departures.in_order

    def started(self, batch: Iterable[InferenceRequest]) -> None:
        """These are given to an instance. With the lock held."""
        self._departures.started(batch)
        if self._decoupled:
            now_ns = time.monotonic_ns()
            for request in batch:
                request.responded_ns = now_ns

    def take_counts(self) -> Counts | None:
        """What was counted since the last time, if anything."""
        with self._lock:
            return take_counts(self.statistics)

    def add_counts(self, counts: Counts) -> None:
        """Count what was counted elsewhere. Raises ValueError where it cannot be."""
        with self._lock:
            add_counts(self.statistics, counts)

    def done(self, requests: Sequence[InferenceRequest], outcome: Outcome) -> Pairs:
        """The same outcome for all of them; what may leave now. With the lock held."""
        return self._departures.done(requests, [outcome] * len(requests))

    def withdrawn(self, request: InferenceRequest) -> Pairs:
        """Its caller left while it waited; what may leave now. With the lock held."""
        fail_ns = time.monotonic_ns() - request.queued_ns
        self.statistics.record_failures(time.time_ns() // 1_000_000, 1, fail_ns, "CANCELED")
        return self.done([request], _LEFT)

    def settled(self, execution: Execution, answers: Sequence[Answer]) -> Pairs:
        """A batch was answered; what may leave now. With the lock held."""
        if not execution.has_deferred:
            return self._departures.done(execution.requests, answers)  # type: ignore[arg-type]
        done: list[InferenceRequest] = []
        outcomes: list[Outcome | None] = []
        for request, answer in zip(execution.requests, answers, strict=True):
            if answer is LATER:
                self.open.open(request, execution.instance)
            elif answer is not AGAIN:
                done.append(request)
                outcomes.append(answer)  # type: ignore[arg-type]
        return self._departures.done(done, outcomes)

    def leave(self, pairs: Pairs) -> None:
        """Hand out what may leave."""
        self._departures.leave(pairs, _resolve)

    def fail(self, requests: Sequence[InferenceRequest], error: MoonpoolError) -> None:
        """Give requests that are in no instance any more an error."""
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
            resolved = self.done(requests, error)
        self.leave(resolved)

    def fail_open(self, instance: ModelInstance, error: MoonpoolError) -> None:
        """An instance is gone; what it was going to answer later fails."""
        with self._lock:
            lost = self.open.take(instance)
            self._changes.tell()
        self.fail(lost, error)

    def respond(
        self,
        instance: ModelInstance,
        request: InferenceRequest,
        outcome: Outcome | None,
        flags: int,
    ) -> None:
        """A response apart from the answer to its batch, the word that it was the last, or both.

        On the reactor's thread. Raises `RemoteProtocolError` for one that its model may not give.
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
        if self._room.keeps_sequences:
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
        with self._lock:
            is_executing = self._is_executing(instance, request)
            if not self.open.end(request, is_executing=is_executing):
                return  # it was given up, as its model was being unloaded
            now_ns = time.monotonic_ns()
            if isinstance(answer, Deferral):
                answer = self._room.answered(request, answer, now_ns)
            else:
                self._room.ended(request, now_ns)
            self._changes.tell()
            if isinstance(answer, Deferral):
                return
            if isinstance(answer, BaseException) and not request.fills_place:
                now_ms = time.time_ns() // 1_000_000
                fail_ns = now_ns - request.queued_ns
                self.statistics.record_failures(now_ms, 1, fail_ns, reason_of(answer))
            resolved = self._departures.done([request], [answer])
        self.leave(resolved)


_LEFT = ModelUnavailable("the caller left")


def _ignored(*_: object) -> None:
    """Until somebody listens."""


def _resolve(request: InferenceRequest, outcome: Outcome | None) -> None:
    if not request.left:
        request.waiter.resolve(outcome)
