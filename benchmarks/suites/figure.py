"""A measured quantity: its median, and how far the middle four fifths of the measurements spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Figure(NamedTuple):
    """`unit` is empty for a ratio. `goal` says what was set out to be reached, where something was.

    Figures of one name in different columns stand side by side in a table.
    """

    name: str
    column: str
    unit: str
    median: float
    p10: float
    p90: float
    samples: int
    goal: str = ""
    # True if the short table has it.
    headline: bool = False

    def cell(self) -> str:
        """Median, spread and goal, as a table shows them."""
        words = f"{shown(self.median)} {self.unit or 'times'}"
        if self.samples > 1:
            words += f" ({shown(self.p10)} to {shown(self.p90)})"
        return f"{words}; goal {self.goal}" if self.goal else words


def figure_of(
    name: str, column: str, unit: str, values: Sequence[float], goal: str = "", headline: bool = False
) -> Figure:
    """Sum `values` up; at least one is there."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return Figure(
        name,
        column,
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


def counted(count: int, what: str) -> str:
    """Return `1 caller`, or `4 callers`."""
    return f"{count} {what}{'' if count == 1 else 's'}"
