"""Memory of a stub beyond that of an interpreter that has imported numpy."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS, pids
from moonpool.benchmarks.suites.report import Report, main

_PROGRAM = "import numpy, sys; sys.stdout.write('.'); sys.stdout.flush(); sys.stdin.read()"
_KINDS = ("RSS", "PSS", "USS")


def memory_mib(pid: int) -> dict[str, float]:
    """Resident, proportional and private memory of a process."""
    kib: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        kib[name] = int(rest.split()[0])
    private = kib["Private_Clean"] + kib["Private_Dirty"]
    return {"RSS": kib["Rss"] / 1024, "PSS": kib["Pss"] / 1024, "USS": private / 1024}


@contextlib.contextmanager
def interpreters(count: int) -> Iterator[list[int]]:
    """Start so many interpreters with numpy, which wait within the block."""
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
                )
            )
            for _ in range(count)
        ]
        for process in processes:
            if process.stdout is not None:
                process.stdout.read(1)
        yield [process.pid for process in processes]
        for process in processes:
            process.communicate()


def measure(report: Report, quick: bool) -> None:
    """Compare as many stubs as interpreters at the same time, before the first request and after many."""
    count = 1 if quick else 5
    inputs = {"INPUT0": np.ones((1, 4), np.float32), "INPUT1": np.ones((1, 4), np.float32)}
    with moonpool.Runtime() as runtime, interpreters(count) as others:
        runtime.load("add_sub", MODELS / "add_sub", instances=count)
        _compare(report, "idle stub", pids(runtime, "add_sub"), others, "≤ 10 MiB")
        for _ in range(20 if quick else 2000):
            runtime.infer("add_sub", inputs)
        _compare(report, "stub after small requests", pids(runtime, "add_sub"), others, "")
    report.note(
        f"{count} of each at the same time; the fewer processes share the libraries, the more of them "
        "counts as PSS and USS."
    )


def _compare(report: Report, name: str, stubs: list[int], others: list[int], goal: str) -> None:
    ours = [memory_mib(pid) for pid in stubs]
    theirs = [memory_mib(pid) for pid in others]
    for kind in _KINDS:
        report.figure(name, "MiB", [found[kind] for found in ours], column=kind)
        values = [found[kind] for found in theirs]
        report.figure(f"interpreter beside it ({name})", "MiB", values, column=kind)
        more = [mine[kind] - other[kind] for mine, other in zip(ours, theirs, strict=True)]
        wanted = goal if kind == "RSS" else ""
        what = f"{name} over interpreter with numpy"
        report.figure(what, "MiB", more, column=kind, goal=wanted, headline=bool(goal))


if __name__ == "__main__":
    main("memory", "What does a stub take beyond an interpreter with numpy?", measure)
