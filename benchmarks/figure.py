"""A measured quantity: its median, and how far the middle four fifths of the measurements spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Figure(NamedTuple):
    """`unit` is empty for a ratio. `goal` says what was set out to be reached, where something was."""

    name: str
    unit: str
    median: float
    p10: float
    p90: float
    samples: int
    goal: str = ""
    # Whether it stands in the short table.
    headline: bool = False

    def cells(self) -> tuple[str, str, str, str]:
        """Name, median, spread and goal, as a table shows them."""
        spread = (
            f"{shown(self.p10)} to {shown(self.p90)}" if self.samples > 1 else "one measurement"
        )
        return self.name, f"{shown(self.median)} {self.unit or 'times'}", spread, self.goal


def figure_of(
    name: str, unit: str, values: Sequence[float], goal: str = "", headline: bool = False
) -> Figure:
    """Sum `values` up; at least one is there."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return Figure(
        name,
        unit,
        statistics.median(ordered),
        ordered[round(0.1 * last)],
        ordered[round(0.9 * last)],
        len(ordered),
        goal,
        headline,
    )


def shown(value: float) -> str:
    """Three significant digits, thousands separated."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3g}"
