"""Tests of the scheduler: batches, priorities, policies, the order of responses, and statistics."""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.inside import hosted_in, registry_of
from tests.runtime.held_batches import Caller, holding, queued, rejected
from tests.runtime.recorder import PATIENCE_S, counted, row, x
from tests.waiting import wait_until

from moonpool import QueueFull, QueueTimeout, RequestTimedOut, Response
from moonpool.ipc.errors import PeerGone

HOUR_US = 3_600_000_000


def batching(**policy: Any) -> dict[str, Any]:
    return {"max_batch_size": 8, "dynamic_batching": policy}


def value(future: Future[Response]) -> float:
    return float(future.result(PATIENCE_S).outputs["Y"].flat[0])


# Batches


@pytest.mark.promise("Batching", "While an instance executes, the next batch forms.")
def test_while_an_instance_executes_the_next_batch_forms(folder: Path) -> None:
    with holding(folder, **batching()) as (backend, runtime):
        futures = [runtime.submit("m", row(i)) for i in range(6)]
        assert backend.sent == [[0]]
        backend.wait_for(1).answer()
        backend.wait_for(2).answer()
        assert [value(future) for future in futures] == [0, 1, 2, 3, 4, 5]
        assert backend.sent == [[0], [1, 2, 3, 4, 5]]


def test_requests_of_other_shapes_wait_for_a_batch_of_their_own(folder: Path) -> None:
    with holding(folder, **batching()) as (backend, runtime):
        runtime.submit("m", row(0))
        for values in ((1,), (2,), (3, 3), (4,)):
            last = runtime.submit("m", row(*values))
        backend.is_quick = True
        backend.wait_for(1).answer()
        assert value(last) == 4
        assert backend.sent == [[0], [1, 2], [3], [4]]


def test_without_dynamic_batching_every_request_goes_alone(folder: Path) -> None:
    with holding(folder, max_batch_size=8) as (backend, runtime):
        futures = [runtime.submit("m", row(i)) for i in range(4)]
        backend.is_quick = True
        backend.wait_for(1).answer()
        assert [value(future) for future in futures] == [0, 1, 2, 3]
        assert backend.sent == [[0], [1], [2], [3]]


@pytest.mark.promise("Watching a server", "A request whose client leaves …")
def test_a_caller_who_leaves_the_queue_counts_as_cancelled(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        first, second = (runtime.submit("m", x(i)) for i in range(2))
        backend.wait_for(1)
        second.cancel()
        scheduler = hosted_in(runtime, "m").scheduler
        assert scheduler.statistics.fail_counts["CANCELED"] == 1
        assert runtime.statistics("m")["inference_stats"]["fail"]["count"] == 1
        backend.is_quick = True
        backend.wait_for(1).answer()
        assert value(first) == 0
        assert runtime.statistics("m")["inference_stats"]["success"]["count"] == 1


def test_idle_instances_share_the_requests(folder: Path) -> None:
    with holding(folder, **counted(2)) as (backend, runtime):
        futures = [runtime.submit("m", x(i)) for i in range(3)]
        one, other = backend.wait_for(1), backend.wait_for(2)
        assert one is not other
        assert backend.sent == [[0], [1]]
        other.answer()
        assert backend.wait_for(3) is other
        other.answer()
        one.answer()
        assert [value(future) for future in futures] == [0, 1, 2]


@pytest.mark.promise("Batching", "Preferred sizes, delays, priorities and queue policies are Triton's, texts included.")
def test_a_preferred_size_is_waited_for_and_sent_at_once(folder: Path) -> None:
    policy = batching(preferred_batch_size=[4], max_queue_delay_microseconds=HOUR_US)
    with holding(folder, **policy) as (backend, runtime):
        backend.is_quick = True
        futures = [runtime.submit("m", row(i)) for i in range(3)]
        assert backend.sent == []
        futures.append(runtime.submit("m", row(3)))
        assert [value(future) for future in futures] == [0, 1, 2, 3]
        assert backend.sent == [[0, 1, 2, 3]]


def test_a_batch_that_does_not_fill_is_sent_after_the_delay_and_not_before(folder: Path) -> None:
    delay_s = 0.5
    policy = batching(max_queue_delay_microseconds=int(delay_s * 1e6))
    with holding(folder, **policy) as (backend, runtime):
        runtime.submit("m", row(0))
        held = backend.wait_for(1)
        begin_s = time.monotonic()
        # None is sent before the instance is free, so any time may pass between them.
        futures = [runtime.submit("m", row(i)) for i in (1, 2)]
        backend.is_quick = True
        held.answer()
        assert [value(future) for future in futures] == [1, 2]
        assert time.monotonic() - begin_s >= delay_s
        assert backend.sent == [[0], [1, 2]]


# Priorities and policies


@pytest.mark.promise("Batching", "Preferred sizes, delays, priorities and queue …")
def test_higher_priorities_go_first_and_none_is_the_default(folder: Path) -> None:
    policy = {"priority_levels": 3, "default_priority_level": 2}
    with holding(folder, max_batch_size=1, dynamic_batching=policy) as (backend, runtime):
        callers = [Caller(runtime, row(0))]
        backend.wait_for(1)
        for count, (number, priority) in enumerate([(30, 3), (20, 0), (31, 3), (10, 1), (21, 2)]):
            callers.append(Caller(runtime, row(number), priority=priority))
            queued(runtime, count + 1)
        backend.is_quick = True
        backend.wait_for(1).answer()
        assert [caller.result() for caller in callers] == [0, 30, 20, 31, 10, 21]
        assert backend.sent == [[0], [10], [20], [21], [30], [31]]


@pytest.mark.promise(
    "Watching a server",
    "A request that finds the queue full, or waits in it for too long, counts as failed, as REJECTED.",
)
@pytest.mark.promise("Batching", "Preferred sizes, delays, priorities and queue …")
def test_a_full_queue_refuses_in_tritons_words(folder: Path) -> None:
    policy = batching(default_queue_policy={"max_queue_size": 2})
    with holding(folder, **policy) as (backend, runtime):
        futures = [runtime.submit("m", row(i)) for i in range(3)]
        for _ in range(2):
            with pytest.raises(QueueFull, match=r"^Exceeds maximum queue size$") as caught:
                runtime.submit("m", row(9))
            assert caught.value.code == "UNAVAILABLE"
        backend.is_quick = True
        backend.wait_for(1).answer()
        assert [value(future) for future in futures] == [0, 1, 2]
        # The queue has a place again.
        assert runtime.infer("m", row(4))["Y"].flat[0] == 4
        assert rejected(runtime) == 2
        assert runtime.statistics("m")["inference_stats"]["fail"]["count"] == 2


@pytest.mark.promise("Watching a server", "A request that finds the queue full, or …")
@pytest.mark.promise("Batching", "Preferred sizes, delays, priorities and queue …")
def test_a_request_that_waits_too_long_is_rejected_in_tritons_words(folder: Path) -> None:
    queue_policy = {"default_timeout_microseconds": HOUR_US, "allow_timeout_override": True}
    with holding(folder, **batching(default_queue_policy=queue_policy)) as (backend, runtime):
        first = runtime.submit("m", row(0))
        late = Caller(runtime, row(1), queue_timeout_us=2000).result()
        assert isinstance(late, QueueTimeout)
        assert (str(late), late.code) == ("Request timeout expired", "UNAVAILABLE")
        backend.wait_for(1).answer()
        # The queue's policy does not apply to the request that executes.
        assert value(first) == 0
        assert backend.sent == [[0]]
        assert runtime.statistics("m")["inference_stats"]["fail"]["count"] == 1
        assert rejected(runtime) == 1


@pytest.mark.promise("Requests between models", "The timeout of a request, from …")
def test_a_timeout_shorter_than_the_way_to_an_idle_instance_is_a_rejection(folder: Path) -> None:
    queue_policy = {"default_timeout_microseconds": HOUR_US, "allow_timeout_override": True}
    with holding(folder, **batching(default_queue_policy=queue_policy)) as (backend, runtime):
        backend.is_quick = True
        # One request comes from another thread and one from the main thread, for which the reactor forms batches.
        assert isinstance(Caller(runtime, row(0), queue_timeout_us=1).result(), QueueTimeout)
        with pytest.raises(QueueTimeout, match=r"^Request timeout expired$"):
            runtime.infer("m", row(0), queue_timeout_us=1)
        assert backend.sent == []
        patient = Caller(runtime, row(1), queue_timeout_us=HOUR_US)
        assert patient.result() == 1
        assert backend.sent == [[1]]


def test_late_requests_go_after_the_others_where_the_policy_says_delay(folder: Path) -> None:
    queue_policy = {"timeout_action": "DELAY", "default_timeout_microseconds": HOUR_US, "allow_timeout_override": True}
    policy = {"default_queue_policy": queue_policy}
    with holding(folder, max_batch_size=1, dynamic_batching=policy) as (backend, runtime):
        first = runtime.submit("m", row(0))
        late = Caller(runtime, row(1), queue_timeout_us=1)
        queued(runtime, 1)
        punctual = runtime.submit("m", row(2))
        backend.is_quick = True
        backend.wait_for(1).answer()
        assert [value(first), late.result(), value(punctual)] == [0, 1, 2]
        assert backend.sent == [[0], [2], [1]]


def test_timers_do_not_pile_up_behind_a_long_queue_timeout(folder: Path) -> None:
    policy = batching(default_queue_policy={"default_timeout_microseconds": HOUR_US})
    with holding(folder, **policy) as (backend, runtime):
        backend.is_quick = True
        for _ in range(300):
            futures = [runtime.submit("m", row(i)) for i in range(2)]
            for future in futures:
                future.result(PATIENCE_S)
        # The queue has one timer, idle memory another, and some existed at the start.
        assert len(registry_of(runtime)._reactor._later) < 10


# Order of responses


@pytest.mark.promise("Batching", "Responses keep the order of their batches if the configuration asks for that.")
def test_responses_keep_the_order_of_batches_where_that_is_asked_for(folder: Path) -> None:
    policy = {"preserve_ordering": True}
    with holding(folder, max_batch_size=1, dynamic_batching=policy, **counted(3)) as office_:
        backend, runtime = office_
        left: list[float] = []
        futures = [runtime.submit("m", row(i)) for i in range(5)]
        for future in futures:
            future.add_done_callback(lambda done: left.append(value(done)))
        held_batches = [backend.wait_for(i) for i in (1, 2, 3)]
        held_batches[2].answer()
        backend.wait_for(4).answer()
        backend.wait_for(5).answer()
        wait_until(lambda: hosted_in(runtime, "m").scheduler.executing == 2)
        assert left == []
        held_batches[1].answer()
        wait_until(lambda: hosted_in(runtime, "m").scheduler.executing == 1)
        assert left == []
        held_batches[0].answer()
        wait_until(lambda: len(left) == 5)
        assert left == [0, 1, 2, 3, 4]


def test_an_error_or_a_caller_that_left_holds_up_nobody_behind_it(folder: Path) -> None:
    policy = {"preserve_ordering": True}
    with holding(folder, max_batch_size=1, dynamic_batching=policy, **counted(2)) as office_:
        backend, runtime = office_
        gone = Caller(runtime, row(0), timeout_s=0.01)
        backend.wait_for(1)
        assert isinstance(gone.result(), RequestTimedOut)
        broken = runtime.submit("m", row(1))
        second = backend.wait_for(2)
        behind = runtime.submit("m", row(2))
        backend.is_quick = True
        second.break_down(PeerGone("broken"))
        wait_until(lambda: len(backend.batches) == 3)
        assert not behind.done()
        backend.batches[0][0].answer()
        with pytest.raises(PeerGone, match="broken"):
            broken.result(PATIENCE_S)
        assert value(behind) == 2


# Statistics


@pytest.mark.promise("Batching", "Statistics count as Triton's do.")
def test_statistics_count_as_tritons_do(folder: Path) -> None:
    with holding(folder, **batching()) as (backend, runtime):
        futures = [runtime.submit("m", row(i)) for i in range(4)]
        backend.is_quick = True
        backend.wait_for(1).answer()
        for future in futures:
            future.result(PATIENCE_S)
        shown = runtime.statistics("m")
    assert shown["name"] == "m"
    assert shown["version"] == "1"
    assert (shown["inference_count"], shown["execution_count"]) == (4, 2)
    stats = shown["inference_stats"]
    assert stats["success"]["count"] == 4
    assert stats["fail"]["count"] == 0
    parts = [stats[k]["ns"] for k in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert 0 < sum(parts) <= stats["success"]["ns"]
    assert [each["batch_size"] for each in shown["batch_stats"]] == [1, 3]
