"""Explains why a contained model could not load: a sentence for its error, with the cure."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from moonpool.ipc.denials import TOLD
from moonpool.ipc.policy import Policy
from moonpool.runtime.process.files import walk

# As Python words EACCES, which Landlock and the modes of files give, and EPERM, which the filter for calls gives.
_FILE = re.compile(r"\[Errno 13\] Permission denied: '([^']+)'")
_CALL = "[Errno 1] Operation not permitted"


def withheld(message: str, policy: Policy) -> str:
    """Return a sentence that says how to allow the refused act behind an error; "" if none was refused, or the stub has
    said it.
    """
    # With TOLD in it, the stub has named the option already.
    if not policy.is_contained or TOLD in message:
        return ""
    found = _FILE.search(message)
    if found is not None:
        # A model may name a text that cannot be a path.
        with contextlib.suppress(ValueError):
            return f"\n{_about_file(found[1], policy)}"
    if _CALL in message:
        return (
            f"\nA model in the sandbox '{policy.level}' has no network and no other processes; the parameters "
            "MOONPOOL_SANDBOX_PORTS and MOONPOOL_SANDBOX_SYSCALLS grant some of it."
        )
    return ""


def _about_file(path: str, policy: Policy) -> str:
    if not _is_in(path, [*policy.read, *(path for path, _ in policy.granted)]):
        return (
            f"A model in the sandbox '{policy.level}' sees no files but its own and its interpreter's; the "
            "parameter MOONPOOL_SANDBOX_PATHS grants others."
        )
    folder = _of_another_owner(path, policy)
    if folder:
        return (
            f"It lies in a granted folder and belongs to another user than the folder: give it to the folder's owner "
            f"(chown -R --reference={folder} {folder})."
        )
    if policy.user is not None and any(is_closed(place) for place in (Path(path), Path(path).parent)):
        return (
            f"It is the model's to read, but closed to user {policy.user}, which this instance is: let others "
            "read it (chmod -R o+rX)."
        )
    return (
        f"A model in the sandbox '{policy.level}' may read it, but write only into its scratch folder "
        "(TMPDIR); the parameter MOONPOOL_SANDBOX_PATHS grants other places with rw: before them."
    )


def _of_another_owner(path: str, policy: Policy) -> str:
    """Return the granted folder that this file lies in, if the two have different owners; "" if not."""
    for folder, _ in policy.granted if policy.user is not None else ():
        # If the file could not be made, its folder refused it.
        place = path if os.path.lexists(path) else os.path.dirname(path)
        with contextlib.suppress(OSError):  # it is gone by now
            if _is_in(place, [folder]) and os.lstat(place).st_uid != os.lstat(folder).st_uid:
                return folder
    return ""


def _is_in(path: str, folders: Sequence[str]) -> bool:
    real = os.path.realpath(path)
    return any(os.path.commonpath([real, folder]) == folder for folder in folders)


def is_closed(path: Path) -> bool:
    """Return True if a user who neither owns this path nor is in its group cannot read the file, or list the folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    wanted = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
    return mode & wanted != wanted


def closed_files(folder: Path) -> Iterator[Path]:
    """Yield the paths in a folder, and the folder itself, that users of instances cannot read, without those below
    closed folders.

    Raises `RepositoryError` if the folder has too many files.
    """
    if is_closed(folder):
        yield folder
        return
    skipped: set[str] = set()
    for entry in walk(folder):
        path = Path(entry.path)
        if str(path.parent) in skipped:
            skipped.add(entry.path)
        elif is_closed(path):
            skipped.add(entry.path)
            yield path
