"""Cost of a call by the size of its tensor, and how much of it is left without copies."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS, option
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import calls_in_turns

SIZES = {
    "4 B": 4,
    "4 KB": 1 << 12,
    "64 KB": 1 << 16,
    "1 MB": 1 << 20,
    "4 MB": 1 << 22,
    "16 MB": 1 << 24,
    "64 MB": 1 << 26,
}
# The sizes in the short table.
_SHOWN = (4, 1 << 20, 1 << 24)
# The kind of the model's answer, and true if the caller writes into `empty()` memory.
WAYS = {
    "array in, array out": ("own", False),
    "array in, copied by the model": ("copy", False),
    "array in, passed through": ("through", False),
    "empty() in, pb_utils.empty() out, copied by the model": ("placed", True),
    "empty() in, passed through": ("through", True),
}


def copy_of(size_bytes: int) -> Callable[[], object]:
    """Return a copy of that size from ordinary memory into shared memory, as a region has it; both warm."""
    fd = os.memfd_create("benchmark")
    try:
        os.ftruncate(fd, size_bytes)
        target = np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)
    finally:
        os.close(fd)
    source = np.ones(size_bytes, np.uint8)
    target[:] = 1
    return lambda: np.copyto(target, source)


def measure(report: Report, quick: bool) -> None:
    """All ways of one size in turns with two copies of that size."""
    with moonpool.Runtime() as runtime:
        for answer in ("own", "copy", "through", "placed"):
            config = {"parameters": {"answer": option(answer)}}
            runtime.load(answer, MODELS / "tensor", config=config)
        for name, size in SIZES.items():
            if quick and size > 1 << 24:
                continue
            rounds, calls = (1, 1) if quick else (10, 50 if size < 1 << 20 else 5)
            _measure_size(runtime, report, name, size, rounds, calls)


def _measure_size(runtime: moonpool.Runtime, report: Report, name: str, size: int, rounds: int, calls: int) -> None:
    copy_in, copy_out = copy_of(size), copy_of(size)

    def two_copies() -> None:
        copy_in()
        copy_out()

    cases: dict[str, Callable[[], object]] = {"two memcpy": two_copies}
    cases |= {way: _call(runtime, size, *how) for way, how in WAYS.items()}
    series = calls_in_turns(cases, rounds, calls)
    for way, times in series.items():
        report.figure(way, "µs", times.values, column=name, headline=size in _SHOWN)
    if size >= 1 << 20:
        for way in WAYS:
            goal = "≤ 1.1" if size == 1 << 24 and way == "array in, array out" else ""
            ratio = series[way].over(series["two memcpy"])
            what = f"{way}, over two memcpy"
            report.ratio(what, ratio, column=name, goal=goal, headline=bool(goal))


def _call(runtime: moonpool.Runtime, size: int, answer: str, in_place: bool) -> Callable[[], object]:
    array = runtime.empty(answer, "INPUT0", size) if in_place else np.empty(size, np.uint8)
    array[:] = 1

    def call() -> None:
        runtime.infer(answer, {"INPUT0": array})

    return call


if __name__ == "__main__":
    main("tensor_size", "What does a call cost by the size of its tensor?", measure)
