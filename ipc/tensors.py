"""Datatypes, shapes and strings: turns a tensor's description into numpy's and back, and encodes and decodes BYTES.

A dtype is always looked up in these tables by an integer code, never built from text. So a peer
can choose one of fourteen entries and nothing else.

A BYTES tensor is a sequence of elements in C order, each a 4-byte little-endian length and its payload. Encoding and
decoding use C loops (map, join, BytesIO.read) with no Python bytecode per element beyond one comprehension, because
tensors may have hundreds of thousands of strings.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.errors import BadTensor
from moonpool.ipc.messages import MAX_DIMS as MAX_DIMS
from moonpool.ipc.signals import raised_again

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

BYTES = 13
BF16 = 14

NAMES: dict[int, str] = {
    1: "BOOL",
    2: "UINT8",
    3: "UINT16",
    4: "UINT32",
    5: "UINT64",
    6: "INT8",
    7: "INT16",
    8: "INT32",
    9: "INT64",
    10: "FP16",
    11: "FP32",
    12: "FP64",
    BYTES: "BYTES",
    BF16: "BF16",
}
CODES: dict[str, int] = {name: code for code, name in NAMES.items()}


class _Dtypes(dict[int, "np.dtype[np.generic]"]):
    """The table below. BF16 is added at the first use, because ml_dtypes is slow to import."""

    def __missing__(self, code: int) -> np.dtype[np.generic]:
        if code == BF16:
            self[BF16] = _bfloat16()
            return self[BF16]
        if code == BYTES:
            raise BadTensor("BYTES elements have no fixed size, so there is no dtype to view them by")
        raise BadTensor(f"{code!r} is not a datatype code; codes run from 1 (BOOL) to {BF16} (BF16)")


def _bfloat16() -> np.dtype[np.generic]:
    """Return ml_dtypes' bfloat16, or raw 16-bit words if that package is missing."""
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(np.uint16)
    dtype: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
    return dtype


# The dtype of each datatype of fixed size. `DTYPES[code]` raises BadTensor for any other code.
DTYPES: dict[int, np.dtype[np.generic]] = _Dtypes(
    {
        1: np.dtype(np.bool_),
        2: np.dtype(np.uint8),
        3: np.dtype(np.uint16),
        4: np.dtype(np.uint32),
        5: np.dtype(np.uint64),
        6: np.dtype(np.int8),
        7: np.dtype(np.int16),
        8: np.dtype(np.int32),
        9: np.dtype(np.int64),
        10: np.dtype(np.float16),
        11: np.dtype(np.float32),
        12: np.dtype(np.float64),
    }
)
# The bytes of an element; 0 for BYTES, whose elements have no fixed size.
ITEMSIZE: dict[int, int] = {code: dtype.itemsize for code, dtype in DTYPES.items()}
ITEMSIZE.update({BYTES: 0, BF16: 2})

# The code of each dtype that was looked up so far. `code_of` finds the others.
CODE_OF: dict[np.dtype[np.generic], int] = {dtype: code for code, dtype in DTYPES.items()}
CODE_OF[np.dtype(np.object_)] = BYTES

# With this limit, the product of a shape and an item size fits into a signed 64-bit integer.
MAX_ELEMENTS = 2**59


def code_of(dtype: np.dtype[np.generic], name: str = "") -> int:
    """Return the datatype code of an array's dtype. Object and S arrays are BYTES.

    Raises BadTensor, which names the tensor if `name` is given, for a dtype that no datatype has.
    """
    code = CODE_OF.get(dtype)
    return _rare_code_of(dtype, name) if code is None else code


def _rare_code_of(dtype: np.dtype[np.generic], name: str) -> int:
    if dtype.kind == "S":
        return BYTES
    # An array of this dtype can only exist if the package has been imported.
    ml_dtypes = sys.modules.get("ml_dtypes")
    if ml_dtypes is not None and dtype == np.dtype(ml_dtypes.bfloat16):
        CODE_OF[dtype] = BF16
        return BF16
    subject = f"tensor '{name}'" if name else "the tensor"
    raise BadTensor(f"{subject} has dtype {dtype}, which no datatype has; {_advice(dtype)}")


def _advice(dtype: np.dtype[np.generic]) -> str:
    if dtype.names is not None or dtype.subdtype is not None:
        return "pass one array for each field"
    if not dtype.isnative:
        return f"convert it first: array.astype('{dtype.newbyteorder('=').name}')"
    if dtype.kind == "U":
        return "convert it first: array.astype(object) sends the text as UTF-8"
    if dtype.kind == "c":
        return "pass the real and imaginary parts as two arrays"
    if dtype.kind in "mM":
        return "convert it first: array.astype('int64')"
    return f"convert it first to one of {', '.join(NAMES.values())}"


def element_count(shape: Sequence[int]) -> int:
    """Return the number of elements of a checked shape; 1 for a shape without dimensions."""
    count = 1
    for size in shape:
        count *= size
    return count


def check_shape(shape: Sequence[int], name: str = "") -> int:
    """Check a shape from outside, and return its number of elements.

    Raises BadTensor for more than MAX_DIMS dimensions, a dimension that is no integer or is
    negative, and for a product above MAX_ELEMENTS (zero-size dimensions left aside).
    """
    if len(shape) > MAX_DIMS:
        raise BadTensor(f"{_shape_of(name)} has {len(shape)} dimensions, and {MAX_DIMS} is the most")
    count = bound = 1
    for size in shape:
        # A bool is an int to isinstance, and numpy's integers do not stay exact when multiplied.
        if type(size) is not int or size < 0:
            raise BadTensor(
                f"{_shape_of(name)} has the dimension {size!r:.40}; each dimension must be an integer of at least 0"
            )
        count *= size
        bound *= size or 1
        if bound > MAX_ELEMENTS:
            raise BadTensor(f"{_shape_of(name)} has more than 2**59 elements")
    return count


def check_tensor(code: int, shape: Sequence[int], size_bytes: int) -> None:
    """Check what a peer says of a tensor in a message, whose dimensions the codec has checked.

    Raises BadTensor if no array has the shape, and unless the elements have so many bytes in all, which only those of
    BYTES may choose. Its text follows the name of the tensor in an error. `check_tensor` in ipc/native/answer.h is the
    same.
    """
    count = prod(shape)
    # numpy makes no array whose other dimensions are huge, beside one of 0.
    if (count or prod([size or 1 for size in shape])) > MAX_ELEMENTS:
        raise BadTensor(f"of shape {shape}: more elements than any tensor has")
    if code != BYTES and count * ITEMSIZE[code] != size_bytes:
        raise BadTensor(f"of shape {shape} has {size_bytes} bytes")


def _shape_of(name: str) -> str:
    return f"the shape of tensor '{name}'" if name else "the shape of the tensor"


def size_bytes(code: int, shape: Sequence[int]) -> int:
    """Return the bytes that a tensor of fixed-size elements takes. `shape` has been checked."""
    return DTYPES[code].itemsize * element_count(shape)


def view(memory: Buffer, offset: int, code: int, shape: Sequence[int]) -> NDArray[np.generic]:
    """Return an array over `memory` from `offset` on, without a copy. It keeps `memory` alive.

    It is writable if `memory` is. Raises BadTensor for a tensor that does not lie within
    `memory`, for a bad shape, for BYTES, and for an unknown code.
    """
    dtype = DTYPES[code]
    # Checked here, because numpy accepts a negative offset and then points before the memory.
    end = offset + check_shape(shape) * dtype.itemsize
    flat = memoryview(memory)
    if offset < 0 or end > flat.nbytes:
        raise BadTensor(
            f"a {NAMES[code]} tensor of shape {list(shape)} at offset {offset} does not lie "
            f"within its memory of {flat.nbytes} bytes"
        )
    return np.ndarray(shape, dtype, buffer=flat, offset=offset)


LENGTH_BYTES = 4
MAX_STRING_BYTES = 2**32 - 1

_pack_length = struct.Struct("<I").pack
_unpack_length = struct.Struct("<I").unpack_from


def encode_bytes(array: NDArray[np.object_] | NDArray[np.bytes_], name: str = "", first: int = 0) -> bytes:
    """Return the wire form of an array of strings (dtype object or S).

    Elements that are bytes are kept, everything else becomes the UTF-8 of its str(). An S array
    loses trailing NULs, as numpy itself does. Raises BadTensor for another dtype, and for an
    element that has no UTF-8 form or is 4 GiB or longer. Errors count the elements from `first` on.
    """
    if array.dtype.kind not in "OS":
        raise BadTensor(
            f"{_tensor(name)} has dtype {array.dtype}, and BYTES is made from object or S arrays; "
            "convert it first: array.astype(object)"
        )
    payloads = _payloads(np.asarray(array).ravel().tolist(), name, first)
    lengths = list(map(len, payloads))
    # There are far fewer lengths than strings, so each is packed once.
    prefixes = {length: _prefix(length, name) for length in set(lengths)}
    parts = [b""] * (2 * len(payloads))
    parts[0::2] = map(prefixes.__getitem__, lengths)
    parts[1::2] = payloads
    return b"".join(parts)


def _prefix(length: int, name: str) -> bytes:
    if length > MAX_STRING_BYTES:
        raise BadTensor(f"an element of {_tensor(name)} has {length} bytes, and {MAX_STRING_BYTES} is the most")
    return _pack_length(length)


def _payloads(elements: list[object], name: str, first: int) -> list[bytes]:
    kinds = set(map(type, elements))
    if kinds <= {bytes}:
        return elements  # type: ignore[return-value]
    if kinds == {str}:
        with suppress(UnicodeEncodeError):
            return list(map(str.encode, elements))  # type: ignore[arg-type]
    return [_payload(element, index, name) for index, element in enumerate(elements, first)]


def _payload(element: object, index: int, name: str) -> bytes:
    if isinstance(element, bytes):
        # The length that a subclass reports may be false.
        return bytes(memoryview(element))
    try:
        return _text(element)
    except Exception:
        error = raised_again(partial(_text, element))
        if error is None:
            raise
        raise BadTensor(
            f"element {index} of {_tensor(name)}, of type {type(element).__name__}, has no UTF-8 "
            f"form ({type(error).__name__}); pass bytes or a str without surrogates"
        ) from error


def _text(element: object) -> bytes:
    return str(element).encode()


def decode_bytes(buffer: Buffer, shape: Sequence[int], name: str = "") -> NDArray[np.object_]:
    """Return the strings in `buffer` as a new object array of `shape` whose elements are bytes.

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
    # A read at the end returns too few bytes and raises nothing. The sum detects a short length field. If the sum is
    # right, the length field of the last element is at its place, and comparing it detects the rest.
    if possible < count or LENGTH_BYTES * count + sum(map(len, elements)) != len(data):
        raise BadTensor(_fault(data, count, name))
    if elements and not data.startswith(_pack_length(len(elements[-1])), len(data) - len(elements[-1]) - LENGTH_BYTES):
        raise BadTensor(_fault(data, count, name))
    array = np.empty(count, dtype=np.object_)
    array[:] = elements
    return array.reshape(tuple(shape))


def check_bytes(buffer: Buffer, shape: Sequence[int], name: str = "") -> None:
    """Raise BadTensor, and nothing else, unless `buffer` holds exactly the strings of `shape`.

    A peer may write to the buffer later, so `decode_bytes` checks again.
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
    """Describe in Triton's words why data do not hold `count` strings."""
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
    # Triton stops counting at the first element too many.
    return f"unexpected number of string elements {count + 1}{_for_input(name)}, expecting {count}"


def _for_input(name: str) -> str:
    return f" for inference input '{name}'" if name else ""


def _tensor(name: str) -> str:
    return f"tensor '{name}'" if name else "the tensor"
