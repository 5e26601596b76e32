"""Landlock: what a process may do with files, which ports it may use, whom it may signal.

Rights belong to what a path leads to, not to its name, so links open nothing. The rules hold for the thread that
puts them on and all that it begins: no other thread may be there yet.
Source: `landlock(7)` and `Documentation/userspace-api/landlock.rst`.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from typing import TYPE_CHECKING

from moonpool.stub.sandbox import kernel

if TYPE_CHECKING:
    from collections.abc import Iterable

_GET_VERSION = 1
_PATH_BENEATH, _PORT = 1, 2

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
# MAKE_CHAR and MAKE_BLOCK
_MAKE_DEVICES = 1 << 6 | 1 << 11
READ = READ_FILE | READ_DIR
# How many of the rights over files there are, by ABI.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_MOST_RIGHTS = 16
CHANGE = (1 << _MOST_RIGHTS) - 1 & ~(EXECUTE | _MAKE_DEVICES | _IOCTL_DEVICE)
# What programs are for that talk to a driver.
USE_DEVICE = READ_FILE | WRITE_FILE | _IOCTL_DEVICE
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE | _IOCTL_DEVICE

_BIND, _CONNECT = 1, 2
# Abstract sockets and signals.
_SCOPES = 3

KNOWS_TRUNCATE, KNOWS_PORTS, KNOWS_SCOPES = 3, 4, 6


def abi() -> int:
    """Which version of Landlock the kernel has; 0 for none."""
    try:
        return kernel.call("landlock_create_ruleset", None, 0, _GET_VERSION)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
            return 0
        raise


def restrict(version: int, paths: Iterable[tuple[str, int]], ports: Iterable[int]) -> None:
    """Leave this thread nothing but these rights over what is at each path, and connections to these ports.

    What is not there is passed over, and so are ports where this version does not know of them. Needs no_new_privs. Raises OSError, with the path where one was the reason.
    """
    handled = (1 << _RIGHTS.get(version, _MOST_RIGHTS)) - 1
    words = [handled]
    if version >= KNOWS_PORTS:
        words.append(_BIND | _CONNECT)
    if version >= KNOWS_SCOPES:
        words.append(_SCOPES)
    ruleset = kernel.call(
        "landlock_create_ruleset", struct.pack(f"={len(words)}Q", *words), 8 * len(words), 0
    )
    try:
        for path, rights in paths:
            _allow(ruleset, path, rights & handled)
        for port in ports if version >= KNOWS_PORTS else ():
            kernel.call("landlock_add_rule", ruleset, _PORT, struct.pack("=QQ", _CONNECT, port), 0)
        kernel.call("landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        # A rule for a file must not name rights over folders.
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= _OF_FILES
        kernel.call("landlock_add_rule", ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(fd)
