"""Tensors of clients: the bytes or the values that a protocol carries, as arrays and back.

What becomes an input is a `Wire` for BYTES and BF16 and a typed array for the rest, as a signature takes them; nothing is
copied where bytes are given. What comes back is a `Wire` for every datatype.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.bytes_tensor import decode_bytes, encode_bytes
from moonpool.ipc.errors import BadTensor, MoonpoolError
from moonpool.ipc.tensors import BF16, BYTES, CODES, DTYPES, ITEMSIZE, MAX_DIMS, NAMES, check_shape
from moonpool.runtime.client_region import is_clients
from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.request import Wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    Input: TypeAlias = NDArray[Any] | Wire
    Bytes: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]

FP16 = CODES["FP16"]
_NO_BYTES = np.empty(0, np.uint8)


def code_of(datatype: object, name: str) -> int:
    """The code of a datatype by its name in the protocol. Raises `InvalidRequest`."""
    code = CODES.get(datatype) if type(datatype) is str else None
    if code is None:
        raise InvalidRequest(f"invalid datatype for input {name}")
    return code


def of_bytes(
    name: str, code: int, shape: Sequence[int], data: Bytes, offset: int, size_bytes: int
) -> Input:
    """An input over `size_bytes` bytes of `data` from `offset` on, which must be there.

    Raises `WrongSize` where the shape wants another size, `InvalidRequest` where it is none.
    """
    count = shape_size(name, shape)
    if code == BYTES:
        return Wire(BYTES, tuple(shape), _raw(data, offset, size_bytes))
    expected = count * ITEMSIZE[code]
    if expected != size_bytes:
        raise WrongSize(name, expected, size_bytes)
    if code == BF16:
        return Wire(BF16, tuple(shape), _raw(data, offset, size_bytes))
    if not size_bytes:
        return np.empty(tuple(shape), DTYPES[code])
    return np.ndarray(shape, DTYPES[code], data, offset)


class WrongSize(InvalidRequest):
    """An input has other bytes than its shape and datatype say."""

    def __init__(self, name: str, expected_bytes: int, size_bytes: int) -> None:
        super().__init__(name, expected_bytes, size_bytes)
        self.name = name
        self.expected_bytes = expected_bytes
        self.size_bytes = size_bytes

    def for_model(self, model: str) -> str:
        """What is wrong, in Triton's words."""
        return (
            f"input byte size mismatch for input '{self.name}' for model '{model}'. "
            f"Expected {self.expected_bytes}, got {self.size_bytes}"
        )

    def __str__(self) -> str:
        return f"input '{self.name}' has {self.size_bytes} bytes, not {self.expected_bytes}"


def shape_size(name: str, shape: Sequence[int]) -> int:
    """The number of elements. Raises `InvalidRequest` for what is no shape."""
    try:
        return check_shape(shape, name)
    except BadTensor as error:
        raise InvalidRequest(str(error)) from None


def _raw(data: Bytes, offset: int, size_bytes: int) -> NDArray[np.uint8]:
    return np.ndarray((size_bytes,), np.uint8, data, offset) if size_bytes else _NO_BYTES


def of_values(name: str, code: int, shape: Sequence[int], values: object) -> Input:
    """An input of the values of a JSON array: nested as the shape says, or flat.

    Raises `BadJson` and `InvalidRequest`, in Triton's words but for numbers that do not fit the datatype: there
    Triton takes their lowest bits.
    """
    if code in (FP16, BF16):
        raise InvalidRequest(
            f"receiving {NAMES[code]} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )
    if not isinstance(values, list):
        raise BadJson("data", "attempt to access JSON non-array as array")
    count = shape_size(name, shape)
    flat, types = _flattened(values)
    if not types <= _TYPES[code]:
        if code == BYTES:
            raise BadStrings
        raise BadJson("data", _WRONG_TYPE[DTYPES[code].kind])
    if len(flat) != count:
        raise BadJson("data", "Shape does not match true shape of 'data' field")
    if code == BYTES:
        return _strings(name, shape, flat)
    try:
        # Whole numbers that do not fit are refused, not wrapped; others become infinite.
        with np.errstate(over="ignore"):
            array: NDArray[Any] = np.array(flat, DTYPES[code])
    except (OverflowError, ValueError):
        raise InvalidRequest(
            f"input '{name}' has values that do not fit its datatype {NAMES[code]}"
        ) from None
    return array.reshape(shape)


class BadJson(MoonpoolError):
    """JSON that is not what it should be; Triton calls that an internal error."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"Unable to parse '{field}': {what}")


class BadStrings(MoonpoolError):
    """What is to be BYTES is no JSON string."""

    def __init__(self) -> None:
        super().__init__(
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
        )


_TYPES: dict[int, frozenset[type]] = {code: frozenset({int}) for code in range(2, 10)}
_TYPES.update({CODES["BOOL"]: frozenset({bool}), BYTES: frozenset({str})})
_TYPES.update({CODES["FP32"]: frozenset({int, float}), CODES["FP64"]: frozenset({int, float})})
_WRONG_TYPE = {
    "b": "attempt to access JSON non-boolean as boolean",
    "u": "attempt to access JSON non-unsigned-integer as unsigned-integer",
    "i": "attempt to access JSON non-signed-integer as signed-integer",
    "f": "attempt to access JSON non-number as double",
}


def _flattened(values: list[Any]) -> tuple[list[Any], set[type]]:
    """The innermost values, in order, and which types they have."""
    types = set(map(type, values))
    for _ in range(MAX_DIMS):
        if types != {list}:
            break
        values = list(chain.from_iterable(values))
        types = set(map(type, values))
    if list in types and len(types) > 1:
        # As Triton, which takes numbers beside arrays of numbers.
        values = list(_leaves(values))
        types = set(map(type, values))
    return values, types


def _leaves(values: list[Any]) -> Iterator[Any]:
    levels = [iter(values)]
    while levels:
        for each in levels[-1]:
            if type(each) is list:
                levels.append(iter(each))
                break
            yield each
        else:
            levels.pop()


def _strings(name: str, shape: Sequence[int], texts: list[str]) -> Wire:
    array = np.empty(len(texts), object)
    array[:] = texts
    try:
        return Wire(BYTES, tuple(shape), np.frombuffer(encode_bytes(array, name), np.uint8))
    except BadTensor as error:  # half of a surrogate pair
        raise InvalidRequest(str(error)) from None


def to_bytes(output: Wire) -> memoryview:
    """The bytes of an output, without a copy; they keep the memory that they lie in."""
    raw = output.raw
    if raw.dtype != np.uint8 or raw.ndim != 1:
        raw = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    return raw.data


def copied_bytes(outputs: Iterable[Wire]) -> int:
    """How many bytes of outputs are still to be copied to whoever wants them."""
    return sum(output.raw.nbytes for output in outputs if not is_clients(output.raw))


def to_values(name: str, output: Wire) -> list[Any]:
    """The values of an output for JSON, flat. Raises `ModelError` for what JSON cannot say."""
    code = output.datatype
    if code in (FP16, BF16):
        raise ModelError(
            f"sending {NAMES[code]} data via JSON is not supported. "
            f"Please use the binary data format for output '{name}'",
            "INVALID_ARG",
        )
    data = to_bytes(output)
    if code == BYTES:
        return _texts(name, output.shape, data)
    values: list[Any] = np.frombuffer(data, DTYPES[code]).tolist() if len(data) else []
    return values


def _texts(name: str, shape: Sequence[int], data: memoryview) -> list[str]:
    try:
        strings = decode_bytes(data, shape, name).ravel()
        return [string.decode() for string in strings]
    except UnicodeDecodeError:
        raise ModelError(
            f"output '{name}' has a string that is no UTF-8, which JSON cannot carry: ask for binary data",
            "INVALID_ARG",
        ) from None
    except BadTensor as error:
        raise ModelError(f"output '{name}': {error}") from None
