"""The batcher: decides which waiting requests go into which batch, and when.

It is pure: no clock, no lock, no file. Time comes in as monotonic nanoseconds and never runs backwards. The owner holds
one lock around every call on a queue.

Theory of operation.

A queue holds *lanes*, first in first out, in the order in which they are served. Without priority levels there is one
lane. With them every level has its own, 1 first. A level whose policy is DELAY has a second lane right behind its
first, for requests that stayed beyond their timeout: they are served when nothing else of that level waits, still
before the next level.

A batch is always the front of that sequence: requests are never reordered to fill one. It ends where the next request
would not fit or has another signature. How much of the front is taken is one of three policies, chosen once:

  alone    no dynamic batching, or a model that cannot batch: one request.
  greedy   neither a delay nor preferred sizes: all that fits.
  planned  the largest preferred size that can be reached exactly. If none can, all that fits, provided that it cannot
           grow or that its oldest request has waited for the whole delay; else nothing yet. Without preferred sizes
           the only preferred size is max_batch_size.

A lane is an OrderedDict by the identity of the request, because a cancelled request leaves from the middle, and a plain
dict gets slow when much has been taken from its front.

The heap of deadlines is not cleaned when a request leaves early. Entries that no longer match are dropped when they
come to the top, or all together when they are most of the heap. The heap refers to no request, so it keeps no tensor
alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias

from moonpool.runtime.errors import QueueFull
from moonpool.runtime.model.config.model import DynamicBatching, QueuePolicy


class QueuedRequest(Protocol):
    """The part of a request that the batcher reads. It must not change while the request waits."""

    @property
    def batch_size(self) -> int:
        """Rows: 1 to max_batch_size, or 1 for a model that does not batch. The caller has checked it."""

    @property
    def priority(self) -> int:
        """1 is the highest level; 0, and anything beyond the last level, is the model's default."""

    @property
    def timeout_us(self) -> int:
        """0 is none. Counts only where the policy allows it, and only if it is below the policy's default."""

    @property
    def signature(self) -> Hashable:
        """The shapes without the first dimension and without ragged inputs. Equal for all requests of a batch."""


# 35 years. A configuration may name a longer time, whose nanoseconds would not fit into 64 bits.
_LONGEST_US = 1 << 50
# (request, rows, signature, arrived_ns, deadline_ns); no deadline is 0.
Entry: TypeAlias = "tuple[Any, int, Hashable, int, int]"
Lane: TypeAlias = "OrderedDict[int, Entry]"


class Level:
    """The requests of one priority level and their policy."""

    __slots__ = ("late", "limit", "may_override", "number", "timeout_us", "to_instance_ns", "waiting")

    def __init__(self, number: int, policy: QueuePolicy | None, to_instance_ns: int = 0) -> None:
        self.number = number
        self.to_instance_ns = to_instance_ns
        self.limit = policy.max_queue_size if policy else 0
        self.timeout_us = min(policy.default_timeout_us, _LONGEST_US) if policy else 0
        self.may_override = policy.allow_timeout_override if policy else False
        self.waiting: Lane = OrderedDict()
        delays = policy is not None and self.timeout_us > 0 and policy.timeout_action == "DELAY"
        self.late: Lane | None = OrderedDict() if delays else None

    def size(self) -> int:
        return len(self.waiting) + (len(self.late) if self.late else 0)

    def lanes(self) -> list[Lane]:
        return [self.waiting] if self.late is None else [self.waiting, self.late]

    def deadline_ns(self, request: QueuedRequest, now_ns: int) -> int:
        """Return the time by which a request that arrives now must leave the queue, to reach an instance in time.

        As in Triton an override can only shorten the default, so without a default timeout it has no effect.
        """
        timeout_us = self.timeout_us
        if self.may_override and 0 < request.timeout_us < timeout_us:
            timeout_us = request.timeout_us
        return now_ns + max(0, timeout_us * 1000 - self.to_instance_ns)


# (deadline_ns, order among equal ones, level, identity of the request)
Deadline: TypeAlias = "tuple[int, int, int, int]"

_STALE_DEADLINES = 64
_EMPTY_LEVELS = 64


class Formation(NamedTuple):
    """The batches to execute now, and the time to ask again if nothing happens before."""

    batches: list[list[Any]]
    """At most one for each idle instance, to be executed at once."""
    expired: list[Any]
    """Requests that wait no longer, to be answered with `QueueTimeout`."""
    wake_at_ns: int | None
    """Later than now. None if only a new request or an idle instance changes anything."""


class Queue:
    """The requests of one model version that wait for an instance.

    Not thread-safe: the owner's lock is held around every call, `form` included. `add`, `remove`
    and `form` cost O(1) a request, amortised, plus O(log n) where timeouts are set.
    """

    def __init__(self, max_batch_size: int, batching: DynamicBatching | None = None, to_instance_ns: int = 0) -> None:
        """`to_instance_ns` is the time that a request needs from here to an instance. It counts as waiting."""
        self._max_rows = max(1, max_batch_size)
        self._to_instance_ns = to_instance_ns
        self._batching = batching
        self._delay_ns = min(batching.max_queue_delay_us, _LONGEST_US) * 1000 if batching else 0
        preferred = sorted(batching.preferred_batch_sizes) if batching else []
        if preferred and not 1 <= preferred[0] <= preferred[-1] <= self._max_rows:
            raise ValueError(f"preferred batch sizes {preferred} are not within 1 to {self._max_rows}")
        self._preferred = preferred or [self._max_rows]
        self._largest = self._preferred[-1]
        # A full batch is preferred in any case, so to name its size as the only preferred one changes nothing.
        self._is_alone = batching is None or self._max_rows == 1
        self._is_planned = self._preferred != [self._max_rows] or self._delay_ns > 0
        self._levels: dict[int, Level] = {}
        self._lanes: list[Lane] = []
        self._only = None if batching and batching.priority_levels else self._open_level(0)
        self._deadlines: list[Deadline] = []
        self._timed = 0
        # The number of requests that wait.
        self.count = 0
        self._rows = 0
        # Nothing can be formed until the queue holds this many rows or this time has come, unless
        # something else than an ordinary add happens, which sets the rows to 0.
        self._hold_rows = 0
        self._hold_until_ns = 0
        self._hold_lane: Lane | None = None
        self._hold_signature: Hashable = None

    def __len__(self) -> int:
        return self.count

    @property
    def rows(self) -> int:
        """Rows of all waiting requests."""
        return self._rows

    def __repr__(self) -> str:
        return f"<Queue: {self.count} requests, {self._rows} rows waiting>"

    def copy_to(self, other: Queue) -> None:
        """Let all requests wait in another queue, too, in the order and with the times of their arrivals.

        None of them is refused: the other queue may hold more than its limit for a while.
        """
        entries = [entry for lane in self._lanes for entry in lane.values()]
        for request, _, _, arrived_ns, _ in sorted(entries, key=lambda entry: entry[3]):
            other.add(request, arrived_ns, is_here=True)

    def add(self, request: QueuedRequest, now_ns: int, is_here: bool = False) -> None:
        """Put the request behind all others of its level, or raise `QueueFull`, but not if it `is_here` already."""
        level = self._only or self._level_of(request)
        lane = level.waiting
        key = id(request)
        if key in lane or (level.late and key in level.late):
            raise ValueError(f"{request!r} is in the queue already")
        if level.limit and not is_here and level.size() >= level.limit:
            raise QueueFull
        rows = request.batch_size
        signature = request.signature
        deadline_ns = 0
        if level.timeout_us:
            deadline_ns = level.deadline_ns(request, now_ns)
            self._remember(deadline_ns, level.number, key)
        lane[key] = (request, rows, signature, now_ns, deadline_ns)
        self.count += 1
        self._rows += rows
        if self._hold_rows and (lane is not self._hold_lane or signature != self._hold_signature):
            self._hold_rows = 0

    def is_late(self, request: QueuedRequest) -> bool:
        """Return True if a request would be rejected at once: its timeout is shorter than the way to an instance."""
        level = self._only or self._level_of(request)
        return level.timeout_us > 0 and level.late is None and level.deadline_ns(request, 0) == 0

    def remove(self, request: QueuedRequest) -> bool:
        """Take out a cancelled request. Returns False if it does not wait here (any more)."""
        level = self._only or self._level_of(request)
        for lane in level.lanes():
            entry = lane.pop(id(request), None)
            if entry is not None:
                self._forget(entry)
                return True
        return False

    def drain(self) -> list[Any]:
        """Take out everything, in the order in which it would have been served."""
        return self._take(self.count)

    @property
    def has_times(self) -> bool:
        """True if time alone may change what is formed: there are delays, preferred sizes or timeouts."""
        if self._is_planned and not self._is_alone:
            return True
        policies = [] if self._batching is None else self._batching.policies
        return any(policy.default_timeout_us for policy in policies)

    @property
    def has_deadlines(self) -> bool:
        """True if a request that waits may have to leave at a time."""
        return bool(self._deadlines)

    # For `form` below, which alone calls these.

    def expire(self, now_ns: int) -> list[Any]:
        """Apply the policy to all requests that waited too long. Returns those that are rejected."""
        rejected: list[Any] = []
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now_ns:
            deadline = heappop(deadlines)
            if self._stale(deadline):
                continue
            _, _, number, key = deadline
            level = self._levels[number]
            entry = level.waiting.pop(key)
            if level.late is None:
                self._forget(entry)
                rejected.append(entry[0])
            else:
                level.late[key] = entry
                self._hold_rows = 0
        return rejected

    def next_batch(self, now_ns: int) -> list[Any]:
        """Return the batch to send now, or an empty list if waiting until `next_try_ns` may improve it."""
        if self._is_alone:
            return self._alone()
        return self._planned(now_ns) if self._is_planned else self._greedy()

    def next_try_ns(self, held: bool) -> int | None:
        """Return the time at which time alone changes something. `held` says that requests wait for the delay."""
        deadlines = self._deadlines
        while deadlines and self._stale(deadlines[0]):
            heappop(deadlines)
        deadline_ns = deadlines[0][0] if deadlines else None
        if not held:
            return deadline_ns
        if deadline_ns is None:
            return self._hold_until_ns
        return min(deadline_ns, self._hold_until_ns)

    def _alone(self) -> list[Any]:
        for lane in self._lanes:
            if lane:
                _, entry = lane.popitem(False)
                self.count -= 1
                self._rows -= entry[1]
                return [entry[0]]
        return []

    def _greedy(self) -> list[Any]:
        batch: list[Any] = []
        room = self._max_rows
        wanted: Hashable = None
        for lane in self._lanes:
            pop = lane.popitem
            while lane and room:
                key, entry = pop(False)
                request, rows, signature, _, _ = entry
                if not batch:
                    wanted = signature
                elif rows > room or signature != wanted:
                    lane[key] = entry
                    lane.move_to_end(key, last=False)
                    room = 0
                    break
                batch.append(request)
                room -= rows
                self._rows -= rows
        self.count -= len(batch)
        return batch

    def _planned(self, now_ns: int) -> list[Any]:
        if self._rows < self._hold_rows and now_ns < self._hold_until_ns:
            return []
        # `marked` is how many requests make the best batch that need not wait; `closed` says that
        # the batch cannot grow.
        count = rows = marked = oldest_ns = 0
        wanted: Hashable = None
        closed = False
        delay_ns, preferred, largest = self._delay_ns, self._preferred, self._largest
        one_lane = len(self._lanes) == 1
        entries = chain.from_iterable(lane.values() for lane in self._lanes)
        for _, more, signature, arrived_ns, _ in entries:
            total = rows + more
            if not count:
                wanted, oldest_ns = signature, arrived_ns
            else:
                if total > largest:
                    marked = marked or count
                    # Looking on could only find an older request, or that the delay is over.
                    if not delay_ns or (one_lane and now_ns - oldest_ns < delay_ns):
                        break
                if total > self._max_rows or signature != wanted:
                    closed = True
                    break
                if arrived_ns < oldest_ns:
                    oldest_ns = arrived_ns
            count += 1
            rows = total
            if rows in preferred:
                marked = count
        delay_is_over = now_ns - oldest_ns >= delay_ns
        if marked and not (delay_ns and delay_is_over):
            return self._take(marked)
        if closed or delay_is_over or rows >= largest:
            return self._take(count)
        self._hold(rows, oldest_ns + delay_ns, wanted)
        return []

    def _hold(self, rows: int, until_ns: int, signature: Hashable) -> None:
        # Only after a look at the whole queue, so all of it has this signature.
        self._hold_rows = next(size for size in self._preferred if size > rows)
        self._hold_until_ns = until_ns
        self._hold_signature = signature
        self._hold_lane = next(lane for lane in reversed(self._lanes) if lane)

    def _take(self, count: int) -> list[Any]:
        batch: list[Any] = []
        taken_rows = 0
        for lane in self._lanes:
            wanted = count - len(batch)
            if wanted < len(lane):
                entries = [lane.popitem(False)[1] for _ in range(wanted)]
            else:
                entries = list(lane.values())
                lane.clear()
            for request, rows, _, _, _ in entries:
                batch.append(request)
                taken_rows += rows
        self.count -= len(batch)
        self._rows -= taken_rows
        self._hold_rows = 0
        return batch

    def _forget(self, entry: Entry) -> None:
        self.count -= 1
        self._rows -= entry[1]
        self._hold_rows = 0

    def _level_of(self, request: QueuedRequest) -> Level:
        batching = self._batching
        number = request.priority
        if batching is not None and not 1 <= number <= batching.priority_levels:
            number = batching.default_priority_level
        return self._levels.get(number) or self._open_level(number)

    def _open_level(self, number: int) -> Level:
        levels = self._levels
        # A client may name a level that nobody else uses; their number is bounded here.
        if len(levels) >= _EMPTY_LEVELS:
            levels = {each: level for each, level in levels.items() if level.size()}
        batching = self._batching
        policy = None
        if batching is not None:
            policy = batching.queue_policy(number)
        levels[number] = Level(number, policy, self._to_instance_ns)
        self._levels = dict(sorted(levels.items()))
        self._lanes = [lane for level in self._levels.values() for lane in level.lanes()]
        return self._levels[number]

    def _remember(self, deadline_ns: int, number: int, key: int) -> None:
        if len(self._deadlines) > _STALE_DEADLINES + 4 * self.count:
            self._deadlines = [each for each in self._deadlines if not self._stale(each)]
            heapify(self._deadlines)
        self._timed += 1
        heappush(self._deadlines, (deadline_ns, self._timed, number, key))

    def _stale(self, deadline: Deadline) -> bool:
        deadline_ns, _, number, key = deadline
        level = self._levels.get(number)
        entry = None if level is None else level.waiting.get(key)
        return entry is None or entry[4] != deadline_ns


def form(queue: Queue, now_ns: int, idle_instances: int) -> Formation:
    """Decide which requests leave a queue at this moment, and take them out.

    Call it after every add, whenever an instance becomes idle, and at `wake_at_ns`. With no idle
    instance it only expires requests.
    """
    expired = queue.expire(now_ns)
    batches: list[list[Any]] = []
    held = False
    while queue.count and len(batches) < idle_instances:
        batch = queue.next_batch(now_ns)
        if not batch:
            held = True
            break
        batches.append(batch)
    # One call into C: a signal handler must not raise while the requests are in neither place.
    return tuple.__new__(Formation, (batches, expired, queue.next_try_ns(held)))
