"""Messages of gRPC as bytes: tensors taken apart from the rest, and bounds for what the protobuf library makes objects of.

A protobuf library copies each tensor twice on the way in, into its message and out of it. The fields of the message itself are few
and stand one behind another, so finding the tensors takes some steps. The rest is left to the library, which checks it.

The library takes some twenty times the bytes of a field that is empty or a small number. So a large message is walked through
along its description first, and refused if it has too many fields. Small messages cannot become large, and are not walked through.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.server.grpc.options import MAX_MESSAGE_BYTES

# Fields of ModelInferRequest and of ModelInferResponse, as tags of fields with a length.
_ID_TAG = 3 << 3 | 2
_RAW_INPUT_TAG = 7 << 3 | 2
_RAW_OUTPUT_TAG = bytes([6 << 3 | 2])
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
# Inputs, outputs and parameters of one request, each with everything in it.
_MOST_PARTS = 1 << 16
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


class BadProtobuf(Exception):
    """The bytes are not a message."""


class Parts(NamedTuple):
    """A request: its fields except id and tensors, the id, and the places of its tensors as (offset, size in bytes)."""

    head: bytes
    request_id: bytes
    tensors: list[tuple[int, int]]


def split(message: bytes, until_tensor: bool = False) -> Parts:
    """Take a ModelInferRequest apart. Raises `BadProtobuf`.

    With `until_tensor`, bytes behind the place of the first tensor are not read, and may be missing.
    """
    end = len(message)
    at = begin = 0
    pieces: list[bytes] = []
    tensors: list[tuple[int, int]] = []
    request_id = b""
    fields = 0
    try:
        while at < end:
            fields += 1
            if fields > _MOST_PARTS:
                raise BadProtobuf(f"more than {_MOST_PARTS} fields")
            field = at
            tag = message[at]
            at += 1
            if tag > 127:
                tag, at = varint(message, field)
            kind = tag & 7
            if kind == _LENGTH:
                size = message[at]
                at += 1
                if size > 127:
                    size, at = varint(message, at - 1)
                if tag in (_RAW_INPUT_TAG, _ID_TAG):
                    if begin < field:
                        pieces.append(message[begin:field])
                    if tag == _ID_TAG:
                        request_id = message[at : at + size]
                    else:
                        tensors.append((at, size))
                        if until_tensor:
                            begin = at = end
                            break
                    begin = at + size
                at += size
            elif kind == _VARINT:
                _, at = varint(message, at)
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                raise BadProtobuf(f"a field of wire type {kind}")
    except (IndexError, OverflowError):  # so long a field, too
        raise BadProtobuf("it ends inside a field") from None
    if at != end:
        raise BadProtobuf("it ends inside a field")
    if begin < end:
        pieces.append(message[begin:])
    return Parts(pieces[0] if len(pieces) == 1 else b"".join(pieces), request_id, tensors)


def tensors_from(message: memoryview, first: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the places of the first tensor and of those behind it. Raises `BadProtobuf`, and `InvalidRequest` for other fields.

    Somebody else may write to the message meanwhile. So each byte is read once, and nothing is believed but sizes of tensors.
    """
    found = [first]
    at, end = sum(first), len(message)
    try:
        while at < end:
            tag, at = varint(message, at)
            if tag != _RAW_INPUT_TAG and tag >> 3 <= _RAW_INPUT_TAG >> 3:
                raise InvalidRequest(
                    "a field of the request follows its tensors: send the fields in the order of their numbers"
                )
            if tag & 7 == _LENGTH:
                size, at = varint(message, at)
                if tag == _RAW_INPUT_TAG:
                    found.append((at, size))
                at += size
            elif tag & 7 == _VARINT:
                _, at = varint(message, at)
            elif tag & 7 in (_FIXED64, _FIXED32):
                at += 8 if tag & 7 == _FIXED64 else 4
            else:
                raise BadProtobuf(f"a field of wire type {tag & 7}")
            if len(found) > _MOST_PARTS:
                raise BadProtobuf(f"more than {_MOST_PARTS} fields")
    except IndexError:
        raise BadProtobuf("it ends inside a field") from None
    if at != end:
        raise BadProtobuf("it ends inside a field")
    return found


def varint(message: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return a number and the offset behind it. Raises `BadProtobuf`, `IndexError`."""
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
        if shift > 63:
            raise BadProtobuf("a number of more than 64 bits")


def length(size: int) -> bytes:
    """Return a length as it travels."""
    digits = bytearray()
    while size > 127:
        digits.append(size & 127 | 128)
        size >>= 7
    digits.append(size)
    return bytes(digits)


def text_field(number: int, text: bytes) -> bytes:
    """Return a field of text, or nothing if the text is empty."""
    return bytes([number << 3 | _LENGTH]) + length(len(text)) + text if text else b""


def join(head: bytes, tensors: list[memoryview], tag: bytes = b"") -> list[bytes | memoryview]:
    """Return a ModelInferResponse of its other fields and its tensors, in pieces.

    With a tag it becomes a field of another message. Raises `ModelError` if no message of gRPC can hold it. That is checked before
    anything is copied, as all tensors may be the same memory.
    """
    pieces: list[bytes | memoryview] = [head]
    for tensor in tensors:
        pieces += (_RAW_OUTPUT_TAG, length(len(tensor)), tensor)
    size_bytes = sum(map(len, pieces))
    if tag:
        pieces[:0] = (tag, length(size_bytes))
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
                tag, at = varint(data, begin)
            self._fields += 1
            if self._fields > _MOST_FIELDS:
                self._refuse(_MOST_FIELDS, "fields", _path(where, known.get(tag >> 3)))
            kind = tag & 7
            if kind == _LENGTH:
                size = data[at]
                at += 1
                if size > 127:
                    size, at = varint(data, at - 1)
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
                _, at = varint(data, at)
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
