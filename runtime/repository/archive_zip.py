"""Reads zip archives entry by entry, with no more memory than one entry of their directory.

Python's `zipfile` is not used: it reads the whole directory first, of any size. An entry's content is inflated in
chunks, up to the size that the directory gives and no further, and compared with its checksum.
"""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.repository.archive_member import DamagedArchive, Member

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_ENCRYPTED, _UTF_8 = 1, 1 << 11
_UNIX = 3
_STORED, _DEFLATED = 0, 8
_LINK_LIMIT_BYTES = 4096
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    mode: int
    method: int
    checksum: int
    packed_bytes: int
    size_bytes: int
    offset: int


def zip_members(archive: IO[bytes], most: int) -> Iterator[tuple[Member, _Content | None]]:
    """Yield each member with its content, None if it has none. Read the content before the next member.

    Raises `DamagedArchive`, and `BadEnvironment` for encrypted members, rare compressions and more than `most` members.
    """
    for entry in _entries(archive, most):
        if entry.name.endswith("/"):
            yield Member(entry.name, "directory"), None
            continue
        content = _content(archive, entry)
        if stat.S_ISLNK(entry.mode):
            if entry.size_bytes > _LINK_LIMIT_BYTES:
                raise BadEnvironment(f"'{entry.name[:200]}' is a link that is too long")
            link = os.fsdecode(b"".join(iter(partial(content.read, _LINK_LIMIT_BYTES), b"")))
            yield Member(entry.name, "symlink", link=link), None
        elif stat.S_IFMT(entry.mode) in (0, stat.S_IFREG):
            # Archives from systems without modes have none.
            yield Member(entry.name, "file", entry.mode & 0o777 or 0o644), content
        else:
            yield Member(entry.name, "special file"), None


def _entries(archive: IO[bytes], most: int) -> Iterator[_Entry]:
    """Read the entries of the directory, which lies at the end."""
    end_bytes = archive.seek(0, os.SEEK_END)
    archive.seek(max(0, end_bytes - _END.size - 0xFFFF))
    tail = archive.read(_END.size + 0xFFFF)
    found = tail.rfind(b"PK\5\6")
    if found < 0 or len(tail) - found < _END.size:
        raise DamagedArchive("File is not a zip file")
    place = end_bytes - len(tail) + found
    _, _, _, _, count, size, offset, _ = _END.unpack_from(tail, found)
    if count == 0xFFFF or size == 0xFFFFFFFF or offset == 0xFFFFFFFF:
        place, count, size, offset = _end64(archive, place)
    if count > most:
        raise BadEnvironment(f"the archive has more than {most} members")
    # Other bytes may stand before the archive.
    before = place - size - offset
    if before < 0:
        raise DamagedArchive("Bad offset for central directory")
    at = before + offset
    for _ in range(count):
        archive.seek(at)
        entry, at = _entry(archive, at, before)
        yield entry


def _end64(archive: IO[bytes], place: int) -> tuple[int, int, int, int]:
    """Find the end of a directory in the zip64 form, and return its place, count, size and offset."""
    if place < _LOCATOR64.size:
        raise DamagedArchive("Corrupt zip64 end of central directory locator")
    archive.seek(place - _LOCATOR64.size)
    mark, _, _, _ = _LOCATOR64.unpack(_take(archive, _LOCATOR64.size))
    place -= _LOCATOR64.size + _END64.size
    if mark != b"PK\6\7" or place < 0:
        raise DamagedArchive("Corrupt zip64 end of central directory locator")
    archive.seek(place)
    mark, _, _, _, _, _, _, count, size, offset = _END64.unpack(_take(archive, _END64.size))
    if mark != b"PK\6\6":
        raise DamagedArchive("Corrupt zip64 end of central directory record")
    return place, count, size, offset


def _entry(archive: IO[bytes], at: int, before: int) -> tuple[_Entry, int]:
    fields = _ENTRY.unpack(_take(archive, _ENTRY.size))
    mark, made_by, _, flags, method, _, _, checksum, packed, size, names, extras, comments = fields[
        :13
    ]
    attributes, offset = fields[15:]
    if mark != b"PK\1\2":
        raise DamagedArchive("Bad magic number for central directory")
    # Info-ZIP on Unix writes the bytes of names as they are, and does not mark them as UTF-8.
    is_utf_8 = flags & _UTF_8 or made_by >> 8 == _UNIX
    name = _take(archive, names).decode("utf-8" if is_utf_8 else "cp437", "surrogateescape")
    extra = _take(archive, extras)
    if flags & _ENCRYPTED:
        raise BadEnvironment(f"'{name[:200]}' is encrypted")
    size, packed, offset = _sizes64(extra, size, packed, offset)
    entry = _Entry(name, attributes >> 16, method, checksum, packed, size, before + offset)
    return entry, at + _ENTRY.size + names + extras + comments


def _sizes64(extra: bytes, *values: int) -> Iterator[int]:
    """Yield sizes and offset. Those that are too large for the entry stand in its extra field."""
    wide, at = b"", 0
    while len(extra) - at >= 4:
        kind, size = struct.unpack_from("<HH", extra, at)
        at += 4
        if kind == 1:
            wide = extra[at : at + size]
            break
        at += size
    for value in values:
        if value == 0xFFFFFFFF:
            if len(wide) < 8:
                raise DamagedArchive("Corrupt zip64 extra field")
            value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        if value >= 1 << 62:
            raise DamagedArchive("Corrupt zip64 extra field")
        yield value


def _content(archive: IO[bytes], entry: _Entry) -> _Content:
    if entry.method not in (_STORED, _DEFLATED):
        what = f"'{entry.name[:200]}' is compressed by method {entry.method}"
        raise BadEnvironment(f"{what}; pack the environment with deflate, as zip does by default")
    archive.seek(entry.offset)
    fields = _LOCAL.unpack(_take(archive, _LOCAL.size))
    if fields[0] != b"PK\3\4":
        raise DamagedArchive("Bad magic number for file header")
    archive.seek(fields[9] + fields[10], os.SEEK_CUR)
    return _Content(archive, entry)


def _take(archive: IO[bytes], size: int) -> bytes:
    data = archive.read(size)
    if len(data) < size:
        raise DamagedArchive("unexpected end of data")
    return data


class _Content:
    """The unpacked content of an entry: no more bytes than the directory says, and compared with its checksum."""

    def __init__(self, archive: IO[bytes], entry: _Entry) -> None:
        self._archive = archive
        self._entry = entry
        self._packed_left = entry.packed_bytes
        self._left = entry.size_bytes
        self._checksum = 0
        self._inflate = zlib.decompressobj(-15) if entry.method == _DEFLATED else None

    def read(self, size_bytes: int, /) -> bytes:
        data = self._unpacked(min(size_bytes, self._left)) if self._left else b""
        self._left -= len(data)
        self._checksum = zlib.crc32(data, self._checksum)
        if not self._left and self._checksum != self._entry.checksum:
            raise DamagedArchive(f"Bad CRC-32 for file '{self._entry.name[:200]}'")
        return data

    def _unpacked(self, most: int) -> bytes:
        inflate = self._inflate
        while True:
            if inflate is None:
                data = self._packed(most)
            else:
                data = inflate.decompress(
                    inflate.unconsumed_tail or self._packed(_CHUNK_BYTES), most
                )
            if data:
                return data
            # zlib would collect bytes after the end of the compressed stream without limit.
            is_over = inflate is not None and inflate.eof
            if is_over or not (self._packed_left or (inflate and inflate.unconsumed_tail)):
                raise DamagedArchive("unexpected end of data")

    def _packed(self, most: int) -> bytes:
        data = _take(self._archive, min(most, self._packed_left))
        self._packed_left -= len(data)
        return data
