"""When a figure has settled: the rule of perf_analyzer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.runtime.bench.window import Window

# So many windows in a row have to agree.
COUNT = 3


def is_stable(windows: Sequence[Window], percent: float) -> bool:
    """Whether rate and mean latency of the last three are all within `percent` of their mean."""
    last = windows[-COUNT:]
    if len(last) < COUNT or any(not len(window.latencies_ns) for window in last):
        return False
    rates = [window.requests_per_s for window in last]
    latencies = [window.mean_latency_us for window in last]
    return _agree(rates, percent) and _agree(latencies, percent)


def _agree(values: Sequence[float], percent: float) -> bool:
    mean = sum(values) / len(values)
    return all(abs(value - mean) <= mean * percent / 100 for value in values)
