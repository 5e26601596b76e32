"""Confidence intervals of figures, and the comparison of two results with conditions that may fail it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moonpool import MoonpoolError
from moonpool.benchmarks.loads import BadLoad, load_in_short, seconds_of
from moonpool.benchmarks.windows import PERCENTILES

# Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1 on. Beyond the last one, it hardly changes.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
    2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048,
    2.045, 2.042,
)  # fmt: skip
# The figures of a point, with the keys that lead to them.
FIGURES: dict[str, tuple[str, ...]] = {
    "requests_per_s": ("requests_per_s",),
    **{name: ("latency_us", name) for name in (*PERCENTILES, "mean")},
    "failed": ("failed",),
}


class BadCondition(MoonpoolError):
    """A text is not a condition on figures."""

    code = "INVALID_ARG"


def quantile_of_t(degrees: float) -> float:
    """Return the two-sided 95 % quantile of Student's t; for fractions that of the next smaller number, which is
    wider.
    """
    return _T[max(0, min(len(_T), int(degrees)) - 1)]


def figure_of(figures: Mapping[str, Any], name: str) -> float | None:
    """Return a figure of a point, a run or a window; None if it was not measured."""
    value: Any = figures
    for key in FIGURES[name]:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None


def confidence(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return mean and 95 % confidence interval of each figure over runs. Figures that a run lacks are left out."""
    found = {}
    for name in FIGURES:
        values = [figure_of(run, name) for run in runs]
        known = [value for value in values if value is not None]
        if len(known) < max(2, len(runs)):
            continue
        mean, error = _mean_and_error(known)
        half = quantile_of_t(len(known) - 1) * error
        # No figure is below 0.
        found[name] = {"mean": mean, "low": max(0.0, mean - half), "high": mean + half}
    return found


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error."""
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


@dataclass(frozen=True, slots=True)
class Change:
    """A ratio of a figure, new over old, and its 95 % confidence interval, which is open without several samples."""

    ratio: float
    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        """True if the interval has no 1, so that noise alone hardly explains the ratio."""
        return self.low > 1 or self.high < 1


def change(old: Sequence[float], new: Sequence[float]) -> Change | None:
    """Return the ratio of geometric means, with Welch's interval of the logarithms; None unless all values are above
    0.
    """
    if not old or not new or min(*old, *new) <= 0:
        return None
    logs = [[math.log(value) for value in values] for values in (old, new)]
    if min(map(len, logs)) < 2:
        difference = sum(logs[1]) / len(logs[1]) - sum(logs[0]) / len(logs[0])
        return Change(math.exp(difference), 0.0, math.inf)
    (before, error_before), (after, error_after) = map(_mean_and_error, logs)
    variances = error_before**2, error_after**2
    total = sum(variances)
    degrees = float(len(_T))
    if total:
        parts = sum(v**2 / (len(each) - 1) for v, each in zip(variances, logs, strict=True))
        degrees = total**2 / parts
    half = quantile_of_t(degrees) * math.sqrt(total)
    middle = after - before
    return Change(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


# With fewer pairs, a bootstrap of their median knows too few values: six of six lie on one side by chance once in 32
# times.
_LEAST_PAIRS = 6
_RESAMPLES = 4000


def paired_change(old: Sequence[float], new: Sequence[float]) -> Change | None:
    """Return the median of the ratios of pairs that were measured one right after the other; None without positive
    pairs.

    A machine's moods hit both of a pair, and a burst that hits one of them moves a median little. The interval is a
    bootstrap's: the middle 95 % of the medians of pairs drawn anew. With few pairs it is Student's, of the logarithms'
    mean.
    """
    pairs = [(a, b) for a, b in zip(old, new, strict=True) if a > 0 and b > 0]
    if not pairs:
        return None
    logs = np.log([b / a for a, b in pairs])
    middle = float(np.median(logs))
    if len(logs) < _LEAST_PAIRS:
        if len(logs) < 2:
            return Change(math.exp(middle), 0.0, math.inf)
        mean, error = _mean_and_error(logs.tolist())
        half = quantile_of_t(len(logs) - 1) * error
        return Change(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
    # Always the same draws, so a file has one interval.
    drawn = np.random.default_rng(0).integers(0, len(logs), (_RESAMPLES, len(logs)))
    low, high = np.quantile(np.median(logs[drawn], axis=1), [0.025, 0.975])
    return Change(math.exp(middle), math.exp(float(low)), math.exp(float(high)))


def changes_in_turns(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Change]:
    """Compare two points whose windows were measured in turns, window by window."""
    found = {}
    for name in FIGURES:
        values = [[figure_of(window, name) or 0.0 for window in point["windows"]] for point in (old, new)]
        compared = paired_change(*values) if len(values[0]) == len(values[1]) else None
        if compared is not None:
            found[name] = compared
    return found


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Change]:
    """Compare two points. Samples are their runs, or else their windows, which notice less of a machine's moods."""
    found = {}
    for name in FIGURES:
        samples = []
        for point in (old, new):
            values = [figure_of(each, name) for each in point.get("runs") or point["windows"]]
            samples.append([value for value in values if value is not None])
        compared = change(*samples)
        if compared is not None:
            found[name] = compared
    return found


_CONDITION = re.compile(r"\s*(\w+)\s*([<>])\s*(.+?)\s*")


@dataclass(frozen=True, slots=True)
class Condition:
    """Fails a comparison: a figure's ratio, new over old, or its new value is above or below a limit."""

    text: str
    figure: str
    is_above: bool
    limit: float
    is_ratio: bool

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read `p99>1.1x`, `requests_per_s<0.95x`, `p99>20ms` or `failed>0`. Raises `BadCondition`."""
        found = _CONDITION.fullmatch(text)
        usage = f"{text!r} must be FIGURE>LIMIT or FIGURE<LIMIT"
        if found is None or found[1] not in FIGURES:
            raise BadCondition(f"{usage}, with one of {', '.join(FIGURES)}")
        figure, limit = found[1], found[3]
        is_ratio = limit.endswith("x")
        try:
            if is_ratio or FIGURES[figure][0] != "latency_us":
                number = float(limit.removesuffix("x"))
            else:
                number = seconds_of(limit, "ms") * 1e6
        except (ValueError, BadLoad) as error:
            raise BadCondition(f"{usage}, with a LIMIT such as 1.1x, 20ms or 5") from error
        if not math.isfinite(number) or number < 0:
            raise BadCondition(f"{usage}, with a LIMIT of 0 or more")
        return cls(text, figure, found[2] == ">", number, is_ratio)

    def failure(self, new: Mapping[str, Any], compared: Mapping[str, Change]) -> str | None:
        """Say how a point meets the condition; None if it does not.

        A ratio must be over the limit and certain. A figure that is missing meets every condition, since nothing shows
        that it is as it was.
        """
        where = load_in_short(new)
        if self.is_ratio:
            found = compared.get(self.figure)
            if found is None:
                return f"{self.text} at {where}: {self.figure} cannot be compared"
            is_met = found.ratio > self.limit if self.is_above else found.ratio < self.limit
            if not is_met or not found.is_certain:
                return None
            return f"{self.text} at {where}: {found.ratio:.3f}x ({found.low:.3f} to {found.high:.3f})"
        value = figure_of(new, self.figure)
        if value is None:
            return f"{self.text} at {where}: {self.figure} was not measured"
        is_met = value > self.limit if self.is_above else value < self.limit
        return f"{self.text} at {where}: {value:.4g}" if is_met else None
