"""Quantiles of durations over the last minute."""

from __future__ import annotations

import time
from math import nan
from typing import TYPE_CHECKING

from moonpool.runtime.exposition import Sample, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.runtime.exposition import Labels

# A value is told from one that is a sixteenth larger.
_BITS = 4
_PARTS = 1 << _BITS
_BUCKETS = 64 * _PARTS
# As in Triton's: a minute in five parts, of which the oldest is forgotten at a time.
_AGES = 5
_AGE_NS = 12_000_000_000


class LatencySummary:
    """One kind of duration of one model version. One thread at a time adds; any may read."""

    __slots__ = ("_ages", "_clock", "_count", "_total_us", "_turns_at_ns")

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._count = 0
        self._total_us = 0
        self._ages: list[dict[int, int]] = [{} for _ in range(_AGES)]
        self._turns_at_ns = clock() + _AGE_NS

    def add(self, duration_ns: int, count: int = 1) -> None:
        """So many of this duration, now."""
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
        """The lines of it. A quantile of nothing is no number."""
        self._turn()
        counts: dict[int, int] = {}
        for age in self._ages:
            for bucket, count in age.copy().items():
                counts[bucket] = counts.get(bucket, 0) + count
        return [
            Sample("_count", labels, self._count),
            Sample("_sum", labels, self._total_us),
            *(
                Sample("", (*labels, ("quantile", shown(each))), _quantile(counts, each))
                for each in quantiles
            ),
        ]


def _bucket(us: int) -> int:
    """Numbers below `_PARTS` have a bucket of their own, larger ones share it with their like."""
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
    """All kinds of durations of one model version. One thread at a time adds."""

    __slots__ = ("infer", "input", "output", "queue", "request")

    def __init__(self) -> None:
        self.request = LatencySummary()
        self.queue = LatencySummary()
        self.input = LatencySummary()
        self.infer = LatencySummary()
        self.output = LatencySummary()

    def add_batch(self, requests: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """The durations of a batch, which are those of each request in it that succeeded."""
        self.input.add(input_ns, requests)
        self.infer.add(infer_ns, requests)
        self.output.add(output_ns, requests)
