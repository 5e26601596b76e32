"""The standard library's ways: a pool, a pipe, a pair of queues. All of them pickle."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from typing import Any

from moonpool.benchmarks.suites.peer.peer import Floats, Peer, rate_of_threads

# Never fork: this process has threads.
_processes = multiprocessing.get_context("spawn")


def add_sub(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """The work."""
    return a + b, a - b


class Pool(Peer):
    """concurrent.futures.ProcessPoolExecutor with one worker."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, _processes)

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        return self._pool.submit(add_sub, a, b).result()

    def rate(self, callers: int, total: int) -> float:
        return rate_of_threads(self, callers, total)

    def close(self) -> None:
        self._pool.shutdown()


class Pipe(Peer):
    """multiprocessing.Pipe."""

    def __init__(self) -> None:
        self._ours, theirs = _processes.Pipe()
        self._process = _processes.Process(target=serve_pipe, args=(theirs,))
        self._process.start()
        theirs.close()

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        self._ours.send((a, b))
        answer: tuple[Floats, Floats] = self._ours.recv()
        return answer

    def close(self) -> None:
        self._ours.send(None)
        self._process.join()
        self._process.close()
        self._ours.close()


def serve_pipe(pipe: Connection) -> None:
    """Serve in the other process."""
    while (inputs := pipe.recv()) is not None:
        pipe.send(add_sub(*inputs))


class Queues(Peer):
    """Two multiprocessing.Queue."""

    def __init__(self) -> None:
        self._asked: Queue[tuple[Floats, Floats] | None] = _processes.Queue()
        self._answered: Queue[tuple[Floats, Floats]] = _processes.Queue()
        self._process = _processes.Process(target=serve_queues, args=(self._asked, self._answered))
        self._process.start()

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        self._asked.put((a, b))
        return self._answered.get()

    def close(self) -> None:
        end_queues(self._process, self._asked, self._answered)


def end_queues(process: Any, asked: Any, answered: Any) -> None:
    """Send None, which ends the process, and close both queues; also for queues of torch."""
    asked.put(None)
    process.join()
    process.close()
    for queue in (asked, answered):
        queue.close()
        queue.join_thread()


def serve_queues(asked: Queue[tuple[Floats, Floats] | None], answered: Queue[tuple[Floats, Floats]]) -> None:
    """Serve in the other process."""
    while (inputs := asked.get()) is not None:
        answered.put(add_sub(*inputs))
