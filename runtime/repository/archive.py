"""Unpacks a packed environment into an empty directory, and writes nothing outside of it.

The archive is not trusted. Every member is checked before it is written: no absolute paths, no `..`, nothing but
directories, regular files and links, no member below a link. Nothing is ever written through a link, so the target of a
link cannot move a write. Targets are checked all the same, so that no environment reaches out of itself by accident.

A member may come twice, as packers write it (venv-pack writes `pyvenv.cfg` twice), if it does not change the kind of
its name: a file replaces a file, a directory or a link comes again as it was. A file is replaced by a new one under its
name and never written into, as it may have other names by hard links, which keep the old content.

Bounds come before work. A few bytes of an archive can ask for endless memory, disk or time, in a header, in a name, in
a dictionary size, in zeros that compress a thousand times. So each of these has a limit, and it is checked before the
bytes are read, kept, inflated or written: the bytes of one header and of all headers, the number of members and of
extended headers, the bytes of all names, the memory of the decompressor, the bytes on the disk. The size that a header
claims is never believed: content is read in chunks, and counted.
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

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.repository.archive_member import SIZE_LIMIT_BYTES, Member, Readable
from moonpool.runtime.repository.archive_tar import tar_members
from moonpool.runtime.repository.archive_zip import zip_members

MEMBER_LIMIT = 500_000
# The names of members and of the directories above them. All of them are kept until the end.
NAMES_LIMIT_BYTES = 64 << 20
# xz -9 needs half of it.
XZ_MEMORY_BYTES = 128 << 20
# An archive may unpack to so many times its own size, and any archive to so many bytes.
_MOST_TIMES = 100
_ALWAYS_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20
# Smaller chunks for xz: at the end of each stream the rest of the chunk is copied, and streams may be empty.
_XZ_CHUNK_BYTES = 8 << 10
# Functions that remove directories recurse.
_DEPTH_LIMIT = 128

# In a virtual environment this link leads to the interpreter that made it, by an absolute path.
_INTERPRETER = re.compile(r"(?:[^/]+/)?bin/python[0-9.]*")


class Unpacker:
    """Writes members below a directory that is empty at the start."""

    def __init__(self, target: Path, size_limit_bytes: int = SIZE_LIMIT_BYTES) -> None:
        self._target = target
        self._left_bytes = size_limit_bytes
        self._limit_bytes = size_limit_bytes
        self._kinds: dict[str, str] = {"": "directory"}
        self._names_left_bytes = NAMES_LIMIT_BYTES

    def add(self, member: Member, content: Readable | None) -> None:
        """Write one member. Raises `BadEnvironment` for one that is not allowed."""
        name = self._checked_name(member)
        if not name:
            return
        path = self._target / name
        if member.kind == "directory":
            path.mkdir(exist_ok=True)
        elif member.kind == "file" and content is not None:
            self._remove_known(name)
            self._write(path, member.mode, content)
        elif member.kind == "symlink":
            self._link(name, member)
        elif member.kind == "hardlink":
            file = self._target / self._linked_file(name, member)
            self._remove_known(name)
            path.hardlink_to(file)
        else:
            raise BadEnvironment(
                f"'{member.name}' is a {member.kind}, not a file, directory or link"
            )
        self._note(name, _kept_kind(member))

    def _remove_known(self, name: str) -> None:
        """Remove a file of this archive that another one replaces.

        A name that exists but is not known stays: the file system takes two names for one, and creating the file fails.
        """
        if name in self._kinds:
            (self._target / name).unlink()

    def _note(self, name: str, kind: str) -> None:
        self._names_left_bytes -= len(name)
        if self._names_left_bytes < 0:
            raise BadEnvironment(
                f"the names in the archive have more than {NAMES_LIMIT_BYTES:,} bytes"
            )
        self._kinds[name] = kind

    def _checked_name(self, member: Member) -> str:
        name = _relative(member.name)
        known = self._kinds.get(name, kind := _kept_kind(member))
        if known != kind:
            both = f"as a {known} and as a {member.kind}"
            raise BadEnvironment(f"'{member.name}' is in the archive twice, {both}")
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
        # Never set-uid or writable by others, always readable and writable by the owner.
        descriptor = os.open(path, flags, (mode & 0o755) | 0o600)
        with open(descriptor, "wb") as stream:
            while chunk := content.read(_CHUNK_BYTES):
                self._left_bytes -= len(chunk)
                if self._left_bytes < 0:
                    limit = f"{self._limit_bytes:,} bytes"
                    raise BadEnvironment(f"the archive holds more than the limit of {limit}")
                stream.write(chunk)

    def _link(self, name: str, member: Member) -> None:
        self._check_link(name, member)
        path = self._target / name
        if name not in self._kinds:
            path.symlink_to(member.link)
        elif os.readlink(path) != member.link:
            raise BadEnvironment(f"'{member.name}' is in the archive twice, as different links")

    def _check_link(self, name: str, member: Member) -> None:
        if _INTERPRETER.fullmatch(name):
            return
        link = f"'{member.name}' links to '{member.link}'"
        if member.link.startswith("/"):
            raise BadEnvironment(f"Path is absolute: {link}")
        reached = posixpath.normpath(posixpath.join(posixpath.dirname(name), member.link))
        if not member.link or reached == ".." or reached.startswith("../"):
            raise BadEnvironment(f"Path contains '..' and leaves the environment: {link}")

    def _linked_file(self, name: str, member: Member) -> str:
        target = _relative(member.link)
        if self._kinds.get(target) != "file" or target == name:
            link = f"'{member.name}' links to '{member.link}'"
            raise BadEnvironment(f"{link}, which is no file that came before it")
        return target


def unpack(archive: IO[bytes], target: Path, size_limit_bytes: int = SIZE_LIMIT_BYTES) -> None:
    """Unpack a tar (plain, gz, bz2 or xz) or zip file into an empty directory.

    Raises `BadEnvironment` without the archive's path, which the caller adds, and `OSError` from the disk. The caller
    removes what was unpacked until then.
    """
    packed_bytes = archive.seek(0, os.SEEK_END)
    archive.seek(0)
    # Environments compress to a tenth of their size, not to a thousandth.
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
        # Decompressors raise OSErrors without a number, too.
        what = "is not a .tar, .tar.gz, .tar.bz2, .tar.xz or .zip file, or a damaged one"
        raise BadEnvironment(f"{what} ({error})") from error


_UNREADABLE = (
    lzma.LZMAError,
    zlib.error,
    EOFError,
    ValueError,  # `DamagedArchive`, and names that no file can have
)


def _kept_kind(member: Member) -> str:
    """Return the kind of entry that a member makes on the disk. A hard link is a file like any other."""
    return "file" if member.kind == "hardlink" else member.kind


def _relative(name: str) -> str:
    """Return a member's name without `.` steps; "" is the root of the archive."""
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
    """Decompresses xz with bounded memory, which Python's own file object does not offer."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._decoder = _xz_decoder()

    def read(self, size_bytes: int, /) -> bytes:
        while True:
            packed = b""
            if self._decoder.eof:
                # Several streams may follow one another, with zeros between them.
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


# Formats that packers write and that are not read here, by their first bytes.
_UNREAD = ((b"\x28\xb5\x2f\xfd", "zstd"), (b"hsqs", "SquashFS"))

# The decompressors by the first bytes of the file.
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
    for start, form in _UNREAD:
        if magic.startswith(start):
            raise BadEnvironment(f"is packed with {form}, which cannot be read; pack it as .tar.gz")
    opener = next(opener for start, opener in _DECOMPRESSORS if magic.startswith(start))
    return tar_members(opener(archive), MEMBER_LIMIT)
