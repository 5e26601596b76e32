"""Bounds for messages, which are checked before the protobuf library makes objects of them.

The library takes some twenty times the bytes of a field that is empty or a small number. So a large message is
walked through first, along its description. Small ones cannot become large, and are not looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.frontend.grpc.wire import (
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    BadMessage,
    varint,
)

# Smaller messages are not looked at.
SMALL_BYTES = 1 << 20
# Fields at all depths: each string, message and parameter is one, each entry of a map three.
_MOST_FIELDS = 1 << 20
# Numbers in packed fields, which become 8 bytes each.
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


def parse(kind: Any, data: bytes) -> Any:
    """Return the message of this kind. Raises `InvalidRequest`, `BadMessage`, and `DecodeError` of the library."""
    check(kind, data)
    return kind.FromString(data)


def check(kind: Any, data: bytes) -> None:
    """Raise `InvalidRequest` if a message has too many fields or numbers, `BadMessage` if it is malformed."""
    if len(data) <= SMALL_BYTES:
        return
    try:
        _Walk(kind.DESCRIPTOR, data).message(kind.DESCRIPTOR, 0, len(data), "")
    except IndexError:
        raise BadMessage("it ends inside a field") from None


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
            if kind == LENGTH:
                size = data[at]
                at += 1
                if size > 127:
                    size, at = varint(data, at - 1)
                if at + size > end:
                    raise BadMessage("a field ends behind its message")
                field = known.get(tag >> 3)
                # Fields that are not known are kept as they are.
                if field is not None and size:
                    if field.message_type is not None:
                        self.message(field.message_type, at, at + size, _path(where, field))
                    elif field.type not in _COMPACT:
                        self._packed(at, at + size, _path(where, field))
                at += size
            elif kind == VARINT:
                _, at = varint(data, at)
            elif kind in (FIXED64, FIXED32):
                at += 8 if kind == FIXED64 else 4
            else:
                raise BadMessage(f"a field of wire type {kind}")
        if at != end:
            raise BadMessage("a field ends behind its message")

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
