"""Prints how the main figures of `benchmarks/results` went from one published run to the next, as git knows them.

The site (`make site`) has this as the page site/HISTORY.md. A shallow clone has only the last run of each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = Path(__file__).parent / "site" / "HISTORY.md"
PLACE = "<!-- history -->"
# The newest ones.
MOST_RUNS = 6


class Run(NamedTuple):
    """One published run of a benchmark, with the commit that brought it."""

    commit: str
    benchmark: str
    question: str
    machine: dict[str, Any]
    figures: dict[tuple[str, str, str], float]
    """Medians by name, column and unit. A ratio has no unit."""

    @property
    def head(self) -> str:
        return f"{self.machine['date'][:10]}, `{self.commit[:8]}`, {self.machine['cpu']}, {self.machine['cores']} cores"


def read(commit: str, text: str) -> Run:
    """Return the run that a file of results has."""
    about, *rows = map(json.loads, filter(None, text.splitlines()))
    figures = {
        (row["name"], row["column"], row["unit"]): row["median"]
        for row in rows
        if row["kind"] == "figure" and row["headline"] and row["median"] is not None
    }
    return Run(commit, about["benchmark"], about["question"], about["machine"], figures)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def runs(file: Path) -> list[Run]:
    """Return the published runs of a benchmark, the oldest first. Without git, the one that lies there."""
    name = file.relative_to(ROOT).as_posix()
    try:
        commits = _git("log", "--reverse", "--format=%H", "--", name).split()
        found = [read(commit, _git("show", f"{commit}:{name}")) for commit in commits]
    except (OSError, subprocess.CalledProcessError):
        found = [read("", file.read_text(encoding="utf-8"))]
    # A commit may change only the words of a file.
    return list({run.machine["date"]: run for run in found}.values())[-MOST_RUNS:]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(found: list[Run]) -> Iterator[str]:
    last = found[-1]
    yield f"## {last.benchmark}\n\n{last.question}\n"
    heads = " | ".join(run.head for run in found)
    yield f"| | {heads} |\n|:--|{'--:|' * len(found)}"
    # Ratios are alike on other machines; other figures are not.
    for key in sorted(last.figures, key=lambda each: bool(each[2])):
        name, column, unit = key
        values = (_number(run.figures[key]) + f" {unit}".rstrip() if key in run.figures else "" for run in found)
        yield f"| {', '.join(filter(None, (name, column)))} | {' | '.join(values)} |"
    yield ""


def page() -> str:
    """Return the page with all tables."""
    tables = ["\n".join(_table(found)) for file in sorted(RESULTS.glob("*.jsonl")) if (found := runs(file))[-1].figures]
    return PAGE.read_text(encoding="utf-8").replace(PLACE, "\n".join(tables))


if __name__ == "__main__":
    sys.stdout.write(page())
