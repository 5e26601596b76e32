"""Reads tar archives as a stream, with no more memory than one bounded header.

Python's `tarfile` is not used: it keeps every header that it has read, and reads extended headers and the maps of
sparse files of any size. This module reads ustar, GNU's long names, `path`, `linkpath` and `size` of PAX headers, and
the two forms of sparse files that GNU tar writes by default: its own, and version 1.0 for PAX.

Every size here comes from the archive. A header is read after its size was checked against what is left of three
budgets: for one header, for all of them, and for their number, as a compressed empty header costs less than a byte and
as much time as any other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.repository.archive_member import DamagedArchive, Member, Readable

# The size of one extended header, and of all of them. Names in environments have some hundred bytes.
HEADER_LIMIT_BYTES = 1 << 20
ALL_HEADERS_LIMIT_BYTES = 256 << 20
# The most bytes in the maps of all sparse files. Maps take more time and memory than other headers.
ALL_MAPS_LIMIT_BYTES = 32 << 20
# The most extended headers of a member, on average: a long name, and a long link or a PAX header.
_EXTENSIONS_PER_MEMBER = 2
_BLOCK_BYTES = 512
_CHUNK_BYTES = 1 << 20
_OVERSIZE = "has a header of a size that no real archive has"
_BAD_MAP = "invalid map of a sparse file"

_FILES = (b"0", b"\0", b"7")
_DEVICES = (b"3", b"4", b"6")
_LONG_NAME, _LONG_LINK, _SPARSE = b"L", b"K", b"S"
_PAX, _GLOBAL_PAX = (b"x", b"X"), b"g"


@dataclass(frozen=True, slots=True)
class _Header:
    name: bytes
    kind: bytes
    size: int
    mode: int
    link: bytes
    block: bytes


@dataclass(frozen=True, slots=True)
class _Extension:
    """Values from extended headers for the member that follows."""

    name: bytes | None = None
    link: bytes | None = None
    size: int | None = None
    # The version of a sparse file's map, and the size of the file with its holes.
    sparse: tuple[int, int] | None = None
    whole_size: int = 0


def tar_members(stream: Readable, most: int) -> Iterator[tuple[Member, Readable | None]]:
    """Yield each member with its content, None if it has none. Read the content before the next member.

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
        self._maps_left_bytes = ALL_MAPS_LIMIT_BYTES

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
            kind = _kind_of(header)
            member = Member(os.fsdecode(header.name), kind, header.mode, os.fsdecode(header.link))
            if kind == "file":
                stored = _Content(self._stream, header.size)
                yield member, self._with_holes(header, extension, stored)
                while stored.read(_CHUNK_BYTES):
                    pass
                self._take(-header.size % _BLOCK_BYTES)
            else:
                yield member, None
            extension = _Extension()

    def _with_holes(self, header: _Header, extension: _Extension, stored: _Content) -> Readable:
        """Return the content of a file with its holes; `stored` unless the file is sparse."""
        if header.kind == _SPARSE:
            numbers, whole = self._gnu_map(header.block), _number(header.block[483:495])
        elif extension.sparse == (1, 0):
            numbers, whole = self._pax_map(stored), extension.whole_size
        elif extension.sparse is not None:
            name = os.fsdecode(header.name[:200])
            what = f"'{name}' is a sparse file of an old kind"
            raise BadEnvironment(f"{what}; pack the environment without --sparse-version")
        else:
            return stored
        return _Sparse(stored, list(zip(numbers[::2], numbers[1::2], strict=True)), whole)

    def _gnu_map(self, header: bytes) -> list[int]:
        """Read the map that begins in a header and goes on in the blocks after it."""
        numbers: list[int] = []
        fields, goes_on = header[386:482], header[482]
        left = HEADER_LIMIT_BYTES
        while True:
            for at in range(0, len(fields), 24):
                if not fields[at + 12]:
                    break
                numbers += _number(fields[at : at + 12]), _number(fields[at + 12 : at + 24])
            if not goes_on:
                return numbers
            block = self._map_block(_Content(self._stream, _BLOCK_BYTES), left)
            left -= len(block)
            fields, goes_on = block[:504], block[504]

    def _pax_map(self, stored: _Content) -> list[int]:
        """Read the map at the beginning of the content: the number of spans, then start and length of each, a number a
        line.
        """
        text, lines, wanted = [b""], 0, 1
        left = HEADER_LIMIT_BYTES
        while lines < wanted:
            block = self._map_block(stored, left)
            left -= len(block)
            text.append(block)
            if not lines and b"\n" in block:
                wanted = 1 + 2 * _decimal(b"".join(text).partition(b"\n")[0])
            lines += block.count(b"\n")
        numbers = b"".join(text).split(b"\n")[1:wanted]
        if any(len(number) > 18 or not number.isdigit() for number in numbers):
            raise DamagedArchive(_BAD_MAP)
        return [int(number) for number in numbers]

    def _map_block(self, stored: _Content, left: int) -> bytes:
        """Read one block of a map, of which `left` bytes may be read."""
        self._maps_left_bytes -= _BLOCK_BYTES
        if left < _BLOCK_BYTES or self._maps_left_bytes < 0:
            raise BadEnvironment(_OVERSIZE)
        block = b""
        while len(block) < _BLOCK_BYTES:
            if not (part := stored.read(_BLOCK_BYTES - len(block))):
                raise DamagedArchive(_BAD_MAP)
            block += part
        return block

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
        self.left = size

    def read(self, size_bytes: int, /) -> bytes:
        wanted = min(size_bytes, self.left)
        if not wanted:
            return b""
        data = self._stream.read(wanted)
        if not data:
            raise DamagedArchive("unexpected end of data")
        self.left -= len(data)
        return data


class _Sparse:
    """A sparse file: the archive stores only the spans that hold data. The holes between them read as zeros.

    Raises `DamagedArchive` unless the spans follow one another, lie in the file, and are what is stored.
    """

    def __init__(self, stored: _Content, spans: list[tuple[int, int]], size: int) -> None:
        end = 0
        for start, length in spans:
            if start < end:
                raise DamagedArchive(_BAD_MAP)
            end = start + length
        if end > size or sum(length for _, length in spans) != stored.left:
            raise DamagedArchive(_BAD_MAP)
        self._stored = stored
        self._spans = iter([*spans, (size, 0)])
        self._at = self._start = self._end = 0

    def read(self, size_bytes: int, /) -> bytes:
        while self._at == self._end:
            if (span := next(self._spans, None)) is None:
                return b""
            self._start, self._end = span[0], sum(span)
        if self._at < self._start:
            data = bytes(min(size_bytes, self._start - self._at))
        else:
            data = self._stored.read(min(size_bytes, self._end - self._at))
        self._at += len(data)
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
    # GNU's own format has other things in the field of the prefix.
    if prefix and block[257:263] == b"ustar\0":
        name = prefix + b"/" + name
    size, mode = _number(block[124:136]), _number(block[100:108])
    return _Header(name, kind, size, mode, _text(block[157:257]), block)


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
    # Names and sizes in a global header would hold for all members, so they are ignored.
    for key, value in _records(data) if kind != _GLOBAL_PAX else ():
        if key == b"path":
            extension = replace(extension, name=value)
        elif key == b"linkpath":
            extension = replace(extension, link=value)
        elif key == b"size":
            extension = replace(extension, size=_decimal(value))
        elif key.startswith(b"GNU.sparse."):
            extension = _sparse(extension, key.removeprefix(b"GNU.sparse."), value)
    return extension


def _sparse(extension: _Extension, key: bytes, value: bytes) -> _Extension:
    major, minor = extension.sparse or (0, 0)
    extension = replace(extension, sparse=(major, minor))
    if key == b"major":
        return replace(extension, sparse=(_decimal(value), minor))
    if key == b"minor":
        return replace(extension, sparse=(major, _decimal(value)))
    if key == b"name":
        return replace(extension, name=value)
    if key == b"realsize":
        return replace(extension, whole_size=_decimal(value))
    return extension


def _decimal(text: bytes) -> int:
    if not re.fullmatch(rb"[0-9]{1,18}", text):
        raise DamagedArchive("invalid header")
    return int(text)


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the records of a PAX header, each `<length> <key>=<value>` and the end of a line."""
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


def _kind_of(header: _Header) -> str:
    if header.kind in (*_FILES, _SPARSE):
        return "file"
    kinds = {b"1": "hardlink", b"2": "symlink", b"5": "directory"}
    return kinds.get(header.kind, "device" if header.kind in _DEVICES else "special file")
