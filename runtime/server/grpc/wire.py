"""Messages of gRPC as bytes: read field by field, put together, and bounds for what the protobuf library makes of them.

A protobuf library copies each tensor twice on the way in, into its message and out of it. The fields of a request are
few and stand one behind another, so `FieldReader` finds the tensors in some steps, and reads the rest of most requests
on the way. Parameters, and what else most requests have not, are left to the library.

The library takes some twenty times the bytes of a field that is empty or a small number. So a large message is walked
through along its description first, and refused if it has too many fields. Small messages cannot become large, and are
not walked through.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.model.protobuf import BadProtobuf, read_varint, varint
from moonpool.runtime.server.grpc.options import MAX_MESSAGE_BYTES

# Fields of ModelInferRequest and of ModelInferResponse, as tags of fields with a length.
_RAW_INPUT_TAG = 7 << 3 | 2
_RAW_OUTPUT_TAG = bytes([6 << 3 | 2])
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_TAG_BYTES = 5
# Inputs, outputs and parameters of one request, each with everything in it.
MOST_PARTS = 1 << 16
# Smaller messages are not walked through.
SMALL_BYTES = 1 << 20
# Fields at all depths: each string, message and parameter is one, and each entry of a map is three.
_MOST_FIELDS = 1 << 20
# Numbers in packed fields, each of which becomes 8 bytes.
_MOST_NUMBERS = 1 << 23
_CHUNK_BYTES = 1 << 20
# Fields of these types take about the memory that they take on the wire.
_COMPACT = (
    FieldDescriptor.TYPE_BOOL,
    FieldDescriptor.TYPE_FLOAT,
    FieldDescriptor.TYPE_DOUBLE,
    FieldDescriptor.TYPE_FIXED32,
    FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_SFIXED32,
    FieldDescriptor.TYPE_SFIXED64,
    FieldDescriptor.TYPE_STRING,
    FieldDescriptor.TYPE_BYTES,
)


class FieldReader:
    """Reads the fields of a message, or of a part of one, one after another. It looks at no byte behind the end."""

    def __init__(self, message: bytes, at: int, end: int, is_cut: bool = False) -> None:
        """Begin at a place. `end` lies in the message, and behind `at`.

        With `is_cut`, the message is the beginning of one, and a tensor in it may end behind it.
        """
        self.message = self._bytes = message
        self._at, self._end, self._is_cut = at, end, is_cut
        # Of the field that was read last: its place, its tag, the place and size of what is in it, or its number.
        self._field = self.tag = self.begin = self.size = self.number = 0

    def next(self) -> bool:
        """Read a field. Returns False if there is none. Raises `BadProtobuf`."""
        if self._at == self._end:
            return False
        self._field = self._at
        tag = FieldReader._varint(self)
        if tag < 8 or tag >> 32 or self._at - self._field > _TAG_BYTES:
            raise BadProtobuf(f"a field with the tag {tag}")
        self.tag, kind, size = tag, tag & 7, 0
        if kind == _LENGTH:
            size = FieldReader._varint(self)
        elif kind == _VARINT:
            self.number = FieldReader._varint(self)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise BadProtobuf(f"a field of wire type {kind}")
        left = self._end - self._at
        is_tensor = self._is_cut and tag == _RAW_INPUT_TAG and size >> 32 == 0
        if size > left and not is_tensor:
            raise BadProtobuf("it ends inside a field")
        self.begin, self.size = self._at, size
        self._at += min(size, left)
        return True

    def _varint(self) -> int:
        number = shift = 0
        while self._at < self._end:
            byte = self._bytes[self._at]
            self._at += 1
            # As the library, which drops what goes beyond 64 bits.
            number |= (byte & (127 if shift < 63 else 1)) << shift
            if byte < 128:
                return number
            shift += 7
            if shift > 63:
                raise BadProtobuf("a number of more than 64 bits")
        raise BadProtobuf("it ends inside a field")

    def inner(self, reader: FieldReader) -> FieldReader:
        """Let a reader of the same message read what is in the field. Returns that reader."""
        reader._at, reader._end = self.begin, self.begin + self.size
        return reader

    def text(self) -> str:
        """Return the text in the field. Raises `UnicodeDecodeError`."""
        return self._bytes[self.begin : self.begin + self.size].decode("utf-8")

    def numbers(self, found: list[int], most: int) -> bool:
        """Add the signed numbers in the field, or its one number. Returns False if that makes more than `most`."""
        if self.tag & 7 == _VARINT:
            found.append(_signed(self.number))
            return len(found) <= most
        reader = FieldReader(self.message, self.begin, self.begin + self.size)
        while reader._at < reader._end:
            found.append(_signed(FieldReader._varint(reader)))
            if len(found) > most:
                return False
        return True

    def field(self) -> bytes:
        """Return the whole field as it came."""
        return self.message[self._field : self._at]


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def tensors_from(message: memoryview, first: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the places of the first tensor and of those behind it. Raises `BadProtobuf`, and `InvalidRequest` for
    other fields.

    Somebody else may write to the message meanwhile. So each byte is read once, and nothing is believed but sizes of
    tensors.
    """
    found = [first]
    at, end = sum(first), len(message)
    try:
        while at < end:
            tag, at = read_varint(message, at)
            if tag != _RAW_INPUT_TAG and tag >> 3 <= _RAW_INPUT_TAG >> 3:
                raise InvalidRequest(
                    "a field of the request follows its tensors: send the fields in the order of their numbers"
                )
            if tag & 7 == _LENGTH:
                size, at = read_varint(message, at)
                if tag == _RAW_INPUT_TAG:
                    found.append((at, size))
                at += size
            elif tag & 7 == _VARINT:
                _, at = read_varint(message, at)
            elif tag & 7 in (_FIXED64, _FIXED32):
                at += 8 if tag & 7 == _FIXED64 else 4
            else:
                raise BadProtobuf(f"a field of wire type {tag & 7}")
            if len(found) > MOST_PARTS:
                raise BadProtobuf(f"more than {MOST_PARTS} fields")
    except IndexError:
        raise BadProtobuf("it ends inside a field") from None
    if at != end:
        raise BadProtobuf("it ends inside a field")
    return found


def text_field(number: int, text: bytes) -> bytes:
    """Return a field of text, or nothing if the text is empty."""
    return bytes([number << 3 | _LENGTH]) + varint(len(text)) + text if text else b""


def join(head: bytes, tensors: list[memoryview], tag: bytes = b"") -> list[bytes | memoryview]:
    """Return a ModelInferResponse of its other fields and its tensors, in pieces.

    With a tag it becomes a field of another message. Raises `ModelError` if no message of gRPC can hold it. That is
    checked before anything is copied, as all tensors may be the same memory.
    """
    pieces: list[bytes | memoryview] = [head]
    for tensor in tensors:
        pieces += (_RAW_OUTPUT_TAG, varint(len(tensor)), tensor)
    size_bytes = sum(map(len, pieces))
    if tag:
        pieces[:0] = (tag, varint(size_bytes))
        size_bytes += len(pieces[0]) + len(pieces[1])
    if size_bytes > MAX_MESSAGE_BYTES:
        raise ModelError(
            f"Response has byte size {size_bytes} which exceeds gRPC's byte size limit {MAX_MESSAGE_BYTES}.",
            "INVALID_ARG",
        )
    return pieces


def parse(kind: Any, data: bytes) -> Any:
    """Return the message of this kind. Raises `InvalidRequest`, `BadProtobuf`, and `DecodeError` of the library."""
    check(kind, data)
    return kind.FromString(data)


def check(kind: Any, data: bytes) -> None:
    """Raise `InvalidRequest` if a message has too many fields or numbers, `BadProtobuf` if it is malformed."""
    if len(data) <= SMALL_BYTES:
        return
    try:
        _Walk(kind.DESCRIPTOR, data).message(kind.DESCRIPTOR, 0, len(data), "")
    except IndexError:
        raise BadProtobuf("it ends inside a field") from None


class _Walk:
    """Counts the fields and numbers of one message."""

    def __init__(self, root: Any, data: bytes) -> None:
        self._root = root
        self._data = data
        self._fields = self._numbers = 0

    def message(self, description: Any, at: int, end: int, where: str) -> None:
        """Count the fields between two places."""
        data, known = self._data, description.fields_by_number
        while at < end:
            begin = at
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = read_varint(data, begin)
            self._fields += 1
            if self._fields > _MOST_FIELDS:
                self._refuse(_MOST_FIELDS, "fields", _path(where, known.get(tag >> 3)))
            kind = tag & 7
            if kind == _LENGTH:
                size = data[at]
                at += 1
                if size > 127:
                    size, at = read_varint(data, at - 1)
                if at + size > end:
                    raise BadProtobuf("a field ends behind its message")
                field = known.get(tag >> 3)
                # Fields that are not known are kept as they are.
                if field is not None and size:
                    if field.message_type is not None:
                        self.message(field.message_type, at, at + size, _path(where, field))
                    elif field.type not in _COMPACT:
                        self._packed(at, at + size, _path(where, field))
                at += size
            elif kind == _VARINT:
                _, at = read_varint(data, at)
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                raise BadProtobuf(f"a field of wire type {kind}")
        if at != end:
            raise BadProtobuf("a field ends behind its message")

    def _packed(self, at: int, end: int, where: str) -> None:
        """Count numbers: each ends with a byte below 128."""
        for begin in range(at, end, _CHUNK_BYTES):
            chunk = np.frombuffer(self._data, np.uint8, min(_CHUNK_BYTES, end - begin), begin)
            self._numbers += int(np.count_nonzero(chunk < 128))
            if self._numbers > _MOST_NUMBERS:
                self._refuse(_MOST_NUMBERS, "numbers", where)

    def _refuse(self, most: int, what: str, where: str) -> None:
        is_inference = self._root.name == "ModelInferRequest"
        advice = "send tensors in raw_input_contents" if is_inference else "ask for less at once"
        raise InvalidRequest(
            f"the {self._root.name} has more than {most} {what}, the last of them in '{where}': {advice}"
        )


def _path(where: str, field: Any) -> str:
    name = "an unknown field" if field is None else field.name
    return f"{where}.{name}" if where else name
