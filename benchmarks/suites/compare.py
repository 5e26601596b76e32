"""One benchmark with another version of moonpool and with this one, in turns: is one faster than the other?

    python -m moonpool.benchmarks.suites.compare latency HEAD~1
    python -m moonpool.benchmarks.suites.compare latency ../other-tree --runs 8

The benchmark is this tree's in both cases, moonpool that of the revision or folder, and of this tree.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from moonpool.benchmarks.suites.all import NAMES
from moonpool.benchmarks.suites.figure import shown

ROOT = Path(__file__).resolve().parents[2]
# With three runs of each, one in ten equal figures would seem to differ.
_FEWEST = 4
# The results of each figure: its unit, and the median of each run.
Found = dict[str, tuple[str, list[float]]]


def tree_of(base: str, scratch: Path) -> Path:
    """The folder `base`, or the files of the git revision `base` below `scratch`."""
    if Path(base).is_dir():
        return Path(base).resolve()
    command = ["git", "archive", "--format=tar", base]
    packed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(scratch, filter="fully_trusted")
    return scratch


def path_of(tree: Path, scratch: Path) -> Path:
    """Make a folder for Python's path: moonpool as in `tree`, with the benchmarks of this tree."""
    package = scratch / "moonpool"
    package.mkdir(parents=True)
    for entry in (tree / "src" / "moonpool").iterdir():
        if entry.name != "benchmarks":
            (package / entry.name).symlink_to(entry)
    (package / "benchmarks").symlink_to(ROOT / "benchmarks")
    return scratch


def run(benchmark: str, path: Path, quick: bool, found: Found) -> None:
    """Run it once with the moonpool at `path`, and add the medians to `found`."""
    command = [sys.executable, "-m", f"moonpool.benchmarks.suites.{benchmark}", "--json", "-"]
    ended = subprocess.run(
        [*command, *(["--quick"] if quick else [])],
        env={**os.environ, "PYTHONPATH": str(path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in map(json.loads, ended.stdout.splitlines()):
        if line["kind"] == "figure":
            name = ", ".join(filter(None, (line["name"], line["column"])))
            found.setdefault(name, (line["unit"], []))[1].append(line["median"])


def verdict(before: Sequence[float], after: Sequence[float]) -> str:
    """Say if two series of medians differ by more than they vary.

    They differ if every run of one lies beyond every run of the other. By chance, two series of five that are
    alike do so in one case of 126.
    """
    if min(len(before), len(after)) < _FEWEST:
        return "too few runs to say"
    if min(after) > max(before) or max(after) < min(before):
        change = statistics.median(after) / statistics.median(before) - 1
        return f"**{change:+.1%}**"
    return "within noise"


def table(before: Mapping[str, tuple[str, list[float]]], after: Found) -> str:
    """The comparison as Markdown."""
    rows = ["| | before | now | change |", "|:--|--:|--:|:--|"]
    for name, (unit, values) in after.items():
        if name not in before:
            continue
        cells = (_cell(before[name][1], unit), _cell(values, unit))
        rows.append(f"| {name} | {' | '.join(cells)} | {verdict(before[name][1], values)} |")
    return "\n".join(rows)


def _cell(values: Sequence[float], unit: str) -> str:
    spread = f"{shown(min(values))} to {shown(max(values))}"
    return f"{shown(statistics.median(values))} {unit or 'times'} ({spread})"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m moonpool.benchmarks.suites.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=NAMES)
    parser.add_argument("base", help="a git revision, or a folder with another tree")
    parser.add_argument("--runs", type=int, default=5, help="runs of each; 5 by default")
    parser.add_argument("--quick", action="store_true", help="only check that it works")
    arguments = parser.parse_args()
    before: Found = {}
    after: Found = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = tree_of(arguments.base, folder / "tree")
        sides = [(path_of(base, folder / "before"), before), (path_of(ROOT, folder / "now"), after)]
        for turn in range(arguments.runs):
            # The second one finds the machine warmer, so they take turns in that, too.
            for path, found in sides if turn % 2 == 0 else reversed(sides):
                run(arguments.benchmark, path, arguments.quick, found)
    print(table(before, after))


if __name__ == "__main__":
    main()
