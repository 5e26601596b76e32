"""The folders in which contained models may write, one for each process."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path

from moonpool.runtime.sandbox import users

_log = logging.getLogger("moonpool")
_PREFIX = "moonpool-scratch-"


def make(user: int | None) -> str:
    """An empty folder for `user`, None for who this process is. Raises OSError.

    Before the first one, folders of runtimes that were killed go.
    """
    _remove_leftovers(Path(tempfile.gettempdir()))
    folder = os.path.realpath(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
    if user is not None:
        os.chown(folder, user, user)
    return folder


def remove(folder: str) -> None:
    """Remove it with what is in it, whatever rights its owner left, and however deep that is. Follows no link.

    Its processes have ended. May be called many times.
    """
    try:
        while folders := _emptied(folder):
            # What is deep comes up, so that no path is too long.
            for each in folders:
                for below in _emptied(each):
                    os.chmod(below, 0o700)
                    os.rename(below, f"{folder}/{secrets.token_hex(16)}")
                os.rmdir(each)
        os.rmdir(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("the scratch folder %s stays: %s", folder, error)


def _emptied(folder: str) -> list[str]:
    """The folders in it, once it has nothing else."""
    os.chmod(folder, 0o700)
    with os.scandir(folder) as entries:
        found = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for path, is_folder in found:
        if not is_folder:
            os.unlink(path)
    return [path for path, is_folder in found if is_folder]


@functools.cache
def _remove_leftovers(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*-*"):
        pid = folder.name[len(_PREFIX) :].split("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and _is_ours(folder):
            remove(str(folder))


def _is_ours(folder: Path) -> bool:
    """Whether this process or one like it made it: others may name what is theirs so, or a link to what is not."""
    with contextlib.suppress(OSError):
        status = folder.lstat()
        is_given = os.geteuid() == 0 and users.FIRST <= status.st_uid <= users.LAST
        return stat.S_ISDIR(status.st_mode) and (is_given or status.st_uid == os.geteuid())
    return False
