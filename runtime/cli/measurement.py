"""How long calls take, and how many there are in a second, at a given concurrency."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.errors import MoonpoolError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Measurement:
    """What a number of callers saw, each calling again as soon as it was answered."""

    def __init__(self, concurrency: int) -> None:
        self.concurrency = concurrency
        self.latencies_ns: list[int] = []
        # Calls that failed, by the text of the error.
        self.errors: Counter[str] = Counter()
        self.seconds = 0.0

    @property
    def requests_per_s(self) -> float:
        """Answered ones only."""
        return len(self.latencies_ns) / self.seconds if self.seconds else 0.0

    def latency_us(self, percentile: float) -> float:
        """NaN where nothing was answered."""
        if not self.latencies_ns:
            return float("nan")
        return float(np.percentile(self.latencies_ns, percentile)) / 1000


def measure(call: Callable[[], object], concurrency: int, seconds: float) -> Measurement:
    """Call from so many threads for so long. Errors of moonpool are counted, others raised."""
    result = Measurement(concurrency)
    barrier = threading.Barrier(concurrency + 1)
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        latencies_ns: list[int] = []
        try:
            barrier.wait()
            while not stop.is_set():
                begin_ns = time.perf_counter_ns()
                try:
                    call()
                except MoonpoolError as error:
                    result.errors[str(error)] += 1
                else:
                    latencies_ns.append(time.perf_counter_ns() - begin_ns)
        except BaseException as error:
            failures.append(error)
            stop.set()
        result.latencies_ns += latencies_ns

    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    begin_s = time.perf_counter()
    try:
        barrier.wait()
        begin_s = time.perf_counter()
        stop.wait(seconds)
    finally:
        # Also when the user has had enough.
        stop.set()
        for thread in threads:
            thread.join()
    result.seconds = time.perf_counter() - begin_s
    if failures:
        raise failures[0]
    return result


async def measure_async(
    call: Callable[[], Awaitable[object]], concurrency: int, seconds: float
) -> Measurement:
    """As `measure`, with tasks of one event loop."""
    result = Measurement(concurrency)
    begin_s = time.perf_counter()

    async def work() -> None:
        while time.perf_counter() - begin_s < seconds:
            begin_ns = time.perf_counter_ns()
            try:
                await call()
            except MoonpoolError as error:
                result.errors[str(error)] += 1
            else:
                result.latencies_ns.append(time.perf_counter_ns() - begin_ns)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    result.seconds = time.perf_counter() - begin_s
    return result
