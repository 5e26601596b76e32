"""`moonpool bench compare A B`: what changed from one result to another, with conditions that fail the command.

One file alone has two sides that were measured in turns. Then B is the side of --url, and A that of --against.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moonpool.benchmarks import result as results
from moonpool.benchmarks.comparison import BadCondition, Change, Condition, changes, changes_in_turns
from moonpool.benchmarks.loads import load_in_short
from moonpool.runtime.cli.shared import UsageError, table
from moonpool.runtime.process.terminal import Terminal, harmless

# The word in place of a repository.
WORD = "compare"
_SHOWN = ("requests_per_s", "mean", "p50", "p90", "p99")
# For these, less is worse.
_MORE_IS_BETTER = {"requests_per_s"}


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--fail-if",
        metavar="CONDITION",
        action="append",
        default=[],
        help="exit with 1 if a load of B meets this, as p99>1.1x, requests_per_s<0.95x, p99>20ms or failed>0; a ratio "
        "must be significant, too: the 95 %% interval of B/A must not contain 1; may be given many times",
    )


def is_meant(arguments: argparse.Namespace) -> bool:
    """Return True for `compare A B` and `compare A`; with --url, or if there is a folder `compare`, it may be a model
    or a repository.
    """
    if arguments.repository != WORD or arguments.url is not None:
        return False
    return arguments.second is not None or str(arguments.model).endswith(".json") or not os.path.isdir(WORD)


def run(arguments: argparse.Namespace) -> int:
    """Compare the results in two files; return 1 if a condition is met."""
    try:
        conditions = [Condition.parse(text) for text in arguments.fail_if]
    except BadCondition as error:
        raise UsageError(f"--fail-if: {error}") from error
    path = Path(arguments.model)
    first = results.read(path)
    in_turns = arguments.second is None
    if in_turns:
        old, new = _sides(first, path), first
        how = changes_in_turns
    else:
        old, new = first, results.read(Path(arguments.second))
        how = changes
    results.check_requests(new, old, str(path))
    if found := results.differences(new, old):
        words = f"the two differ in {'; '.join(found)}"
        print(f"moonpool: {harmless(words)}", file=sys.stderr)
    pairs = [(results.matching(point, old["series"]), point) for point in new["series"]]
    if not any(before is not None for before, _ in pairs):
        raise results.Incomparable(f"{path} and {arguments.second} have no load in common")
    compared = [(point, how(before, point) if before is not None else None) for before, point in pairs]
    _show(old, new, compared, in_turns=in_turns)
    failures = [
        failure
        for point, ratios in compared
        if ratios is not None
        for condition in conditions
        if (failure := condition.failure(point, ratios))
    ]
    for failure in failures:
        print(f"moonpool: failed: {harmless(failure)}", file=sys.stderr)
    return 1 if failures else 0


def _sides(found: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Return the other side of a result that was measured in turns with it."""
    against = found.get("against")
    if not isinstance(against, dict) or not found.get("in_turns"):
        raise UsageError(f"{path} has one side: give two files, or one of --url with --against URL, measured in turns")
    return against


_Compared = Sequence[tuple[Mapping[str, Any], Mapping[str, Change] | None]]


def _show(old: Mapping[str, Any], new: Mapping[str, Any], compared: _Compared, *, in_turns: bool) -> None:
    terminal = Terminal(sys.stdout)
    ours, theirs = map(harmless, results.names(new, old))
    terminal.line(terminal.paint(f"{ours} over {theirs}:", "bold"))
    rows = [["load", *("requests/s" if name == "requests_per_s" else name for name in _SHOWN)]]
    for point, ratios in compared:
        if ratios is None:
            rows.append([load_in_short(point), "not measured there", *[""] * (len(_SHOWN) - 1)])
        else:
            rows.append([load_in_short(point), *(_cell(name, ratios.get(name)) for name in _SHOWN)])
    head, *lines = table(rows, align=">" * len(rows[0]))
    terminal.line(terminal.paint(head, "bold"))
    for line in lines:
        terminal.line(line)
    if in_turns:
        count = min(len(point["windows"]) for point, _ in compared)
        words = f"medians of the ratios of {count} pairs of windows in turns"
        terminal.line(f"{words}, with 95 % intervals; alike where 1 lies within")
        return
    samples = "runs" if all(point.get("runs") for point, _ in compared) else "windows"
    terminal.line(f"ratios of means of {samples}, with 95 % intervals; alike where 1 lies within")


def _cell(name: str, found: Change | None) -> str:
    if found is None:
        return "-"
    if not found.is_certain:
        verdict = "alike"
    else:
        verdict = "better" if (found.ratio > 1) == (name in _MORE_IS_BETTER) else "worse"
    if math.isinf(found.high):
        return f"{found.ratio:.3f} (one sample) {verdict}"
    return f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f}) {verdict}"
