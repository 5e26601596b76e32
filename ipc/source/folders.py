"""Names the folder of which a run's files come out, and empties folders whose contents somebody else made."""

from __future__ import annotations

import contextlib
import os
import secrets

OUT = "out"
MOST_FILES = 1000


def empty(folder: str) -> None:
    """Remove all that is in a folder, whatever the modes and however deep. Follows no link. Raises OSError.

    Nobody else may change it meanwhile.
    """
    while True:
        folders = _emptied(folder)
        if not folders:
            return
        # Deep folders are moved up, so that no path is too long.
        for each in folders:
            for below in _emptied(each):
                _open(below)
                os.rename(below, f"{folder}/{secrets.token_hex(16)}")
            os.rmdir(each)


def _emptied(folder: str) -> list[str]:
    """Remove the files of a folder, and return its folders."""
    _open(folder)
    with os.scandir(folder) as entries:
        found = [(entry.path, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for path, is_folder in found:
        if not is_folder:
            os.unlink(path)
    return [path for path, is_folder in found if is_folder]


def _open(folder: str) -> None:
    """Let this process into a folder, whatever its mode."""
    # The root of a container may have no right to do this in a folder of another user (CAP_FOWNER), and needs no mode.
    with contextlib.suppress(PermissionError):
        os.chmod(folder, 0o700)
