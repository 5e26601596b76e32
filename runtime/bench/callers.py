"""Callers in this process: how long their calls take, and how many there are in a second."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.bench.window import Window

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def measure(call: Callable[[], object], concurrency: int, seconds: float) -> Window:
    """Call from so many threads for so long. Errors of moonpool are counted, others raised."""
    latencies_ns: list[int] = []
    errors: Counter[str] = Counter()
    barrier = threading.Barrier(concurrency + 1)
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        mine: list[int] = []
        try:
            barrier.wait()
            while not stop.is_set():
                begin_ns = time.perf_counter_ns()
                try:
                    call()
                except MoonpoolError as error:
                    errors[str(error)] += 1
                else:
                    mine.append(time.perf_counter_ns() - begin_ns)
        except BaseException as error:
            failures.append(error)
            stop.set()
        latencies_ns.extend(mine)

    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    started: list[threading.Thread] = []
    begin_s = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        barrier.wait()
        begin_s = time.perf_counter()
        stop.wait(seconds)
    except BaseException as error:
        # Those that wait for all the others would wait for ever.
        barrier.abort()
        if not isinstance(error, RuntimeError):
            raise
        raise MoonpoolError(
            f"this machine has no room for {concurrency} threads of callers: {error}"
        ) from error
    finally:
        # Also when the user has had enough.
        stop.set()
        for thread in started:
            thread.join()
    taken_s = time.perf_counter() - begin_s
    if failures:
        raise failures[0]
    return Window(taken_s, np.array(latencies_ns, np.int64), errors)


async def measure_async(
    call: Callable[[], Awaitable[object]], concurrency: int, seconds: float
) -> Window:
    """As `measure`, with tasks of one event loop."""
    # Commands that have none import this, too.
    import asyncio

    latencies_ns: list[int] = []
    errors: Counter[str] = Counter()
    begin_s = time.perf_counter()

    async def work() -> None:
        while time.perf_counter() - begin_s < seconds:
            begin_ns = time.perf_counter_ns()
            try:
                await call()
            except MoonpoolError as error:
                errors[str(error)] += 1
            else:
                latencies_ns.append(time.perf_counter_ns() - begin_ns)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return Window(time.perf_counter() - begin_s, np.array(latencies_ns, np.int64), errors)
