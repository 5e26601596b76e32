"""Tests of histograms and quantiles: their precision, and the forgetting of old values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.runtime.observe.distributions import BucketCounts, LatencySummary

pytestmark = pytest.mark.promise(
    "Watching a server", "Quantiles are those of the last minute, and close to the true ones."
)

MINUTE_NS = 60_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def quantile(summary: LatencySummary, of: float) -> float:
    (sample,) = summary.samples((), [of])[2:]
    return sample.value


@given(st.lists(st.integers(0, 10**12), min_size=1), st.sampled_from([0.01, 0.5, 0.9, 1.0]))
def test_a_quantile_is_near_the_value_that_has_its_rank(durations: list[int], of: float) -> None:
    summary = LatencySummary(Clock())
    for duration in durations:
        summary.add(duration)
    exact_us = sorted(durations)[math.ceil(of * len(durations)) - 1] // 1000

    assert abs(quantile(summary, of) - exact_us) <= exact_us / 16
    count, total = summary.samples((), [])
    assert (count.value, total.value) == (len(durations), sum(d // 1000 for d in durations))


def test_values_older_than_a_minute_count_in_no_quantile() -> None:
    clock = Clock()
    summary = LatencySummary(clock)
    summary.add(5_000_000, 3)
    clock.now_ns += MINUTE_NS // 2
    summary.add(1_000, 1)

    assert abs(quantile(summary, 1.0) - 5000) < 5000 / 16
    clock.now_ns += MINUTE_NS // 2
    assert quantile(summary, 1.0) == 1
    clock.now_ns += 1000 * MINUTE_NS
    assert math.isnan(quantile(summary, 0.5))
    summary.add(2_000)
    assert quantile(summary, 0.5) == 2
    assert [sample.value for sample in summary.samples((), [])] == [5, 15003]


def test_a_histogram_counts_what_is_not_above_a_bound() -> None:
    counts = BucketCounts((10, 100))
    for value in (1, 10, 11, 100, 101, 5000):
        counts.add(value)
    counts.add(7, 4)

    lines = [
        (sample.suffix, dict(sample.labels).get("le"), sample.value)
        for sample in counts.samples((("a", "b"),), unit=10)
    ]
    assert lines == [
        ("_count", None, 10),
        ("_sum", None, 525.1),
        ("_bucket", "1", 6),
        ("_bucket", "10", 8),
        ("_bucket", "+Inf", 10),
    ]
