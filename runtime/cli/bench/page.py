"""A result as one page of HTML: tables and plots without scripts, and without anything from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from moonpool.runtime.bench.loads import load_in_short
from moonpool.runtime.bench.result import described, names, others_of
from moonpool.runtime.bench.slo import time_words
from moonpool.runtime.bench.windows import PARTS

_STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #5a6675; --line: #d5dbe3; --back: #fff;
  --c0: #2563b8; --c1: #b8561a; --c2: #1f7a4d; --c3: #7a3fb0; --c4: #b0203f; --c5: #0f7c8a; --c6: #7d6608; --c7: #5a6675; }
@media (prefers-color-scheme: dark) { :root { --text: #e6eaf0; --soft: #a0abba; --line: #37414f; --back: #14181f;
  --c0: #79aef5; --c1: #f0a26b; --c2: #6fce9f; --c3: #c79bf2; --c4: #f58aa0; --c5: #66c9d6; --c6: #d9c15a; --c7: #a0abba; } }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif;
  color: var(--text); background: var(--back); overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 1.5rem 0 .5rem; }
p { margin: .25rem 0; color: var(--soft); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1rem; font-size: .8rem; }
.legend i { display: inline-block; width: .7em; height: .7em; margin-right: .35em; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--soft); font-size: 12px; }
.axis { stroke: var(--line); } .line { fill: none; stroke-width: 2; } .theirs { stroke-dasharray: 5 4; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
"""
# The place of a plot within its picture, in the picture's units.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 280, 58, 12, 10, 34
_PERCENTILES = ("p50", "p90", "p99")
_COLOURS = 8


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
    heads = [title]
    if "against" in found:
        heads = list(names(found, found["against"]))
        facts.append(f"lines: {heads[0]}; dashed: {heads[1]}")
    for head, each in zip(heads, both, strict=True):
        sections.append(f"<h2>{escape(head)}</h2>{table_of(_rows_of(each))}")
    sections += map(_other, others_of(found))
    return document(title, facts, sections)


def _other(found: Mapping[str, Any]) -> str:
    """Return the section of another host or level, with its ratios over the first one."""
    host = found.get("host")
    facts = f"<p>{escape(host['versions'])}; {escape(host['command'])}</p>" if host else ""
    section = f"<h2>{escape(found['where'])}</h2>{facts}{table_of(_rows_of(found))}"
    compared = [point for point in found["series"] if point.get("ratios")]
    # The first one that is called in process is over nothing.
    if not compared or found["over"] == found["where"]:
        return section
    names_of = list(compared[0]["ratios"])
    rows = [["load", *names_of]]
    for point in compared:
        ratios = [point["ratios"][name] for name in names_of]
        shown = [f"{r['median']:.2f} ({r['least']:.2f} to {r['most']:.2f})" for r in ratios]
        rows.append([load_in_short(point), *shown])
    words = f"times those of {found['over']}: medians of ratios in turns, least to most"
    return f"{section}<p>{escape(words)}</p>{table_of(rows)}"


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


def _rows_of(found: Mapping[str, Any]) -> list[list[str]]:
    latencies = ("mean", "p50", "p90", "p95", "p99", "max")
    has_server = any(point["server"] for point in found["series"])
    rows = [
        [
            "load", "requests/s", *(f"{name} µs" for name in latencies), "failed", "settled",
            *(["good/s", "holds"] if "slo" in found else []),
            *([f"{part} µs" for part in PARTS] if has_server else []),
        ]
    ]  # fmt: skip
    for point in found["series"]:
        server = point["server"] or {}
        rows.append(
            [
                load_in_short(point),
                f"{point['requests_per_s']:,.1f}",
                *(_number(point["latency_us"].get(name)) for name in latencies),
                str(point["failed"]),
                "yes" if point["stable"] else "no",
                *(
                    [f"{point['goodput_per_s']:,.1f}", point["broken"] or "yes"]
                    if "slo" in found
                    else []
                ),
                *([_number(server.get(f"{part}_us")) for part in PARTS] if has_server else []),
            ]
        )
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def table_of(rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts as HTML; the first row is its head."""
    head, *lines = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines
    )
    return f'<div class="scroll"><table><tr>{cells}</tr>{body}</table></div>'


_Line = tuple[str, int, bool, list[tuple[float, float]]]


def _plots_of_several(found: Mapping[str, Any]) -> str:
    """Draw rate and latency over the loads, with a line for each host or level."""
    labels = [load_in_short(point) for point in found["series"]]
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
        + _plot("Requests a second, by load", rates, labels)
        + "".join(_plot(f"{name} in ms, by load", each, labels) for name, each in latencies.items())
        + "</div>"
    )


def _milliseconds(
    points: Sequence[tuple[float, Mapping[str, Any]]], percentile: str
) -> list[tuple[float, float]]:
    return [
        (x, value / 1000)
        for x, point in points
        if (value := point["latency_us"].get(percentile)) is not None
    ]


def _plots(found: Mapping[str, Any]) -> str:
    """Draw rate and latency over the loads, and the rate of each window."""
    if others_of(found):
        return _plots_of_several(found)
    both = [(found, False), *([(found["against"], True)] if "against" in found else [])]
    labels = [load_in_short(point) for point in found["series"]]
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
        + _plot("Requests a second, by load", rates, labels)
        + _plot("Latency in ms, by load", latencies, labels)
        + _plot("Requests a second, by window", windows, numbers)
        + "</div>"
    )


def _plot(caption: str, lines: Sequence[_Line], labels: Sequence[str]) -> str:
    values = [y for _, _, _, points in lines for _, y in points]
    top = round_up(max(values, default=1.0))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        across = x / (len(labels) - 1) if len(labels) > 1 else 0.5
        return LEFT + across * wide, TOP + high - y / top * high

    parts = []
    for step in range(5):
        value = top * step / 4
        _, y = place(0, value)
        parts.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.4g}</text>')
    every = math.ceil(len(labels) / 8) or 1
    for index, label in list(enumerate(labels))[::every]:
        x, _ = place(index, 0)
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(label[:14])}</text>'
        )
    legend = []
    for name, colour, is_theirs, points in lines:
        where = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
        style = "line theirs" if is_theirs else "line"
        parts.append(f'<polyline class="{style}" stroke="var(--c{colour})" points="{path}"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="var(--c{colour})"/>' for x, y in where
        ]
        if not is_theirs:
            mark = f'<i style="background: var(--c{colour})"></i>'
            legend.append(f"<span>{mark}{escape(name)}</span>")
    return (
        f'<figure><figcaption>{escape(caption)}</figcaption><div class="legend">{"".join(legend)}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(caption)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def round_up(value: float) -> float:
    """Return the next number that an axis can end at."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(each * size for each in (1, 2, 4, 5, 8, 10) if each * size >= value)
