"""Tests of statistics: the counts, and the form in which they are reported."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.runtime.observe.statistics import MOST_BATCH_SIZES, Statistics

counts = st.integers(0, 1000)
executions = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), counts, counts, counts, counts, counts))


def test_nothing_has_happened_at_first() -> None:
    snapshot = Statistics("add_sub", "1").snapshot()
    nothing = {"count": 0, "ns": 0}
    assert snapshot == {
        "name": "add_sub",
        "version": "1",
        "last_inference": 0,
        "inference_count": 0,
        "execution_count": 0,
        "inference_stats": {
            "success": nothing,
            "fail": nothing,
            "queue": nothing,
            "compute_input": nothing,
            "compute_infer": nothing,
            "compute_output": nothing,
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "response_stats": {},
        "batch_stats": [],
        "memory_usage": [],
    }


def test_a_batch_counts_for_each_of_its_requests_and_once_for_its_size() -> None:
    statistics = Statistics("add_sub", "1")
    statistics.record_batch(
        now_ms=1234,
        batch_rows=5,
        requests=2,
        rows=5,
        success_ns=900,
        queue_ns=300,
        input_ns=10,
        infer_ns=200,
        output_ns=30,
    )
    snapshot = statistics.snapshot()
    assert snapshot["last_inference"] == 1234
    assert snapshot["inference_count"] == 5
    assert snapshot["execution_count"] == 1
    assert snapshot["inference_stats"] == {
        "success": {"count": 2, "ns": 900},
        "fail": {"count": 0, "ns": 0},
        "queue": {"count": 2, "ns": 300},
        "compute_input": {"count": 2, "ns": 20},
        "compute_infer": {"count": 2, "ns": 400},
        "compute_output": {"count": 2, "ns": 60},
        "cache_hit": {"count": 0, "ns": 0},
        "cache_miss": {"count": 0, "ns": 0},
    }
    assert snapshot["batch_stats"] == [
        {
            "batch_size": 5,
            "compute_input": {"count": 1, "ns": 10},
            "compute_infer": {"count": 1, "ns": 200},
            "compute_output": {"count": 1, "ns": 30},
        }
    ]
    assert repr(statistics) == ("<Statistics of add_sub 1: 2 succeeded, 0 failed, 1 executions>")


@pytest.mark.promise(
    "Watching a server",
    "A request whose client leaves the queue counts as failed, as CANCELED. A batch counts as "
    "executed even if all its requests failed.",
)
def test_a_batch_in_which_everything_failed_was_executed_all_the_same() -> None:
    statistics = Statistics("add_sub", "1")
    statistics.record_batch(1, 4, 0, 0, 0, 0, 10, 10, 10)
    statistics.record_failures(2, 4, 80)
    assert (statistics.execution_count, statistics.last_inference_ms) == (1, 2)
    assert (statistics.inference_count, statistics.success_count) == (0, 0)
    assert (statistics.fail_count, statistics.fail_ns) == (4, 80)
    (batch,) = statistics.snapshot()["batch_stats"]
    assert batch["batch_size"] == 4
    assert batch["compute_infer"] == {"count": 1, "ns": 10}


def test_callers_who_choose_sizes_fill_no_memory_with_them() -> None:
    statistics = Statistics("m", "1")
    for rows in range(1, 6001):
        statistics.record_batch(7, rows, 1, rows, 1, 1, 1, 1, 1)
        statistics.record_batch(7, rows + 10_000, 1, rows, 1, 1, 1, 1, 1)
    assert statistics.success_count == 12_000
    assert len(statistics.snapshot()["batch_stats"]) == MOST_BATCH_SIZES
    # Those that are there are counted on.
    statistics.record_batch(7, 1, 1, 1, 1, 1, 1, 1, 1)
    assert statistics.batch_sizes()[1] == 2


def test_sums_of_durations_may_outgrow_64_bits() -> None:
    # A thousand requests that wait at a time do that within four months.
    statistics, most = Statistics("m", "1"), 2**63 - 1
    for _ in range(2):
        statistics.record_batch(7, 1, 1, 1, most, most, most, most, most)
        statistics.record_failures(7, 1, most)
    sums = statistics.snapshot()["inference_stats"]
    assert [sums[each]["ns"] for each in ("success", "fail", "queue", "compute_infer")] == [2 * most] * 4


@given(executions)
def test_the_totals_are_the_sums_and_batch_sizes_come_in_order(
    done: list[tuple[int, int, int, int, int, int, int]],
) -> None:
    statistics = Statistics("m", "1")
    for rows, requests, success, queue, put, infer, got in done:
        statistics.record_batch(7, rows, requests, rows, success, queue, put, infer, got)
    assert statistics.execution_count == len(done)
    assert statistics.inference_count == sum(each[0] for each in done)
    assert statistics.success_count == sum(each[1] for each in done)
    assert statistics.queue_ns == sum(each[3] for each in done)
    assert statistics.infer_ns == sum(each[5] * each[1] for each in done)
    batches = json.loads(json.dumps(statistics.snapshot()))["batch_stats"]
    assert [each["batch_size"] for each in batches] == sorted({each[0] for each in done})
    for batch in batches:
        alike = [each for each in done if each[0] == batch["batch_size"]]
        assert batch["compute_infer"] == {"count": len(alike), "ns": sum(e[5] for e in alike)}
