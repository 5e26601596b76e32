"""The results of a search for settings: as text, as changes of `config.pbtxt`, and as a page without scripts."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from moonpool import ConfigError, MoonpoolError
from moonpool.benchmarks.commands.page import (
    LEFT,
    RIGHT,
    WIDTH,
    Key,
    Mark,
    across,
    document,
    down,
    drawn,
    quarters,
    round_up,
    table_of,
)
from moonpool.benchmarks.slo import Slo, time_words
from moonpool.benchmarks.tuning.settings import Unwritable, Value, written
from moonpool.benchmarks.tuning.tuner import Confirmation, Measured, Tuner
from moonpool.runtime.cli.shared import figure, load_in_words, table
from moonpool.runtime.process.terminal import Terminal, harmless
from moonpool.runtime.repository.repository import CONFIG_FILENAME


def introduce(tuner: Tuner) -> None:
    """Print what is searched, and what is left out."""
    terminal = Terminal(sys.stdout)
    rows = [["setting", "now", "tried"]]
    for setting in tuner.settings:
        shown = [_shown(value) for value in setting.values]
        rows.append([_name(setting.model, setting.name), shown[setting.start], ", ".join(shown)])
    for line in table(rows, align="<<<"):
        terminal.line(harmless(line))
    for (model, name), why in tuner.left_out.items():
        terminal.line(harmless(f"left out: {_name(model, name)}: {why}"))
    terminal.line(load_in_words(os.getloadavg()[0]))
    terminal.line()


def _name(model: str, setting: str) -> str:
    return f"{model}.{setting}"


def _shown(value: Value) -> str:
    return "unset" if value is None else str(value)


def in_words(changed: Mapping[str, Mapping[str, Value]]) -> str:
    """Write values that differ from the start."""
    words = [
        f"{_name(model, name)}={_shown(value)}" for model, values in changed.items() for name, value in values.items()
    ]
    return " ".join(words) or "as now"


def _callers(each: Measured) -> str:
    return "1 caller" if each.callers == 1 else f"{each.callers} callers"


def line_of(tuner: Tuner, each: Measured) -> str:
    """Describe a measured load in one line."""
    words = harmless(in_words(tuner.values_at(each.place)))
    if each.callers == 0:
        return f"{words}: fails: {harmless((each.broken or '').splitlines()[0])}"
    broken = "" if each.broken is None else f", does not hold: {harmless(each.broken)}"
    return f"{words}, {_callers(each)}: {figure(each.rate)}/s, {tuner.figure} {time_words(each.latency_us)}{broken}"


class Report:
    """The results, printed, written to files, and as a page."""

    def __init__(self, tuner: Tuner, slo: Slo | None, repository: Path) -> None:
        self._tuner, self._slo, self._repository = tuner, slo, repository
        self._terminal = Terminal(sys.stdout)

    def show(self, confirmation: Confirmation, *, was_cut: bool, is_written: bool, html: Path | None) -> int:
        """Show what was found, and whether the budget cut the search short; return the exit code. Raises OSError,
        `Unwritable`, `ConfigError`.
        """
        tuner, best = self._tuner, self._tuner.best
        if best is None:
            raise MoonpoolError("nothing was measured; give the search more time (--budget)")
        rows = [self._row(each) for each in tuner.front()]
        head = ["requests/s", tuner.figure, "callers", "holds", "settings"]
        for line in table([head, *rows], align=">>><<"):
            self._terminal.line(line)
        verdict, is_proposed = self._verdict(best, confirmation, was_cut=was_cut)
        self._terminal.line()
        for line in verdict:
            self._terminal.line(harmless(line))
        texts: dict[Path, tuple[str, str]] = {}
        diff = ""
        if is_proposed:
            texts = self._texts(best)
            diff = "".join(self._diff(path, *text) for path, text in texts.items())
            if diff:
                self._terminal.line(harmless_lines(diff))
            if is_written:
                self._write(texts)
        if html is not None:
            html.write_text(self._page(verdict, [head, *rows], diff), encoding="utf-8")
            self._terminal.line(str(html))
        return 0 if best.broken is None and confirmation.is_within_limits else 1

    def _page(self, verdict: Sequence[str], front: Sequence[Sequence[str]], diff: str) -> str:
        tuner = self._tuner
        title = f"{next(iter(tuner.raws))}: the search for settings"
        left_out = [f"left out: {_name(*key)}: {why}" for key, why in tuner.left_out.items()]
        limits = self._slo.limits_us if self._slo else {}
        limit_ms = limits[tuner.figure] / 1000 if tuner.figure in limits else None
        sections = [
            f'<div class="plots">{_scatter(tuner, limit_ms)}</div>',
            f"<h2>Most throughput for its latency</h2>{table_of(front)}",
        ]
        if diff:
            sections.append(f'<h2>The change</h2><pre class="scroll">{escape(diff)}</pre>')
        everything = [front[0], *(self._row(each) for each in tuner.measured)]
        sections.append(f"<h2>All that was measured</h2>{table_of(everything)}")
        return document(title, [*verdict, *left_out], sections)

    def _row(self, each: Measured) -> list[str]:
        if each.callers == 0:
            return ["-", "-", "-", "fails", harmless(in_words(self._tuner.values_at(each.place)))]
        known = each.latency_us == each.latency_us
        return [
            figure(each.rate) if known else "-",
            time_words(each.latency_us) if known else "-",
            str(each.callers),
            "yes" if each.broken is None else harmless(each.broken.splitlines()[0][:40]),
            harmless(in_words(self._tuner.values_at(each.place))),
        ]

    def _verdict(self, best: Measured, confirmation: Confirmation, *, was_cut: bool) -> tuple[list[str], bool]:
        """Say in a few lines what was found; the second is True if the best place is proposed."""
        tuner, slo = self._tuner, self._slo
        limits = f" within {slo.words}" if slo else ""
        at = f"{figure(best.rate)} requests/s, {tuner.figure} {time_words(best.latency_us)}, {_callers(best)}"
        fails = len({each.place for each in tuner.measured if each.callers == 0})
        lines = [f"Settings that were tried and do not work: {fails}."] if fails else []
        if was_cut:
            tried = len({each.place for each in tuner.measured})
            lines.append(f"The budget ended the search after {tried} settings; --budget allows more.")
        if best.broken is not None:
            if math.isinf(best.score):
                raise MoonpoolError(f"no load could be measured: {best.broken}")
            wanted = f"No settings were found that hold{limits}" if slo else "No load settled"
            return [
                *lines,
                f"{wanted}. The best that was seen: {at} ({best.broken}), with "
                f"{in_words(tuner.values_at(best.place))}.",
            ], False
        if best.place == tuner.start:
            return [*lines, f"Nothing better was found{limits} than the present settings: {at}."], True
        lines.append(f"Best{limits}: {at}, with {in_words(tuner.values_at(best.place))}.")
        if (alike := confirmation.as_good) is not None:
            lines.append(
                f"With {_callers(alike)}, the present settings are as good: {figure(alike.rate)}/s at {tuner.figure} "
                f"{time_words(alike.latency_us)}. So nothing is proposed."
            )
            return lines, False
        if pairs := confirmation.pairs:
            ratios = " and ".join(f"{theirs.rate / ours.rate:.2f}" for ours, theirs in pairs if ours.rate)
            now = ", ".join(
                f"{figure(ours.rate)}/s at {tuner.figure} {time_words(ours.latency_us)}" for ours, _ in pairs
            )
            lines.append(f"Measured again in turns with the present settings ({now}): {ratios} times the rate.")
        if not confirmation.holds:
            lines.append(
                "It was not better within the limits every time, so nothing is proposed: measure it again with "
                "`moonpool bench --slo`."
            )
        return lines, confirmation.holds

    def _texts(self, best: Measured) -> dict[Path, tuple[str, str]]:
        """Return the texts of the configurations that change, as they are and as they should be."""
        found = {}
        for model, values in self._tuner.values_at(best.place).items():
            if not model:
                continue
            path = self._repository / model / CONFIG_FILENAME
            try:
                text = path.read_text(encoding="utf-8") if path.exists() else ""
                new = written(text, values, self._tuner.raws[model], str(path))
            except (Unwritable, ConfigError, UnicodeDecodeError) as error:
                print(f"moonpool: {harmless(str(error))}", file=sys.stderr)
                continue
            found[path] = text, new
        return found

    def _diff(self, path: Path, text: str, new: str) -> str:
        name = f"{path.parent.name}/{path.name}"
        lines = difflib.unified_diff(
            text.splitlines(keepends=True),
            new.splitlines(keepends=True),
            # So `git apply` and `patch` make a file that is not there.
            f"a/{name}" if path.exists() else os.devnull,
            f"b/{name}",
        )
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)

    def _write(self, texts: Mapping[Path, tuple[str, str]]) -> None:
        """Change the files, unless somebody else has meanwhile. Raises OSError and `Unwritable`."""
        for path, (text, new) in texts.items():
            real = path.resolve()
            if (real.read_text(encoding="utf-8") if real.exists() else "") != text:
                raise Unwritable(f"{path} has changed meanwhile; it is left as it is")
            replace_file(real, new)
            self._terminal.line(f"written: {path}")


def replace_file(path: Path, text: str) -> None:
    """Write a file that is whole at every moment, with the mode of the one before. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # "x" refuses a file or a link of that name, which is not ours to follow or to remove.
    with temporary.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def harmless_lines(text: str) -> str:
    """Return lines of text without control characters but the ends of lines."""
    return "\n".join(harmless(line) for line in text.rstrip("\n").split("\n"))


def _scatter(tuner: Tuner, limit_ms: float | None) -> str:
    """Draw the loads as points of rate and latency, with a line through the front."""
    front = [(each.rate, each.latency_us / 1000) for each in tuner.front()]
    points = [(each.rate, each.latency_us / 1000) for each in tuner.measured]
    known = [point for point in points if not math.isnan(sum(point))]
    most_rate = round_up(max((rate for rate, _ in known), default=1.0))
    # Points far above the limit would press all others onto the axis.
    tallest = max((ms for _, ms in front), default=1.0) * 2
    top = round_up(max(tallest, 1.25 * (limit_ms or 0.0)))

    def place(rate: float, ms: float) -> tuple[float, float]:
        return across(rate / most_rate), down(min(1.0, ms / top))

    parts = []
    for point in known:
        x, y = place(*point)
        colour = 0 if point in front else 1
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="var(--c{colour})"/>')
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in front))
    parts.append(f'<polyline class="line" stroke="var(--c0)" points="{path}"/>')
    keys = [Key("most throughput for its latency", 0), Key("other loads", 1)]
    if limit_ms is not None:
        _, y = place(0, limit_ms)
        parts.append(
            f'<line class="line theirs" stroke="var(--c3)" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        keys.append(Key("the limit (dashed)", 3))
    marks = [Mark(part / 4, text) for part, text in enumerate(quarters(most_rate))]
    caption = f"{tuner.figure} in ms, by requests a second"
    return drawn(caption, keys, parts, top, marks, "requests a second")
