"""One sequence of requests, and the slots of one instance that sequences are put into."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

from moonpool.runtime.batcher import Queue, form
from moonpool.runtime.errors import SequenceLost
from moonpool.runtime.level import Request as BatchRequest

if TYPE_CHECKING:
    from moonpool.ipc.errors import MoonpoolError

START = 1
END = 2

CorrelationId: TypeAlias = "int | str"


class Request(BatchRequest, Protocol):
    """What is read of a request; nobody else changes it while it is here."""

    @property
    def correlation_id(self) -> CorrelationId:
        """Which sequence it belongs to; 0 and "" are none."""

    @property
    def flags(self) -> int:
        """START, END, both or none."""

    def identify(self, correlation_id: CorrelationId, flags: int) -> None:
        """From now on these are its id and its flags."""


R = TypeVar("R", bound=Request)


def lost(correlation_id: CorrelationId, model: str) -> SequenceLost:
    """What everybody is told who goes on with a sequence whose instance ended."""
    return SequenceLost(
        f"sequence {correlation_id} of model '{model}' is lost, as the instance ended that had "
        "its state; start it again"
    )


class Sequence(Generic[R]):
    """From a request that starts it to the answer to one that ends it."""

    __slots__ = ("executing", "id", "is_closed", "lost", "table", "waiting")

    def __init__(self, correlation_id: CorrelationId) -> None:
        self.id = correlation_id
        # With the times at which they arrived.
        self.waiting: deque[tuple[R, int]] = deque()
        self.executing: R | None = None
        # The last that arrived says END: what comes next has to START.
        self.is_closed = False
        self.table: Table[R] | None = None
        self.lost: MoonpoolError | None = None

    @property
    def head(self) -> R | None:
        """What may be executed next, if anything may at the moment."""
        return self.waiting[0][0] if self.waiting and self.executing is None else None

    def place_of(self, request: R) -> int | None:
        """How many requests wait before this one; None where it does not wait."""
        for place, (each, _) in enumerate(self.waiting):
            if each is request:
                return place
        return None


class Table(Generic[R]):
    """The slots of one instance."""

    __slots__ = ("is_retiring", "limit", "order", "queue", "slots")

    def __init__(self, order: int, limit: int, queue: Queue[R] | None) -> None:
        self.order = order
        # How many slots there can be, of which those have a place in the list that were ever used.
        self.limit = limit
        self.slots: list[Sequence[R] | None] = []
        # No further sequence comes into it.
        self.is_retiring = False
        # Of first requests, where batches are made of the oldest.
        self.queue = queue

    def direct(
        self, utilization: float, delay_ns: int, now_ns: int
    ) -> tuple[list[R | None], int | None]:
        """The requests for a batch in which a slot is a place, or when to look again.

        None is an empty place. `utilization` is the part of the slots that makes waiting for more unnecessary.
        """
        ready = [
            each.waiting[0] for each in self.slots if each is not None and each.head is not None
        ]
        if not ready:
            return [], None
        oldest, oldest_ns = min(ready, key=lambda head: head[1])
        if len(ready) < utilization * self.limit and now_ns < oldest_ns + delay_ns:
            return [], oldest_ns + delay_ns
        batch: list[R | None] = []
        for place, sequence in enumerate(self.slots):
            head = None if sequence is None else sequence.head
            # Another shape waits; the oldest goes first, so nobody waits for ever.
            if head is not None and head.signature == oldest.signature:
                batch += [None] * (place - len(batch))
                batch.append(head)
        return batch, None

    def oldest(self, queue: Queue[R], now_ns: int) -> tuple[list[R | None], int | None]:
        """The requests for a batch of the oldest, or when to look again."""
        formation = form(queue, now_ns, 1)
        return [*chain(*formation.batches)], formation.wake_at_ns
