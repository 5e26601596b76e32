"""The files of a model: when they changed, and a directory made of files that a caller brings."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.runtime.repository import RepositoryError

if TYPE_CHECKING:
    from collections.abc import Mapping

Stamp = tuple[tuple[str, int, int], ...]


def stamp_of(path: Path) -> Stamp:
    """What differs when a file, or one anywhere in a directory, was changed: names, times, sizes."""
    if path.is_file():
        return (_stamp(path),)
    stamps = []
    for folder, folders, files in os.walk(path, followlinks=True):
        # Python writes there whenever a model is imported.
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        stamps += [_stamp(Path(folder, name)) for name in sorted(files)]
    return tuple(stamps)


def _stamp(file: Path) -> tuple[str, int, int]:
    try:
        found = file.stat()
    except OSError:
        return str(file), 0, 0
    return str(file), found.st_mtime_ns, found.st_size


def write_directory(name: str, files: Mapping[str, bytes]) -> Path:
    """A new directory, which no other user may look into, in which `name` has these files by path.

    Raises `RepositoryError` for a path that leads out of it. Whoever asked removes it, by `remove`.
    """
    for path in files:
        if not path or path.startswith("/") or "\0" in path or ".." in path.split("/"):
            raise RepositoryError(
                f"Invalid file parameter 'file:{path}' must stay within model directory."
            )
    folder = Path(tempfile.mkdtemp(prefix="moonpool-model-"))
    try:
        (folder / name).mkdir()
        for path, content in files.items():
            file = folder / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    except OSError as error:
        remove(folder)
        raise RepositoryError(f"cannot write the model's files: {error}") from error
    return folder


def remove(folder: Path) -> None:
    """Remove a directory with all that is in it; what is gone already is no error."""
    shutil.rmtree(folder, ignore_errors=True)
