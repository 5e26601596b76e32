"""What a model prints: descriptors 1 and 2 are a pipe to the runtime, which reads it line by line."""

from __future__ import annotations

import faulthandler
import io
import signal
import sys


def prepare() -> None:
    """Send lines when they are whole, and the stacks of all threads when the process is in trouble.

    SIGTERM comes from a runtime that waited for too long, SIGKILL follows: so the log shows where
    the model hung. A model may install a handler of its own.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def prepare_fork() -> None:
    """In a process that the model forked, SIGTERM ends it, which is how `multiprocessing` ends its workers."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # no handler of the model's
        faulthandler.unregister(signal.SIGTERM)
