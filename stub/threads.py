"""Starts moonpool's own threads in a stub, and ends the process when one of them fails.

Theory of operation. Other threads, and the runtime, wait for what these threads do, without a deadline of their own. A
thread that died without a word would leave them waiting for ever, and there may be no memory left to send an error. So
the process ends with the traceback as its last output. The runtime then sees the death, fails the requests, and starts
the stub again. All threads are daemons: none keeps the process at its end.

Libraries such as gevent and eventlet replace threads and locks when a model patches with them, usually at its top. So
this module keeps Python's own (`Lock`, `RLock`, `sleep`, `_start_native`) from before the model is imported, and the
stub makes its threads and locks with them: a function that gevent runs on the main thread's loop would wait for ever
while that thread receives. And gevent patches locks that are held, as those of the import that is going on, only if
`threading` knows no thread but the main one. So a thread that runs before that import is a bare one. Eventlet goes
through all that it can reach from modules by dictionaries and lists, and puts a lock of its own in place of each RLock.
So an object of the stub keeps an RLock in a slot.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, Union

Lock, RLock, _start_native = _thread.allocate_lock, _thread.RLock, _thread.start_new_thread
sleep = time.sleep


def end_process() -> NoReturn:
    """Print the exception that is being handled, and end the process. Any thread may call this.

    For failures that leave others waiting, as when memory runs out: the runtime fails their requests and starts the
    stub again.
    """
    try:
        traceback.print_exc()
    finally:
        os._exit(1)


class BareThread:
    """A thread that `threading` does not know."""

    def __init__(self, work: Callable[[], object]) -> None:
        """Start it. Raises RuntimeError if the machine has no thread to spare."""
        self._ended = Lock()
        self._ended.acquire()
        self._work = work
        _start_native(self._run, ())

    def _run(self) -> None:
        try:
            self._work()
        except BaseException:
            end_process()
        finally:
            self._ended.release()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end, or for so long."""
        if self._ended.acquire(timeout=-1 if timeout_s is None else timeout_s):
            self._ended.release()

    def is_alive(self) -> bool:
        return self._ended.locked()


Thread = Union[threading.Thread, BareThread]


def start(work: Callable[[], object], name: str) -> Thread:
    """Run `work` on a daemon thread. The process ends if `work` raises.

    Raises RuntimeError if the machine has no thread to spare.
    """
    if _thread.start_new_thread is not _start_native:
        return BareThread(work)

    def run() -> None:
        try:
            work()
        except BaseException:
            end_process()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
