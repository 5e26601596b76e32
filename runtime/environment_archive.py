"""Unpacks a packed environment into an empty directory, and nothing outside of it.

The archive is not trusted.  Every member is checked before it is written: no absolute paths, no
`..`, nothing but directories, regular files and links, no member below a link, no member twice.
Because nothing is ever written through a link, what a link points to cannot move a write; links
are checked all the same, so that an environment does not reach out of itself by accident.

Everything that an archive takes is bounded, and checked before it is taken: the bytes of each header and of all headers, the
number of members, their names, the memory for decompression, the bytes on the disk.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import posixpath
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from moonpool.runtime.environment_error import BadEnvironment
from moonpool.runtime.environment_member import Member
from moonpool.runtime.environment_tar import Readable, tar_members
from moonpool.runtime.environment_zip import zip_members

SIZE_LIMIT_BYTES = 64 << 30
MEMBER_LIMIT = 500_000
# The names of members and of the directories above them; all are kept until the end.
NAMES_LIMIT_BYTES = 64 << 20
# xz -9 needs half of it.
XZ_MEMORY_BYTES = 128 << 20
# An archive may unpack to so many times its own size; a small one may unpack to so many bytes in any case.
_MOST_TIMES = 100
_ALWAYS_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20
# For xz. At the end of each stream the rest of the chunk is copied, and a stream may be empty.
_XZ_CHUNK_BYTES = 8 << 10
# What removes directories recurses.
_DEPTH_LIMIT = 128

# In a virtual environment this link leads to the interpreter it was made with, by absolute path.
_INTERPRETER = re.compile(r"(?:[^/]+/)?bin/python[0-9.]*")


class Unpacker:
    """Writes members below a directory that is empty at first."""

    def __init__(self, target: Path, size_limit_bytes: int = SIZE_LIMIT_BYTES) -> None:
        self._target = target
        self._left_bytes = size_limit_bytes
        self._limit_bytes = size_limit_bytes
        self._kinds: dict[str, str] = {"": "directory"}
        self._names_left_bytes = NAMES_LIMIT_BYTES

    def add(self, member: Member, content: Readable | None) -> None:
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
        self._note(name, "file" if member.kind == "hardlink" else member.kind)

    def _note(self, name: str, kind: str) -> None:
        self._names_left_bytes -= len(name)
        if self._names_left_bytes < 0:
            raise BadEnvironment(
                f"the names in the archive have more than {NAMES_LIMIT_BYTES:,} bytes"
            )
        self._kinds[name] = kind

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
            self._note(directory, "directory")

    def _write(self, path: Path, mode: int, content: Readable) -> None:
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
    packed_bytes = archive.seek(0, os.SEEK_END)
    archive.seek(0)
    # Packed, the files of environments have a tenth of their size, not a thousandth.
    most_bytes = max(_ALWAYS_BYTES, packed_bytes * _MOST_TIMES)
    unpacker = Unpacker(target, min(size_limit_bytes, most_bytes))
    try:
        for member, content in _members(archive):
            unpacker.add(member, content)
    except (*_UNREADABLE, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        if isinstance(error, lzma.LZMAError) and "emory" in str(error):
            what = f"needs more than {XZ_MEMORY_BYTES >> 20} MiB of memory to be unpacked"
            raise BadEnvironment(
                f"{what}; pack it with a smaller dictionary, as xz -9 has"
            ) from error
        # The decompressors raise OSErrors that have no number.
        what = "is not a .tar, .tar.gz, .tar.bz2, .tar.xz or .zip file, or a damaged one"
        raise BadEnvironment(f"{what} ({error})") from error


_UNREADABLE = (
    lzma.LZMAError,
    zlib.error,
    EOFError,
    ValueError,  # `DamagedArchive`, and names that no file can have
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


class _Unxz:
    """Decompresses xz with bounded memory; Python's own file object has no such bound."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._decoder = _xz_decoder()

    def read(self, size_bytes: int, /) -> bytes:
        while True:
            packed = b""
            if self._decoder.eof:
                # Streams may follow one another, with zeros between them.
                packed = self._decoder.unused_data.lstrip(b"\0") or self._packed().lstrip(b"\0")
                if not packed:
                    return b""
                self._decoder = _xz_decoder()
            elif self._decoder.needs_input:
                packed = self._packed()
                if not packed:
                    raise EOFError(
                        "Compressed file ended before the end-of-stream marker was reached"
                    )
            if data := self._decoder.decompress(packed, size_bytes):
                return data

    def _packed(self) -> bytes:
        return self._stream.read(_XZ_CHUNK_BYTES)


def _xz_decoder() -> lzma.LZMADecompressor:
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)


# By how the file begins.
_DECOMPRESSORS: tuple[tuple[bytes, Callable[[IO[bytes]], Readable]], ...] = (
    (b"\x1f\x8b", lambda archive: gzip.GzipFile(fileobj=archive)),
    (b"BZh", bz2.BZ2File),
    (b"\xfd7zXZ", _Unxz),
    (b"", lambda archive: archive),
)


def _members(archive: IO[bytes]) -> Iterator[tuple[Member, Readable | None]]:
    magic = archive.read(6)
    archive.seek(0)
    if magic.startswith(b"PK"):
        return zip_members(archive, MEMBER_LIMIT)
    opener = next(opener for start, opener in _DECOMPRESSORS if magic.startswith(start))
    return tar_members(opener(archive), MEMBER_LIMIT)
