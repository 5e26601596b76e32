"""Requests a second by the number of callers, as threads and as tasks, with one instance and two."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import median

import numpy as np

import moonpool
from moonpool.benchmarks.callers import measure as press
from moonpool.benchmarks.callers import measure_async as press_async
from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns, time_us
from moonpool.runtime.cli.demo import PingPong

CALLERS = (1, 2, 4, 16, 64)
_QUICK_CALLERS = (1, 16)
# The ping-pong for which the goal is stated.
_FLOOR_US = 10.0
_INPUTS = {"INPUT0": np.ones((1, 4), np.float32), "INPUT1": np.ones((1, 4), np.float32)}


def with_threads(runtime: moonpool.Runtime, model: str, callers: int, window_s: float) -> float:
    """Requests a second of that many threads, each of which calls `infer` again and again."""
    found = press(lambda: runtime.infer(model, _INPUTS), callers, window_s)
    return found.requests_per_s


def with_tasks(runtime: moonpool.Runtime, model: str, callers: int, window_s: float) -> float:
    """Requests a second of that many asyncio tasks, each of which awaits `ainfer` again and again."""
    found = press_async(lambda: runtime.ainfer(model, _INPUTS), callers, window_s)
    return asyncio.run(found).requests_per_s


def measure(report: Report, quick: bool) -> None:
    """Every number of callers, kind of caller and number of instances, with a ping-pong before each."""
    rounds, window_s, pings = (1, 0.02, 20) if quick else (5, 0.3, 500)
    with moonpool.Runtime() as runtime, PingPong() as peer:
        for instances in (1, 2):
            runtime.load(f"add_sub_{instances}", MODELS / "add_sub", instances=instances)

        def case(
            run: Callable[[moonpool.Runtime, str, int, float], float], instances: int, callers: int
        ) -> Callable[[], list[float]]:
            def windows() -> list[float]:
                floor_us = median(time_us(peer, pings))
                rate = run(runtime, f"add_sub_{instances}", callers, window_s)
                return [rate, rate * floor_us / _FLOOR_US]

            return windows

        cases = {
            (f"{callers} {word}{'s' if callers > 1 else ''}", instances): case(run, instances, callers)
            for word, run in (("thread", with_threads), ("task", with_tasks))
            for callers in (_QUICK_CALLERS if quick else CALLERS)
            for instances in (1, 2)
        }
        for (name, instances), series in in_turns(cases, rounds).items():
            where = "1 instance" if instances == 1 else f"{instances} instances"
            rates = [values[0] for values in series.rounds]
            report.figure(name, "requests/s", rates, column=where, headline=True)
            if name.startswith("16 "):
                scaled = [values[1] for values in series.rounds]
                what = f"{name}, were a ping-pong 10 µs"
                goal = "≥ 40,000" if instances == 1 else ""
                report.figure(what, "requests/s", scaled, column=where, goal=goal, headline=True)
        report.figure("ping-pong beside them", "µs", time_us(peer, pings), column="1 instance")


if __name__ == "__main__":
    main("throughput", "How many calls a second do many callers get through?", measure)
