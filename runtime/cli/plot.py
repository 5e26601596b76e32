"""The curves of `moonpool bench`, as a picture. Needs matplotlib: the extra `plot`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from moonpool.runtime.bench.comparison import described, names

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_PERCENTILES = {"p50": "C0", "p90": "C1", "p99": "C2"}


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def title(found: Mapping[str, Any]) -> str:
    """Return a picture's title: the model and its requests, and below them what differs between the two lines."""
    first = f"{found['model']}, {described(found['inputs'])}"
    if "against" not in found:
        return f"{first}\n{found.get('label') or found['where']}"
    ours, theirs = names(found, found["against"])
    return f"{first}\n{ours} (solid) and {theirs} (dashed)"


def save_plot(found: Mapping[str, Any], path: Path) -> None:
    """Throughput and latency by load, side by side; what it is compared with is dashed."""
    # Importing it takes half a second, and most commands need none of it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    throughput, latency = figure.subplots(1, 2)
    figure.suptitle(title(found))
    kind = "concurrency" if "concurrency" in found["series"][0] else "request_rate"
    _draw(throughput, latency, found, kind, "-")
    if "against" in found:
        _draw(throughput, latency, found["against"], kind, "--")
    throughput.set_ylabel("requests/s")
    latency.set_ylabel("latency, µs")
    latency.legend()
    loads = [point[kind] for point in found["series"]]
    for axes in (throughput, latency):
        axes.set_xlabel("concurrent callers" if kind == "concurrency" else "requests/s asked for")
        axes.set_xscale("log", base=2)
        axes.set_xticks(loads, [f"{load:g}" for load in loads])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _draw(throughput: Any, latency: Any, found: Mapping[str, Any], kind: str, style: str) -> None:
    points = [point for point in found["series"] if kind in point]
    loads = [point[kind] for point in points]
    rates = [point["requests_per_s"] for point in points]
    throughput.plot(loads, rates, marker="o", linestyle=style, color="C0")
    for name, colour in _PERCENTILES.items():
        values = [point["latency_us"][name] for point in points]
        # One name in the legend for both lines of a colour.
        label = name if style == "-" else None
        latency.plot(loads, values, marker="o", linestyle=style, color=colour, label=label)
