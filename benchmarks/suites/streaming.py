"""Responses a second of one decoupled model for one consumer, and the time to the first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

import moonpool
from moonpool.benchmarks.suites.hosted import MODELS
from moonpool.benchmarks.suites.report import Report, main
from moonpool.benchmarks.suites.rounds import in_turns

_CONFIG = {
    "input": [{"name": "N", "data_type": "TYPE_INT32", "dims": [1]}],
    "output": [{"name": "Y", "data_type": "TYPE_INT32", "dims": [1]}],
    "model_transaction_policy": {"decoupled": True},
}


def _stream(runtime: moonpool.Runtime, n: int) -> moonpool.ResponseStream:
    return runtime.stream("streaming", {"N": np.array([n], np.int32)})


def _in_thread(runtime: moonpool.Runtime, n: int) -> float:
    before = time.perf_counter()
    count = sum(1 for _ in _stream(runtime, n))
    return count / (time.perf_counter() - before)


def _in_task(runtime: moonpool.Runtime, n: int) -> float:
    async def take() -> float:
        before = time.perf_counter()
        count = 0
        async for _ in _stream(runtime, n):
            count += 1
        return count / (time.perf_counter() - before)

    return asyncio.run(take())


def _first(runtime: moonpool.Runtime, times: int) -> list[float]:
    """Seconds from the request to its first response, which is its last but one."""
    took = []
    for _ in range(times):
        before = time.perf_counter()
        responses = _stream(runtime, 1)
        next(responses)
        took.append(time.perf_counter() - before)
        list(responses)
    return took


def measure(report: Report, quick: bool) -> None:
    """One model, one request, one consumer."""
    rounds, n = (1, 500) if quick else (7, 20_000)
    with moonpool.Runtime() as runtime:
        runtime.load("streaming", MODELS / "streaming.py", config=_CONFIG)
        cases: dict[str, Callable[[], list[float]]] = {
            "thread": lambda: [_in_thread(runtime, n)],
            "task": lambda: [_in_task(runtime, n)],
            "first": lambda: [seconds * 1e6 for seconds in _first(runtime, 20)],
        }
        series = in_turns(cases, rounds)
    report.figure(
        "responses of 4 bytes, taken by a thread", "responses/s", series["thread"].values, goal="20,000", headline=True
    )
    report.figure("taken by an asyncio task", "responses/s", series["task"].values, headline=True)
    report.figure("from the request to the first response", "µs", series["first"].values)
    report.note(f"{n} responses to one request, each sent by itself in a loop.")


if __name__ == "__main__":
    main("streaming", "How many responses a second does a decoupled model give?", measure)
