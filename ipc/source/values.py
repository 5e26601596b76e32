"""Writes values as bytes, and reads them again: what goes into a run of somebody's source, and what comes out.

A value is `None`, a truth value, a number, a text, bytes, an array, or a list or dictionary of these. Its document is
msgpack. Arrays, and bytes that are long, are not in it: they lie in a memory that travels beside it, and the document
has their places. Nothing is ever unpickled, and what is read may be hostile: sizes, places, datatypes and depth are
checked before anything is made of them.

Both ends use this file: the runtime, and the process in which the source runs.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from typing import Any, Callable, Union

import numpy as np

from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.codec import Extension, pack, pack_with, unpack
from moonpool.ipc.errors import LocalProtocolError, RemoteProtocolError

Buffer = Union[bytes, memoryview]
# Lists and dictionaries may be nested so deep, and all together have so many members.
MOST_DEPTH = 64
MOST_MEMBERS = 1_000_000
# What takes longer to read counts as several, so that no value takes more than half a second: an array, an entry of a
# dictionary, and a list, a dictionary or long bytes beside their members.
_OF_ARRAY, _OF_ENTRY, _OF_ITSELF = 16, 3, 2
# The longest document. What is read of it may take a hundred times as much.
MOST_DOCUMENT_BYTES = 32 << 20
# Room in the file for an answer for what it has beside the value and the files: the text of an error.
BESIDE_BYTES = 1 << 20
# Begins a packet with a call of a function, in place of an answer. No msgpack begins so.
CALL = b"\xc1"
# The document travels in the packet if it fits there, beside the numbers.
_MOST_IN_PACKET = MAX_PACKET_BYTES - 1024
# The place of an array in the memory is a multiple of this, and longer bytes lie there, too.
_ALIGNMENT = 64
_LONG_BYTES = 4096
# Codes of msgpack's extensions.
_ARRAY, _BYTES, _WHOLE, _COMPLEX = 1, 2, 3, 4
_PLACE = struct.Struct("=QQ")
_PAIR = struct.Struct("=dd")
# A whole number that msgpack does not have may take so many bytes: 4,300 digits, of which Python makes a text.
_MOST_DIGITS_BYTES = 1785
_MOST_DIMENSIONS = 32
# Keys of dictionaries, beside whole numbers that msgpack has.
_KEYS = (str, bool, float, bytes, type(None))
# What a value is made of.
_READ = frozenset({*_KEYS, int, complex, list, dict, np.ndarray})
# No objects, and no records: their fields could have any name and place.
_DTYPE = re.compile(
    r"[<>|=]?(?:[?bBhHiIlLqQefdFD]|[biufc][0-9]{1,2}|[SU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,6}[A-Za-z]{1,2}\])?)"
)
_CHARACTERS = "surrogatepass"


class Unsendable(LocalProtocolError):
    """The value has something in it that does not travel. The text says what."""


class Written:
    """A value as bytes: the document, and the parts of the memory with the place of each."""

    def __init__(self) -> None:
        self.document = b""
        self.parts: list[tuple[int, Buffer]] = []
        self.size_bytes = 0
        self._members = 0

    @property
    def needs_memory(self) -> bool:
        """True if it does not fit into a packet."""
        return bool(self.parts) or len(self.document) > _MOST_IN_PACKET

    def add(self, part: Buffer, size_bytes: int) -> int:
        """Add a part to the memory, and return its place."""
        place = -(-self.size_bytes // _ALIGNMENT) * _ALIGNMENT
        self.parts.append((place, part))
        self.size_bytes = place + size_bytes
        return place

    def plain(self, value: object, depth: int = 0) -> object:
        """Return the value as msgpack takes it. Raises `Unsendable`."""
        kind = type(value)
        if value is None or kind in (bool, float):
            return value
        if kind is int:
            return _whole(value)  # type: ignore[arg-type]
        if kind is str:
            return value
        if isinstance(value, (np.ndarray, np.generic)):
            return self._of_numpy(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._bytes(bytes(value))
        if depth >= MOST_DEPTH:
            raise Unsendable(f"it is nested deeper than {MOST_DEPTH}")
        if isinstance(value, (list, tuple)):
            self._count(_OF_ITSELF + len(value))
            return [self.plain(each, depth + 1) for each in value]
        if isinstance(value, Mapping):
            self._count(_OF_ITSELF + _OF_ENTRY * len(value))
            return {_key(key): self.plain(each, depth + 1) for key, each in value.items()}
        return _of_subclass(value)

    def _count(self, members: int) -> None:
        self._members += members
        if self._members > MOST_MEMBERS:
            raise Unsendable(f"it has more than {MOST_MEMBERS} members, of which an array counts as {_OF_ARRAY}")

    def _bytes(self, value: bytes) -> object:
        if len(value) < _LONG_BYTES:
            return value
        self._count(_OF_ITSELF)
        return Extension(_BYTES, _PLACE.pack(self.add(value, len(value)), len(value)))

    def _of_numpy(self, value: np.ndarray[Any, Any] | np.generic) -> object:
        if isinstance(value, np.generic) and value.dtype.kind in "biufcSU":
            return self.plain(value.item())
        array = np.asarray(value)
        name = array.dtype.str
        if array.dtype.hasobject or _DTYPE.fullmatch(name) is None or array.ndim > _MOST_DIMENSIONS:
            raise Unsendable(f"an array of {array.dtype} does not travel")
        self._count(_OF_ARRAY)
        array = np.ascontiguousarray(array).reshape(array.shape)
        size_bytes = array.nbytes
        place = 0
        if size_bytes:
            place = self.add(array.reshape(-1).view(np.uint8).data, size_bytes)
        return Extension(_ARRAY, pack([name, array.shape, place, size_bytes]))


def _whole(value: int) -> object:
    if -(1 << 63) <= value < 1 << 64:
        return value
    size_bytes = value.bit_length() // 8 + 1
    if size_bytes > _MOST_DIGITS_BYTES:
        raise Unsendable(f"a whole number of {value.bit_length()} bits does not travel")
    return Extension(_WHOLE, value.to_bytes(size_bytes, "little", signed=True))


def _of_subclass(value: object) -> object:
    """Return the value of a class that derives from one that travels."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return _whole(int.__index__(value))
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, complex):
        return Extension(_COMPLEX, _PAIR.pack(value.real, value.imag))
    raise Unsendable(f"a value of the class {type(value).__name__:.80} does not travel")


def _key(key: object) -> object:
    if _is_key(key):
        return key
    if isinstance(key, np.generic):
        return _key(key.item())
    if isinstance(key, (str, int, float)):
        plain = int.__index__(key) if isinstance(key, int) else _of_subclass(key)
        if _is_key(plain):
            return plain
    raise Unsendable(f"a key of the class {type(key).__name__:.80} or of this size does not travel")


def _is_key(key: object) -> bool:
    """Return True for a key that travels. Of longer numbers, any count has the same hash, and of complex ones."""
    return type(key) in _KEYS or (type(key) is int and -(1 << 63) <= key < 1 << 64)


def write(value: object) -> Written:
    """Write a value. Raises `Unsendable`. The parts refer to the arrays in it, which must not change meanwhile."""
    written = Written()
    plain = written.plain(value)
    try:
        written.document = pack_with(plain, unicode_errors=_CHARACTERS)
    except (ValueError, OverflowError, TypeError) as error:
        raise Unsendable(str(error)) from error
    if len(written.document) > MOST_DOCUMENT_BYTES:
        raise Unsendable(f"its texts and numbers take more than {MOST_DOCUMENT_BYTES} bytes")
    return written


def read(document: Buffer, memory: Buffer | None) -> Any:
    """Read a value. Its arrays are views of `memory`, which must stay as it is. Raises `RemoteProtocolError`."""
    reader = _Reader(memory)
    most = min(len(document), MOST_MEMBERS)
    try:
        if len(document) > MOST_DOCUMENT_BYTES:
            raise RemoteProtocolError(f"a document of more than {MOST_DOCUMENT_BYTES} bytes")
        value = unpack(
            document,
            ext_hook=reader.extension,
            list_hook=reader.list_read,
            object_pairs_hook=reader.map_read,
            strict_map_key=False,
            unicode_errors=_CHARACTERS,
            max_array_len=most,
            max_map_len=min(most, MOST_MEMBERS // _OF_ENTRY),
        )
        _check_depth(value)
    except RemoteProtocolError:
        raise
    except Exception as error:  # msgpack has many: of formats, keys, characters, depth
        raise RemoteProtocolError(f"a document that cannot be read: {error!r:.200}") from error
    return value


class _Reader:
    """Makes the parts of a value that msgpack does not have, and counts its members."""

    def __init__(self, memory: Buffer | None) -> None:
        self._memory = memory
        self._size_bytes = 0 if memory is None else len(memory)
        self._members = self._taken_bytes = 0

    def list_read(self, members: list[object]) -> list[object]:
        # An empty list takes one byte, and sixty of memory.
        self._count(_OF_ITSELF + len(members))
        return members

    def map_read(self, members: list[tuple[object, object]]) -> dict[object, object]:
        self._count(_OF_ITSELF + _OF_ENTRY * len(members))
        if not all(_is_key(key) for key, _ in members):
            raise RemoteProtocolError("a key of another kind than keys have")
        return dict(members)

    def _count(self, members: int) -> None:
        self._members += members
        if self._members > MOST_MEMBERS:
            raise RemoteProtocolError(f"a value has more than {MOST_MEMBERS} members")

    def extension(self, code: int, data: bytes) -> object:
        if code == _ARRAY:
            return self._array(data)
        if code == _BYTES and len(data) == _PLACE.size:
            self._count(_OF_ITSELF)
            return bytes(self._part(*_PLACE.unpack(data)))
        if code == _WHOLE and len(data) <= _MOST_DIGITS_BYTES:
            return int.from_bytes(data, "little", signed=True)
        if code == _COMPLEX and len(data) == _PAIR.size:
            return complex(*_PAIR.unpack(data))
        raise RemoteProtocolError("an extension that values do not have")

    def _part(self, place: int, length: int) -> Buffer:
        """Return a part of the memory. All together are no more than it: the same part many times could be any size."""
        self._taken_bytes += length
        if self._taken_bytes > self._size_bytes:
            raise RemoteProtocolError("the parts of the memory are more than all of it")
        return _slice(self._memory, place, length, self._size_bytes)

    def _array(self, data: bytes) -> np.ndarray[Any, Any]:
        self._count(_OF_ARRAY)
        name, shape, place, length = unpack(data)
        if not isinstance(name, str) or _DTYPE.fullmatch(name) is None or not isinstance(shape, list):
            raise RemoteProtocolError("an array without a datatype or shape")
        numbers = [*shape, place, length]
        if len(shape) > _MOST_DIMENSIONS or any(type(each) is not int or each < 0 for each in numbers):
            raise RemoteProtocolError("an array of no shape")
        dtype = np.dtype(name)
        if math.prod(shape) * dtype.itemsize != length:
            raise RemoteProtocolError("an array of another size than its shape")
        if not length:
            if math.prod(shape):
                raise RemoteProtocolError("an array of elements without a size")
            return np.zeros(shape, dtype)
        return np.frombuffer(self._part(place, length), dtype).reshape(shape)


def parcel(written: Written, fd: int) -> bytes:
    """Return a packet with a value. What does not fit into it is written to the file `fd`. Raises OSError."""
    document, place = written.document, 0
    parts = written.parts
    if len(document) > _MOST_IN_PACKET:
        place = written.add(document, len(document))
        document = b""
    for at, part in parts:
        _write_at(fd, memoryview(part), at)
    packet: bytes = pack([document, place, len(written.document), written.size_bytes])
    return packet


def _write_at(fd: int, part: memoryview, place: int) -> None:
    while part:
        done = os.pwrite(fd, part, place)
        part, place = part[done:], place + done


def unpacked(packet: bytes, mapped: Callable[[int], Buffer]) -> Any:
    """Return the value in a packet. `mapped` maps so many bytes of the file beside it.

    Raises `RemoteProtocolError`, and what `mapped` raises.
    """
    try:
        document, place, length, size_bytes = unpack(packet)
    except Exception as error:
        raise RemoteProtocolError(f"a packet without a value: {error!r:.200}") from error
    if not isinstance(document, bytes) or any(type(n) is not int or n < 0 for n in (place, length, size_bytes)):
        raise RemoteProtocolError("a packet without a value")
    memory = mapped(size_bytes) if size_bytes else None
    if not document:
        # A copy, since the process that has the file may change it. With one byte too many, `read` refuses it.
        document = bytes(_slice(memory, place, min(length, MOST_DOCUMENT_BYTES + 1), size_bytes))
    return read(document, memory)


def _check_depth(value: object) -> None:
    """Raise `RemoteProtocolError` for what `write` never writes: a value nested deeper, or of another class."""
    level: list[Any] = [value]
    # The outermost layers are those of the message that the value is in.
    for _ in range(MOST_DEPTH + 4):
        below: list[Any] = []
        for each in level:
            if type(each) is list:
                below += each
            elif type(each) is dict:
                below += each.values()
        # msgpack makes objects of its own of times.
        if any(type(each) not in _READ for each in below):
            raise RemoteProtocolError("a value of a class that values do not have")
        level = [each for each in below if type(each) in (list, dict)]
        if not level:
            return
    raise RemoteProtocolError(f"a value is nested deeper than {MOST_DEPTH}")


def _slice(memory: Buffer | None, place: int, length: int, size_bytes: int) -> Buffer:
    if memory is None or place + length > size_bytes:
        raise RemoteProtocolError("a part lies outside the memory")
    return memory[place : place + length]
