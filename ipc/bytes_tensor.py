"""The BYTES format: each element as a 4-byte little-endian length and its payload, in C order.

Both directions do their work in C loops (map, join, BytesIO.read) with no Python bytecode per
element beyond one comprehension: strings come by the hundred thousand.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.errors import BadTensor
from moonpool.ipc.tensors import check_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

LENGTH_BYTES = 4
MAX_STRING_BYTES = 2**32 - 1

_pack_length = struct.Struct("<I").pack
_unpack_length = struct.Struct("<I").unpack_from


def encode_bytes(array: NDArray[np.object_] | NDArray[np.bytes_], name: str = "") -> bytes:
    """The wire form of an array of strings (dtype object or S).

    Elements that are bytes are kept, everything else becomes the UTF-8 of its str(). An S array
    loses trailing NULs, as numpy itself does. Raises BadTensor for another dtype, and for an
    element that has no UTF-8 form or is 4 GiB or longer.
    """
    if array.dtype.kind not in "OS":
        raise BadTensor(
            f"{_tensor(name)} has dtype {array.dtype}, and BYTES is made from object or S arrays; "
            "convert it first: array.astype(object)"
        )
    payloads = _payloads(np.asarray(array).ravel().tolist(), name)
    lengths = list(map(len, payloads))
    # There are far fewer lengths than strings, so each is packed once.
    prefixes = {length: _prefix(length, name) for length in set(lengths)}
    parts = [b""] * (2 * len(payloads))
    parts[0::2] = map(prefixes.__getitem__, lengths)
    parts[1::2] = payloads
    return b"".join(parts)


def _prefix(length: int, name: str) -> bytes:
    if length > MAX_STRING_BYTES:
        raise BadTensor(
            f"an element of {_tensor(name)} has {length} bytes, and {MAX_STRING_BYTES} is the most"
        )
    return _pack_length(length)


def _payloads(elements: list[object], name: str) -> list[bytes]:
    kinds = set(map(type, elements))
    if kinds <= {bytes}:
        return elements  # type: ignore[return-value]
    if kinds == {str}:
        with suppress(UnicodeEncodeError):
            return list(map(str.encode, elements))  # type: ignore[arg-type]
    return [_payload(element, index, name) for index, element in enumerate(elements)]


def _payload(element: object, index: int, name: str) -> bytes:
    if isinstance(element, bytes):
        # A subclass may lie about its length.
        return bytes(memoryview(element))
    try:
        return str(element).encode()
    except Exception as error:
        raise BadTensor(
            f"element {index} of {_tensor(name)}, of type {type(element).__name__}, has no UTF-8 "
            f"form ({type(error).__name__}); pass bytes or a str without surrogates"
        ) from error


def decode_bytes(buffer: Buffer, shape: Sequence[int], name: str = "") -> NDArray[np.object_]:
    """The strings in `buffer` as a new object array of `shape` whose elements are bytes.

    `buffer` is copied before it is parsed, since a peer may be writing to it meanwhile, and no more
    elements are made than `shape` has or the buffer can hold. Raises BadTensor, and nothing else,
    for a buffer that does not hold exactly the elements of `shape`, and for a bad shape.
    """
    count = check_shape(shape, name)
    data = bytes(buffer)
    possible = min(count, len(data) // LENGTH_BYTES)
    read = BytesIO(data).read
    from_bytes = int.from_bytes
    elements = [read(from_bytes(read(4), "little")) for _ in range(possible)]
    # A read at the end comes back short and says nothing, so the sum finds a short length field,
    # and the last element's own length field (always at its place if the sum is right) the rest.
    if possible < count or LENGTH_BYTES * count + sum(map(len, elements)) != len(data):
        raise BadTensor(_fault(data, count, name))
    if elements and not data.startswith(
        _pack_length(len(elements[-1])), len(data) - len(elements[-1]) - LENGTH_BYTES
    ):
        raise BadTensor(_fault(data, count, name))
    array = np.empty(count, dtype=np.object_)
    array[:] = elements
    return array.reshape(tuple(shape))


def check_bytes(buffer: Buffer, shape: Sequence[int], name: str = "") -> None:
    """Raises BadTensor, and nothing else, unless `buffer` holds exactly the strings of `shape`.

    A peer may write to the buffer later; whoever decodes it checks again.
    """
    count = check_shape(shape, name)
    data = memoryview(buffer)
    end = data.nbytes
    offset = 0
    for _ in range(count):
        if offset + LENGTH_BYTES > end:
            raise BadTensor(_fault(bytes(data), count, name))
        offset += LENGTH_BYTES + _unpack_length(data, offset)[0]
    if offset != end:
        raise BadTensor(_fault(bytes(data), count, name))


def _fault(data: bytes, count: int, name: str) -> str:
    """What is wrong with data that do not hold `count` strings, in Triton's words."""
    offset = 0
    for found in range(count):
        if offset == len(data):
            return f"expected {count} strings{_for_input(name)}, got {found}"
        if len(data) - offset < LENGTH_BYTES:
            return "Invalid bytes tensor data: incomplete length field"
        offset += LENGTH_BYTES + int.from_bytes(data[offset : offset + LENGTH_BYTES], "little")
        if offset > len(data):
            return "Invalid bytes tensor data: string extends beyond buffer"
    if len(data) - offset < LENGTH_BYTES:
        return "Invalid bytes tensor data: incomplete length field"
    # Triton counts no further than the first element too many.
    return f"unexpected number of string elements {count + 1}{_for_input(name)}, expecting {count}"


def _for_input(name: str) -> str:
    return f" for inference input '{name}'" if name else ""


def _tensor(name: str) -> str:
    return f"tensor '{name}'" if name else "the tensor"
