"""Requests a second by the number of callers, as threads and as tasks, with one instance and two."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from statistics import median

import numpy as np

import moonpool
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
    counts = [0] * callers
    end = threading.Event()
    begin = threading.Barrier(callers + 1)

    def call(index: int) -> None:
        begin.wait()
        while not end.is_set():
            runtime.infer(model, _INPUTS)
            counts[index] += 1

    threads = [threading.Thread(target=call, args=(index,)) for index in range(callers)]
    for thread in threads:
        thread.start()
    begin.wait()
    before = time.perf_counter()
    time.sleep(window_s)
    done, passed_s = sum(counts), time.perf_counter() - before
    end.set()
    for thread in threads:
        thread.join()
    return done / passed_s


def with_tasks(runtime: moonpool.Runtime, model: str, callers: int, window_s: float) -> float:
    """Requests a second of that many asyncio tasks, each of which awaits `ainfer` again and again."""

    async def call(until: float) -> int:
        count = 0
        while time.perf_counter() < until:
            await runtime.ainfer(model, _INPUTS)
            count += 1
        return count

    async def run() -> float:
        before = time.perf_counter()
        until = before + window_s
        counts = await asyncio.gather(*(call(until) for _ in range(callers)))
        return sum(counts) / (time.perf_counter() - before)

    return asyncio.run(run())


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
            (f"{callers} {word}{'s' if callers > 1 else ''}", instances): case(
                run, instances, callers
            )
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
