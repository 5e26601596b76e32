"""Which request of which sequence goes into which batch of which instance, and when.

Pure, as the batcher: no clock, no lock, no file. Time comes in as monotonic nanoseconds and never runs
backwards; the owner holds one lock around every call.
"""

# Theory of operation
#
# A sequence is all requests of one correlation id, from one that starts it to the answer to one that
# ends it. An instance has a number of *slots*. A sequence is put into a free slot when it starts, the
# lowest number first, and stays there; where no slot is free, it waits in the backlog, with everything
# that arrives for it. At most one request of a sequence executes at a time, so they stay in order.
#
# How a batch is made of the sequences in the slots of an idle instance is one of two policies:
#
#   direct   a slot is a place in the batch. The batch reaches to the last slot that has a request, and
#            places before it that have none are empty. Sent when enough slots have a request, or when
#            the oldest one has waited for the whole delay.
#   oldest   the first request of every sequence stands in a queue of the batcher, one an instance.
#
# A sequence ends when a request that said END is answered, when nobody has said anything for too long,
# or when its instance breaks; where the model is iterative, every request is a sequence of its own. What
# then still waits under the same id starts another one, which goes behind the backlog.
#
# A sequence is idle from its last answer on. All may be idle equally long, so they stand in the order
# in which they became idle. One whose instance broke is remembered as long, to say why it is gone.

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from moonpool.runtime.batcher import Queue
from moonpool.runtime.config import DynamicBatching
from moonpool.runtime.errors import InvalidRequest, own
from moonpool.runtime.sequence import END, START, R, Sequence, Table, lost

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moonpool.ipc.errors import MoonpoolError
    from moonpool.runtime.config import SequenceBatching
    from moonpool.runtime.sequence import CorrelationId

# An instance, by its identity.
S = TypeVar("S")


class Formation(NamedTuple, Generic[R, S]):
    """What to do now, and when to ask again if nothing happens before."""

    batches: list[tuple[S, list[R | None]]]
    """At most one for each idle instance, to be executed at once. None is an empty place."""
    failed: list[tuple[R, MoonpoolError]]
    """No longer waiting; to be answered with the error."""
    wake_at_ns: int | None
    """Later than now. None: only a request, an answer or an idle instance changes anything."""


class Sequencer(Generic[R, S]):
    """The sequences of one model version. Not thread-safe: the owner's lock is held around every call."""

    def __init__(self, batching: SequenceBatching, max_batch_size: int, model: str) -> None:
        self._batching = batching
        self._max_batch_size = max_batch_size
        self._model = model
        self._idle_ns = batching.max_idle_us * 1000
        self._open: dict[CorrelationId, Sequence[R]] = {}
        self._tables: dict[S, Table[R]] = {}
        self._joined = 0
        # (slot, order of its table, table): slots that were given up, and the first that was never used.
        self._free: list[tuple[int, int, Table[R]]] = []
        self._backlog: OrderedDict[Sequence[R], None] = OrderedDict()
        self._idle: OrderedDict[Sequence[R], int] = OrderedDict()
        self._executing: dict[int, Sequence[R]] = {}
        self._failed: list[tuple[R, MoonpoolError]] = []
        # By identity. Not a number, which would be wrong for ever if a signal handler raised beside it.
        self._waiting: set[int] = set()
        self._last_id = 0
        self._is_closing = False

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    def __repr__(self) -> str:
        return f"<Sequencer: {len(self._waiting)} requests wait, {len(self._open)} sequences>"

    # Requests

    def add(self, request: R, now_ns: int) -> bool:
        """Put the request behind the others of its sequence, or raise `InvalidRequest` or `SequenceLost`.

        True where it starts a sequence whose id another one has that did not end.
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
                f"inference request to model '{self._model}' must specify a non-zero or non-empty "
                "correlation ID"
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
        """Take out a cancelled request. False if it does not wait here (any more)."""
        sequence = self._open.get(request.correlation_id)
        place = None if sequence is None else sequence.place_of(request)
        if sequence is None:
            return False
        if place is None:
            # It may have been added half; then nothing else would free the slot that it got.
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

    def done(self, request: R, now_ns: int) -> None:
        """A request of a batch was answered."""
        sequence = self._executing.pop(id(request), None)
        if sequence is None:  # its instance left meanwhile
            return
        sequence.executing = None
        if request.flags & END or self._batching.is_iterative:
            self._end(sequence, now_ns)
        else:
            self._go_on(sequence, now_ns)

    def again(self, request: R, now_ns: int) -> bool:
        """A request of a batch is to be executed once more, before the others of its sequence.

        False, and the request is not taken, where its instance left meanwhile.
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
        """Take out everything that waits, the sequences in slots first; what executes ends its sequence."""
        drained: list[R] = []
        seated = (each for table in self._tables.values() for each in table.slots)
        for sequence in [*filter(None, seated), *self._backlog]:
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
        """No more requests are added: what is idle would only keep others out of its slot."""
        self._is_closing = True
        for sequence in list(self._idle):
            self._end(sequence, now_ns)

    # Instances

    def join(self, instance: S, now_ns: int) -> None:
        """An instance takes part from now on; nothing happens if it does already."""
        if instance in self._tables:
            return
        batching = self._batching
        queue: Queue[R] | None = None
        if not batching.is_direct:
            policy = DynamicBatching(batching.preferred_batch_sizes, batching.max_queue_delay_us)
            queue = Queue(self._max_batch_size, policy)
        self._joined += 1
        table: Table[R] = Table(self._joined, batching.slots, queue)
        self._tables[instance] = table
        heappush(self._free, (0, table.order, table))
        self._fill(now_ns)

    def retire(self, instance: S) -> bool:
        """No sequence begins in an instance any more. True, and it has left, when it has none."""
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
        """An instance broke: sequences that had begun in it are lost, others go to the front of the backlog."""
        table = self._tables.pop(instance, None)
        if table is None:
            return
        self._free = [each for each in self._free if each[2] is not table]
        self._free.sort()
        for sequence in filter(None, reversed(table.slots)):
            sequence.table = None
            if sequence.executing is not None:
                self._executing.pop(id(sequence.executing))
            self._lose(sequence, now_ns)
        self._fill(now_ns)

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

    def form(self, now_ns: int, idle: Iterable[S]) -> Formation[R, S]:
        """Decide what happens at this moment, and take it out.

        Call it after everything else, with the instances that execute nothing.
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
        return Formation(batches, failed, min(wakes, default=None))

    def _batch(self, table: Table[R], now_ns: int) -> tuple[list[R | None], int | None]:
        """The batch to send now, or when to look again."""
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
        if not self._seat(sequence):
            self._backlog[sequence] = None
        return sequence

    def _begin_again(self, old: Sequence[R], *, first: bool = False) -> None:
        """What still waits under the id of a sequence that ended is another one."""
        sequence: Sequence[R] = Sequence(old.id)
        sequence.waiting, sequence.is_closed = old.waiting, old.is_closed
        self._open[sequence.id] = sequence
        self._backlog[sequence] = None
        if first:
            self._backlog.move_to_end(sequence, last=False)

    def _seat(self, sequence: Sequence[R]) -> bool:
        """Put it into a slot, if one is free."""
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
        """Put what waits in the backlog into free slots."""
        while self._backlog and self._seat(next(iter(self._backlog))):
            sequence, _ = self._backlog.popitem(last=False)
            self._ready(sequence, now_ns)

    def _ready(self, sequence: Sequence[R], now_ns: int) -> None:
        """Another request is the first of a sequence that executes nothing."""
        if sequence.table is not None and sequence.table.queue is not None and sequence.head:
            sequence.table.queue.add(sequence.head, now_ns)

    def _start(self, sequence: Sequence[R]) -> None:
        request, _ = sequence.waiting.popleft()
        sequence.executing = request
        self._executing[id(request)] = sequence
        self._waiting.discard(id(request))

    def _go_on(self, sequence: Sequence[R], now_ns: int) -> None:
        """What a sequence does that has another first request, or none any more."""
        if sequence.executing is not None:
            return
        if sequence.waiting:
            self._ready(sequence, now_ns)
        elif sequence.is_closed or self._is_closing or sequence.table is None:
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
        """Fail what waits from a place on, up to what starts anew."""
        waiting = sequence.waiting
        while place < len(waiting) and not waiting[place][0].flags & START:
            self._failed.append((waiting[place][0], error))
            self._waiting.discard(id(waiting[place][0]))
            del waiting[place]

    def _expire(self, now_ns: int) -> None:
        """End what has been idle for too long."""
        while self._idle:
            sequence, deadline_ns = next(iter(self._idle.items()))
            if deadline_ns > now_ns:
                return
            self._end(sequence, now_ns)
