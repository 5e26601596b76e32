"""The curves of `moonpool bench`, as a picture. Needs matplotlib: the extra `plot`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from moonpool.runtime.cli.measurement import Measurement


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def save_plot(measurements: Sequence[Measurement], title: str, path: Path) -> None:
    """Throughput and latency by concurrency, side by side."""
    # Importing it takes half a second, and most commands need none of it.
    from matplotlib.figure import Figure

    concurrencies = [m.concurrency for m in measurements]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    throughput, latency = figure.subplots(1, 2)
    figure.suptitle(title)
    throughput.plot(concurrencies, [m.requests_per_s for m in measurements], marker="o")
    throughput.set_ylabel("requests/s")
    for percentile in (50, 90, 99):
        values = [m.latency_us(percentile) for m in measurements]
        latency.plot(concurrencies, values, marker="o", label=f"p{percentile}")
    latency.set_ylabel("latency, µs")
    latency.legend()
    for axes in (throughput, latency):
        axes.set_xlabel("concurrent callers")
        axes.set_xscale("log", base=2)
        axes.set_xticks(concurrencies, [str(c) for c in concurrencies])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
