"""The page that `moonpool bench --export html` writes, as text and in a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.page.browser import Browser, Page, needs_chromium

from moonpool.benchmarks.commands.page import Key, Mark, document, drawn, page_of, quarters
from moonpool.benchmarks.windows import PARTS

HOSTILE = "<script>window.hacked = 1</script><img src=http://attacker.example/x onerror=alert(1)>"


def result(model: str = "add_sub", **more: Any) -> dict[str, Any]:
    """A result of three loads."""
    windows = [{"requests_per_s": 90.0 + number} for number in range(5)]
    series = [
        {
            "concurrency": callers,
            "stable": True,
            "requests_per_s": 100.0 * callers,
            "failed": 0,
            "latency_us": dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), 1000.0 * callers),
            "generator_share": None,
            "server": None,
            "windows": windows,
        }
        for callers in (1, 4, 16)
    ]  # fmt: skip
    about = {"model": model, "where": "http://localhost:8000", "date": "2026-01-01", "inputs": {"X": ["FP32", 1, 2]}}
    return {**about, "series": series, **more}


def test_a_page_has_its_figures_and_nothing_of_a_stranger() -> None:
    page = page_of(result(HOSTILE, against=result(label=HOSTILE)))

    assert "<script" not in page
    assert "<img" not in page
    assert "<td>1,600</td>" in page
    assert page.count("<svg") == 3
    assert 'class="line theirs"' in page


def test_a_page_of_a_search_has_its_limits() -> None:
    found = result(slo={"limits_us": {"p99": 20_000}, "highest_rate": 1230, "lowest_broken_rate": 1290})
    for point in found["series"]:
        point |= {"goodput_per_s": 5.0, "broken": "p99 30 ms"}

    assert "limits: p99 20 ms; held by 1230 requests/s" in page_of(found)
    assert "p99 30 ms" in page_of(found)


def hosts() -> dict[str, Any]:
    """A result of a host, with those of two others."""
    ratio = {"median": 0.5, "least": 0.4, "most": 0.6}
    others = []
    for name in ("triton", HOSTILE):
        other = result(where=f"{name} at http://localhost:9000", over="http://localhost:8000")
        other["host"] = {"name": name, "versions": f"{name} 1.2", "command": f"start {name}"}
        for point in other["series"]:
            point |= {"requests_per_s": 77.0, "ratios": {"p99": ratio}}
        others.append(other)
    host = {"name": "moonpool", "versions": "moonpool 9", "command": "moonpool serve"}
    return result(host=host, hosts=others)


def test_a_page_has_all_hosts_with_their_ratios() -> None:
    page = page_of(hosts())

    assert "<script" not in page
    assert "<img" not in page
    assert page.count("<td>77</td>") == 6
    assert page.count("0.5 (0.4 to 0.6) better") == 6
    for text in ("moonpool 9; moonpool serve", "triton 1.2; start triton"):
        assert text in page
    # A line for each host in each plot, and in its legend.
    assert page.count("<polyline") == 9
    assert page.count("<span>") == 9


@pytest.mark.parametrize(
    ("top", "texts"),
    [
        (1e4, ["0", "2,500", "5,000", "7,500", "10,000"]),
        (1.0, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        (0.02, ["0.000", "0.005", "0.010", "0.015", "0.020"]),
        (5e7, ["0.0 M", "12.5 M", "25.0 M", "37.5 M", "50.0 M"]),
    ],
)
def test_the_numbers_of_an_axis_are_written_alike(top: float, texts: list[str]) -> None:
    assert quarters(top) == texts


def test_every_axis_across_is_named() -> None:
    page = page_of(result())

    assert re.findall(r'class="name"[^>]*>([^<]*)<', page) == ["callers", "callers", "window"]


def widest() -> dict[str, Any]:
    """A result with every column that there is, of eight loads."""
    found = result(slo={"limits_us": {"p99": 20_000}, "highest_rate": 9, "lowest_broken_rate": 10})
    (point, *_) = found["series"]
    found["series"] = [
        {
            **point,
            "concurrency": 2**number,
            "requests_per_s": 1200.0 * number,
            "latency_us": dict.fromkeys(point["latency_us"], 281_000.0),
            "goodput_per_s": 1100.0 * number,
            "broken": "p99 281 ms is over 20 ms",
            "server": {f"{part}_us": 123_456.0 for part in PARTS} | {"rows_per_execution": 8.0},
        }
        for number in range(8)
    ]
    return found


def one_plot() -> str:
    """Return a page with a single plot."""
    marks = [Mark(part / 4, text) for part, text in enumerate(quarters(1e4))]
    plot = drawn("p99 in ms, by rate", [Key("loads", 0)], [], 1.0, marks, "requests a second")
    return document("one", [], [f'<div class="plots">{plot}</div>'])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@needs_chromium
@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "The page of a result loads nothing, reads well on a phone, and is dark where the reader's system is.",
)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1200])
def test_a_page_is_readable(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    file = tmp_path / "page.html"
    file.write_text(page_of({**hosts(), "model": HOSTILE}), encoding="utf-8")
    page = Page(browser, width, 800, dark=dark)
    try:
        page.goto(file.as_uri())
        page.wait_for("document.readyState == 'complete'")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelectorAll('svg polyline').length") > 0
        narrow = page.evaluate("document.querySelector('svg').getBoundingClientRect().width")
        assert 250 < narrow <= width
        colours = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert colours == ("rgb(20, 24, 31)" if dark else "rgb(255, 255, 255)")
        assert page.evaluate("window.hacked") is None
        assert [url for url in page.requests() if not url.startswith("file:")] == []
        assert page.complaints() == []
    finally:
        page.close()


@needs_chromium
@pytest.mark.parametrize("width", [360, 1000, 1600])
def test_plots_and_tables_fit_their_page(browser: Browser, tmp_path: Path, width: int) -> None:
    for text in (page_of(widest()), one_plot()):
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        page = Page(browser, width, 800)
        try:
            page.goto(file.as_uri())
            page.wait_for("document.readyState == 'complete' && !!document.querySelector('svg')")
            sizes = page.evaluate(
                """[...document.querySelectorAll('svg text')].map(text => parseFloat(getComputedStyle(text).fontSize)
                * text.ownerSVGElement.getBoundingClientRect().width / text.ownerSVGElement.viewBox.baseVal.width)"""
            )
            outside = page.evaluate(
                """[...document.querySelectorAll('svg text')].filter(text => { const own = text.getBoundingClientRect(),
                all = text.ownerSVGElement.getBoundingClientRect(); return own.left < all.left ||
                own.right > all.right + 1; }).map(text => text.textContent)"""
            )
            cut = page.evaluate(
                "[...document.querySelectorAll('.scroll')].filter(each => each.scrollWidth > each.clientWidth).length"
            )
        finally:
            page.close()

        assert 9 < min(sizes) <= max(sizes) < 18
        assert outside == []
        assert not cut or width == 360  # there, tables are scrolled
