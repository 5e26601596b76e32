"""One series of figures over another: ratios, and how far they spread."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of some ratios, the smallest and the largest."""

    median: float
    least: float
    most: float

    def as_dict(self) -> dict[str, float]:
        return {"median": self.median, "least": self.least, "most": self.most}


# What is compared: a name, and where it stands in the figures of a window.
_COMPARED = {
    "requests_per_s": ("requests_per_s",),
    "p50": ("latency_us", "p50"),
    "p99": ("latency_us", "p99"),
}


def ratios(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], *, in_turns: bool
) -> dict[str, Ratio]:
    """Ratios of the figures of two lists of windows: rate, p50 and p99.

    Windows that were measured in turns are compared pair by pair; others each with the median of the other
    side. What has no figure on a side is left out.
    """
    found = {}
    for name, path in _COMPARED.items():
        left, right = _values(ours, path), _values(theirs, path)
        if not in_turns and any(right):
            right = [statistics.median(value for value in right if value)] * len(left)
        quotients = [a / b for a, b in zip(left, right, strict=False) if a and b]
        if quotients:
            found[name] = Ratio(statistics.median(quotients), min(quotients), max(quotients))
    return found


def _values(windows: Sequence[Mapping[str, Any]], path: Sequence[str]) -> list[float | None]:
    values = []
    for window in windows:
        value: Any = window
        for name in path:
            value = value[name]
        values.append(value)
    return values


def matching(point: Mapping[str, Any], series: Sequence[Mapping[str, Any]]) -> Any:
    """The point of the series with the same load; None if there is none."""
    keys = ("concurrency", "request_rate", "distribution")
    for other in series:
        if all(point.get(key) == other.get(key) for key in keys):
            return other
    return None
