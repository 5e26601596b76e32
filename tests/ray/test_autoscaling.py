"""The policy that follows the time in queues. Needs no Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moonpool.ray.autoscaling import BUSY, PRESSURE, decide, queue_policy


@pytest.mark.promise(
    "Ray Serve",
    "Replicas follow the time that requests wait: more come while it is over its target, at most twice as many at "
    "once, and one goes when it is under half of it and the others would not be too busy.",
)
@pytest.mark.parametrize(
    ("replicas", "pressure", "busy", "decision"),
    [(2, 1.5, 1.0, 3), (2, 9.0, 1.0, 4), (4, 1.01, 1.0, 5), (4, 0.8, 0.1, 4), (4, 0.1, 0.2, 3), (4, 0.1, 0.6, 4)],
)
def test_replicas_follow_the_time_in_queues(replicas: int, pressure: float, busy: float, decision: int) -> None:
    assert decide(replicas, [pressure] * replicas, [busy] * replicas, 0, 10) == decision


def test_the_last_replica_goes_when_nothing_is_asked() -> None:
    assert decide(1, [0.0], [0.0], 0, 0) == 0
    assert decide(1, [0.0], [0.0], 0, 1) == 1


def test_the_first_replica_comes_with_the_first_request() -> None:
    assert decide(0, [], [], 1, 1) == 1
    assert decide(0, [], [], 0, 0) == 0


def test_requests_that_no_replica_takes_are_a_reason_for_more() -> None:
    assert decide(2, [0.0, 0.0], [1.0, 1.0], 100, 200) == 4


def test_the_policy_reads_what_replicas_have_reported() -> None:
    context = SimpleNamespace(
        aggregated_metrics={PRESSURE: {"a": 3.0, "b": 1.0}, BUSY: {"a": 1.0, "b": 1.0}},
        target_num_replicas=2,
        total_queued_requests=0.0,
        total_num_requests=8.0,
    )

    assert queue_policy(context) == (4, {})


def test_the_policy_knows_no_reports_at_first() -> None:
    context = SimpleNamespace(
        aggregated_metrics=None, target_num_replicas=1, total_queued_requests=None, total_num_requests=1.0
    )

    assert queue_policy(context) == (1, {})
