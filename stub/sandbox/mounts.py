"""What a stub's own mount namespace shows: everything read-only but what it may write, and closed folders opened.

A user of its own cannot pass a folder that is closed to others, such as somebody's home, to the files that were
granted below it. So the topmost closed folder is covered by an empty one, and what was granted is put back at the
places where it was.

Source: `mount(2)`, `mount_setattr(2)`, `open_tree(2)`, `move_mount(2)`, `tmpfs(5)`.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from typing import TYPE_CHECKING

from moonpool.stub.sandbox import kernel
from moonpool.stub.sandbox.files import OWN_THREADS
from moonpool.stub.sandbox.refused import SandboxRefused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moonpool.ipc.policy import Policy

_RDONLY, _NOSUID, _NODEV = 1, 2, 4
_BIND, _REC, _PRIVATE = 4096, 16384, 1 << 18
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
# OPEN_TREE_CLONE, and MOVE_MOUNT_F_EMPTY_PATH.
_CLONE, _FROM_FD = 1, 4
# A file of nothing takes a page's worth of the kernel's memory.
_BYTES_PER_FILE = 4096
_FEWEST_FILES = 1024


def rearrange(policy: Policy, user: int | None) -> bool:
    """Make the mounts what `policy` grants, for `user` where the process is to become another one.

    Returns whether everything else is read-only now, which takes Linux 5.12. Raises OSError where the kernel
    allows no mounts, and `SandboxRefused` where a path stays out of reach.
    """
    _mount("none", "/", "", _REC | _PRIVATE)
    umask = os.umask(0o022)
    try:
        if user is not None:
            _open_up([*policy.read, *policy.write], policy.scratch, user)
        if policy.scratch:
            _own_scratch(policy.scratch, policy.scratch_bytes, user)
    finally:
        os.umask(umask)
    written = [*policy.write, *([OWN_THREADS] if policy.devices else [])]
    return _forbid_writing([*written, *([policy.scratch] if policy.scratch else [])])


def _forbid_writing(kept: Iterable[str]) -> bool:
    """Make all read-only but what is at these paths, which stays as it is; False where the kernel does not know how."""
    copies: dict[str, int] = {}
    try:
        for path in kept:
            copies[path] = _copied(path)
        attributes = struct.pack("=QQQQ", _RDONLY | _NOSUID, 0, 0, 0)
        _call("mount_setattr", "/", _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, len(attributes))
        for path, fd in copies.items():
            _call("move_mount", path, fd, b"", _AT_FDCWD, os.fsencode(path), _FROM_FD)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        return False
    finally:
        for fd in copies.values():
            os.close(fd)
    return True


def _copied(path: str) -> int:
    """A descriptor of what is mounted at `path` and below, as it is: what is read-only there, nobody makes writable."""
    flags = _CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    return _call("open_tree", path, _AT_FDCWD, os.fsencode(path), flags)


def closed_above(path: str, user: int) -> str:
    """The topmost folder above `path` that `user`, who is in no group, cannot pass; "" for none."""
    place = "/"
    for part in path.split("/")[1:]:
        status = os.stat(place)
        bit = stat.S_IXUSR if status.st_uid == user else stat.S_IXOTH
        if not status.st_mode & bit:
            return place
        place = os.path.join(place, part)
    return ""


def _open_up(paths: Iterable[str], scratch: str, user: int) -> None:
    """Cover the closed folders above `paths` and `scratch`, and put back what is at `paths`."""
    found: dict[str, list[tuple[str, int]]] = {}
    fds: list[int] = []
    try:
        for path in sorted(path for path in paths if os.path.exists(path)):
            cover = closed_above(path, user)
            if cover:
                fds.append(os.open(path, os.O_PATH | os.O_CLOEXEC))
                found.setdefault(cover, []).append((path, fds[-1]))
        if scratch:
            found.setdefault(closed_above(scratch, user), [])
        found.pop("", None)
        for cover, below in found.items():
            if cover == "/":
                raise SandboxRefused("own_user", "/ is closed to others", "chmod o+x /")
            _mount("tmpfs", cover, "tmpfs", _NOSUID | _NODEV, "mode=0755,size=1m")
            for path, fd in below:
                _make_place(path, is_folder=stat.S_ISDIR(os.fstat(fd).st_mode))
                _mount(f"/proc/self/fd/{fd}", path, "", _BIND | _REC)
    finally:
        for fd in fds:
            os.close(fd)


def _make_place(path: str, *, is_folder: bool) -> None:
    if os.path.exists(path):  # inside another one that was put back
        return
    os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
    if not is_folder:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def _own_scratch(path: str, size_bytes: int, user: int | None) -> None:
    """A file system of its own, which goes with the process and cannot grow beyond its size."""
    os.makedirs(path, exist_ok=True)
    owner = os.geteuid() if user is None else user
    group = os.getegid() if user is None else user
    files = max(_FEWEST_FILES, size_bytes // _BYTES_PER_FILE)
    options = f"mode=0700,uid={owner},gid={group},size={size_bytes},nr_inodes={files}"
    _mount("tmpfs", path, "tmpfs", _NOSUID | _NODEV, options)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = (os.fsencode(source), os.fsencode(target), kind.encode())
    _call("mount", target, *texts, flags, options.encode())


def _call(name: str, path: str, *arguments: int | bytes) -> int:
    """A system call that is about `path`. Raises OSError, which says so."""
    try:
        return kernel.call(name, *arguments)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
