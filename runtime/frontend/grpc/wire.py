"""Messages of inference as bytes: their tensors apart from the rest, so that nobody copies those.

A protobuf library copies each tensor twice on the way in, into its message and out of it. The fields of the
message itself are few and stand one behind another, so finding the tensors takes some steps. What is not
tensors is left to the library, which checks it.
"""

from __future__ import annotations

from typing import NamedTuple

from moonpool.runtime.errors import ModelError
from moonpool.runtime.frontend.grpc.options import MAX_MESSAGE_BYTES

# Fields of ModelInferRequest and of ModelInferResponse, as tags of fields with a length.
_ID_TAG = 3 << 3 | 2
_RAW_INPUT_TAG = 7 << 3 | 2
_RAW_OUTPUT_TAG = bytes([6 << 3 | 2])
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


# Inputs, outputs and parameters of one request, beside what is in them.
_MOST_FIELDS = 1 << 16


class BadMessage(Exception):
    """Bytes that are no message."""


class Parts(NamedTuple):
    """A request: its fields but id and tensors, the id, and where its tensors lie as (offset, size in bytes)."""

    head: bytes
    request_id: bytes
    tensors: list[tuple[int, int]]


def split(message: bytes) -> Parts:
    """Take a ModelInferRequest apart. Raises `BadMessage`."""
    end = len(message)
    at = begin = 0
    pieces: list[bytes] = []
    tensors: list[tuple[int, int]] = []
    request_id = b""
    fields = 0
    try:
        while at < end:
            fields += 1
            if fields > _MOST_FIELDS:
                raise BadMessage(f"more than {_MOST_FIELDS} fields")
            field = at
            tag = message[at]
            at += 1
            if tag > 127:
                tag, at = varint(message, field)
            kind = tag & 7
            if kind == LENGTH:
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
                    begin = at + size
                at += size
            elif kind == VARINT:
                _, at = varint(message, at)
            elif kind in (FIXED64, FIXED32):
                at += 8 if kind == FIXED64 else 4
            else:
                raise BadMessage(f"a field of wire type {kind}")
    except IndexError:
        raise BadMessage("it ends inside a field") from None
    if at != end:
        raise BadMessage("it ends inside a field")
    if begin < end:
        pieces.append(message[begin:])
    return Parts(pieces[0] if len(pieces) == 1 else b"".join(pieces), request_id, tensors)


def varint(message: bytes, at: int) -> tuple[int, int]:
    """A number and where the next thing begins."""
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
        if shift > 63:
            raise BadMessage("a number of more than 64 bits")


def length(size: int) -> bytes:
    """A length as it travels."""
    digits = bytearray()
    while size > 127:
        digits.append(size & 127 | 128)
        size >>= 7
    digits.append(size)
    return bytes(digits)


def text_field(number: int, text: bytes) -> bytes:
    """A field of text, nothing where it is empty."""
    return bytes([number << 3 | LENGTH]) + length(len(text)) + text if text else b""


def join(head: bytes, tensors: list[memoryview], tag: bytes = b"") -> bytes:
    """Make a ModelInferResponse of its other fields and its tensors, which are copied here once.

    With a tag it is a field of another message. Raises `ModelError` if no message of gRPC can hold it, before
    anything is copied: all tensors may be the same memory.
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
    return b"".join(pieces)
