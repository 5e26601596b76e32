"""Unpacks a packed environment into an empty directory, and nothing outside of it.

The archive is not trusted.  Every member is checked before it is written: no absolute paths, no
`..`, nothing but directories, regular files and links, no member below a link, no member twice.
Because nothing is ever written through a link, what a link points to cannot move a write; links
are checked all the same, so that an environment does not reach out of itself by accident.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import posixpath
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from moonpool.runtime.environment_error import BadEnvironment

SIZE_LIMIT_BYTES = 64 << 30
MEMBER_LIMIT = 500_000
_CHUNK_BYTES = 1 << 20
_LINK_LIMIT_BYTES = 4096
_HEADER_LIMIT_BYTES = 16 << 20
# What removes directories recurses.
_DEPTH_LIMIT = 128

# In a virtual environment this link leads to the interpreter it was made with, by absolute path.
_INTERPRETER = re.compile(r"(?:[^/]+/)?bin/python[0-9.]*")


@dataclass(frozen=True, slots=True)
class Member:
    """One thing in an archive; `kind` is "directory", "file", "symlink", "hardlink" or else."""

    name: str
    kind: str
    mode: int = 0o755
    link: str = ""


class Unpacker:
    """Writes members below a directory that is empty at first."""

    def __init__(self, target: Path, size_limit_bytes: int = SIZE_LIMIT_BYTES) -> None:
        self._target = target
        self._left_bytes = size_limit_bytes
        self._limit_bytes = size_limit_bytes
        self._kinds: dict[str, str] = {"": "directory"}

    def add(self, member: Member, content: IO[bytes] | None) -> None:
        """Write one member; raises BadEnvironment for one that must not be."""
        name = self._checked_name(member)
        if not name:
            return
        path = self._target / name
        if member.kind == "directory":
            path.mkdir(exist_ok=True)
        elif member.kind == "file" and content is not None:
            self._write(path, member.mode, content)
        elif member.kind == "symlink":
            self._check_link(name, member)
            path.symlink_to(member.link)
        elif member.kind == "hardlink":
            path.hardlink_to(self._target / self._linked_file(member))
        else:
            raise BadEnvironment(
                f"'{member.name}' is a {member.kind}, not a file, directory or link"
            )
        self._kinds[name] = "file" if member.kind == "hardlink" else member.kind

    def _checked_name(self, member: Member) -> str:
        name = _relative(member.name)
        known = self._kinds.get(name)
        if known is not None and (known, member.kind) != ("directory", "directory"):
            raise BadEnvironment(f"'{member.name}' is in the archive twice")
        if len(self._kinds) > MEMBER_LIMIT:
            raise BadEnvironment(f"the archive has more than {MEMBER_LIMIT} members")
        self._make_parents(posixpath.dirname(name), member.name)
        return name

    def _make_parents(self, parent: str, shown: str) -> None:
        missing = []
        while parent not in self._kinds:
            missing.append(parent)
            parent = posixpath.dirname(parent)
        if self._kinds[parent] != "directory":
            raise BadEnvironment(f"'{shown}' is below '{parent}', a {self._kinds[parent]}")
        for directory in reversed(missing):
            (self._target / directory).mkdir()
            self._kinds[directory] = "directory"

    def _write(self, path: Path, mode: int, content: IO[bytes]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # Never set-uid, never writable by others; always readable and writable by the owner.
        descriptor = os.open(path, flags, (mode & 0o755) | 0o600)
        with open(descriptor, "wb") as stream:
            while chunk := content.read(_CHUNK_BYTES):
                self._left_bytes -= len(chunk)
                if self._left_bytes < 0:
                    limit = f"{self._limit_bytes:,} bytes"
                    raise BadEnvironment(f"the archive holds more than the limit of {limit}")
                stream.write(chunk)

    def _check_link(self, name: str, member: Member) -> None:
        if _INTERPRETER.fullmatch(name):
            return
        link = f"'{member.name}' links to '{member.link}'"
        if member.link.startswith("/"):
            raise BadEnvironment(f"Path is absolute: {link}")
        reached = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.link))
        if not member.link or reached == ".." or reached.startswith("../"):
            raise BadEnvironment(f"Path contains '..' and leaves the environment: {link}")

    def _linked_file(self, member: Member) -> str:
        target = _relative(member.link)
        if self._kinds.get(target) != "file":
            link = f"'{member.name}' links to '{member.link}'"
            raise BadEnvironment(f"{link}, which is no file that came before it")
        return target


def unpack(archive: IO[bytes], target: Path, size_limit_bytes: int = SIZE_LIMIT_BYTES) -> None:
    """Unpack a tar (plain, gz, bz2 or xz) or zip file into an empty directory.

    Raises BadEnvironment without the archive's path, which the caller adds, and OSError where the
    disk refuses.  What was unpacked until then stays; the caller removes it.
    """
    unpacker = Unpacker(target, size_limit_bytes)
    archive.seek(0)
    magic = archive.read(6)
    archive.seek(0)
    try:
        members = _zip_members(archive) if magic[:2] == b"PK" else _tar_members(archive, magic)
        for member, content in members:
            unpacker.add(member, content)
    except (*_UNREADABLE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        # The decompressors raise OSErrors that have no number.
        what = "is not a .tar, .tar.gz, .tar.bz2, .tar.xz or .zip file, or a damaged one"
        raise BadEnvironment(f"{what} ({error})") from error


_UNREADABLE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    lzma.LZMAError,
    zlib.error,
    EOFError,
    RuntimeError,  # encrypted zip files, unknown compression
    ValueError,  # names that no file can have
)


def _relative(name: str) -> str:
    """A member's name without `.` steps; "" is the root of the archive."""
    if name.startswith("/"):
        raise BadEnvironment(f"Path is absolute: '{name}'")
    steps = [step for step in name.split("/") if step not in ("", ".")]
    if ".." in steps:
        raise BadEnvironment(f"Path contains '..': '{name}'")
    if len(steps) > _DEPTH_LIMIT:
        raise BadEnvironment(f"'{name[:60]}...' lies deeper than {_DEPTH_LIMIT} directories")
    if "\0" in name:
        raise BadEnvironment(f"Path contains a NUL byte: {name!r}")
    return "/".join(steps)


class _Bounded:
    """A stream for tarfile that refuses reads beyond reason: those of oversize headers."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.seek = stream.seek
        self.tell = stream.tell

    def read(self, size_bytes: int) -> bytes:
        if size_bytes > _HEADER_LIMIT_BYTES:
            raise BadEnvironment("has a header of a size that no real archive has")
        return self._stream.read(size_bytes)


# By how the file begins.
_DECOMPRESSORS: tuple[tuple[bytes, Callable[[IO[bytes]], object]], ...] = (
    (b"\x1f\x8b", gzip.open),
    (b"BZh", bz2.open),
    (b"\xfd7zXZ", lzma.open),
    (b"", nullcontext),
)


def _tar_members(archive: IO[bytes], magic: bytes) -> Iterator[tuple[Member, IO[bytes] | None]]:
    opener = next(opener for start, opener in _DECOMPRESSORS if magic.startswith(start))
    with (
        cast("AbstractContextManager[IO[bytes]]", opener(archive)) as stream,
        tarfile.open(fileobj=cast("IO[bytes]", _Bounded(stream)), mode="r:") as tar,
    ):
        for info in tar:
            kind = _tar_kind(info)
            content = tar.extractfile(info) if kind == "file" else None
            yield Member(info.name, kind, info.mode, info.linkname), content


def _tar_kind(info: tarfile.TarInfo) -> str:
    if info.isdir():
        return "directory"
    if info.isreg():
        return "file"
    if info.issym():
        return "symlink"
    if info.islnk():
        return "hardlink"
    return "device" if info.isdev() else "special file"


def _zip_members(archive: IO[bytes]) -> Iterator[tuple[Member, IO[bytes] | None]]:
    with zipfile.ZipFile(archive) as packed:
        for info in packed.infolist():
            mode = info.external_attr >> 16
            if info.is_dir():
                yield Member(info.filename, "directory"), None
                continue
            with packed.open(info) as content:
                if stat.S_ISLNK(mode):
                    link = os.fsdecode(content.read(_LINK_LIMIT_BYTES))
                    yield Member(info.filename, "symlink", link=link), None
                elif stat.S_IFMT(mode) in (0, stat.S_IFREG):
                    # Archives made where there are no modes have none.
                    yield Member(info.filename, "file", mode & 0o777 or 0o644), content
                else:
                    yield Member(info.filename, "special file"), None
