"""The folders in which contained models may write, one for each process."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from pathlib import Path

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
    """Remove it with what is in it, whatever rights its owner left. Its processes have ended. Follows no link."""
    for parent, folders, _ in os.walk(folder):
        os.chmod(parent, 0o700)
        for path in (os.path.join(parent, name) for name in folders):
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _remove_leftovers(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*-*"):
        pid = folder.name[len(_PREFIX) :].split("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}") and _is_ours(folder):
            remove(str(folder))


def _is_ours(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        status = folder.lstat()
        return os.geteuid() in (0, status.st_uid)
    return False
