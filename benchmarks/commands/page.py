"""A result as one page of HTML: tables and plots without scripts, and without anything from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from moonpool.benchmarks.commands.report import ratios_of, tables_of, unsettled
from moonpool.benchmarks.loads import load_in_short
from moonpool.benchmarks.result import described, names, others_of
from moonpool.benchmarks.slo import time_words

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #5a6675; --line: #d5dbe3; --back: #fff;
  --c0: #2563b8; --c1: #b8561a; --c2: #1f7a4d; --c3: #7a3fb0; --c4: #b0203f; --c5: #0f7c8a; --c6: #7d6608;
  --c7: #5a6675; }
@media (prefers-color-scheme: dark) { :root { --text: #e6eaf0; --soft: #a0abba; --line: #37414f; --back: #14181f;
  --c0: #79aef5; --c1: #f0a26b; --c2: #6fce9f; --c3: #c79bf2; --c4: #f58aa0; --c5: #66c9d6; --c6: #d9c15a;
  --c7: #a0abba; } }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif;
  color: var(--text); background: var(--back); overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 1.5rem 0 .5rem; }
p { margin: .25rem 0; color: var(--soft); }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1rem; font-size: .8rem; }
.legend i { display: inline-block; width: .7em; height: .7em; margin-right: .35em; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 12px; }
svg .name { fill: var(--text); } @media (max-width: 30rem) { svg text { font-size: 15px; } }
.axis { stroke: var(--line); } .line { fill: none; stroke-width: 2; } .theirs { stroke-dasharray: 5 4; }
.scroll { overflow-x: auto; }
table { font-size: .875rem; border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: bottom; }
th, td { overflow-wrap: normal; }
td { white-space: nowrap; vertical-align: top; }
td.words { white-space: normal; overflow-wrap: anywhere; text-align: left; min-width: 9rem; }
"""
# The place of a plot within its picture, in the picture's units.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 300, 70, 16, 10, 52
# The width of a letter in these units, as it is at most, and the letters of a mark.
_LETTER, _LONGEST_MARK = 9, 14
_PERCENTILES = ("p50", "p90", "p99")
_COLOURS = 8
_LONG_CELL = 20
# The names of the axis of loads, by their fields.
_LOADS = {"request_rate": "requests a second that are sent", "concurrency": "callers"}


def page_of(found: Mapping[str, Any]) -> str:
    """Return the page of a result, with those that it was compared with."""
    title = f"{found['model']}: {found.get('label') or found['where']}"
    facts = [
        f"{found['where']}, {found['date']}, moonpool {found.get('moonpool', '?')}, "
        f"Python {found.get('python', '?')}, {found.get('machine', '?')}, {found.get('cores', '?')} cores, "
        f"load average {found.get('load_average', '?')}",
        f"each request: {described(found['inputs'])}",
    ]
    if host := found.get("host"):
        facts.append(f"{host['versions']}; {host['command']}")
    if "slo" in found:
        limits = found["slo"]["limits_us"].items()
        shown = ", ".join(f"{name} {time_words(us)}" for name, us in limits)
        rate = found["slo"]["highest_rate"]
        facts.append(f"limits: {shown}" + (f"; held by {rate:g} requests/s" if rate else ""))
    sections = [_plots(found)]
    both = [found, *([found["against"]] if "against" in found else [])]
    facts += unsettled([*both, *others_of(found)])
    heads = [title]
    if "against" in found:
        heads = list(names(found, found["against"]))
        facts.append(f"lines: {heads[0]}; dashed: {heads[1]}")
    for head, each in zip(heads, both, strict=True):
        sections.append(f"<h2>{escape(head)}</h2>{_tables_of(each)}")
    sections += map(_other, others_of(found))
    return document(title, facts, sections)


def _other(found: Mapping[str, Any]) -> str:
    """Return the section of another host or level, with its ratios over the first one."""
    host = found.get("host")
    facts = f"<p>{escape(host['versions'])}; {escape(host['command'])}</p>" if host else ""
    section = f"<h2>{escape(found['where'])}</h2>{facts}{_tables_of(found)}"
    # The first one that is called in process is over nothing.
    if found["over"] == found["where"]:
        return section
    words = f"times those of {found['over']}: medians of ratios in turns, least to most"
    return f"{section}<p>{escape(words)}</p>{table_of(ratios_of(found))}"


def document(title: str, facts: Sequence[str], sections: Sequence[str]) -> str:
    """Return a page with a title, facts as text, and sections that are HTML already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Texts of a server are on the page, so that nothing on it may run or load.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        + "".join(f"<p>{escape(fact)}</p>" for fact in facts)
        + "".join(sections)
        + "</body></html>\n"
    )


def _tables_of(found: Mapping[str, Any]) -> str:
    return "".join(table_of(rows) + (f"<p>{escape(words)}</p>" if words else "") for rows, words in tables_of(found))


def table_of(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts as HTML; the first row is its head."""
    head, *lines = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td{_style_of(cell)}>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines
    )
    return f'<div class="scroll"><table><tr>{cells}</tr>{body}</table></div>'


def _style_of(cell: str) -> str:
    """Let a cell with many words have several lines, so that no column leaves the page."""
    return ' class="words"' if len(cell) > _LONG_CELL else ""


_Line = tuple[str, int, bool, list[tuple[float, float]]]


def _plots_of_several(found: Mapping[str, Any]) -> str:
    """Draw rate and latency over the loads, with a line for each host or level."""
    labels, load = [load_in_short(point) for point in found["series"]], _load_of(found)
    rates: list[_Line] = []
    latencies: dict[str, list[_Line]] = {"p50": [], "p99": []}
    for number, each in enumerate((found, *others_of(found))):
        at = {load_in_short(point): point for point in each["series"]}
        known = [(float(i), at[label]) for i, label in enumerate(labels) if label in at]
        name, colour = each["where"], number % _COLOURS
        rates.append((name, colour, False, [(x, p["requests_per_s"]) for x, p in known]))
        for percentile, lines in latencies.items():
            lines.append((name, colour, False, _milliseconds(known, percentile)))
    return (
        '<div class="plots">'
        + _plot("Requests a second, by load", rates, labels, load)
        + "".join(_plot(f"{name} in ms, by load", each, labels, load) for name, each in latencies.items())
        + "</div>"
    )


def _load_of(found: Mapping[str, Any]) -> str:
    """Name the axis of the loads."""
    point = found["series"][0] if found["series"] else {}
    return next((name for field, name in _LOADS.items() if field in point), "load")


def _milliseconds(points: Sequence[tuple[float, Mapping[str, Any]]], percentile: str) -> list[tuple[float, float]]:
    return [(x, value / 1000) for x, point in points if (value := point["latency_us"].get(percentile)) is not None]


def _plots(found: Mapping[str, Any]) -> str:
    """Draw rate and latency over the loads, and the rate of each window."""
    if others_of(found):
        return _plots_of_several(found)
    both = [(found, False), *([(found["against"], True)] if "against" in found else [])]
    labels, load = [load_in_short(point) for point in found["series"]], _load_of(found)
    rates: list[_Line] = []
    latencies: list[_Line] = []
    for each, is_theirs in both:
        at = {load_in_short(point): point for point in each["series"]}
        known = [(float(i), at[label]) for i, label in enumerate(labels) if label in at]
        rates.append(("requests/s", 0, is_theirs, [(x, p["requests_per_s"]) for x, p in known]))
        for colour, name in enumerate(_PERCENTILES):
            latencies.append((name, colour, is_theirs, _milliseconds(known, name)))
    windows: list[_Line] = [
        (
            load_in_short(point),
            index % 4,
            False,
            [(float(x), w["requests_per_s"]) for x, w in enumerate(point["windows"])],
        )
        for index, point in enumerate(found["series"][:4])
    ]
    most = max((len(point["windows"]) for point in found["series"][:4]), default=0)
    numbers = [str(number + 1) for number in range(most)]
    return (
        '<div class="plots">'
        + _plot("Requests a second, by load", rates, labels, load)
        + _plot("Latency in ms, by load", latencies, labels, load)
        + _plot("Requests a second, by window", windows, numbers, "window")
        + "</div>"
    )


def _plot(caption: str, lines: Sequence[_Line], labels: Sequence[str], across_is: str) -> str:
    values = [y for _, _, _, points in lines for _, y in points]
    top = round_up(max(values, default=1.0))

    def part(number: float) -> float:
        return number / (len(labels) - 1) if len(labels) > 1 else 0.5

    parts, keys = [], []
    for name, colour, is_theirs, points in lines:
        where = [(across(part(x)), down(y / top)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
        style = "line theirs" if is_theirs else "line"
        parts.append(f'<polyline class="{style}" stroke="var(--c{colour})" points="{path}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="var(--c{colour})"/>' for x, y in where]
        if not is_theirs:
            keys.append(Key(name, colour))
    marks = [Mark(part(number), label) for number, label in enumerate(labels)]
    return drawn(caption, keys, parts, top, marks, across_is)


class Mark(NamedTuple):
    """A place on the axis across, as a part of its length, and its text."""

    at: float
    text: str


class Key(NamedTuple):
    """A name in the legend of a plot, and the number of its colour."""

    name: str
    colour: int


def across(part: float) -> float:
    """Return the place of a part of the axis across."""
    return LEFT + part * (WIDTH - LEFT - RIGHT)


def down(part: float) -> float:
    """Return the place of a part of the axis upward."""
    return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)


def drawn(
    caption: str, keys: Sequence[Key], parts: Sequence[str], top: float, marks: Sequence[Mark], across_is: str
) -> str:
    """Return a plot: its parts, which are SVG, over an axis up to `top`, and one across with a name and marks."""
    axes = []
    for step, text in enumerate(quarters(top)):
        y = down(step / 4)
        axes.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    texts = [mark.text[:_LONGEST_MARK] for mark in marks]
    # Texts that have no room beside each other are left out, in equal steps.
    room = (WIDTH - LEFT - RIGHT) / (max(map(len, texts), default=1) * _LETTER + 10)
    every = math.ceil(len(marks) / max(1.0, room)) or 1
    for mark, text in list(zip(marks, texts, strict=True))[::every]:
        # The last one would leave the picture if it stood in the middle of its place.
        anchor = "end" if mark.at == 1 else "middle"
        x = min(across(mark.at), WIDTH - 2)
        axes.append(f'<text x="{x:.1f}" y="{HEIGHT - 30}" text-anchor="{anchor}">{escape(text)}</text>')
    axes.append(
        f'<text class="name" x="{across(0.5):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(across_is)}</text>'
    )
    legend = "".join(f'<span><i style="background: var(--c{key.colour})"></i>{escape(key.name)}</span>' for key in keys)
    return (
        f'<figure><figcaption>{escape(caption)}</figcaption><div class="legend">{legend}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(caption)}">'
        f"{''.join(axes)}{''.join(parts)}</svg></figure>"
    )


def quarters(top: float) -> list[str]:
    """Write the quarters of an axis from 0 to `top`, all with the same number of decimals."""
    unit, name = (1e6, " M") if top >= 1e7 else (1.0, "")
    values = [top / unit * step / 4 for step in range(5)]
    decimals = next((n for n in range(9) if all(abs(round(v, n) - v) <= 1e-9 * values[-1] for v in values)), 9)
    return [f"{value:,.{decimals}f}{name}" for value in values]


def round_up(value: float) -> float:
    """Return the next number that an axis can end at."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(each * size for each in (1, 2, 4, 5, 8, 10) if each * size >= value)
