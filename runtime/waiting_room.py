"""Where requests wait for an instance, as the scheduler sees it: with or without sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from moonpool.runtime.batcher import Queue, QueueTimeout, form
from moonpool.runtime.errors import BackendError
from moonpool.runtime.request import AGAIN, InferenceRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.ipc.errors import MoonpoolError
    from moonpool.runtime.backend import ModelInstance
    from moonpool.runtime.config import ModelConfig
    from moonpool.runtime.request import Answer


Rejected: TypeAlias = "list[tuple[InferenceRequest, MoonpoolError]]"


class Plan(NamedTuple):
    """What to do now, and when to ask again if nothing happens before."""

    batches: list[tuple[ModelInstance, list[InferenceRequest]]]
    """At most one for each idle instance, to be executed at once."""
    rejected: Rejected
    """Do not wait any more."""
    wake_at_ns: int | None


_NOTHING = Plan([], [], None)
# The least time that a request needs from here to a stub: another process has to wake up. A request that may
# wait for less never reaches an instance in time, even an idle one.
_TO_INSTANCE_NS = 20_000


class WaitingRoom:
    """Requests that have nothing to do with each other. The scheduler's lock is held around every call."""

    # Whether more than the queue changes when a batch is answered.
    keeps_sequences = False

    def __init__(self, config: ModelConfig) -> None:
        batching = config.dynamic_batching
        self._is_open = batching is None or not batching.max_queue_delay_us
        self._rejects_late = batching is not None and batching.rejects_late
        self._queue: Queue[InferenceRequest] = Queue(
            config.max_batch_size, batching, _TO_INSTANCE_NS
        )

    def __len__(self) -> int:
        return len(self._queue)

    def lets_past(self, request: InferenceRequest) -> bool:
        """Tell if a request may go into an idle instance without being added."""
        return self._is_open and not len(self._queue) and not self.is_late(request)

    def is_late(self, request: InferenceRequest) -> bool:
        """Tell if a request is rejected even if an instance is idle, because it would reach that too late."""
        return self._rejects_late and self._queue.is_late(request)

    def add(self, request: InferenceRequest, now_ns: int) -> None:
        """Let a request wait. Raises `QueueFull`, and `InvalidRequest` and `SequenceLost` where there are sequences."""
        self._queue.add(request, now_ns)

    def remove(self, request: InferenceRequest, now_ns: int) -> bool:  # noqa: ARG002 - for sequences
        """Take out a cancelled request. False if it does not wait here (any more)."""
        return self._queue.remove(request)

    def drain(self, now_ns: int) -> list[InferenceRequest]:  # noqa: ARG002 - for sequences
        """Take out everything."""
        return self._queue.drain()

    def form(self, now_ns: int, idle: Sequence[ModelInstance]) -> Plan:
        """What the instances that are idle should do. Takes it out."""
        if not len(self._queue):
            return _NOTHING
        formation = form(self._queue, now_ns, len(idle))
        rejected: Rejected = [(request, QueueTimeout()) for request in formation.expired]
        # The instance that was busy last has everything in its caches.
        batches = list(zip(reversed(idle), formation.batches, strict=False))
        return Plan(batches, rejected, formation.wake_at_ns)

    def answered(self, request: InferenceRequest, answer: Answer, now_ns: int) -> Answer:  # noqa: ARG002
        """What becomes of a request that was in a batch: `AGAIN` where it waits here once more."""
        return _NOT_ITERATIVE if answer is AGAIN else answer

    def ended(self, request: InferenceRequest, now_ns: int) -> None:
        """A request that was to be answered later has had its last response."""

    def join(self, instance: ModelInstance, now_ns: int) -> None:
        """An instance is ready, perhaps not for the first time."""

    def retire(self, instance: ModelInstance) -> bool:  # noqa: ARG002 - for sequences
        """An instance is to end: nothing new is bound to it. True, and it has left, once nothing is."""
        return True

    def leave(self, instance: ModelInstance, now_ns: int) -> None:
        """An instance broke."""

    def close(self, now_ns: int) -> None:
        """No more requests come, but for those that are tried once more."""


_NOT_ITERATIVE = BackendError(
    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
    "configured to handle such a flag."
)
