"""The sequencer: decides which request of which sequence goes into which batch of which instance, and when.

It is pure, as the batcher is: no clock, no lock, no file. Time comes in as monotonic nanoseconds and never runs
backwards. The owner holds one lock around every call.

Theory of operation.

A sequence is all requests of one correlation id, from one that starts it to the answer to one that ends it. An instance
has a number of *slots*. When a sequence starts, it is put into a free slot, the lowest number first, and stays there.
If no slot is free, it waits in the backlog, with everything that arrives for it. At most one request of a sequence
executes at a time, so they stay in order.

There are two policies to make a batch of the sequences in the slots of an idle instance:

  direct   a slot is a place in the batch. The batch reaches to the last slot that has a request, and places before it
           that have none are empty. It is sent when enough slots have a request, or when the oldest request has waited
           for the whole delay.
  oldest   the first request of every sequence stands in a queue of the batcher, one for each instance.

A sequence ends when a request that said END is answered, when nothing has arrived for it for too long, or when its
instance breaks. If the model is iterative, every request is a sequence of its own. Requests that still wait under the
id of a sequence that ended start another one, which goes behind the backlog.

A sequence is idle from its last answer on. All may be idle equally long, so they stand in the order in which they
became idle. A sequence whose instance broke is remembered as long, to tell its caller why it is gone.

If the runtime keeps the states of sequences (`StateOfSequence`), the last one is here, from the first answer on. It
goes with the sequence. If the model says that states survive, a sequence with one outlives its instance: it goes to the
front of the backlog. A request that the instance was executing fails, and the sequence stands where it stood before it.
If that request is tried once more, it takes its old place, unless a later one has gone first.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from heapq import heappop, heappush
from itertools import chain
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import InvalidRequest, SequenceLost, own
from moonpool.runtime.model.config.model import DynamicBatching, SequenceBatching
from moonpool.runtime.schedule.batcher import Queue, QueuedRequest, form

START = 1
END = 2

CorrelationId: TypeAlias = "int | str"


class SequenceRequest(QueuedRequest, Protocol):
    """The part of a request that the sequencer reads. Nobody else changes it while it is here."""

    @property
    def correlation_id(self) -> CorrelationId:
        """The id of its sequence; 0 and "" are none."""

    @property
    def flags(self) -> int:
        """START, END, both or none."""

    def identify(self, correlation_id: CorrelationId, flags: int) -> None:
        """Set its id and its flags."""

    def tell_apart(self, states: Hashable) -> None:
        """Let it share a batch only with requests whose states have the same key."""


class StateOfSequence(Protocol):
    """Is what a sequence keeps between its requests, as the sequencer reads it."""

    @property
    def key(self) -> Hashable:
        """Requests whose states have equal keys can be joined in a batch."""


R = TypeVar("R", bound=SequenceRequest)
# An instance, by its identity.
S = TypeVar("S")


def lost(correlation_id: CorrelationId, model: str) -> SequenceLost:
    """Return the error for requests that go on with a sequence whose instance ended."""
    return SequenceLost(
        f"sequence {correlation_id} of model '{model}' is lost, as the instance ended that had "
        "its state; start it again"
    )


class Sequence(Generic[R]):
    """One sequence, from the request that starts it to the answer to the one that ends it."""

    __slots__ = ("broken_off", "executing", "id", "is_closed", "lost", "state", "table", "waiting")

    def __init__(self, correlation_id: CorrelationId) -> None:
        self.id = correlation_id
        # With the times at which they arrived.
        self.waiting: deque[tuple[R, int]] = deque()
        self.executing: R | None = None
        # The last request that arrived says END, so the next one has to START.
        self.is_closed = False
        self.table: SlotTable[R] | None = None
        self.lost: MoonpoolError | None = None
        # The state after the last answer; None before the first one, and if no states are kept.
        self.state: StateOfSequence | None = None
        # The request that its instance had when it broke, until another one executes.
        self.broken_off: R | None = None

    @property
    def head(self) -> R | None:
        """The request to execute next; None if none waits, or one executes."""
        return self.waiting[0][0] if self.waiting and self.executing is None else None

    def place_of(self, request: R) -> int | None:
        """Return the number of requests that wait before this one; None if it does not wait."""
        for place, (each, _) in enumerate(self.waiting):
            if each is request:
                return place
        return None


class SlotTable(Generic[R]):
    """The slots of one instance."""

    __slots__ = ("is_retiring", "limit", "order", "queue", "slots")

    def __init__(self, order: int, limit: int, queue: Queue | None) -> None:
        self.order = order
        self.limit = limit
        # Only as many as were ever used, up to the limit.
        self.slots: list[Sequence[R] | None] = []
        # No further sequence comes into the table.
        self.is_retiring = False
        # The first requests of all sequences, for the policy "oldest".
        self.queue = queue

    def direct(self, utilization: float, delay_ns: int, now_ns: int) -> tuple[list[R | None], int | None]:
        """Return the requests for a batch in which a slot is a place, or the time to look again.

        None is an empty place. `utilization` is the part of the slots that makes waiting for more unnecessary.
        """
        ready = [each.waiting[0] for each in self.slots if each is not None and each.head is not None]
        if not ready:
            return [], None
        oldest, oldest_ns = min(ready, key=lambda head: head[1])
        if len(ready) < utilization * self.limit and now_ns < oldest_ns + delay_ns:
            return [], oldest_ns + delay_ns
        batch: list[R | None] = []
        for place, sequence in enumerate(self.slots):
            head = None if sequence is None else sequence.head
            # Other shapes wait for another batch. The oldest request goes first, so none waits for ever.
            if head is not None and head.signature == oldest.signature:
                batch += [None] * (place - len(batch))
                batch.append(head)
        return batch, None

    def oldest(self, queue: Queue, now_ns: int) -> tuple[list[R | None], int | None]:
        """Return the oldest requests for a batch, or the time to look again."""
        formation = form(queue, now_ns, 1)
        return [*chain(*formation.batches)], formation.wake_at_ns


class SequenceFormation(NamedTuple, Generic[R, S]):
    """The batches to execute now, and the time to ask again if nothing happens before."""

    batches: list[tuple[S, list[R | None]]]
    """At most one for each idle instance, to be executed at once. None is an empty place."""
    failed: list[tuple[R, MoonpoolError]]
    """Requests that wait no longer, to be answered with the error."""
    wake_at_ns: int | None
    """Later than now. None if only a request, an answer or an idle instance changes anything."""


class Sequencer(Generic[R, S]):
    """The sequences of one model version. Not thread-safe: the owner's lock is held around every call."""

    def __init__(
        self,
        batching: SequenceBatching,
        max_batch_size: int,
        model: str,
        initial: StateOfSequence | None = None,
        *,
        survives: bool = False,
    ) -> None:
        """`initial` is the state of every sequence at its start, if states are kept. `survives`: they outlive
        instances.
        """
        self._initial = initial
        self._survives = survives
        self._batching = batching
        self._max_batch_size = max_batch_size
        self._model = model
        self._idle_ns = batching.max_idle_us * 1000
        self._open: dict[CorrelationId, Sequence[R]] = {}
        self._tables: dict[S, SlotTable[R]] = {}
        self._joined = 0
        # (slot, order of its table, table): slots that became free, and the first one that was never used.
        self._free: list[tuple[int, int, SlotTable[R]]] = []
        self._backlog: OrderedDict[Sequence[R], None] = OrderedDict()
        self._idle: OrderedDict[Sequence[R], int] = OrderedDict()
        self._executing: dict[int, Sequence[R]] = {}
        self._failed: list[tuple[R, MoonpoolError]] = []
        # By identity. Not a number, which would be wrong for ever if a signal handler raised beside it.
        self._waiting: set[int] = set()
        self._last_id = 0
        self._is_closing = False

    def __len__(self) -> int:
        """Return the number of requests that wait."""
        return len(self._waiting)

    @property
    def backlog(self) -> int:
        """The number of sequences that wait for a slot."""
        return len(self._backlog)

    def __repr__(self) -> str:
        return f"<Sequencer: {len(self._waiting)} requests wait, {len(self._open)} sequences>"

    # Requests

    def add(self, request: R, now_ns: int) -> bool:
        """Put the request behind the others of its sequence, or raise `InvalidRequest` or `SequenceLost`.

        Returns True if it starts a sequence while another one of the same id has not ended.
        """
        self._expire(now_ns)
        self._identify(request)
        correlation_id = request.correlation_id
        starts, ends = request.flags & START, request.flags & END
        sequence = self._open.get(correlation_id)
        if not starts and (sequence is None or sequence.is_closed):
            raise self._not_started(request)
        if sequence is not None and sequence.lost is not None:
            if not starts:
                raise own(sequence.lost)
            self._forget(sequence)
            sequence = None
        is_conflict = bool(starts) and sequence is not None and not sequence.is_closed
        if sequence is None:
            sequence = self._begin(correlation_id)
        sequence.waiting.append((request, now_ns))
        sequence.is_closed = bool(ends) or self._batching.is_iterative
        self._idle.pop(sequence, None)
        self._waiting.add(id(request))
        if sequence.head is request:
            self._ready(sequence, now_ns)
        return is_conflict

    def _identify(self, request: R) -> None:
        if request.batch_size > 1:
            raise InvalidRequest(
                f"inference request to model '{self._model}' must specify batch-size 1 due to "
                "requirements of sequence batcher"
            )
        if request.correlation_id:
            return
        if not self._batching.is_iterative:
            raise InvalidRequest(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty correlation ID"
            )
        self._last_id += 1
        while self._last_id in self._open:
            self._last_id += 1
        request.identify(self._last_id, request.flags | START)

    def _not_started(self, request: R) -> InvalidRequest:
        return InvalidRequest(
            f"inference request for sequence {request.correlation_id} to model '{self._model}' must "
            "specify the START flag on the first request of the sequence"
        )

    def remove(self, request: R, now_ns: int) -> bool:
        """Take out a cancelled request. Returns False if it does not wait here (any more)."""
        sequence = self._open.get(request.correlation_id)
        place = None if sequence is None else sequence.place_of(request)
        if sequence is None:
            return False
        if place is None:
            # `add` may have been interrupted half-way. Then nothing else would free the slot that it took.
            is_used = sequence.waiting or sequence.executing is not None or sequence in self._idle
            if not is_used:
                self._end(sequence, now_ns)
            return False
        if sequence.head is request and sequence.table and sequence.table.queue is not None:
            sequence.table.queue.remove(request)
        del sequence.waiting[place]
        self._waiting.discard(id(request))
        if request.flags & START:
            self._fail(sequence, place, self._not_started(request))
            sequence.is_closed = sequence.is_closed or place == len(sequence.waiting)
        if place == 0:
            self._go_on(sequence, now_ns)
        return True

    def state_of(self, request: R) -> StateOfSequence | None:
        """Return the last state of the sequence of a request that executes; None at its start."""
        return self._executing[id(request)].state

    def keep(self, request: R, state: StateOfSequence) -> None:
        """Set the state of a sequence after the answer to a request, unless its instance left meanwhile."""
        sequence = self._executing.get(id(request))
        if sequence is not None:
            sequence.state = state

    def rejoin(self, request: R, now_ns: int) -> bool:
        """Put a request back to the front of its sequence, after its instance broke. Returns False if the sequence went
        on.
        """
        sequence = self._open.get(request.correlation_id)
        if sequence is None or sequence.broken_off is not request:
            return False
        if sequence.head is not None and sequence.table and sequence.table.queue is not None:
            sequence.table.queue.remove(sequence.head)
        sequence.broken_off = None
        if not sequence.waiting:
            sequence.is_closed = bool(request.flags & END)
        sequence.waiting.appendleft((request, now_ns))
        self._idle.pop(sequence, None)
        self._waiting.add(id(request))
        self._ready(sequence, now_ns)
        return True

    def done(self, request: R, now_ns: int) -> None:
        """Note that a request of a batch was answered."""
        sequence = self._executing.pop(id(request), None)
        if sequence is None:  # its instance left meanwhile
            return
        sequence.executing = None
        if request.flags & END or self._batching.is_iterative:
            self._end(sequence, now_ns)
        else:
            self._go_on(sequence, now_ns)

    def again(self, request: R, now_ns: int) -> bool:
        """Queue a request of a batch again, before the others of its sequence.

        Returns False, and does not queue it, if its instance left meanwhile.
        """
        sequence = self._executing.pop(id(request), None)
        if sequence is None:
            return False
        sequence.executing = None
        request.identify(sequence.id, 0)
        sequence.waiting.appendleft((request, now_ns))
        self._waiting.add(id(request))
        self._ready(sequence, now_ns)
        return True

    def drain(self, now_ns: int) -> list[R]:
        """Take out all requests that wait, those of sequences in slots first. A request that executes ends its
        sequence.
        """
        drained: list[R] = []
        in_slots = (each for table in self._tables.values() for each in table.slots)
        for sequence in [*filter(None, in_slots), *self._backlog]:
            if sequence.head is not None and sequence.table and sequence.table.queue is not None:
                sequence.table.queue.remove(sequence.head)
            drained += [request for request, _ in sequence.waiting]
            sequence.waiting.clear()
            sequence.is_closed = True
        self._waiting.clear()
        self._backlog.clear()
        for sequence in list(self._open.values()):
            if sequence.executing is None:
                self._end(sequence, now_ns)
        return drained

    def close(self, now_ns: int) -> None:
        """Expect no more requests. Idle sequences end, as they would only keep others out of their slots."""
        self._is_closing = True
        for sequence in list(self._idle):
            self._end(sequence, now_ns)

    # Instances

    @property
    def has_sequences(self) -> bool:
        """True if a sequence is bound to an instance, or waits for one."""
        return bool(self.backlog) or any(any(each.slots) for each in [*self._tables.values()])

    def join(self, instance: S, now_ns: int) -> None:
        """Take in an instance, unless it is here already."""
        if instance in self._tables:
            return
        batching = self._batching
        queue: Queue | None = None
        if not batching.is_direct:
            policy = DynamicBatching(batching.preferred_batch_sizes, batching.max_queue_delay_us)
            queue = Queue(self._max_batch_size, policy)
        self._joined += 1
        table: SlotTable[R] = SlotTable(self._joined, batching.slots, queue)
        self._tables[instance] = table
        heappush(self._free, (0, table.order, table))
        self._fill(now_ns)

    def retire(self, instance: S) -> bool:
        """Let no sequence begin in an instance. Returns True, and the instance has left, once it has none."""
        table = self._tables.get(instance)
        if table is None:
            return True
        table.is_retiring = True
        self._free = sorted(each for each in self._free if each[2] is not table)
        if any(table.slots):
            return False
        del self._tables[instance]
        return True

    def leave(self, instance: S, now_ns: int) -> None:
        """Take out an instance that broke. Sequences that had begun in it are lost, others go to the front of the
        backlog.

        If states survive, sequences that have one count as others.
        """
        table = self._tables.pop(instance, None)
        if table is None:
            return
        self._free = [each for each in self._free if each[2] is not table]
        self._free.sort()
        for sequence in filter(None, reversed(table.slots)):
            sequence.table = None
            request = sequence.executing
            if request is not None:
                self._executing.pop(id(request))
            if self._survives and sequence.state is not None and not self._batching.is_iterative:
                self._carry_over(sequence, now_ns)
            else:
                self._lose(sequence, now_ns)
        self._fill(now_ns)

    def _carry_over(self, sequence: Sequence[R], now_ns: int) -> None:
        request, sequence.executing = sequence.executing, None
        self._backlog[sequence] = None
        self._backlog.move_to_end(sequence, last=False)
        if request is not None:
            sequence.broken_off = request
            # Its caller may send it once more.
            sequence.is_closed = sequence.is_closed and bool(sequence.waiting)
            self._go_on(sequence, now_ns)

    def _lose(self, sequence: Sequence[R], now_ns: int) -> None:
        error = lost(sequence.id, self._model)
        self._fail(sequence, 0, error)
        self._forget(sequence)
        if sequence.waiting:
            self._begin_again(sequence, first=True)
        elif not sequence.is_closed and not self._is_closing:
            sequence.lost = error
            self._open[sequence.id] = sequence
            self._idle[sequence] = now_ns + self._idle_ns

    def form(self, now_ns: int, idle: Iterable[S]) -> SequenceFormation[R, S]:
        """Decide which requests leave at this moment, and take them out.

        Call it after every other call, with the instances that execute nothing.
        """
        self._expire(now_ns)
        batches: list[tuple[S, list[R | None]]] = []
        wakes: list[int] = []
        for instance in idle if self._waiting else ():
            table = self._tables.get(instance)
            if table is None:
                continue
            batch, wake_at_ns = self._batch(table, now_ns)
            if batch:
                batches.append((instance, batch))
            elif wake_at_ns is not None:
                wakes.append(wake_at_ns)
        if self._idle:
            wakes.append(next(iter(self._idle.values())))
        failed, self._failed = self._failed, []
        return SequenceFormation(batches, failed, min(wakes, default=None))

    def _batch(self, table: SlotTable[R], now_ns: int) -> tuple[list[R | None], int | None]:
        """Return the batch to send now, or the time to look again."""
        batching = self._batching
        if table.queue is None:
            delay_ns = batching.max_queue_delay_us * 1000
            batch, wake_at_ns = table.direct(batching.minimum_slot_utilization, delay_ns, now_ns)
        else:
            batch, wake_at_ns = table.oldest(table.queue, now_ns)
        for request in filter(None, batch):
            self._start(self._open[request.correlation_id])
        return batch, wake_at_ns

    # Sequences

    def _begin(self, correlation_id: CorrelationId) -> Sequence[R]:
        sequence: Sequence[R] = Sequence(correlation_id)
        self._open[correlation_id] = sequence
        if not self._place(sequence):
            self._backlog[sequence] = None
        return sequence

    def _begin_again(self, old: Sequence[R], *, first: bool = False) -> None:
        """Start another sequence with the requests that still wait under the id of one that ended."""
        sequence: Sequence[R] = Sequence(old.id)
        sequence.waiting, sequence.is_closed = old.waiting, old.is_closed
        self._open[sequence.id] = sequence
        self._backlog[sequence] = None
        if first:
            self._backlog.move_to_end(sequence, last=False)

    def _place(self, sequence: Sequence[R]) -> bool:
        """Put a sequence into a slot. Returns False if none is free."""
        if not self._free:
            return False
        number, order, table = heappop(self._free)
        if number == len(table.slots):
            table.slots.append(None)
            if len(table.slots) < table.limit:
                heappush(self._free, (number + 1, order, table))
        table.slots[number] = sequence
        sequence.table = table
        return True

    def _fill(self, now_ns: int) -> None:
        """Put sequences of the backlog into free slots."""
        while self._backlog and self._place(next(iter(self._backlog))):
            sequence, _ = self._backlog.popitem(last=False)
            self._ready(sequence, now_ns)

    def _ready(self, sequence: Sequence[R], now_ns: int) -> None:
        """Queue the first request of a sequence that executes nothing."""
        head = sequence.head
        if head is not None and self._initial is not None:
            last = None if head.flags & START else sequence.state
            head.tell_apart((last or self._initial).key)
        if sequence.table is not None and sequence.table.queue is not None and sequence.head:
            sequence.table.queue.add(sequence.head, now_ns)

    def _start(self, sequence: Sequence[R]) -> None:
        request, _ = sequence.waiting.popleft()
        sequence.executing, sequence.broken_off = request, None
        if request.flags & START:
            sequence.state = None
        self._executing[id(request)] = sequence
        self._waiting.discard(id(request))

    def _go_on(self, sequence: Sequence[R], now_ns: int) -> None:
        """Go on with the next request of a sequence; without one, the sequence is idle, or ends."""
        if sequence.executing is not None:
            return
        if sequence.waiting:
            self._ready(sequence, now_ns)
        elif (
            sequence.is_closed
            or self._is_closing
            # It has not begun.
            or (sequence.table is None and sequence.state is None)
        ):
            self._end(sequence, now_ns)
        else:
            self._idle[sequence] = now_ns + self._idle_ns

    def _end(self, sequence: Sequence[R], now_ns: int) -> None:
        table = sequence.table
        if table is not None:
            number = table.slots.index(sequence)
            table.slots[number] = None
            if not table.is_retiring:
                heappush(self._free, (number, table.order, table))
        self._forget(sequence)
        if sequence.waiting:
            self._begin_again(sequence)
        self._fill(now_ns)

    def _forget(self, sequence: Sequence[R]) -> None:
        del self._open[sequence.id]
        self._idle.pop(sequence, None)
        self._backlog.pop(sequence, None)

    def _fail(self, sequence: Sequence[R], place: int, error: MoonpoolError) -> None:
        """Fail the requests that wait from a place on, up to one that starts a sequence."""
        waiting = sequence.waiting
        while place < len(waiting) and not waiting[place][0].flags & START:
            self._failed.append((waiting[place][0], error))
            self._waiting.discard(id(waiting[place][0]))
            del waiting[place]

    def _expire(self, now_ns: int) -> None:
        """End the sequences that have been idle for too long."""
        while self._idle:
            sequence, deadline_ns = next(iter(self._idle.items()))
            if deadline_ns > now_ns:
                return
            self._end(sequence, now_ns)
