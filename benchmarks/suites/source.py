"""Measures a run of source beside programs that are started for it, bare and in bubblewrap. `contained.py` has more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

import moonpool
from moonpool.benchmarks.suites.contained import BWRAP
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns
from moonpool.runtime.process.usage import memory_of, with_descendants

_BYTES = 16 << 20
# Enough for the process of the next run to be forked.
_PAUSE_S = 0.03
_WITH_NUMPY = "import numpy; print(1 + 1)"


def add_one(x: int) -> int:
    """Return what a small function returns."""
    return x + 1


def _run() -> object:
    return moonpool.run(add_one, {"x": 1}, timeout_s=60).unwrap()


def _program(command: Sequence[str]) -> object:
    return subprocess.run(command, cwd="/", check=True, capture_output=True).stdout


def _timed_ms(call: Callable[[], object], count: int, pause_s: float = 0.0) -> list[float]:
    times = []
    for _ in range(count):
        time.sleep(pause_s)
        before = time.perf_counter()
        call()
        times.append((time.perf_counter() - before) * 1000)
    return times


def _others(report: Report) -> dict[str, Callable[[], object]]:
    """Return the programs that can be started here, each with numpy."""
    found: dict[str, Callable[[], object]] = {}
    interpreter = [sys.executable, "-c", _WITH_NUMPY]
    found["python -c"] = partial(_program, interpreter)
    if shutil.which("bwrap"):
        found["bwrap python -c"] = partial(_program, [*BWRAP, *interpreter])
    else:
        report.skipped("bwrap python -c", "bubblewrap is not installed")
    return found


def _rate(threads: int, window_s: float) -> list[float]:
    """Return the runs a second of so many threads."""
    counts = [0] * threads
    ends = time.monotonic() + window_s

    def go(number: int) -> None:
        while time.monotonic() < ends:
            _run()
            counts[number] += 1

    began = time.monotonic()
    callers = [threading.Thread(target=go, args=(number,)) for number in range(threads)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return [sum(counts) / (time.monotonic() - began)]


def _processor_ms(count: int) -> list[float]:
    """Return the milliseconds of a processor that a run takes of this program."""
    before = time.process_time()
    for _ in range(count):
        _run()
    return [(time.process_time() - before) * 1000 / count]


def measure(report: Report, quick: bool) -> None:
    """Starts in turns; then rates; then large arrays beside copies of them."""
    rounds, calls, window_s = (1, 2, 0.2) if quick else (15, 10, 1.0)
    array = np.ones(_BYTES, np.uint8)
    room = [np.empty_like(array), np.empty_like(array)]
    with moonpool.Sandbox(timeout_s=60) as box:
        box.run("n = 0")
        cases: dict[str, Callable[[], list[float]]] = {
            "moonpool.run": partial(_timed_ms, _run, calls),
            "moonpool.run, after a pause": partial(_timed_ms, _run, calls, _PAUSE_S),
            "Sandbox.run": partial(_timed_ms, partial(box.run, "n += 1; n"), calls),
        }
        for name, start in _others(report).items():
            cases[name] = partial(_timed_ms, start, 1)
        found = in_turns(cases, rounds)
        goals = {"moonpool.run, after a pause": "≤ 3 ms"}
        for name, series in found.items():
            goal = goals.get(name, "")
            report.figure("a small function, with numpy at hand", "ms", series.values, column=name, goal=goal)
        for name in ("python -c", "bwrap python -c"):
            if name in found:
                ratios = found[name].over(found["moonpool.run, after a pause"])
                report.ratio(f"{name} over moonpool.run after a pause", ratios, headline=True)
        rates = in_turns({n: partial(_rate, n, window_s) for n in (1, 2, 4)}, 1 if quick else 5)
        for threads, series in rates.items():
            goal = "≥ 300" if threads == 2 else ""
            report.figure("runs a second", "", series.values, column=f"{threads} threads", goal=goal, headline=True)
        spent = in_turns({"": partial(_processor_ms, calls)}, rounds)[""]
        report.figure("processor time of this program for a run", "ms", spent.values)

        def copies() -> None:
            np.copyto(room[0], array)
            np.copyto(room[1], room[0])

        large = in_turns(
            {
                "copies": partial(_timed_ms, copies, 2),
                "fresh": partial(_timed_ms, lambda: bytearray(bytes(array.data)), 2),
                "run": partial(_timed_ms, lambda: moonpool.run("x", {"x": array}, timeout_s=60).unwrap(), 2, _PAUSE_S),
                "box": partial(_timed_ms, lambda: box.run("x", {"x": array}).unwrap(), 2),
            },
            rounds,
        )
        for name, words in (("run", "moonpool.run"), ("box", "Sandbox.run")):
            report.figure("16 MB in and out", "ms", large[name].values, column=words)
            report.ratio("16 MB in and out, over two memcpy", large[name].over(large["copies"]), column=words)
            ratios = large[name].over(large["fresh"])
            report.ratio("16 MB in and out, over two copies into new memory", ratios, column=words, goal="≤ 1.2")
        pids = with_descendants([os.getpid()])[1:]
        own = [memory_of(pid).own_bytes / (1 << 20) for pid in pids]
        report.figure("memory of all processes for runs, and of one Sandbox", "MB", [sum(own)])
    report.note(
        "python -c starts an interpreter that imports numpy, bare or in bubblewrap. To get out of a run, a hole in the "
        "kernel is needed that can be reached by few system calls, past Landlock and namespaces; out of bubblewrap one "
        "behind any call; out of a bare program nothing."
    )


if __name__ == "__main__":
    main("source", "What does a run of source cost?", measure)
