"""Starts moonpool's own threads in a stub, and ends the process when one of them fails.

Theory of operation. Other threads, and the runtime, wait for what these threads do, without a deadline of their own. A thread that
died without a word would leave them waiting for ever, and there may be no memory left to send an error. So the
process ends with the traceback as its last output. The runtime then sees the death, fails the requests, and
starts the stub again. All threads are daemons: none keeps the process at its end.
"""

from __future__ import annotations

import _thread
import os
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn


def end_process() -> NoReturn:
    """Print the exception that is being handled, and end the process. Any thread may call this.

    For failures that leave others waiting, as when memory runs out: the runtime fails their requests and starts the stub again.
    """
    try:
        traceback.print_exc()
    finally:
        os._exit(1)


def start(work: Callable[[], object], name: str) -> threading.Thread:
    """Run `work` on a daemon thread. The process ends if `work` raises.

    Raises RuntimeError if the machine has no thread to spare.
    """

    def run() -> None:
        try:
            work()
        except BaseException:
            end_process()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def start_bare(work: Callable[[], object]) -> None:
    """Start a thread without the locks of `threading`, which the interrupted code below the caller may hold."""

    def run() -> None:
        try:
            work()
        except BaseException:
            end_process()

    _thread.start_new_thread(run, ())
