"""The common base of the ways to call add_sub in another process."""

from __future__ import annotations

import threading
import time

import numpy as np
from numpy.typing import NDArray

from moonpool.benchmarks.hosts.process import Unavailable as Unavailable
from moonpool.benchmarks.suites.rounds import time_us

Floats = NDArray[np.float32]


class Peer:
    """A way of calling. The constructor opens it, and may raise Unavailable; leaving the context closes it."""

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        """Sum and difference, computed elsewhere. Arrays of one row."""
        raise NotImplementedError

    def leave(self) -> None:
        """Free the resources of this thread, which makes no more calls."""

    def close(self) -> None:
        """End the processes that were started."""

    def times_us(self, elements: int, count: int) -> list[float]:
        """Time each of `count` calls, with that many floats in each of two inputs and outputs."""
        a, b = self.inputs(elements)
        total, difference = self.call(a, b)
        if not ((total == 3).all() and (difference == -1).all()):
            raise ValueError(f"{type(self).__name__} gave a wrong answer")
        del total, difference
        return time_us(lambda: self.call(a, b), count)

    def inputs(self, elements: int) -> tuple[Floats, Floats]:
        """Ones and twos."""
        return np.full((1, elements), 1, np.float32), np.full((1, elements), 2, np.float32)

    def rate(self, callers: int, total: int) -> float | None:
        """Return calls a second with so many callers at once, for the ways that allow more than one."""
        del callers, total
        return None

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def rate_of_threads(peer: Peer, callers: int, total: int) -> float:
    """Calls a second of so many threads, each of which calls again and again."""
    a, b = peer.inputs(4)
    share = -(-total // callers)

    def call() -> None:
        for _ in range(share):
            peer.call(a, b)
        peer.leave()

    threads = [threading.Thread(target=call) for _ in range(callers)]
    before = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return callers * share / (time.perf_counter() - before)
