"""Columns of text, aligned."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *, align: str, indent: int = 0) -> list[str]:
    """The rows as lines; `align` has a `<` or a `>` for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)
        ]
        lines.append(" " * indent + "  ".join(cells).rstrip())
    return lines


def figure(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, thousands apart: 0.0123, 1.23, 12,300."""
    if value == 0:
        return "0"
    shown = float(f"{value:.{digits}g}")
    if abs(shown) >= 10 ** (digits - 1):
        return f"{shown:,.0f}"
    return f"{shown:,.{digits}g}"
