"""Limits of latency: whether a load keeps them, how many of its answers do, and the search for the highest rate that
holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.benchmarks.generator.engine import DUE, END, FIRST
from moonpool.benchmarks.loads import BadLoad, Rate, seconds_of
from moonpool.benchmarks.windows import FALLS_BEHIND, PERCENTILES, Point, Window, percentile_us

# Limits that are not percentiles of the latency: of the time to a stream's first response, and between its responses.
_OF_STREAMS = {"first": "first_ns", "between": "between_ns"}
_STREAM_PERCENTILE = 99.0
_FIGURES = (*PERCENTILES, "mean", *_OF_STREAMS)
# A search does not go below a rate at which a window has so many requests, because their figures would mean nothing.
_LEAST_REQUESTS = 10
# A rate is reached if at least this share of it was answered.
_REACHED = 0.95


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in microseconds, by figure: p50 to max and mean of the latency, and p99 of `first` and `between`
    responses.
    """

    limits_us: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read `p99=20ms,first=5ms`; a number alone is in milliseconds. Raises `BadLoad`."""
        limits = {}
        for part in text.split(","):
            name, equals, time = part.strip().partition("=")
            if not equals or name not in _FIGURES:
                raise BadLoad(f"{part!r} must be FIGURE=TIME, with one of {', '.join(_FIGURES)}")
            limits[name] = seconds_of(time, "ms") * 1e6
            if limits[name] <= 0:
                raise BadLoad(f"{part!r} allows no time")
        return cls(limits)

    @property
    def words(self) -> str:
        return ", ".join(f"{name} {time_words(limit)}" for name, limit in self.limits_us.items())

    def broken(self, point: Point) -> str | None:
        """Say why a load does not hold, in a few words; None if it does.

        Beside the limits, all requests must succeed, the windows must agree, and a planned rate must have been reached.
        """
        whole = point.whole
        if not len(whole.latencies_ns):
            return "no request was answered"
        for name, limit_us in self.limits_us.items():
            found_us = self.figure_us(whole, name)
            # NaN, where there is no such time, breaks the limit, too.
            if not found_us <= limit_us:
                shown = "not known" if math.isnan(found_us) else time_words(found_us)
                return f"{name} {shown}"
        if whole.failed:
            return f"{whole.failed} failed"
        if isinstance(point.load, Rate):
            planned = len(whole.late_ns) + whole.unsent
            reached = whole.requests_per_s / point.load.per_s
            if whole.delayed > FALLS_BEHIND * planned:
                return f"{whole.delayed} of {planned} sent late"
            if reached < _REACHED:
                return f"{reached:.0%} of the rate"
        return None if point.stable else "not settled"

    def figure_us(self, whole: Window, name: str) -> float:
        """Return the figure in microseconds; NaN if there is none."""
        if name == "mean":
            return whole.mean_latency_us
        if name in _OF_STREAMS:
            return percentile_us(getattr(whole, _OF_STREAMS[name]), _STREAM_PERCENTILE)
        return whole.latency_us(PERCENTILES[name])

    def goodput_per_s(self, whole: Window) -> float:
        """Count the answers a second that are within the limits by themselves.

        An answer is good within the largest limit of the latency, as a smaller one is for other percentiles, and within
        the limit of its first response.
        """
        rows = whole.log.rows[whole.log.is_answered]
        of_latency = [us for name, us in self.limits_us.items() if name not in _OF_STREAMS]
        good = rows[:, END] - rows[:, DUE] <= max(of_latency, default=math.inf) * 1000
        if "first" in self.limits_us:
            first = rows[:, FIRST]
            good &= (first > 0) & (first - rows[:, DUE] <= self.limits_us["first"] * 1000)
        return float(good.sum()) / whole.seconds if whole.seconds else 0.0

    def as_dict(self, points: list[Point]) -> dict[str, Any]:
        """Return the limits and what was found, for a result."""
        rates = [point for point in points if isinstance(point.load, Rate)]
        held = [p.load.per_s for p in rates if isinstance(p.load, Rate) and not self.broken(p)]
        highest = max(held, default=None)
        broken = [
            p.load.per_s for p in rates if isinstance(p.load, Rate) and p.load.per_s > (highest or 0) and self.broken(p)
        ]
        return {
            "limits_us": dict(self.limits_us),
            "highest_rate": highest,
            "lowest_broken_rate": min(broken, default=None),
        }


def time_words(time_us: float) -> str:
    """Write a time with a unit that suits it."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if time_us >= size:
            return f"{time_us / size:.3g} {unit}"
    return f"{time_us:.3g} µs"


# A search ends when the lowest rate that does not hold is at most so many times the highest one that does.
_PRECISION = 1.05
_MOST_STEPS = 40


class RateSearch:
    """Yields rates until it knows the highest one that holds: it doubles or halves, then bisects.

    Call `saw` with each point before you ask for the next rate.
    """

    def __init__(self, slo: Slo, start_per_s: float, distribution: str, window_s: float) -> None:
        """Begin with `start_per_s`, which may be any guess. `window_s` is the length of a window."""
        self._slo = slo
        self._least = _LEAST_REQUESTS / window_s
        self._next = max(start_per_s, self._least)
        self._distribution = distribution
        self._holds = 0.0
        self._breaks = math.inf

    def saw(self, point: Point) -> None:
        """Take the outcome of the last rate."""
        if isinstance(point.load, Rate):
            if self._slo.broken(point) is None:
                self._holds = max(self._holds, point.load.per_s)
            else:
                self._breaks = min(self._breaks, point.load.per_s)

    def __iter__(self) -> Iterator[Rate]:
        for _ in range(_MOST_STEPS):
            yield Rate(_rounded(self._next), self._distribution)
            if self._breaks == math.inf:
                self._next = self._holds * 2
            elif not self._holds and self._breaks <= self._least:
                return
            elif not self._holds:
                self._next = max(self._breaks / 2, self._least)
            else:
                self._next = math.sqrt(self._holds * self._breaks)
            if self._holds and self._breaks <= self._holds * _PRECISION:
                return


def _rounded(value: float) -> float:
    """Round to three digits, which are enough for the precision and read well."""
    return float(f"{value:.3g}")
