"""System calls for which Python has no function, by name."""

from __future__ import annotations

import ctypes
import errno
import os

from moonpool.stub.sandbox import syscalls

# Not ctypes.util, which starts programs to find a library.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
NUMBERS = syscalls.numbers(syscalls.this_machine())


def call(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call. Raises OSError, with ENOSYS where the number is not known for this machine.

    Numbers are passed as whole words: a plain int would leave the upper half of a register as it was.
    """
    number = NUMBERS.get(name)
    if number is None:
        raise OSError(errno.ENOSYS, f"{name} has no number that is known for this machine")
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *words)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def prctl(option: int, *arguments: int) -> int:
    """`prctl(2)`; what is not given is zero. Raises OSError."""
    return call("prctl", option, *arguments, *(0,) * (4 - len(arguments)))
