"""Sets up the output of a stub, and its signals: descriptors 1 and 2 are a pipe, which the runtime reads line by
line.
"""

from __future__ import annotations

import faulthandler
import io
import signal
import sys


def prepare() -> None:
    """Write each line as soon as it is whole, and the stacks of all threads at a crash or at SIGTERM.

    The runtime sends SIGTERM when it has waited for too long, and SIGKILL a moment later. So the log shows where the
    model hung. A model may install its own handler.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=False)
    # Not SIG_IGN: an exec keeps it, and programs that the model starts would ignore the signal, too.
    signal.signal(signal.SIGINT, _stay)


def _stay(*_: object) -> None:
    """Do nothing at SIGINT: the runtime ends this process."""


def prepare_fork() -> None:
    """Let SIGTERM end a process that the model forked: `multiprocessing` ends its workers so."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # no handler of the model's
        faulthandler.unregister(signal.SIGTERM)
