"""Distributions of values that are cheap to add to: counts by range, and quantiles over the last minute."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import nan

from moonpool.runtime.observe.exposition import Labels, Sample, shown

# Two values share a bucket if they differ by less than about a sixteenth.
_BITS = 4
_PARTS = 1 << _BITS
_BUCKETS = 64 * _PARTS
# As in Triton: a minute in five parts, of which the oldest is forgotten at a time.
_AGES = 5
_AGE_NS = 12_000_000_000


class BucketCounts:
    """Counts integers by the first bound that is not below them. For one writer; any thread may read."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        """Values above the last bound are counted, too."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def add(self, value: int, count: int = 1) -> None:
        """Count a value so many times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def samples(self, labels: Labels, unit: int = 1) -> list[Sample]:
        """Return the lines of the histogram. `unit` is the number of added units that make one shown unit."""
        return bucket_samples(self.bounds, self.counts, self.total, labels, unit)


def bucket_samples(
    bounds: Sequence[int], counts: Sequence[int], total: int, labels: Labels, unit: int = 1
) -> list[Sample]:
    """Return the lines of a histogram: count, sum, and the number of values in each bucket or below it."""
    below = 0
    buckets = []
    for bound, count in zip([*bounds, None], list(counts), strict=True):
        below += count
        le = "+Inf" if bound is None else shown(bound / unit)
        buckets.append(Sample("_bucket", (*labels, ("le", le)), below))
    return [Sample("_count", labels, below), Sample("_sum", labels, total / unit if unit != 1 else total), *buckets]


class LatencySummary:
    """One kind of duration of one model version. For one writer at a time; any thread may read."""

    __slots__ = ("_ages", "_clock", "_count", "_total_us", "_turns_at_ns")

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._count = 0
        self._total_us = 0
        self._ages: list[dict[int, int]] = [{} for _ in range(_AGES)]
        self._turns_at_ns = clock() + _AGE_NS

    def add(self, duration_ns: int, count: int = 1) -> None:
        """Count a duration so many times, now."""
        us = duration_ns // 1000
        self._count += count
        self._total_us += us * count
        self._turn()
        newest = self._ages[0]
        bucket = _bucket(us)
        newest[bucket] = newest.get(bucket, 0) + count

    def _turn(self) -> None:
        now_ns = self._clock()
        while now_ns >= self._turns_at_ns:
            late = now_ns - self._turns_at_ns
            self._turns_at_ns += _AGE_NS * max(1, late // _AGE_NS - _AGES)
            self._ages = [{}, *self._ages[:-1]]

    def samples(self, labels: Labels, quantiles: Sequence[float]) -> list[Sample]:
        """Return the lines of the summary. Without values a quantile is NaN."""
        self._turn()
        counts: dict[int, int] = {}
        for age in self._ages:
            for bucket, count in age.copy().items():
                counts[bucket] = counts.get(bucket, 0) + count
        return [
            Sample("_count", labels, self._count),
            Sample("_sum", labels, self._total_us),
            *(Sample("", (*labels, ("quantile", shown(each))), _quantile(counts, each)) for each in quantiles),
        ]


def _bucket(us: int) -> int:
    """Return the bucket of a number. Each number below `_PARTS` has its own, larger ones share buckets."""
    shift = us.bit_length() - _BITS - 1
    if shift <= 0:
        return us
    return min((shift << _BITS) + (us >> shift), _BUCKETS)


def _middle(bucket: int) -> float:
    shift = max(0, (bucket >> _BITS) - 1)
    low = (bucket - (shift << _BITS)) << shift
    return low + ((1 << shift) - 1) / 2


def _quantile(counts: dict[int, int], quantile: float) -> float:
    rank = quantile * sum(counts.values())
    below = 0
    for bucket in sorted(counts):
        below += counts[bucket]
        if below >= rank and below:
            return _middle(bucket)
    return nan


class LatencySummaries:
    """All kinds of durations of one model version. For one writer at a time."""

    __slots__ = ("infer", "input", "output", "queue", "request")

    def __init__(self) -> None:
        self.request = LatencySummary()
        self.queue = LatencySummary()
        self.input = LatencySummary()
        self.infer = LatencySummary()
        self.output = LatencySummary()

    def add_batch(self, requests: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """Count the durations of a batch for each request in it that succeeded."""
        self.input.add(input_ns, requests)
        self.infer.add(infer_ns, requests)
        self.output.add(output_ns, requests)


class CacheSummaries:
    """Durations of one model version's response cache. For one writer at a time."""

    __slots__ = ("hit", "miss")

    def __init__(self) -> None:
        self.hit = LatencySummary()
        self.miss = LatencySummary()
