"""Opens and lists files that others may have put in place, without blocking and within bounds.

Somebody who may write to a repository may put a FIFO in the place of a file, a link to anywhere, or a tree without end.
Each of these is an error only of the model that it belongs to.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from moonpool.ipc.errors import MoonpoolError

# The most files and folders of one model, or at the top of a repository. An environment in a model's folder has many.
MOST_ENTRIES = 500_000
# Folders within folders. Functions that remove a directory recurse, and Python gives up at a thousand.
DEEPEST = 64

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class RepositoryError(MoonpoolError):
    """A repository, or a model in it, that is missing or cannot be read."""

    __module__ = "moonpool"
    _fault = "setup"

    def __init__(self, what: str, code: str = "INVALID_ARG") -> None:
        super().__init__(what)
        self.code = code


class LeadsOut(OSError):
    """A file that lies outside of the folder that it has to lie in."""


def open_file(path: str | os.PathLike[str], within: Sequence[Path] = ()) -> IO[bytes]:
    """Open a regular file for reading; the caller closes it.

    Raises OSError for everything else: opening a FIFO would block, and opening a device may have effects. With
    `within`, raises `LeadsOut` for a file that is in none of these folders, wherever links lead.
    """
    # O_PATH opens any kind of file without effects. Below, the file is opened by this descriptor, so nobody can
    # exchange it meanwhile.
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        mode = os.fstat(found).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            kind = next((word for test, word in _KINDS if test(mode)), "something else")
            raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))
        name = f"/proc/self/fd/{found}"
        if within:
            _check_within(os.readlink(name), within, path)
        # Without O_NONBLOCK, a file on which another process holds a lease would block.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return open(os.open(name, flags), "rb")
    finally:
        os.close(found)


def _check_within(real: str, folders: Sequence[Path], path: str | os.PathLike[str]) -> None:
    if not any(is_within(real, os.path.realpath(folder)) for folder in folders):
        what = f"it leads to {real}, which is outside of {folders[0]}; put a copy there instead"
        raise LeadsOut(errno.EPERM, what, str(path))


def is_within(path: str, folder: str) -> bool:
    """Return True if a path without links is the folder, or lies in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def read_file(path: str | os.PathLike[str], most_bytes: int, within: Sequence[Path] = ()) -> bytes:
    """Read a whole regular file, as `open_file`. Raises OSError, EFBIG if it has more than `most_bytes`."""
    with open_file(path, within) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {_size(most_bytes)}", str(path))
    return data


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes} bytes"


def directories(path: Path) -> list[str]:
    """List the names of a folder's folders, sorted; links to folders are among them.

    Raises `RepositoryError` if the folder cannot be listed or has more than `MOST_ENTRIES` entries.
    """
    names = []
    try:
        with os.scandir(path) as entries:
            for number, entry in enumerate(entries):
                if number >= MOST_ENTRIES:
                    raise _too_many(path)
                if _is_directory(entry, follows=True):
                    names.append(entry.name)
    except OSError as error:
        raise RepositoryError(f"cannot read the directory {path}: {error.strerror}") from error
    return sorted(names)


def _is_directory(entry: os.DirEntry[str], *, follows: bool) -> bool:
    try:
        return entry.is_dir(follow_symlinks=follows)
    except OSError:
        # A link to itself, or to where this user may not look, is one entry's trouble.
        return False


def check_no_loop(path: Path, title: str) -> None:
    """Raise `RepositoryError` for a link to a folder that the link lies in, such as `.` or `/`.

    A model behind such a link would consist of its repository, and of itself.
    """
    real, place = os.path.realpath(path), os.path.realpath(path.parent)
    if is_within(place, real):
        raise RepositoryError(f"{title}: {path} links to {real}, a folder that it lies in")


def walk(folder: Path, follows: Callable[[str], bool] = lambda _: False) -> Iterator[os.DirEntry[str]]:
    """Yield the files and folders in a folder and below, in an order that depends on their names alone.

    Links are yielded and not followed, except those of the folder itself whose names `follows` accepts. What this user
    may not list has nothing in it, and neither has `__pycache__`, to which Python writes on every import.
    Raises `RepositoryError` beyond `MOST_ENTRIES` or `DEEPEST`.
    """
    waiting: list[tuple[str, int]] = [(str(folder), 0)]
    count = 0
    while waiting:
        place, depth = waiting.pop()
        if depth > DEEPEST:
            raise RepositoryError(f"{folder} has folders that lie more than {DEEPEST} deep")
        entries = []
        try:
            with os.scandir(place) as found:
                for entry in found:
                    count += 1
                    if count > MOST_ENTRIES:
                        raise _too_many(folder)
                    entries.append(entry)
        except OSError:
            continue
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.name == "__pycache__":
                continue
            yield entry
            if _is_directory(entry, follows=depth == 0 and follows(entry.name)):
                waiting.append((entry.path, depth + 1))


def _too_many(folder: Path) -> RepositoryError:
    return RepositoryError(f"{folder} has more than {MOST_ENTRIES} files and folders")


def stamp_of(path: Path, follows: Callable[[str], bool] = lambda _: False, without: Collection[str] = ()) -> bytes:
    """Compute a digest of names, links, times and sizes. It changes when a file, or any file in a directory, changes.

    `follows` and errors are those of `walk`. If a link is not followed, a change of the file at its end counts. Files
    of the directory itself with names in `without` do not count.
    """
    digest = hashlib.sha256()
    _add(digest, path)
    if path.is_dir():
        ignored = {str(path / name) for name in without}
        for entry in walk(path, follows):
            if entry.path not in ignored and not _is_directory(entry, follows=False):
                _add(digest, entry.path)
    return digest.digest()


def _add(digest: hashlib._Hash, path: str | os.PathLike[str]) -> None:
    link, facts = "", (0, 0)
    try:
        link = os.readlink(path) if os.path.islink(path) else ""
        found = os.stat(path)
        # The time of a directory changes with every `__pycache__`.
        if not stat.S_ISDIR(found.st_mode):
            facts = (found.st_mtime_ns, found.st_size)
    except OSError:
        pass
    digest.update(repr((os.fspath(path), link, *facts)).encode())


def parsed_json(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON text that others have written. Raises ValueError, also for one that is nested too
    deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def bounded_json(text: bytes, most_values: int) -> Any:
    """Return the value of a JSON text as `parsed_json` does. Raises ValueError before it is read, if it may have more
    values: short ones take thirty times as much memory as their text, and all other threads wait meanwhile.
    """
    if sum(map(text.count, (b",", b"[", b"{"))) > most_values:
        raise ValueError(f"it has more than {most_values:,} values")
    return parsed_json(text)


def parsed_object(text: str | bytes, subject: str) -> dict[str, Any]:
    """Return the object in a JSON text that others have written. Raises ValueError with a text that names `subject`."""
    try:
        found = parsed_json(text)
    except ValueError as error:
        raise ValueError(f"{subject} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{subject} is not a JSON object")
    return found
