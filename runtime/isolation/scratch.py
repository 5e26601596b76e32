"""Makes, measures and removes the folders in which contained models may write, one for each process."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import tempfile
from pathlib import Path

from moonpool.ipc.source.folders import empty
from moonpool.runtime.isolation import users
from moonpool.runtime.log import RuntimeLog

_log = RuntimeLog("moonpool")
_PREFIX = "moonpool-scratch-"
_BLOCK_BYTES = 512
# Even an empty file takes some of the kernel's memory.
_FILE_BYTES = 1024


def make(user: int | None) -> str:
    """Make an empty folder for `user`, None for this process's user, and return its path. Raises OSError.

    The first call removes folders of runtimes that were killed.
    """
    _remove_leftovers(Path(tempfile.gettempdir()))
    folder = os.path.realpath(tempfile.mkdtemp(prefix=prefix_of(os.getpid())))
    if user is not None:
        os.chown(folder, user, user)
    return folder


def prefix_of(pid: int) -> str:
    """Return how the names of the folders of a runtime begin.

    Containers may share a folder for temporary files, and a number says nothing about another one's processes: the PID
    namespace is part of the name.
    """
    return f"{_PREFIX}{os.stat('/proc/self/ns/pid').st_ino}.{pid}-"


def remove(folder: str) -> None:
    """Remove a folder and all in it, whatever the modes and however deep. Follows no link.

    Its processes have ended. May be called many times.
    """
    try:
        empty(folder)
        _take_back(folder)
        os.rmdir(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("cannot remove the scratch folder %s: %s", folder, error)


def _take_back(folder: str) -> None:
    """Make root the owner of a folder that `make` gave away.

    Only its owner may remove it from /tmp, unless root may remove anything, as it may not in most containers.
    """
    if os.geteuid() == 0:
        # Its user could put a link in its place.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchown(fd, 0, -1)
        finally:
            os.close(fd)


@functools.cache
def _remove_leftovers(place: Path) -> None:
    of_namespace = prefix_of(0).removesuffix("0-")
    for folder in place.glob(f"{of_namespace}*-*"):
        pid = folder.name[len(of_namespace) :].partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and _is_ours(folder):
            remove(str(folder))


def _is_ours(folder: Path) -> bool:
    """Return True if a runtime made the folder. Other users may give such a name to a folder of theirs, or to a
    link.
    """
    with contextlib.suppress(OSError):
        status = folder.lstat()
        is_given = os.geteuid() == 0 and users.FIRST <= status.st_uid <= users.LAST
        return stat.S_ISDIR(status.st_mode) and (is_given or status.st_uid == os.geteuid())
    return False


def size_of_folder(path: str, enough_bytes: int) -> int:
    """Return the bytes that the files in a folder take, or a little more than `enough_bytes`. Follows no link.

    A folder that cannot be listed, because of its mode or the length of its path, counts as more than enough.
    """
    size_bytes, folders = 0, [path]
    while folders and size_bytes <= enough_bytes:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    size_bytes += status.st_blocks * _BLOCK_BYTES + _FILE_BYTES
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    if size_bytes > enough_bytes:
                        break
        except (FileNotFoundError, NotADirectoryError):
            continue  # the folder was removed meanwhile
        except OSError:
            return enough_bytes + 1
    return size_bytes
