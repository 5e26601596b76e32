"""How many values lie in which range: a histogram that is cheap to add to."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from moonpool.runtime.exposition import Sample, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.runtime.exposition import Labels


class BucketCounts:
    """Counts of integers by the first bound that is not below them. One thread at a time adds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[int]) -> None:
        """What is above the last bound is counted, too."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def add(self, value: int, count: int = 1) -> None:
        """So many of this value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def samples(self, labels: Labels, unit: int = 1) -> list[Sample]:
        """The lines of it, in units of so many of what was added."""
        return bucket_samples(self.bounds, self.counts, self.total, labels, unit)


def bucket_samples(
    bounds: Sequence[int], counts: Sequence[int], total: int, labels: Labels, unit: int = 1
) -> list[Sample]:
    """The lines of a histogram: count, sum, and how many are in each bucket or below it."""
    below = 0
    buckets = []
    for bound, count in zip([*bounds, None], list(counts), strict=True):
        below += count
        le = "+Inf" if bound is None else shown(bound / unit)
        buckets.append(Sample("_bucket", (*labels, ("le", le)), below))
    return [
        Sample("_count", labels, below),
        Sample("_sum", labels, total / unit if unit != 1 else total),
        *buckets,
    ]
