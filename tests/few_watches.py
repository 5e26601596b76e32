"""A program of a user who has few watches of epoll left:

    python tests/few_watches.py 64 PROGRAM ARGUMENT...

A filter says that there is none, as the kernel does (ENOSPC), for every descriptor whose number is not below the first
argument. So who tests says when they are gone, by the number of connections, and nobody else on the machine is short of
them.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from pathlib import Path

from moonpool.stub.sandbox import identity, kernel, seccomp

_EPOLL_CTL_ADD = 1
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000
_NUMBER, _OPERATION, _FD = 0, 24, 32


def command(first: int) -> list[str]:
    """The words before a program."""
    return [sys.executable, str(Path(__file__)), str(first)]


def lack(first: int) -> None:
    """Have no watches for descriptors from this number on, in this process and its children, for good."""
    code = [
        (_LOAD, 0, 0, _NUMBER),
        # With io_uring, libuv would call epoll_ctl past the filter.
        (_IF_EQUAL, 0, 1, kernel.NUMBERS["io_uring_setup"]),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_IF_EQUAL, 0, 5, kernel.NUMBERS["epoll_ctl"]),
        (_LOAD, 0, 0, _OPERATION),
        (_IF_EQUAL, 0, 3, _EPOLL_CTL_ADD),
        (_LOAD, 0, 0, _FD),
        (_IF_AT_LEAST, 0, 1, first),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSPC),
        (_RETURN, 0, 0, _ALLOW),
    ]
    identity.forbid_new_privileges()
    seccomp.install(b"".join(struct.pack("=HBBI", *each) for each in code))


def main() -> None:
    lack(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
