"""Clients that ask a server all the time, and note who answers."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Clients:
    """Ask all the time, over connections that last for a few requests, and note who answers."""

    def __init__(self, ask: Callable[[], set[int]], count: int = 4) -> None:
        """`ask` opens a connection, sends requests, and returns the processes that have answered them."""
        self._ask = ask
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._go_on) for _ in range(count)]
        self.pids: set[int] = set()
        self.errors: list[object] = []

    def _go_on(self) -> None:
        while not self._stop.is_set():
            seen = self.pids
            try:
                pids = self._ask()
            except Exception as error:
                self.errors.append(error)
                return
            if len(pids) > 1:
                self.errors.append(f"one connection led to {pids}")
            seen |= pids

    def forget(self) -> None:
        """Note who answers requests that begin from now on, and nobody else."""
        # What asks at present has the other set.
        self.pids = set()

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
