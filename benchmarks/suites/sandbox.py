"""One model at each level of the sandbox: time to start, time of a call, calls a second."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS, option, pids
from moonpool.benchmarks.suites.placement import placed, placements
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import Series, calls_in_turns, in_turns
from moonpool.benchmarks.suites.throughput import with_tasks

LEVELS = ("off", "standard", "strict")
CALLERS = 16
_INPUTS = {"INPUT0": np.ones((1, 4), np.float32), "INPUT1": np.ones((1, 4), np.float32)}
_NOBODY = 65534

# The values of each round, by quantity and by level.
Found = dict[str, dict[str, list[list[float]]]]


def found(quick: bool) -> Found:
    """All three levels in turns, as the user of this process."""
    with moonpool.Runtime() as runtime:

        def load(level: str) -> None:
            config = {"parameters": {"MOONPOOL_SANDBOX": option(level)}}
            runtime.load(level, MODELS / "add_sub", config=config)

        def start(level: str) -> list[float]:
            before = time.perf_counter()
            load(level)
            took_ms = (time.perf_counter() - before) * 1000
            runtime.unload(level)
            return [took_ms]

        started = in_turns(_by_level(lambda level: lambda: start(level)), 1 if quick else 40)
        for level in LEVELS:
            load(level)
        rounds, calls, window_s = (1, 20, 0.02) if quick else (60, 300, 0.3)
        stubs = [pid for level in LEVELS for pid in pids(runtime, level)]
        # On one core only the calls themselves take time: no other core has to be woken up.
        with placed(placements()[1], stubs):
            called = calls_in_turns(_by_level(lambda level: lambda: runtime.infer(level, _INPUTS)), rounds, calls)
        rates = in_turns(
            _by_level(lambda level: lambda: [with_tasks(runtime, level, CALLERS, window_s)]), 1 if quick else 15
        )
    measured = {"start": started, "call": called, "rate": rates}
    return {what: {level: series.rounds for level, series in by_level.items()} for what, by_level in measured.items()}


def _by_level(case: Callable[[str], Callable[[], object]]) -> dict[str, Callable[[], Sequence[float]]]:
    return {level: case(level) for level in LEVELS}  # type: ignore[misc]


def tell(report: Report, who: str, measured: Found) -> None:
    """The figures of one user."""
    names = {
        "start": ("a stub, spawn to ready", "ms"),
        "call": ("infer, add_sub of 4 floats", "µs"),
        "rate": (f"{CALLERS} tasks", "requests/s"),
    }
    for what, (name, unit) in names.items():
        for level in LEVELS:
            values = Series(measured[what][level]).values
            report.figure(f"{name}, {who}", unit, values, column=level, headline=True)
    start, call, rate = ({level: Series(rounds) for level, rounds in measured[what].items()} for what in names)
    for level in ("standard", "strict"):
        below = LEVELS[LEVELS.index(level) - 1]
        is_strict = level == "strict"
        report.figure(
            f"start-up over {below}, {who}",
            "ms",
            start[level].minus(start[below]),
            column=level,
            goal="≤ 5" if is_strict else "",
            headline=is_strict,
        )
        for name, series, goal in (("latency", call, "≤ 1.03"), ("throughput", rate, "≥ 0.97")):
            ratio = series[level].over(series[below])
            report.ratio(
                f"{name} over {below}, {who}", ratio, column=level, goal=goal if is_strict else "", headline=is_strict
            )


def as_nobody(quick: bool) -> Mapping[str, object]:
    """Return the same findings for a user without rights. Raises RuntimeError with the reason if there can be none."""
    program = f"import json; from moonpool.benchmarks.suites.sandbox import found; print(json.dumps(found({quick})))"
    root = Path(__file__).resolve().parents[2]
    helper = root / "tests" / "as_nobody.py"
    ended = subprocess.run(
        [sys.executable, str(helper), sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)])},
    )
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().rpartition("\n")[2] or "it died")
    result: Mapping[str, object] = json.loads(ended.stdout)
    return result


def measure(report: Report, quick: bool) -> None:
    """Measure as this user, and as nobody too if this user is root."""
    is_root = os.geteuid() == 0
    tell(report, "root" if is_root else f"user {os.geteuid()}", found(quick))
    if is_root:
        who = f"user {_NOBODY}"
        try:
            tell(report, who, as_nobody(quick))  # type: ignore[arg-type]
        except RuntimeError as error:
            report.skipped(f"as {who}", str(error))
    report.note("Calls are made on one core, so that the sandbox is what differs and not the placement.")


if __name__ == "__main__":
    main("sandbox", "What does strict isolation cost?", measure)
