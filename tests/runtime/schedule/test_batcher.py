"""Tests of the batcher in single scenes with a known outcome."""

from __future__ import annotations

import tracemalloc
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pytest

from moonpool.runtime.errors import QueueFull, QueueTimeout
from moonpool.runtime.model.config.model import DynamicBatching, QueuePolicy
from moonpool.runtime.schedule.batcher import Queue, form

pytestmark = pytest.mark.promise(
    "Batching",
    "No request is lost or batched twice, no batch is larger than the model accepts, and "
    "requests of one priority level keep their order.",
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

US = 1000


@contextmanager
def not_growing() -> Iterator[None]:
    """Check that what happens inside, some thousand times, keeps at most some kilobytes."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


@dataclass(eq=False)
class Asked:
    """The part of a request that the batcher reads."""

    name: str = ""
    batch_size: int = 1
    priority: int = 0
    timeout_us: int = 0
    signature: Hashable = ((4,),)

    def __repr__(self) -> str:
        return self.name


def policy(
    action: Literal["REJECT", "DELAY"] = "REJECT", timeout_us: int = 0, override: bool = False, limit: int = 0
) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=action, default_timeout_us=timeout_us, allow_timeout_override=override, max_queue_size=limit
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


def queue_of(max_batch_size: int, config: DynamicBatching | None, *requests: Asked, now_ns: int = 0) -> Queue:
    queue: Queue = Queue(max_batch_size, config)
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
        Queue(4, batching(preferred=(4, 8)))


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


# Events that end a wait


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
    requests = [Asked(f"{number}", priority=level) for number, level in enumerate([0, 3, 1, 2, 1, 9])]
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
    queue: Queue = Queue(1, batching(levels=10**9, default_level=1))
    with not_growing():
        for level in range(1, 5000):
            queue.add(Asked(priority=level), level)
            assert len(form(queue, level, 1).batches) == 1


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
    [(10, True, 5, 5), (10, True, 20, 10), (10, False, 5, 10), (10, True, 0, 10), (0, True, 5, None)],
)
def test_a_request_can_only_shorten_the_timeout_and_only_where_allowed(
    default_us: int, override: bool, asked_us: int, expires_us: int | None
) -> None:
    config = batching(default_policy=policy(timeout_us=default_us, override=override))
    queue = queue_of(8, config, Asked(timeout_us=asked_us))
    assert form(queue, 0, 0).wake_at_ns == (None if expires_us is None else expires_us * US)


def test_the_way_to_an_instance_counts_as_waiting() -> None:
    config = batching(default_policy=policy(timeout_us=10, override=True))
    queue: Queue = Queue(8, config, to_instance_ns=4 * US)
    hasty, patient = Asked("hasty", timeout_us=4), Asked("patient", timeout_us=5)

    assert (queue.is_late(hasty), queue.is_late(patient)) == (True, False)

    queue.add(hasty, 0)
    queue.add(patient, 0)
    assert form(queue, 0, 0) == ([], [hasty], 1 * US)
    assert form(queue, 1 * US, 1) == ([], [patient], None)


def test_a_time_that_never_passes_may_be_as_long_as_a_configuration_says() -> None:
    longest = 2**64 - 1
    queue = Queue(2, batching(delay_us=longest, default_policy=policy(timeout_us=longest)))
    now_ns = 2**60
    queue.add(Asked("alone"), now_ns)
    formation = form(queue, now_ns + 2**55, 1)
    assert (formation.batches, formation.expired) == ([], [])
    queue.add(Asked("second"), now_ns + 2**55)
    assert len(form(queue, now_ns + 2**55, 1).batches) == 1


def test_nobody_is_late_where_no_timeout_rejects() -> None:
    for rules in (None, policy(override=True), policy("DELAY", timeout_us=10, override=True)):
        queue: Queue = Queue(8, batching(default_policy=rules), to_instance_ns=4 * US)
        assert not queue.is_late(Asked(timeout_us=1))


# Requests that are removed


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
    queue: Queue = Queue(1, batching(default_policy=policy(timeout_us=10**6)))
    first = Asked("stays")
    queue.add(first, 0)
    with not_growing():
        for now_ns in range(1, 5000):
            passing = Asked()
            queue.add(passing, now_ns)
            queue.remove(passing)
    assert form(queue, 10**9, 0).expired == [first]


def test_requests_whose_time_ends_together_expire_in_the_order_in_which_they_came() -> None:
    made = [Asked(str(number)) for number in range(20)]
    queue = queue_of(8, batching(default_policy=policy(timeout_us=1)), *reversed(made))
    assert form(queue, 10 * US, 0).expired == made[::-1]
