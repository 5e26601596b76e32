"""The users that instances are, where the runtime is root: each a user that nobody else is.

Several runtimes of a machine share the numbers. Which are taken is told by locks on the bytes of one file, which the
kernel takes off when the runtime ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import threading

# Numbers that Debian and systemd leave to nobody.
FIRST, LAST = 60600, 61183
_FILE = "/run/moonpool-users"
# CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_KILL, CAP_SETGID and CAP_SETUID; containers may take them from root.
_NEEDED = 1 << 0 | 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7

_lock = threading.Lock()
_taken: set[int] = set()
# Of the file, while one is taken: closing it takes the locks off.
_fd = -1


def take() -> int | None:
    """The number of a user and a group that are nobody's; None where this process cannot give its children users.

    Any thread may call it.
    """
    global _fd
    if os.geteuid() != 0 or not _are_mapped() or not _has_rights():
        return None
    with _lock:
        if _fd < 0:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                _fd = os.open(_FILE, flags, 0o600)
            except OSError:  # a file system that is read-only
                return None
        for user in range(FIRST, LAST + 1):
            if user not in _taken and _locked(user):
                _taken.add(user)
                return user
    return None


def _has_rights() -> bool:
    """Whether this root may make a process another user, give it a folder, and end it."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        (held,) = (int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return held & _NEEDED == _NEEDED


def _are_mapped() -> bool:
    """Whether these users and groups are anybody in this process's user namespace."""
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
    """No process is this user any more; nothing happens for None. Any thread may call it, and twice."""
    global _fd
    with _lock:
        if user not in _taken:
            return
        _taken.discard(user)
        fcntl.lockf(_fd, fcntl.LOCK_UN, 1, user)
        if not _taken:
            os.close(_fd)
            _fd = -1
