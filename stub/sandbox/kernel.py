"""Makes system calls for which Python has no function, by name."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import partial
from typing import Callable

from moonpool.ipc import syscalls

# Not ctypes.util, which starts programs to find a library.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
NUMBERS = syscalls.numbers(syscalls.this_machine())


def call(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call. Raises OSError, with ENOSYS if its number is not known for this machine."""
    return prepared(name, *arguments)()


def prepared(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> Callable[[], int]:
    """Return a function that makes a system call as `call` does. The call itself takes few objects of Python.

    Numbers are passed as whole words: a plain int would leave the upper half of a register as it was.
    """
    number = NUMBERS.get(name)
    if number is None:
        raise OSError(errno.ENOSYS, f"{name} has no number that is known for this machine")
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return partial(_call, partial(_libc.syscall, ctypes.c_long(number), *words))


def _call(act: Callable[[], int]) -> int:
    result = act()
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def prctl(option: int, argument: int = 0, second: int = 0) -> None:
    """Call `prctl(2)` with zero for the other arguments. Raises OSError."""
    if _libc.prctl(option, argument, second, 0, 0) == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
