"""Reads tar archives as a stream, with no more memory than one bounded header.

Python's `tarfile` is not used: it keeps every header that it has read, reads extended headers of any size, and expands the
maps of sparse files. This module reads ustar, GNU's long names, and `path`, `linkpath` and `size` of PAX headers.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from moonpool.runtime.environment_error import BadEnvironment
from moonpool.runtime.environment_member import DamagedArchive, Member

if TYPE_CHECKING:
    from collections.abc import Iterator

# The size of one extended header, and of all of them: names in environments have some hundred bytes.
HEADER_LIMIT_BYTES = 1 << 20
ALL_HEADERS_LIMIT_BYTES = 256 << 20
# The extended headers that a member may have: a long name, and a long link or a PAX header.
_EXTENSIONS_PER_MEMBER = 2
_BLOCK_BYTES = 512
_CHUNK_BYTES = 1 << 20
_OVERSIZE = "has a header of a size that no real archive has"

_FILES = (b"0", b"\0", b"7")
_DEVICES = (b"3", b"4", b"6")
_LONG_NAME, _LONG_LINK, _SPARSE = b"L", b"K", b"S"
_PAX, _GLOBAL_PAX = (b"x", b"X"), b"g"


class Readable(Protocol):
    """A stream. `read` returns at most `size_bytes`, and none only at the end."""

    def read(self, size_bytes: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Header:
    name: bytes
    kind: bytes
    size: int
    mode: int
    link: bytes


@dataclass(frozen=True, slots=True)
class _Extension:
    """The facts in extended headers about the member that follows."""

    name: bytes | None = None
    link: bytes | None = None
    size: int | None = None
    is_sparse: bool = False


def tar_members(stream: Readable, most: int) -> Iterator[tuple[Member, Readable | None]]:
    """Yield each member with its content, which is to be read before the next one; None if it has none.

    Raises `DamagedArchive`, and `BadEnvironment`, also for more than `most` members.
    """
    return _Tar(stream, most).members()


class _Tar:
    def __init__(self, stream: Readable, most: int) -> None:
        self._stream = stream
        self._most = self._members_left = most
        # A compressed header may take less than a byte, and an empty one costs as much time as any other.
        self._extensions_left = _EXTENSIONS_PER_MEMBER * most
        self._headers_left_bytes = ALL_HEADERS_LIMIT_BYTES

    def members(self) -> Iterator[tuple[Member, Readable | None]]:
        extension = _Extension()
        is_first = True
        while (block := self._header_block(is_first)) is not None:
            is_first = False
            header = _parse(block)
            if header.kind in (_LONG_NAME, _LONG_LINK, *_PAX, _GLOBAL_PAX):
                extension = _extended(extension, header.kind, self._extended_header(header.size))
                continue
            self._members_left -= 1
            if self._members_left < 0:
                raise BadEnvironment(f"the archive has more than {self._most} members")
            header = _joined(header, extension)
            kind = _kind_of(header, extension)
            extension = _Extension()
            member = Member(os.fsdecode(header.name), kind, header.mode, os.fsdecode(header.link))
            if kind != "file":
                yield member, None
                continue
            content = _Content(self._stream, header.size)
            yield member, content
            while content.read(_CHUNK_BYTES):
                pass
            self._take(-header.size % _BLOCK_BYTES)

    def _header_block(self, is_first: bool) -> bytes | None:
        """Read the next header; None at the end, which is a block of zeros or the end of the stream."""
        block = self._stream.read(_BLOCK_BYTES)
        if not block and not is_first:
            return None
        block += self._take(_BLOCK_BYTES - len(block))
        return block if any(block) else None

    def _extended_header(self, size: int) -> bytes:
        self._headers_left_bytes -= size
        self._extensions_left -= 1
        if self._extensions_left < 0:
            raise BadEnvironment("has more extended headers than any real archive")
        if size > HEADER_LIMIT_BYTES or self._headers_left_bytes < 0:
            raise BadEnvironment(_OVERSIZE)
        data = self._take(size)
        self._take(-size % _BLOCK_BYTES)
        return data

    def _take(self, size: int) -> bytes:
        content = _Content(self._stream, size)
        parts = []
        while part := content.read(size):
            parts.append(part)
        return b"".join(parts)


class _Content:
    """The next `size` bytes of a stream. Raises `DamagedArchive` if the stream ends before."""

    def __init__(self, stream: Readable, size: int) -> None:
        self._stream = stream
        self._left = size

    def read(self, size_bytes: int, /) -> bytes:
        wanted = min(size_bytes, self._left)
        if not wanted:
            return b""
        data = self._stream.read(wanted)
        if not data:
            raise DamagedArchive("unexpected end of data")
        self._left -= len(data)
        return data


def _parse(block: bytes) -> _Header:
    blank = block[:148] + b" " * 8 + block[156:]
    signed = sum(byte - 256 if byte > 127 else byte for byte in blank)
    if _number(block[148:156]) not in (sum(blank), signed):
        raise DamagedArchive("bad checksum")
    name, prefix = _text(block[:100]), _text(block[345:500])
    kind = block[156:157]
    if kind == b"\0" and name.endswith(b"/"):
        kind = b"5"
    # GNU's own format has something else in the field of the prefix.
    if prefix and block[257:263] == b"ustar\0":
        name = prefix + b"/" + name
    return _Header(
        name, kind, _number(block[124:136]), _number(block[100:108]), _text(block[157:257])
    )


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _number(field: bytes) -> int:
    if field[0] == 0x80:
        number = int.from_bytes(field[1:], "big")
    else:
        digits = _text(field).strip()
        if digits and not re.fullmatch(rb"[0-7]{1,12}", digits):
            raise DamagedArchive("invalid header")
        number = int(digits or b"0", 8)
    if number >= 1 << 63:
        raise DamagedArchive("invalid header")
    return number


def _extended(extension: _Extension, kind: bytes, data: bytes) -> _Extension:
    if kind == _LONG_NAME:
        return replace(extension, name=_text(data))
    if kind == _LONG_LINK:
        return replace(extension, link=_text(data))
    # A global header cannot give names or sizes: they would hold for all members.
    for key, value in _records(data) if kind != _GLOBAL_PAX else ():
        if key == b"path":
            extension = replace(extension, name=value)
        elif key == b"linkpath":
            extension = replace(extension, link=value)
        elif key == b"size":
            if not re.fullmatch(rb"[0-9]{1,18}", value):
                raise DamagedArchive("invalid header")
            extension = replace(extension, size=int(value))
        elif key.startswith(b"GNU.sparse."):
            extension = replace(extension, is_sparse=True)
    return extension


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The records of a PAX header, each `<length> <key>=<value>` and the end of a line."""
    start = 0
    while start < len(data) and data[start]:
        found = re.compile(rb"([0-9]{1,8}) ").match(data, start)
        end = start + int(found[1]) if found else 0
        if found is None or not found.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise DamagedArchive("invalid header")
        key, equals, value = data[found.end() : end - 1].partition(b"=")
        if not equals:
            raise DamagedArchive("invalid header")
        yield key, value
        start = end


def _joined(header: _Header, extension: _Extension) -> _Header:
    return replace(
        header,
        name=header.name if extension.name is None else extension.name,
        link=header.link if extension.link is None else extension.link,
        size=header.size if extension.size is None else extension.size,
    )


def _kind_of(header: _Header, extension: _Extension) -> str:
    if header.kind == _SPARSE or extension.is_sparse:
        name = os.fsdecode(header.name[:200])
        raise BadEnvironment(f"'{name}' is a sparse file; pack the environment without --sparse")
    if header.kind in _FILES:
        return "file"
    kinds = {b"1": "hardlink", b"2": "symlink", b"5": "directory"}
    return kinds.get(header.kind, "device" if header.kind in _DEVICES else "special file")
