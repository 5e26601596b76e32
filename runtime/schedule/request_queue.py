"""The queue of one model, as its scheduler sees it, with or without sequences; and the requests that are open after
their batch.

`RequestQueue` asks the batcher, and `SequenceQueue` the sequencer, what to do with real requests and instances. Neither
takes a lock or reads a clock: the scheduler calls them with its lock held, except to read a length, and gives the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import BackendError, InvalidRequest, ModelUnavailable, QueueTimeout
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Model, ModelInstance
from moonpool.runtime.model.config.model import ModelConfig, SequenceBatching
from moonpool.runtime.model.request import AGAIN, LATER, Answer, InferenceRequest
from moonpool.runtime.schedule.batcher import Queue, form
from moonpool.runtime.schedule.sequence_controls import SequenceControls
from moonpool.runtime.schedule.sequence_states import SequenceStates
from moonpool.runtime.schedule.sequences import START, Sequencer, lost

_log = RuntimeLog("moonpool")

Rejected: TypeAlias = "list[tuple[InferenceRequest, MoonpoolError]]"


class QueueDecision(NamedTuple):
    """The batches to execute now, and the time to ask again if nothing happens before."""

    batches: list[tuple[ModelInstance, list[InferenceRequest]]]
    """At most one for each idle instance, to be executed at once."""
    rejected: Rejected
    """Requests that wait no longer."""
    wake_at_ns: int | None


class Permits(Protocol):
    """The permits with which the instances of a model execute, where they need some (`rate_limiter.py`)."""

    def form(self, now_ns: int) -> tuple[list[Any], Rejected]:
        """Start what the queue wants to start in instances that may execute. Needs the lane's lock."""

    def leave(self, instances: Iterable[ModelInstance]) -> None:
        """Return what instances hold that have ended."""


# The least time that a request needs from here to a stub: another process has to wake up. A request that may
# wait for less never reaches an instance in time, even an idle one.
_TO_INSTANCE_NS = 20_000


class RequestQueue:
    """Requests that do not depend on each other."""

    def __init__(self, config: ModelConfig) -> None:
        # True if an answer to a batch changes more than the queue itself.
        self.keeps_sequences = False
        # The states of sequences that are kept here.
        self.states: SequenceStates | None = None
        self._configure(config, _queue_of(config))

    def _configure(self, config: ModelConfig, queue: Queue) -> None:
        batching = config.dynamic_batching
        # True if time alone may let a batch go, or end a request.
        self.has_times = queue.has_times
        self._is_open = batching is None or not batching.max_queue_delay_us
        self._rejects_late = batching is not None and batching.rejects_late
        self._queue = queue

    def reconfigure(self, config: ModelConfig) -> None:
        """Go on under other delays and queue policies, with all requests that wait. Not for sequences."""
        queue = _queue_of(config)
        # A signal handler may raise meanwhile. Until the next line, the requests are in the old queue.
        self._queue.copy_to(queue)
        self._configure(config, queue)

    def __len__(self) -> int:
        return self._queue.count

    @property
    def unplaced(self) -> int:
        """The number of requests that wait and that any instance could take."""
        return self._queue.count

    @property
    def has_sequences(self) -> bool:
        """True if a sequence has begun and has not ended."""
        return False

    def lets_past(self, request: InferenceRequest) -> bool:
        """Return True if a request may go into an idle instance without being added."""
        return self._is_open and not self._queue.count and not (self._rejects_late and self.is_late(request))

    def is_late(self, request: InferenceRequest) -> bool:
        """Return True if a request is rejected even if an instance is idle, because it would reach that too late."""
        return self._rejects_late and self._queue.is_late(request)

    def may_form(self, idle: Sequence[ModelInstance]) -> bool:
        """Return False if `form` has nothing to decide: nothing waits, or all instances are busy and no request has a
        deadline.
        """
        queue = self._queue
        return queue.count > 0 and (bool(idle) or queue.has_deadlines)

    def add(self, request: InferenceRequest, now_ns: int) -> None:
        """Let a request wait. Raises `QueueFull`; with sequences also `InvalidRequest` and `SequenceLost`."""
        self._queue.add(request, now_ns)

    def remove(self, request: InferenceRequest, now_ns: int) -> bool:  # noqa: ARG002 - for sequences
        """Take out a cancelled request. Returns False if it does not wait here (any more)."""
        return self._queue.remove(request)

    def drain(self, now_ns: int) -> list[InferenceRequest]:  # noqa: ARG002 - for sequences
        """Take out everything."""
        return self._queue.drain()

    @property
    def count(self) -> int:
        """The number of requests that wait for an instance."""
        return self._queue.count

    def take(self, now_ns: int) -> list[InferenceRequest]:
        """Take out the next batch, of a queue without times that is not empty."""
        batch: list[InferenceRequest] = self._queue.next_batch(now_ns)
        return batch

    def form(self, now_ns: int, idle: Sequence[ModelInstance]) -> QueueDecision:
        """Decide what the idle instances execute, and take it out."""
        formation = form(self._queue, now_ns, len(idle))
        rejected: Rejected = [(request, QueueTimeout()) for request in formation.expired]
        # The instance that was busy last has everything in its caches.
        batches = list(zip(reversed(idle), formation.batches, strict=False))
        # As in `form`.
        return tuple.__new__(QueueDecision, (batches, rejected, formation.wake_at_ns))

    def answered(self, request: InferenceRequest, answer: Answer, now_ns: int) -> Answer:  # noqa: ARG002
        """Take the answer to a request of a batch. Returns the answer to hand out; `AGAIN` if the request waits
        again.
        """
        return _NOT_ITERATIVE if answer is AGAIN else answer

    def ended(self, request: InferenceRequest, now_ns: int) -> None:
        """Note that a request that its batch left open has had its last response."""

    def join(self, instance: ModelInstance, now_ns: int) -> None:
        """Take in an instance that is ready; it may be here already."""

    def retire(self, instance: ModelInstance) -> bool:  # noqa: ARG002 - for sequences
        """Bind nothing new to an instance. Returns True, and the instance has left, once nothing is bound to it."""
        return True

    def leave(self, instance: ModelInstance, now_ns: int) -> None:
        """Take out an instance that broke."""

    def close(self, now_ns: int) -> None:
        """Expect no more requests, except those that are queued again."""


def _queue_of(config: ModelConfig) -> Queue:
    return Queue(config.max_batch_size, config.dynamic_batching, _TO_INSTANCE_NS)


class SequenceQueue(RequestQueue):
    """Requests of sequences, for a model with a sequence batcher."""

    def __init__(
        self,
        config: ModelConfig,
        batching: SequenceBatching,
        states: SequenceStates | None = None,
        *,
        survives: bool = False,
    ) -> None:
        """`survives`: the states of sequences outlive their instances."""
        super().__init__(config)
        self.keeps_sequences, self.states = True, states
        self.has_times = True
        self._is_open = False
        self._model = config.name
        self._is_iterative = batching.is_iterative
        self._controls = SequenceControls(config, batching.controls, states)
        self._sequencer: Sequencer[InferenceRequest, ModelInstance] = Sequencer(
            batching, config.max_batch_size, config.name, None if states is None else states.initial, survives=survives
        )

    def __len__(self) -> int:
        return len(self._sequencer)

    def may_form(self, idle: Sequence[ModelInstance]) -> bool:  # noqa: ARG002 - sequences end when their time is over
        return True

    @property
    def unplaced(self) -> int:
        return self._sequencer.backlog

    @property
    def has_sequences(self) -> bool:
        return self._sequencer.has_sequences

    def add(self, request: InferenceRequest, now_ns: int) -> None:
        self._controls.check(request.correlation_id)
        # It was on its way into an instance that broke. Another sequence may have its id by now.
        if request.attempts and not request.flags & START:
            if self._sequencer.rejoin(request, now_ns):
                return
            raise lost(request.correlation_id, self._model)
        if self._sequencer.add(request, now_ns):
            _log.warning(
                "sequence %s for model '%s' has a conflict. The previous sequence did not end before "
                "this sequence start. Previous sequence will be terminated early.",
                request.correlation_id,
                self._model,
            )

    def remove(self, request: InferenceRequest, now_ns: int) -> bool:
        return self._sequencer.remove(request, now_ns)

    def drain(self, now_ns: int) -> list[InferenceRequest]:
        return self._sequencer.drain(now_ns)

    def form(self, now_ns: int, idle: Sequence[ModelInstance]) -> QueueDecision:
        formation = self._sequencer.form(now_ns, idle)
        complete, state_of = self._controls.complete, self._sequencer.state_of
        batches = [(instance, complete(batch, state_of)) for instance, batch in formation.batches]
        return QueueDecision(batches, formation.failed, formation.wake_at_ns)

    def answered(self, request: InferenceRequest, answer: Answer, now_ns: int) -> Answer:
        if request.fills_place:
            return _GONE if answer is AGAIN else answer
        # It may come back, or bring the state for the next one.
        if answer is LATER and (self._is_iterative or self.states is not None):
            return answer
        self._keep_state(request)
        if answer is AGAIN and self._is_iterative:
            if not request.left and self._sequencer.again(request, now_ns):
                request.queued_ns = now_ns
                return AGAIN
            answer = _GONE
        self._sequencer.done(request, now_ns)
        return super().answered(request, answer, now_ns)

    def ended(self, request: InferenceRequest, now_ns: int) -> None:
        self._keep_state(request)
        self._sequencer.done(request, now_ns)

    def _keep_state(self, request: InferenceRequest) -> None:
        """Put the state that a response brought in the place of the last one. A sequence has one from its first answer
        on.
        """
        states = request.states
        if states is not None:
            new, states.new = states.new, None
            self._sequencer.keep(request, new or states.before)

    def join(self, instance: ModelInstance, now_ns: int) -> None:
        self._sequencer.join(instance, now_ns)

    def retire(self, instance: ModelInstance) -> bool:
        return self._sequencer.retire(instance)

    def leave(self, instance: ModelInstance, now_ns: int) -> None:
        self._sequencer.leave(instance, now_ns)

    def close(self, now_ns: int) -> None:
        self._sequencer.close(now_ns)


class OpenRequests:
    """Requests whose responses come apart from the answer to their batch. Not thread-safe: the scheduler's lock guards
    it.
    """

    def __init__(self) -> None:
        self._instance_of: dict[InferenceRequest, ModelInstance] = {}
        # Those of them whose callers have left, each with the time since which nobody waits for it here.
        self._deserted_ns: dict[InferenceRequest, int] = {}
        # Requests that had their last response before the answer to their batch.
        self._ended: set[InferenceRequest] = set()

    def __len__(self) -> int:
        return len(self._instance_of)

    def open(self, request: InferenceRequest, instance: ModelInstance, now_ns: int) -> None:
        """Note a request that the answer to its batch left open, unless it has had its last response already.

        A request that fills a place has no caller and is never open.
        """
        if request in self._ended:
            self._ended.remove(request)
        elif not request.fills_place:
            self._instance_of[request] = instance
            if request.left:
                self._deserted_ns[request] = now_ns

    def desert(self, request: InferenceRequest, now_ns: int) -> None:
        """Note that the caller of a request has left, if it is open."""
        if request in self._instance_of:
            self._deserted_ns.setdefault(request, now_ns)

    def deserted_since(self, time_ns: int) -> set[ModelInstance]:
        """Return the instances that have open requests, and none whose caller has left after that time, or is there."""
        kept = {
            instance
            for request, instance in self._instance_of.items()
            if self._deserted_ns.get(request, time_ns) >= time_ns
        }
        return set(self._instance_of.values()) - kept

    def end(self, request: InferenceRequest, *, is_executing: bool) -> bool:
        """Note the last response of a request. Returns False if the request has ended before."""
        self._deserted_ns.pop(request, None)
        if self._instance_of.pop(request, None) is not None:
            return True
        if is_executing and request not in self._ended:
            self._ended.add(request)
            return True
        return False

    def instance_of(self, request: InferenceRequest) -> ModelInstance | None:
        """Return the instance that is going to answer a request; None if the request is not open."""
        return self._instance_of.get(request)

    def has(self, instance: ModelInstance) -> bool:
        """Return True if an instance has open requests."""
        return instance in self._instance_of.values()

    def wanted_count(self, instance: ModelInstance | None = None) -> int:
        """Return the number of open requests of an instance, or of all, whose callers have not left."""
        return sum(
            not request.left and instance in (None, its_instance)
            for request, its_instance in list(self._instance_of.items())
        )

    def take(self, instance: ModelInstance | None = None) -> list[InferenceRequest]:
        """Forget the open requests of an instance, or all, and return them."""
        taken = [
            request
            for request, its_instance in self._instance_of.items()
            if instance is None or its_instance is instance
        ]
        for request in taken:
            del self._instance_of[request]
            self._deserted_ns.pop(request, None)
        return taken

    def without_ended(self, requests: Iterable[InferenceRequest]) -> list[InferenceRequest]:
        """Return the requests of a lost batch that have a caller and had no last response yet."""
        left = [each for each in requests if each not in self._ended and not each.fills_place]
        self._ended.difference_update(requests)
        return left


def check_many(model: str, request: InferenceRequest) -> None:
    """Raise `InvalidRequest` if the caller of a request to a decoupled model takes one response only."""
    if not request.waiter.takes_many:
        raise InvalidRequest(
            f"model '{model}' is decoupled: it may give any number of responses, so they have to be taken from a stream"
        )


def queue_for(model: Model) -> RequestQueue:
    """Make the queue of a model. Raises `LoadFailed` and `InvalidRequest` for invalid initial states."""
    config, survives = model.config, model.options.state_survives
    sequences = config.sequence_batching
    if sequences is None:
        return RequestQueue(config)
    return SequenceQueue(config, sequences, SequenceStates.of(model), survives=survives)


_NOT_ITERATIVE = BackendError(
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
    "configured to handle such a flag."
)
# For requests that nobody waits for, so nobody sees it.
_GONE = ModelUnavailable("the caller left")
