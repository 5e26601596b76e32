"""Tests of counts that travel from one process to another."""

from __future__ import annotations

from bisect import bisect_left

import pytest

from moonpool.runtime.observe.statistics import Statistics, add_counts, take_counts


def counted(times: int) -> Statistics:
    statistics = Statistics("m", "1")
    for i in range(times):
        statistics.record_batch(1000 + i, 2, 1, 2, 50, 10, 20, 30, 5)
        statistics.by_duration[i] += 1
    statistics.record_failures(3000, 2, 70, "REJECTED")
    return statistics


def test_counts_taken_in_one_process_count_in_another() -> None:
    here, there, wanted = counted(2), counted(3), counted(5)
    wanted.record_failures(3000, 2, 70, "REJECTED")
    counts = take_counts(here)
    assert counts is not None
    add_counts(there, counts)
    for name in Statistics.__slots__:
        if name not in ("by_duration", "responses"):
            assert getattr(there, name) == getattr(wanted, name), name
    assert there.snapshot() == wanted.snapshot()
    assert there.by_duration[:4] == [2, 2, 1, 0]


def test_nothing_is_taken_twice() -> None:
    statistics = counted(1)
    assert take_counts(statistics) is not None
    assert take_counts(statistics) is None
    assert statistics.snapshot() == Statistics("m", "1").snapshot()


def test_counts_by_other_bounds_are_taken_by_them_and_shown_by_some() -> None:
    bounds = (-5, 10, 100, 1000)
    here, there = (Statistics("m", "1", bounds) for _ in range(2))
    for taken in (3, 11, 12, 99, 1001):
        here.record_batch(1000, 1, 1, 1, taken, 0, 0, taken, 0)
        here.by_duration[bisect_left(bounds, taken)] += 1
    counts = take_counts(here)
    assert counts is not None
    assert here.by_duration == [0] * 5
    add_counts(there, counts)
    assert there.by_duration == [0, 1, 3, 0, 1]
    assert there.within((10, 1000)) == [1, 3, 1]
    assert there.within(bounds) == there.by_duration
    with pytest.raises(ValueError, match="figures"):
        add_counts(Statistics("m", "1"), counts)


def test_malformed_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 figures"):
        add_counts(Statistics("m", "1"), ([1, 2, 3], []))
