"""The batcher against single scenes with known answers, and against a model that is slow and plain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moonpool.runtime.batcher import Queue, QueueFull, QueueTimeout, form
from moonpool.runtime.config import DynamicBatching, QueuePolicy

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

US = 1000


@dataclass(eq=False)
class Asked:
    """A request as the batcher sees it."""

    name: str = ""
    batch_size: int = 1
    priority: int = 0
    timeout_us: int = 0
    signature: Hashable = ((4,),)

    def __repr__(self) -> str:
        return self.name


def policy(
    action: Literal["REJECT", "DELAY"] = "REJECT",
    timeout_us: int = 0,
    override: bool = False,
    limit: int = 0,
) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=action,
        default_timeout_us=timeout_us,
        allow_timeout_override=override,
        max_queue_size=limit,
    )


def batching(
    preferred: Sequence[int] = (),
    delay_us: int = 0,
    levels: int = 0,
    default_level: int = 0,
    default_policy: QueuePolicy | None = None,
    policies: Mapping[int, QueuePolicy] | None = None,
) -> DynamicBatching:
    return DynamicBatching(
        preferred_batch_sizes=tuple(preferred),
        max_queue_delay_us=delay_us,
        preserve_ordering=False,
        priority_levels=levels,
        default_priority_level=default_level,
        default_queue_policy=default_policy or policy(),
        priority_queue_policies=policies or {},
    )


def queue_of(
    max_batch_size: int, config: DynamicBatching | None, *requests: Asked, now_ns: int = 0
) -> Queue[Asked]:
    queue: Queue[Asked] = Queue(max_batch_size, config)
    for request in requests:
        queue.add(request, now_ns)
    return queue


def rows(*sizes: int) -> list[Asked]:
    return [Asked(str(number), size) for number, size in enumerate(sizes)]


def sizes(batches: list[list[Asked]]) -> list[list[int]]:
    return [[request.batch_size for request in batch] for batch in batches]


# Without dynamic batching


def test_without_dynamic_batching_every_request_is_its_own_batch_in_order() -> None:
    requests = rows(1, 2, 1)
    formation = form(queue_of(8, None, *requests), 0, 5)
    assert formation == ([[requests[0]], [requests[1]], [requests[2]]], [], None)


def test_a_model_that_cannot_batch_gets_one_request_at_a_time_even_with_dynamic_batching() -> None:
    assert sizes(form(queue_of(0, batching(delay_us=50), *rows(1, 1)), 0, 4).batches) == [[1], [1]]


def test_no_more_batches_are_formed_than_instances_are_idle() -> None:
    queue = queue_of(8, None, *rows(1, 1, 1))
    assert len(form(queue, 0, 2).batches) == 2
    assert len(queue) == 1
    assert form(queue, 0, 0) == ([], [], None)


# Without delay


def test_a_batch_is_as_large_as_fits() -> None:
    queue = queue_of(4, batching(), *rows(1, 2, 2, 1, 1))
    assert sizes(form(queue, 0, 3).batches) == [[1, 2], [2, 1, 1]]
    assert (len(queue), queue.rows) == (0, 0)


def test_a_request_that_does_not_fit_is_not_overtaken_by_one_that_would() -> None:
    assert sizes(form(queue_of(4, batching(), *rows(3, 2, 1)), 0, 1).batches) == [[3]]


def test_only_requests_with_equal_signatures_share_a_batch() -> None:
    a, b, c = Asked("a"), Asked("b", signature=((5,),)), Asked("c")
    assert form(queue_of(8, batching(), a, b, c), 0, 3).batches == [[a], [b], [c]]


@pytest.mark.parametrize(
    ("waiting", "first", "rest"),
    [
        ([1] * 3, [1] * 3, []),
        ([1] * 5, [1] * 4, [1]),
        ([1] * 10, [1] * 8, [1] * 2),
        ([3, 3], [3, 3], []),
        ([3, 6], [3], [6]),
        ([3, 1, 3], [3, 1], [3]),
        ([3, 2, 2], [3, 2, 2], []),
        ([4, 1, 4], [4], [1, 4]),
        ([9, 1], [9], [1]),
    ],
)
def test_the_largest_preferred_size_within_reach_is_sent_first(
    waiting: list[int], first: list[int], rest: list[int]
) -> None:
    queue = queue_of(16, batching(preferred=(8, 4)), *rows(*waiting))
    assert sizes(form(queue, 0, 1).batches) == [first]
    assert [request.batch_size for request in queue.drain()] == rest


def test_a_preferred_size_that_the_model_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="not within 1 to 4"):
        Queue[Asked](4, batching(preferred=(4, 8)))


# With delay


def test_requests_wait_for_company_until_the_oldest_has_waited_long_enough() -> None:
    queue = queue_of(4, batching(delay_us=100), Asked("a"), now_ns=5)
    assert form(queue, 5, 1) == ([], [], 5 + 100 * US)
    queue.add(Asked("b"), 50 * US)
    assert form(queue, 50 * US, 1).wake_at_ns == 5 + 100 * US
    assert form(queue, 4 + 100 * US, 1).batches == []
    assert sizes(form(queue, 5 + 100 * US, 1).batches) == [[1, 1]]


def test_a_full_batch_does_not_wait() -> None:
    queue = queue_of(4, batching(delay_us=100), *rows(2, 1))
    assert form(queue, 0, 1).batches == []
    queue.add(Asked("last"), 1)
    assert sizes(form(queue, 1, 1).batches) == [[2, 1, 1]]


def test_a_batch_that_cannot_grow_does_not_wait() -> None:
    too_large = queue_of(4, batching(delay_us=100), *rows(3, 2))
    assert sizes(form(too_large, 0, 2).batches) == [[3]]
    different = queue_of(4, batching(delay_us=100), Asked("a"), Asked("b", signature=()))
    formation = form(different, 0, 2)
    assert (sizes(formation.batches), formation.wake_at_ns) == ([[1]], 100 * US)


def test_a_different_request_ends_a_wait_that_had_begun() -> None:
    queue = queue_of(4, batching(delay_us=100), Asked("a"))
    assert form(queue, 0, 1).batches == []
    queue.add(Asked("b", signature=()), 1)
    assert sizes(form(queue, 1, 1).batches) == [[1]]


def test_a_preferred_size_is_sent_before_the_delay_and_everything_after_it() -> None:
    queue = queue_of(16, batching(preferred=(4,), delay_us=100), *rows(*[1] * 6))
    assert sizes(form(queue, 1, 1).batches) == [[1] * 4]
    late = queue_of(16, batching(preferred=(4,), delay_us=100), *rows(*[1] * 6))
    assert sizes(form(late, 100 * US, 1).batches) == [[1] * 6]


def test_a_higher_priority_can_complete_a_preferred_size_that_the_queue_had_passed() -> None:
    config = batching(preferred=(4, 8), delay_us=100, levels=2, default_level=2)
    queue = queue_of(8, config, *rows(3, 2))
    assert form(queue, 0, 1).batches == []
    queue.add(Asked("urgent", priority=1), 1)
    assert sizes(form(queue, 1, 1).batches) == [[1, 3]]


# What ends a wait that has begun


def test_after_a_cancellation_the_rest_waits_for_its_own_delay() -> None:
    first, second = Asked("first"), Asked("second")
    queue = queue_of(4, batching(delay_us=100), first)
    form(queue, 0, 1)
    queue.add(second, 60 * US)
    assert queue.remove(first)
    assert form(queue, 70 * US, 1) == ([], [], 160 * US)


def test_a_cancellation_can_bring_a_preferred_size_within_reach() -> None:
    requests = rows(3, 2, 1)
    queue = queue_of(8, batching(preferred=(4, 8), delay_us=100), *requests)
    assert form(queue, 0, 1).batches == []
    assert queue.remove(requests[1])
    assert sizes(form(queue, 1, 1).batches) == [[3, 1]]


def test_after_a_batch_the_next_request_waits_for_its_own_delay() -> None:
    queue = queue_of(4, batching(preferred=(2, 4), delay_us=100), Asked("a"))
    form(queue, 0, 1)
    queue.add(Asked("b"), 10 * US)
    assert sizes(form(queue, 10 * US, 1).batches) == [[1, 1]]
    queue.add(Asked("c"), 20 * US)
    assert form(queue, 20 * US, 1) == ([], [], 120 * US)


def test_a_request_that_became_late_can_bring_a_preferred_size_within_reach() -> None:
    rules = policy("DELAY", timeout_us=10, override=True)
    config = batching(preferred=(4, 8), delay_us=100, default_policy=rules)
    queue = queue_of(8, config, Asked("hasty", 2, timeout_us=5), *rows(3, 1))
    assert form(queue, 0, 1) == ([], [], 5 * US)
    assert sizes(form(queue, 5 * US, 1).batches) == [[3, 1]]


def test_the_oldest_request_of_a_batch_counts_whatever_its_level() -> None:
    config = batching(preferred=(2, 8), delay_us=100, levels=2, default_level=1)
    queue = queue_of(8, config, Asked("low", 3, priority=2))
    queue.add(Asked("high"), 30 * US)
    assert form(queue, 40 * US, 1).wake_at_ns == 100 * US


def test_a_low_level_that_waited_for_the_whole_delay_leaves_with_the_high_ones() -> None:
    config = batching(preferred=(2,), delay_us=100, levels=2, default_level=1)
    queue = queue_of(8, config, Asked("low", priority=2))
    queue.add(Asked("high"), 99 * US)
    queue.add(Asked("high too"), 99 * US)
    assert sizes(form(queue, 100 * US, 1).batches) == [[1, 1, 1]]


def test_a_late_request_can_still_be_cancelled() -> None:
    request = Asked("a")
    queue = queue_of(8, batching(default_policy=policy("DELAY", timeout_us=10)), request)
    form(queue, 10 * US, 0)
    assert queue.remove(request)
    assert len(queue) == 0


# Priorities


def test_a_higher_priority_goes_first_and_equal_ones_stay_in_order() -> None:
    requests = [
        Asked(f"{number}", priority=level) for number, level in enumerate([0, 3, 1, 2, 1, 9])
    ]
    queue = queue_of(8, batching(levels=3, default_level=2), *requests)
    (batch,) = form(queue, 0, 1).batches
    assert [request.name for request in batch] == ["2", "4", "0", "3", "5", "1"]


def test_without_levels_a_priority_changes_nothing() -> None:
    first, second = Asked("a", priority=2), Asked("b", priority=1)
    assert form(queue_of(8, batching(), first, second), 0, 1).batches == [[first, second]]


def test_every_level_obeys_its_own_policy() -> None:
    config = batching(levels=2, default_level=2, policies={1: policy(limit=1)})
    queue = queue_of(8, config, Asked(), Asked(), Asked(priority=1))
    with pytest.raises(QueueFull):
        queue.add(Asked(priority=1), 0)
    queue.add(Asked(), 0)
    assert len(queue) == 4


def test_levels_that_are_no_longer_used_are_forgotten() -> None:
    queue: Queue[Asked] = Queue(1, batching(levels=10**9, default_level=1))
    for level in range(1, 500):
        queue.add(Asked(priority=level), level)
        assert len(form(queue, level, 1).batches) == 1
    assert len(queue._levels) <= 65


# Policies


def test_a_full_queue_refuses_with_tritons_text_and_keeps_what_it_has() -> None:
    queue = queue_of(8, batching(default_policy=policy(limit=2)), *rows(1, 1))
    with pytest.raises(QueueFull, match=r"^Exceeds maximum queue size$") as caught:
        queue.add(Asked(), 0)
    assert caught.value.code == "UNAVAILABLE"
    assert (len(queue), queue.rows) == (2, 2)


def test_a_request_that_waited_too_long_is_rejected_even_while_no_instance_is_idle() -> None:
    request = Asked("a")
    queue = queue_of(8, batching(default_policy=policy(timeout_us=10)), request)
    assert form(queue, 0, 0) == ([], [], 10 * US)
    assert form(queue, 10 * US, 0) == ([], [request], None)
    assert len(queue) == 0
    assert str(QueueTimeout()) == "Request timeout expired"
    assert QueueTimeout().code == "UNAVAILABLE"


def test_a_delayed_request_goes_behind_all_of_its_level_and_is_still_served() -> None:
    config = batching(levels=2, default_level=1, default_policy=policy("DELAY", timeout_us=10))
    old, low, young = Asked("old"), Asked("low", priority=2), Asked("young")
    queue = queue_of(8, config, old)
    queue.add(low, 9 * US)
    queue.add(young, 9 * US)
    assert form(queue, 10 * US, 0) == ([], [], 19 * US)
    assert form(queue, 11 * US, 1).batches == [[young, old, low]]


@pytest.mark.parametrize(
    ("default_us", "override", "asked_us", "expires_us"),
    [
        (10, True, 5, 5),
        (10, True, 20, 10),
        (10, False, 5, 10),
        (10, True, 0, 10),
        (0, True, 5, None),
    ],
)
def test_a_request_can_only_shorten_the_timeout_and_only_where_allowed(
    default_us: int, override: bool, asked_us: int, expires_us: int | None
) -> None:
    config = batching(default_policy=policy(timeout_us=default_us, override=override))
    queue = queue_of(8, config, Asked(timeout_us=asked_us))
    assert form(queue, 0, 0).wake_at_ns == (None if expires_us is None else expires_us * US)


# Leaving early


def test_a_removed_request_leaves_no_trace() -> None:
    a, b = Asked("a", 2), Asked("b", 3)
    queue = queue_of(8, batching(default_policy=policy(timeout_us=10)), a, b)
    assert queue.remove(a)
    assert not queue.remove(a)
    assert (len(queue), queue.rows) == (1, 3)
    assert form(queue, 1, 1).batches == [[b]]
    assert not queue.remove(b)
    assert form(queue, 10 * US, 1) == ([], [], None)


def test_a_request_that_is_queued_already_is_refused() -> None:
    request = Asked("twice")
    queue = queue_of(8, batching(), request)
    with pytest.raises(ValueError, match="twice is in the queue already"):
        queue.add(request, 0)
    assert len(queue) == 1


def test_deadlines_of_requests_that_were_served_do_not_pile_up() -> None:
    queue: Queue[Asked] = Queue(1, batching(default_policy=policy(timeout_us=10**6)))
    first = Asked("stays")
    queue.add(first, 0)
    for now_ns in range(1, 1000):
        passing = Asked()
        queue.add(passing, now_ns)
        queue.remove(passing)
    assert len(queue._deadlines) < 100
    assert form(queue, 10**9, 0).expired == [first]


# Everything at once, against a plain model

CONFIGS = st.builds(
    batching,
    preferred=st.lists(st.integers(1, 6), max_size=3, unique=True),
    delay_us=st.sampled_from([0, 15, 30]),
    levels=st.sampled_from([0, 2]),
    default_level=st.just(2),
    default_policy=st.builds(
        policy,
        st.sampled_from(["REJECT", "DELAY"]),
        st.sampled_from([0, 10, 20]),
        st.booleans(),
        st.sampled_from([0, 4]),
    ),
    policies=st.dictionaries(
        st.integers(1, 2),
        st.builds(policy, st.sampled_from(["REJECT", "DELAY"]), st.sampled_from([0, 11])),
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
    """Sorts everything anew at every step, and looks at every possible batch."""

    def __init__(self, max_batch_size: int, config: DynamicBatching | None) -> None:
        self.max_rows = max(1, max_batch_size)
        self.config = config
        self.items: list[Item] = []
        self.clock = 0

    def policy_of(self, level: int) -> QueuePolicy:
        if self.config is None:
            return policy()
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
        beyond = [
            n for n in range(1, whole + 1) if n < len(items) and total[n + 1] > max(preferred)
        ]
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
    @initialize(size=st.sampled_from([0, 1, 6, 7, 8, 9]), config=CONFIGS | CONFIGS | st.none())
    def start(self, size: int, config: DynamicBatching | None) -> None:
        assume(config is None or max(config.preferred_batch_sizes, default=0) <= max(size, 1))
        self.size = max(size, 1)
        self.queue: Queue[Asked] = Queue(size, config)
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
    def add(
        self,
        batch_size: int,
        priority: int,
        timeout_us: int,
        signature: str,
        step_us: int,
        idle: int,
    ) -> None:
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

    @rule(step_us=st.integers(1, 12))
    def time_passes(self, step_us: int) -> None:
        self.now_ns += step_us * US

    @rule(idle=st.integers(0, 3))
    def form(self, idle: int) -> None:
        formation = form(self.queue, self.now_ns, idle)
        assert formation == self.plain.form(self.now_ns, idle)
        assert len(self.queue) == len(self.plain.items)
        assert self.queue.rows == sum(item.request.batch_size for item in self.plain.items)
        for batch in formation.batches:
            assert sum(request.batch_size for request in batch) <= self.size
            assert len({request.signature for request in batch}) == 1
        if formation.wake_at_ns is not None:
            assert formation.wake_at_ns > self.now_ns
        elif len(self.queue):
            assert len(formation.batches) == idle, "requests wait for a delay that never ends"

    @rule()
    def drain(self) -> None:
        self.plain.items.sort(key=lambda item: (item.level, item.late, item.order))
        assert self.queue.drain() == [item.request for item in self.plain.items]
        self.plain.items.clear()
        assert (len(self.queue), self.queue.rows) == (0, 0)


TestQueueAgainstPlainModel = pytest.mark.slow(QueueAgainstPlainModel.TestCase)
TestQueueAgainstPlainModel.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None
)


@settings(max_examples=60, deadline=None)
@given(
    config=CONFIGS,
    gaps_us=st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(0, 3)), max_size=25
    ),
)
def test_whoever_follows_wake_at_serves_every_request_once_and_none_beyond_the_delay(
    config: DynamicBatching, gaps_us: list[tuple[int, int, int]]
) -> None:
    queue: Queue[Asked] = Queue(6, config)
    arrived: dict[Asked, int] = {}
    left: list[Asked] = []
    now_ns, wake_ns = 0, None

    def turn(at_ns: int) -> int | None:
        formation = form(queue, at_ns, 100)
        for request in [
            *formation.expired,
            *(each for batch in formation.batches for each in batch),
        ]:
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
