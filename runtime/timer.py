"""A moment of the monotonic clock as a descriptor that becomes readable then: Linux's timerfd.

The standard library has it from Python 3.13 on only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
# Later than any machine runs, and a number that the kernel takes.
_FAR_S = 1e9


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Timer:
    """One timer. One thread at a time."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._when: float | None = None

    def fileno(self) -> int:
        """Readable once the time has come."""
        return self._fd

    def set(self, when: float | None) -> None:
        """Go off at `time.monotonic()` seconds `when`, or never."""
        if when == self._when:
            return
        self._when = when
        # All zero would disarm it.
        nanoseconds = 0 if when is None else max(1, int(min(when, _FAR_S) * 1e9))
        spec = _Itimerspec()
        spec.value.seconds, spec.value.nanoseconds = divmod(nanoseconds, 1_000_000_000)
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> None:
        """After it went off: not readable any more."""
        self._when = None
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)
