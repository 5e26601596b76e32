"""Private users for instances, if the runtime is root.

Theory of operation. Several runtimes of a machine share the numbers. A runtime takes a number by a lock on one byte of
a file, and the kernel releases the lock when the runtime ends, however it ends. Such locks belong to the process: they
do not keep two threads apart, and closing any descriptor of the file releases all of them. So within the process
`_taken` says which numbers are in use, the file is open exactly once, and it is closed only when the last number was
given back. `_lock` guards all three.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from moonpool.ipc.policy import FIRST_SHARED_USER, LAST_SHARED_USER

# Numbers that Debian and systemd leave unused. Those from FIRST_SHARED_USER on are users of shared folders.
FIRST, LAST = 60600, LAST_SHARED_USER
_FILE = "/run/moonpool-users"
# CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_KILL, CAP_SETGID and CAP_SETUID; containers may take them from root.
_NEEDED = 1 << 0 | 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7

_lock = threading.Lock()
_taken: set[int] = set()
# The descriptor of the file while a number is taken. Closing it releases the locks.
_fd = -1


def take() -> int | None:
    """Take an unused number of a user and a group; return None if this process cannot give its children other users.

    Any thread may call it.
    """
    global _fd
    if not _can_give():
        return None
    with _lock:
        if _fd < 0:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                _fd = os.open(_FILE, flags, 0o600)
            except OSError:  # a file system that is read-only
                return None
        for user in range(FIRST, FIRST_SHARED_USER):
            if user not in _taken and _locked(user):
                _taken.add(user)
                return user
    return None


def of_folders(paths: Iterable[str]) -> int | None:
    """Return the shared user that owns one of these folders; None if there is none.

    The operator made it the owner. No instance has it alone, and it need not be given back.
    Raises OSError.
    """
    if not _can_give():
        return None
    owners = {os.stat(path, follow_symlinks=False).st_uid for path in paths}
    return min(owners & set(range(FIRST_SHARED_USER, LAST_SHARED_USER + 1)), default=None)


def unshared(root: Path) -> int | None:
    """Return a shared user that owns no folder in `root`; None if this process cannot give its children other users.

    Raises OSError if all are taken.
    """
    if not _can_give():
        return None
    owners = {path.lstat().st_uid for path in root.iterdir()}
    # From the last on, as operators take the first ones for folders of their own.
    for user in range(LAST_SHARED_USER, FIRST_SHARED_USER - 1, -1):
        if user not in owners:
            return user
    raise OSError(errno.EUSERS, f"no user is left for another folder; remove some of {root}")


def _can_give() -> bool:
    return os.geteuid() == 0 and _are_mapped() and _has_rights()


def _has_rights() -> bool:
    """Return True if this root may change the user of a process, give it a folder, and end it."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        (held,) = (int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return held & _NEEDED == _NEEDED


def _are_mapped() -> bool:
    """Return True if this process's user namespace has these users and groups."""
    return all(_maps(name) for name in ("uid_map", "gid_map"))


def _maps(name: str) -> bool:
    with open(f"/proc/self/{name}", encoding="ascii") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= FIRST and first + count > LAST for first, _, count in ranges)


def _locked(user: int) -> bool:
    try:
        fcntl.lockf(_fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, user)
    except OSError:  # another process has it
        return False
    return True


def give_back(user: int | None) -> None:
    """Give a user back when no process runs as it any more. Does nothing for None. Any thread may call it, and
    twice.
    """
    global _fd
    with _lock:
        if user not in _taken:
            return
        _taken.discard(user)
        fcntl.lockf(_fd, fcntl.LOCK_UN, 1, user)
        if not _taken:
            os.close(_fd)
            _fd = -1
