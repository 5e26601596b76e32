"""Compares the batcher with a slow and plain model of it, for random operations on the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moonpool.runtime.errors import QueueFull
from moonpool.runtime.model.config.model import DynamicBatching, QueuePolicy
from moonpool.runtime.schedule.batcher import Queue, form

pytestmark = pytest.mark.promise("Batching", "No request is lost or …")

if TYPE_CHECKING:
    from collections.abc import Hashable

US = 1000


@dataclass(eq=False)
class Asked:
    """The part of a request that the batcher reads."""

    name: str
    batch_size: int
    priority: int = 0
    timeout_us: int = 0
    signature: Hashable = "s"


CONFIGS = st.builds(
    DynamicBatching,
    preferred_batch_sizes=st.lists(st.integers(1, 6), max_size=3, unique=True).map(tuple),
    max_queue_delay_us=st.sampled_from([0, 15, 30]),
    priority_levels=st.sampled_from([0, 2]),
    default_priority_level=st.just(2),
    default_queue_policy=st.builds(
        QueuePolicy,
        st.sampled_from(["REJECT", "DELAY"]),
        st.sampled_from([0, 10, 20]),
        st.booleans(),
        st.sampled_from([0, 4]),
    ),
    priority_queue_policies=st.dictionaries(
        st.integers(1, 2),
        st.builds(QueuePolicy, st.sampled_from(["REJECT", "DELAY"]), st.sampled_from([0, 11])),
        max_size=2,
    ),
)


@dataclass
class Item:
    request: Asked
    level: int
    arrived_ns: int
    order: int
    deadline_ns: int | None
    late: int = 0


class Plain:
    """A batcher that sorts everything anew at every step, and looks at every possible batch."""

    def __init__(self, max_batch_size: int, config: DynamicBatching | None) -> None:
        self.max_rows = max(1, max_batch_size)
        self.config = config
        self.items: list[Item] = []
        self.clock = 0

    def policy_of(self, level: int) -> QueuePolicy:
        if self.config is None:
            return QueuePolicy()
        return self.config.priority_queue_policies.get(level, self.config.default_queue_policy)

    def add(self, request: Asked, now_ns: int) -> bool:
        level, config = 0, self.config
        if config is not None and config.priority_levels:
            known = 1 <= request.priority <= config.priority_levels
            level = request.priority if known else config.default_priority_level
        rules = self.policy_of(level)
        if 0 < rules.max_queue_size <= sum(item.level == level for item in self.items):
            return False
        timeout_us = rules.default_timeout_us
        if rules.allow_timeout_override and request.timeout_us:
            timeout_us = min(timeout_us, request.timeout_us)
        deadline_ns = now_ns + timeout_us * US if timeout_us else None
        self.clock += 1
        self.items.append(Item(request, level, now_ns, self.clock, deadline_ns))
        return True

    def go_on_under(self, config: DynamicBatching | None) -> None:
        """Let all requests arrive again, at the times of their arrivals, and refuse none."""
        self.items.sort(key=lambda item: (item.level, item.late, item.order))
        self.items.sort(key=lambda item: item.arrived_ns)
        before, self.items, self.config = self.items, [], config
        for item in before:
            # An empty model refuses nothing.
            others, self.items = self.items, []
            assert self.add(item.request, item.arrived_ns)
            self.items = [*others, *self.items]

    def form(self, now_ns: int, idle: int) -> tuple[list[list[Asked]], list[Asked], int | None]:
        expired = self.expire(now_ns)
        batches: list[list[Asked]] = []
        wakes: list[int] = []
        while self.items and len(batches) < idle:
            self.items.sort(key=lambda item: (item.level, item.late, item.order))
            count, wake_ns = self.choose(now_ns)
            if wake_ns is not None:
                wakes.append(wake_ns)
                break
            batches.append([item.request for item in self.items[:count]])
            del self.items[:count]
        wakes += [item.deadline_ns for item in self.items if item.deadline_ns is not None]
        return batches, expired, min(wakes, default=None)

    def expire(self, now_ns: int) -> list[Asked]:
        due = [i for i in self.items if i.deadline_ns is not None and i.deadline_ns <= now_ns]
        due.sort(key=lambda item: (item.deadline_ns, item.order))
        rejected = []
        for item in due:
            if self.policy_of(item.level).timeout_action == "DELAY":
                self.clock += 1
                item.late, item.deadline_ns = self.clock, None
            else:
                self.items.remove(item)
                rejected.append(item.request)
        return rejected

    def choose(self, now_ns: int) -> tuple[int, int | None]:
        config, items = self.config, self.items
        if config is None or self.max_rows == 1:
            return 1, None
        total = [sum(i.request.batch_size for i in items[:n]) for n in range(len(items) + 1)]
        alike = [n for n in range(1, len(items) + 1) if self.alike(items[:n])]
        whole = max(n for n in alike if n == 1 or total[n] <= self.max_rows)
        preferred = config.preferred_batch_sizes or (self.max_rows,)
        exact = [n for n in range(1, whole + 1) if total[n] in preferred]
        beyond = [n for n in range(1, whole + 1) if n < len(items) and total[n + 1] > max(preferred)]
        oldest_ns = min(item.arrived_ns for item in items[:whole])
        over_ns = oldest_ns + config.max_queue_delay_us * US
        best = max(exact, default=0) or min(beyond, default=0)
        if best and (config.max_queue_delay_us == 0 or now_ns < over_ns):
            return best, None
        if now_ns >= over_ns or whole < len(items) or total[whole] >= max(preferred):
            return whole, None
        return 0, over_ns

    @staticmethod
    def alike(items: list[Item]) -> bool:
        return len({item.request.signature for item in items}) == 1


class QueueAgainstPlainModel(RuleBasedStateMachine):
    # Batches without delays and preferred sizes are formed in a way of their own.
    @initialize(
        size=st.sampled_from([0, 1, 6, 7, 8, 9]), config=CONFIGS | CONFIGS | st.just(DynamicBatching()) | st.none()
    )
    def start(self, size: int, config: DynamicBatching | None) -> None:
        assume(config is None or max(config.preferred_batch_sizes, default=0) <= max(size, 1))
        self.size, self.is_batching = max(size, 1), size > 0
        self.queue: Queue = Queue(size, config)
        self.plain = Plain(size, config)
        self.now_ns = 0
        self.names = 0

    @rule(
        batch_size=st.integers(1, 3),
        priority=st.integers(0, 3),
        timeout_us=st.sampled_from([0, 3, 50]),
        signature=st.sampled_from("sssssst"),
        step_us=st.integers(0, 4),
        idle=st.sampled_from([0, 1, 1, 1]),
    )
    def add(self, batch_size: int, priority: int, timeout_us: int, signature: str, step_us: int, idle: int) -> None:
        self.now_ns += step_us * US
        self.names += 1
        rows_in = min(batch_size, self.size)
        request = Asked(str(self.names), rows_in, priority, timeout_us, signature)
        if self.plain.add(request, self.now_ns):
            self.queue.add(request, self.now_ns)
        else:
            with pytest.raises(QueueFull):
                self.queue.add(request, self.now_ns)
        self.form(idle)

    @precondition(lambda self: self.plain.items)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.plain.items))
        self.plain.items.remove(item)
        assert self.queue.remove(item.request)
        assert not self.queue.remove(item.request)
        self.form(1)

    @rule(config=CONFIGS | st.none())
    def go_on_under_another_policy(self, config: DynamicBatching | None) -> None:
        assume(config is None or max(config.preferred_batch_sizes, default=0) <= self.size)
        before = self.queue
        self.queue = Queue(self.size if self.is_batching else 0, config)
        before.copy_to(self.queue)
        self.plain.go_on_under(config)
        self.form(1)

    @rule(step_us=st.integers(1, 12))
    def time_passes(self, step_us: int) -> None:
        self.now_ns += step_us * US

    @rule(idle=st.integers(0, 3))
    def form(self, idle: int) -> None:
        batches, expired, wake_at_ns = form(self.queue, self.now_ns, idle)
        assert (batches, expired, wake_at_ns) == self.plain.form(self.now_ns, idle)
        assert len(self.queue) == len(self.plain.items)
        assert self.queue.rows == sum(item.request.batch_size for item in self.plain.items)
        for batch in batches:
            assert sum(request.batch_size for request in batch) <= self.size
            assert len({request.signature for request in batch}) == 1
        if wake_at_ns is not None:
            assert wake_at_ns > self.now_ns
        elif len(self.queue):
            assert len(batches) == idle, "requests wait for a delay that never ends"

    @rule()
    def drain(self) -> None:
        self.plain.items.sort(key=lambda item: (item.level, item.late, item.order))
        assert self.queue.drain() == [item.request for item in self.plain.items]
        self.plain.items.clear()
        assert (len(self.queue), self.queue.rows) == (0, 0)


TestQueueAgainstPlainModel = pytest.mark.slow(QueueAgainstPlainModel.TestCase)
TestQueueAgainstPlainModel.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    config=CONFIGS, gaps_us=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 3)), max_size=25)
)
def test_a_loop_that_follows_wake_at_serves_every_request_once_within_its_delay(
    config: DynamicBatching, gaps_us: list[tuple[int, int, int]]
) -> None:
    queue: Queue = Queue(6, config)
    arrived: dict[Asked, int] = {}
    left: list[Asked] = []
    now_ns, wake_ns = 0, None

    def turn(at_ns: int) -> int | None:
        formation = form(queue, at_ns, 100)
        for request in [*formation.expired, *(each for batch in formation.batches for each in batch)]:
            assert at_ns - arrived[request] <= config.max_queue_delay_us * US
            left.append(request)
        return formation.wake_at_ns

    for gap_us, size, priority in gaps_us:
        next_ns = now_ns + gap_us * US
        while wake_ns is not None and wake_ns < next_ns:
            wake_ns = turn(wake_ns)
        now_ns = next_ns
        request = Asked("", size, priority)
        try:
            queue.add(request, now_ns)
        except QueueFull:
            continue
        arrived[request] = now_ns
        wake_ns = turn(now_ns)
    while wake_ns is not None:
        wake_ns = turn(wake_ns)
    assert len(queue) == 0
    assert len(left) == len(set(left)) == len(arrived)
