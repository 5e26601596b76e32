"""What to tell whoever wonders why a contained model failed: what was kept from it, and what grants it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.runtime.repository_files import walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moonpool.ipc.policy import Policy

# As Python words EACCES, which Landlock and the modes of files give, and EPERM, which the filter for calls gives.
_FILE = re.compile(r"\[Errno 13\] Permission denied: '([^']+)'")
_CALL = "[Errno 1] Operation not permitted"


def withheld(message: str, policy: Policy) -> str:
    """What grants a model what its error says that it was refused; "" where nothing does, or nothing need."""
    if not policy.is_contained:
        return ""
    found = _FILE.search(message)
    if found is not None:
        # A model may name what can be the path of nothing.
        with contextlib.suppress(ValueError):
            return f"\n{_about_file(found[1], policy)}"
    if _CALL in message:
        return (
            f"\nA model in the sandbox '{policy.level}' has no network and no other processes; the parameters "
            "MOONPOOL_SANDBOX_PORTS and MOONPOOL_SANDBOX_SYSCALLS grant some of it."
        )
    return ""


def _about_file(path: str, policy: Policy) -> str:
    if not _is_in(path, policy.read):
        return (
            f"A model in the sandbox '{policy.level}' sees no files but its own and its interpreter's; the "
            "parameter MOONPOOL_SANDBOX_PATHS grants others."
        )
    if policy.user is not None and any(
        is_closed(place) for place in (Path(path), Path(path).parent)
    ):
        return (
            f"It is the model's to read, but closed to user {policy.user}, which this instance is: let others "
            "read it (chmod -R o+rX)."
        )
    return (
        f"A model in the sandbox '{policy.level}' may read it, but write only into its scratch folder "
        "(TMPDIR); the parameter MOONPOOL_SANDBOX_PATHS grants other places with rw: before them."
    )


def _is_in(path: str, folders: Sequence[str]) -> bool:
    real = os.path.realpath(path)
    return any(os.path.commonpath([real, folder]) == folder for folder in folders)


def is_closed(path: Path) -> bool:
    """Whether a user who neither owns it nor is in its group cannot read this file, or list this folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    wanted = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
    return mode & wanted != wanted


def closed_files(folder: Path) -> Iterator[Path]:
    """Find files in a folder, and the folder itself, that users of instances could not read; nothing below closed folders.

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
