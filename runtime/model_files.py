"""Makes a directory of the files that a caller brings for a model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.runtime.repository_files import DEEPEST, RepositoryError

if TYPE_CHECKING:
    from collections.abc import Mapping

# The most bytes in a path, and the most files, that a caller may bring for a model.
_LONGEST_PATH = 1024
_MOST_FILES = 10_000


def write_directory(name: str, files: Mapping[str, bytes]) -> Path:
    """A new directory, which no other user may look into, in which `name` has these files by path.

    Raises `RepositoryError` for a path that leads out of it, and beyond the bounds above. The caller removes
    it, by `remove`.
    """
    if len(files) > _MOST_FILES:
        raise RepositoryError(f"a load has {_MOST_FILES} files at most, not {len(files)}")
    for path in files:
        _check_path(path)
    folder = Path(tempfile.mkdtemp(prefix="moonpool-model-"))
    try:
        (folder / name).mkdir()
        for path, content in files.items():
            file = folder / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    except (OSError, ValueError) as error:
        remove(folder)
        raise RepositoryError(f"cannot write the model's files: {error}") from error
    except BaseException:
        remove(folder)
        raise
    return folder


def _check_path(path: str) -> None:
    if not path or path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise RepositoryError(
            f"Invalid file parameter 'file:{path[:_LONGEST_PATH]}' must stay within model directory."
        )
    # Functions that make and remove directories recurse.
    if len(path.encode(errors="replace")) > _LONGEST_PATH or path.count("/") > DEEPEST:
        raise RepositoryError(
            f"Invalid file parameter 'file:{path[:80]}...': a path has {_LONGEST_PATH} bytes and {DEEPEST} folders "
            "at most"
        )


def remove(folder: Path) -> None:
    """Remove a directory with all that is in it; what is gone already is no error."""
    shutil.rmtree(folder, ignore_errors=True)
