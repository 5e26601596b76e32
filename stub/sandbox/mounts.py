"""Rearranges a stub's own mount namespace: all is read-only but the places to write to, and closed folders are covered.

A private user cannot pass a folder that is closed to others, such as a home, to the files below it that it
needs. So the topmost closed folder is covered by an empty one, and the needed files are mounted again at their
places. Granted paths have mounts of their own (`granted.py`).

A process also gets shared memory of its own: a folder in place of /dev/shm, on the same file system in memory as its
scratch folder, so that one limit holds for both. Nobody else's shared memory is there. If a grant names /dev/shm, or a
folder above or below, it is left as it is.

The order matters. The mounts of granted paths are copied first, because later mounts may cover their places. Then
closed folders are covered, and the file system in memory is mounted. Then everything is made read-only. Last, the
copies that stay writable are attached, outer ones before inner ones.

Source: `mount(2)`, `mount_setattr(2)`, `open_tree(2)`, `move_mount(2)`, `tmpfs(5)`.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from moonpool.ipc.policy import Policy
from moonpool.stub.sandbox import kernel, namespaces
from moonpool.stub.sandbox.granted import Granted, closed_above
from moonpool.stub.sandbox.landlock import OWN_THREADS
from moonpool.stub.sandbox.outcome import SandboxRefused

_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_BIND, _REC, _PRIVATE = 4096, 16384, 1 << 18
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
# OPEN_TREE_CLONE, and MOVE_MOUNT_F_EMPTY_PATH.
_CLONE, _FROM_FD = 1, 4
# An empty file takes about a page of the kernel's memory.
_BYTES_PER_FILE = 4096
_FEWEST_FILES = 1024
# `covers` recognizes the empty folders by this size.
_COVER_BYTES = 1 << 20
# The name of the layer that is on if the process has shared memory of its own, and the place of it.
LAYER = "shared_memory"
SHARED_MEMORY = "/dev/shm"
# The two folders of the file system in memory.
_SCRATCH, _SHARED = "scratch", "shm"


class Arranged(NamedTuple):
    """Tells what came of it."""

    # True if nothing can be written to but what is meant to be, which takes Linux 5.12.
    is_read_only: bool
    # The folder of the process's own shared memory; "" for none.
    shared_memory: str


def rearrange(policy: Policy, user: int | None, granted: Sequence[Granted]) -> Arranged:
    """Arrange the mounts as `policy` says, and attach `granted`. If the process will change its user, it becomes
    `user`.

    Raises OSError if the kernel allows no mounts, and `SandboxRefused` if a path stays out of reach.
    """
    mount("none", "/", "", _REC | _PRIVATE)
    umask = os.umask(0o022)
    try:
        with ExitStack() as held:
            for each in granted:
                # Before another mount covers the path.
                each.copy_mount()
            if user is not None:
                _open_up(policy.read, granted, policy.scratch, user)
            attached = [(each.path, each.attach) for each in granted]
            writable = {OWN_THREADS: OWN_THREADS} if policy.devices else {}
            shared_memory = ""
            if policy.scratch:
                _make_memory(policy.scratch, policy.scratch_bytes, user)
                writable[policy.scratch] = f"{policy.scratch}/{_SCRATCH}"
                shared_memory = _place_of_shared_memory(policy.granted)
            if shared_memory:
                writable[shared_memory] = f"{policy.scratch}/{_SHARED}"
            for path, source in writable.items():
                fd = _copied(source)
                held.callback(os.close, fd)
                attached.append((path, partial(_attach, path, fd)))
            is_read_only = _forbid_writing()
            # Outer ones first, because a folder hides the mounts in it when it is attached.
            for _, attach in sorted(attached, key=itemgetter(0)):
                attach()
    finally:
        os.umask(umask)
    return Arranged(is_read_only, shared_memory)


def show_own_processes() -> None:
    """Enter another mount namespace, whose /proc has the processes of this process's PID namespace and no others.

    Raises OSError, as in containers that hide a part of /proc.
    """
    namespaces.enter_mounts()
    mount("none", "/", "", _REC | _PRIVATE)
    mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)


def _place_of_shared_memory(granted: Iterable[tuple[str, bool]]) -> str:
    """Return the folder in whose place a process gets its own shared memory; "" if it is granted, or if there is
    none.
    """
    place = os.path.realpath(SHARED_MEMORY)
    names = [path.rstrip("/") + "/" for path, _ in granted]
    is_granted = any(f"{place}/".startswith(name) or name.startswith(f"{place}/") for name in names)
    return "" if is_granted or not os.path.isdir(place) else place


def _forbid_writing() -> bool:
    """Make all mounts read-only. Returns False if the kernel does not know how."""
    attributes = struct.pack("=QQQQ", _RDONLY | _NOSUID, 0, 0, 0)
    try:
        _call("mount_setattr", "/", _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return False
    return True


def _attach(path: str, fd: int) -> None:
    _call("move_mount", path, fd, b"", _AT_FDCWD, os.fsencode(path), _FROM_FD)


def _copied(path: str) -> int:
    """Return the descriptor of a copy of the mounts at `path` and below. Mounts that are read-only stay so."""
    flags = _CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return _call("open_tree", path, _AT_FDCWD, os.fsencode(path), flags)


def _open_up(paths: Iterable[str], granted: Iterable[Granted], scratch: str, user: int) -> None:
    """Cover the closed folders above `paths`, `granted` and `scratch`, and mount `paths` again."""
    found: dict[str, list[tuple[str, int]]] = {}
    fds: list[int] = []
    try:
        for path in sorted(path for path in paths if os.path.exists(path)):
            cover = closed_above(path, user)
            if cover:
                fds.append(os.open(path, os.O_PATH | os.O_CLOEXEC))
                found.setdefault(cover, []).append((path, fds[-1]))
        places = [(each.path, closed_above(each.path, user), each.fd) for each in granted]
        for cover in (closed_above(scratch, user) if scratch else "", *(cover for _, cover, _ in places)):
            found.setdefault(cover, [])
        found.pop("", None)
        for cover, below in found.items():
            if cover == "/":
                raise SandboxRefused("own_user", "/ is closed to others", "chmod o+x /")
            options = f"mode=0755,size={_COVER_BYTES}"
            mount("tmpfs", cover, "tmpfs", _NOSUID | _NODEV, options)
            for path, fd in below:
                make_place(path, fd)
                mount(f"/proc/self/fd/{fd}", path, "", _BIND | _REC)
        for path, cover, fd in places:
            if cover:
                make_place(path, fd)
    finally:
        for fd in fds:
            os.close(fd)


def covers(paths: Iterable[str]) -> list[str]:
    """Find the empty folders that cover closed ones above these paths, inside the namespace."""
    above: set[str] = set()
    for path in paths:
        while path != "/":
            path = os.path.dirname(path)
            above.add(path)
    return [path for path in above if os.path.ismount(path) and _size_of(path) == _COVER_BYTES]


def _size_of(path: str) -> int:
    status = os.statvfs(path)
    return status.f_blocks * status.f_frsize


def make_place(path: str, fd: int) -> None:
    """Make a folder or a file at `path`, of the kind that the descriptor has."""
    if os.path.exists(path):  # inside another path that was mounted again
        return
    is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        # O_EXCL, because another process may have put a link there by now.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _make_memory(path: str, size_bytes: int, user: int | None) -> None:
    """Mount a file system in memory, which ends with the process and cannot grow beyond its size, and make its two
    folders.
    """
    os.makedirs(path, exist_ok=True)
    owner = os.geteuid() if user is None else user
    group = os.getegid() if user is None else user
    files = max(_FEWEST_FILES, size_bytes // _BYTES_PER_FILE)
    options = f"mode=0755,size={size_bytes},nr_inodes={files}"
    mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, options)
    for name in (_SCRATCH, _SHARED):
        os.mkdir(f"{path}/{name}", 0o700)
        os.chown(f"{path}/{name}", owner, group)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount something, see mount(2). Raises OSError with the path of the place."""
    texts = (os.fsencode(source), os.fsencode(target), kind.encode())
    _call("mount", target, *texts, flags, options.encode())


def _call(name: str, path: str, *arguments: int | bytes) -> int:
    """Make a system call about `path`. Raises OSError with that path."""
    try:
        return kernel.call(name, *arguments)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
