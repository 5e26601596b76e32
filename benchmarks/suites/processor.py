"""Processor time of a small request, in the stub and in the runtime: the limit of a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS, pids
from moonpool.benchmarks.suites.placement import placed, placements
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns

_MODEL = "add_sub"
_INPUTS = {"INPUT0": np.ones((1, 4), np.float32), "INPUT1": np.ones((1, 4), np.float32)}
_TASKS = 16


def busy_us(pid: int) -> float:
    """Processor time that all threads of a process have taken so far."""
    # The clock of another process has no name, only the number that clock_getcpuclockid(3) computes.
    return time.clock_gettime_ns((~pid << 3) | 2) / 1000


def one_by_one(runtime: moonpool.Runtime, count: int) -> None:
    """One caller, who waits for each answer."""
    for _ in range(count):
        runtime.infer(_MODEL, _INPUTS)


def with_id(runtime: moonpool.Runtime, count: int) -> None:
    """Send requests as `one_by_one` does, each with an id, which most requests do not have."""
    for _ in range(count):
        runtime.infer(_MODEL, _INPUTS, request_id="1")


def many(runtime: moonpool.Runtime, count: int) -> None:
    """Callers of one event loop, whose requests share batches."""

    async def call() -> None:
        for _ in range(count // _TASKS):
            await runtime.ainfer(_MODEL, _INPUTS)

    async def run() -> None:
        await asyncio.gather(*(call() for _ in range(_TASKS)))

    asyncio.run(run())


def measure(report: Report, quick: bool) -> None:
    """Measure each kind of caller in turns, with both sides on one core and on two."""
    rounds, count = (1, 32) if quick else (10, 2_000)
    with moonpool.Runtime() as runtime:
        runtime.load(_MODEL, MODELS / _MODEL)
        (stub,) = pids(runtime, _MODEL)

        def case(run: Callable[[moonpool.Runtime, int], None]) -> Callable[[], list[float]]:
            def window() -> list[float]:
                stub_us, own_us = busy_us(stub), time.process_time_ns() / 1000
                run(runtime, count)
                passed = busy_us(stub) - stub_us, time.process_time_ns() / 1000 - own_us
                return [each / count for each in passed]

            return window

        callers = {"1 thread": one_by_one, "1 thread, with an id": with_id, f"{_TASKS} tasks": many}
        where = {each.name: each for each in placements()}
        for place in ("one core", "two cores"):
            if place not in where:
                continue
            with placed(where[place], [stub]):
                found = in_turns({name: case(run) for name, run in callers.items()}, rounds)
            for name, series in found.items():
                for index, side in enumerate(("stub", "runtime")):
                    values = [each[index] for each in series.rounds]
                    report.figure(f"{name}, {place}", "µs", values, column=side, headline=True)


if __name__ == "__main__":
    main("processor", "What processor time does a small request take, on each side?", measure)
