"""Settles who removes the shared memory, semaphores and folders that a model makes with `multiprocessing` or joblib.

These libraries start a process, the *tracker*, that removes them when all processes that use it have ended: each of them has the other end
of its pipe. The runtime gives it the time for that (`runtime/process/child.py`).
"""

from __future__ import annotations

import contextlib
import os
import sys

_MODULES = (
    "multiprocessing.resource_tracker",
    "joblib.externals.loky.backend.resource_tracker",
    "loky.backend.resource_tracker",
)


def forget() -> None:
    """Let a fork of a template have trackers of its own: that of the template would remove nothing before the template ends."""
    for name in _MODULES:
        tracker = getattr(sys.modules.get(name), "_resource_tracker", None)
        if getattr(tracker, "_fd", None) is not None:
            with contextlib.suppress(OSError):
                os.close(tracker._fd)
            tracker._fd = tracker._pid = None
