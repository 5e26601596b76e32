"""Keeping stubs from looking into the processes that serve them."""

from __future__ import annotations

import ctypes
import logging
import os
import threading

_log = logging.getLogger("moonpool")
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4
_lock = threading.Lock()


def forbid_looking_inside() -> None:
    """From now on no process of the same user can trace this one, or read its memory, environment and descriptors.

    Nor is there a core dump of it; whoever wants to look inside must be root. See `PR_SET_DUMPABLE` in prctl(2).
    Raises OSError. Any thread may call it, and many times.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with _lock:
        if libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0:
            return
        if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "PR_SET_DUMPABLE was refused")
    _log.info(
        "process %d can be looked into by root alone, as it serves untrusted models", os.getpid()
    )
