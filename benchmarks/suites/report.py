"""The results of a benchmark: collected in order, written as JSON lines, shown as a table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from moonpool.benchmarks.suites.figure import Figure, figure_of
from moonpool.benchmarks.suites.machine import Noise, facts, listen

# The column of figures that name none.
_ALONE = "median (10th to 90th percentile)"


class Report:
    """One run of one benchmark. Measures the load of the machine before the first measurement and after the last.

    `heard` gets each line as soon as it is known, for runs that may not come to their end.
    """

    def __init__(
        self,
        benchmark: str,
        question: str,
        quick: bool,
        heard: Callable[[Mapping[str, object]], object] = lambda _: None,
    ) -> None:
        self._machine = facts()
        self._heard = heard
        self._lines: list[dict[str, object]] = []
        self._add(
            {"kind": "run", "benchmark": benchmark, "question": question, "quick": quick, "machine": self._machine}
        )
        self._looks = 1 if quick else 20
        self._before = listen(self._looks)

    def figure(
        self, name: str, unit: str, values: Sequence[float], *, column: str = "", goal: str = "", headline: bool = False
    ) -> Figure:
        """Add a quantity that was measured once or more."""
        figure = figure_of(name, column, unit, values, goal, headline)
        self._add({"kind": "figure", **figure._asdict()})
        return figure

    def ratio(
        self, name: str, values: Sequence[float], *, column: str = "", goal: str = "", headline: bool = False
    ) -> Figure:
        """Add a ratio of two quantities that were measured beside each other, once a round."""
        return self.figure(name, "", values, column=column, goal=goal, headline=headline)

    def skipped(self, name: str, reason: str) -> None:
        """Note that something cannot be measured here, and why."""
        self._add({"kind": "skipped", "name": name, "reason": reason})

    def failed(self, name: str, reason: str) -> None:
        """Note that something that can be measured here was not, and why."""
        self._add({"kind": "skipped", "name": name, "reason": reason, "failed": True})

    def note(self, text: str) -> None:
        """Add a sentence that a reader of the figures must know."""
        self._add({"kind": "note", "text": text})

    def _add(self, line: dict[str, object]) -> None:
        self._lines.append(line)
        self._heard(line)

    def close(self) -> list[dict[str, object]]:
        """Return all lines. The last one says how noisy the machine was."""
        after = listen(self._looks)
        noise = {"before": self._before._asdict(), "after": after._asdict()}
        noisy = self._before.is_noisy or after.is_noisy
        self._add({"kind": "noise", "noisy": noisy, **noise})
        return self._lines


def table(lines: Iterable[Mapping[str, object]], *, headlines_only: bool = False) -> str:
    """The lines of one run as a Markdown section."""
    head: list[str] = []
    cells: dict[str, dict[str, str]] = {}
    tail: list[str] = []
    for line in lines:
        kind = line["kind"]
        if kind == "run":
            quick = " (quick: too short to quote)" if line["quick"] else ""
            head = [f"### {line['benchmark']}{quick}", "", f"{line['question']}", ""]
        elif kind == "figure" and (line["headline"] or not headlines_only):
            figure = _figure(line)
            cells.setdefault(figure.name, {})[figure.column or _ALONE] = figure.cell()
        elif kind == "skipped":
            cells[str(line["name"])] = {"": f"not measured: {line['reason']}"}
        elif kind == "note" and not headlines_only:
            tail.append(f"- {line['text']}")
        elif kind == "noise" and line["noisy"]:
            tail.append(f"- Noisy machine: {_noise_in_words(line)}.")
    return "\n".join([*head, *_rows(cells), *([""] if tail else []), *tail])


def _rows(cells: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A table with a row for each name, and each column in the order in which it first comes."""
    columns = list(dict.fromkeys(column for row in cells.values() for column in row if column))
    columns = columns or [_ALONE]
    rows = [f"| | {' | '.join(columns)} |", f"|:--|{'--:|' * len(columns)}"]
    for name, row in cells.items():
        # A case that was not measured has its reason in the first column.
        words = [row.get(column, "") for column in columns]
        words[0] = row.get("", words[0])
        rows.append(f"| {name} | {' | '.join(words)} |")
    return rows


def _figure(line: Mapping[str, object]) -> Figure:
    fields = {key: value for key, value in line.items() if key in Figure._fields}
    return Figure(**fields)  # type: ignore[arg-type]


def _noise_in_words(line: Mapping[str, object]) -> str:
    words = []
    for when in ("before", "after"):
        noise = Noise(**line[when])  # type: ignore[arg-type]
        words.append(
            f"{when} it {noise.others} other tasks were running, {noise.stolen:.1%} of the time was "
            f"stolen, load {noise.load}"
        )
    return "; ".join(words)


def machine_in_words(line: Mapping[str, object]) -> str:
    """A sentence on the machine of a run, from its first line."""
    machine = line["machine"]
    if not isinstance(machine, dict):
        raise TypeError(f"the first line of a run has no machine, but {machine!r}")
    return (
        f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, Python "
        f"{machine['python']}, numpy {machine['numpy']}, {str(machine['date'])[:10]}"
    )


def read(path: Path) -> list[dict[str, object]]:
    """The lines that a run has written."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(benchmark: str, question: str, measure: Callable[[Report, bool], None]) -> None:
    """The command line of a benchmark."""
    parser = argparse.ArgumentParser(prog=f"python -m moonpool.benchmarks.suites.{benchmark}", description=question)
    parser.add_argument("--quick", action="store_true", help="only check that it works")
    parser.add_argument("--json", metavar="FILE", help="write JSON lines; - for standard output")
    arguments = parser.parse_args()
    # Without this every process would compile the modules whose bytecode an installed one reads.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    report = Report(benchmark, question, arguments.quick)
    measure(report, arguments.quick)
    lines = report.close()
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    if arguments.json == "-":
        sys.stdout.write(text)
        return
    print(machine_in_words(lines[0]) + "\n\n" + table(lines))
    if arguments.json:
        Path(arguments.json).write_text(text)
