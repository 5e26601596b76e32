"""Tensors of clients: the bytes or the JSON values of a protocol as arrays, and back.

Inputs are `WireTensor` for BYTES and BF16, and typed arrays for other datatypes, as a signature takes them. Inputs of
bytes are views on those bytes. Outputs are `WireTensor` for every datatype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby, islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.errors import BadTensor, MoonpoolError
from moonpool.ipc.tensors import (
    BF16,
    BYTES,
    CODES,
    DTYPES,
    ITEMSIZE,
    MAX_DIMS,
    NAMES,
    check_shape,
    decode_bytes,
    encode_bytes,
)
from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.model.request import WireTensor

Input: TypeAlias = NDArray[Any] | WireTensor
Bytes: TypeAlias = bytes | bytearray | memoryview | NDArray[np.uint8]

FP16 = CODES["FP16"]
_NO_BYTES = np.empty(0, np.uint8)
# Values that are handled in one go. Between two slices, another thread may have the interpreter.
_SLICE = 1 << 16


class LongArray:
    """The innermost values of a JSON array in order, in parts that can each be handled in one go, and their types.

    Values in more levels of arrays than a tensor has dimensions stay in them. No tensor has objects, so an empty one
    stands for any number of them.
    """

    __slots__ = ("elements", "levels", "parts", "types")

    def __init__(self) -> None:
        self.parts: list[list[Any]] = []
        self.types: set[type] = set()
        # The levels of arrays in the array; 0 if it is flat.
        self.levels = 0
        # How many elements the array itself has, which may be arrays.
        self.elements = 0

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def add(self, values: list[Any]) -> None:
        """Add elements of the array, in a list that may be changed."""
        self.elements += len(values)
        for part, types, levels in _flat_parts(values, 0):
            self.types |= types
            self.levels = max(self.levels, levels)
            if dict in types:
                part = [{}]
            if self.parts and len(self.parts[-1]) + len(part) <= _SLICE:
                self.parts[-1] += part
            else:
                self.parts.append(part)

    def slices(self) -> Iterator[list[Any]]:
        """Yield the values in parts of at most `_SLICE`, and drop each before the next one."""
        self.parts.reverse()
        while self.parts:
            part = self.parts.pop()
            if len(part) <= _SLICE:
                yield part
                continue
            for begin in range(0, len(part), _SLICE):
                yield part[begin : begin + _SLICE]


ARRAYS = frozenset({list, LongArray})
"""The types of JSON arrays."""


def code_of(datatype: object, name: str) -> int:
    """Return the code of a datatype by its name in the protocol. Raises `InvalidRequest`."""
    code = CODES.get(datatype) if type(datatype) is str else None
    if code is None:
        raise InvalidRequest(f"invalid datatype for input {name}")
    return code


def of_bytes(name: str, code: int, shape: Sequence[int], data: Bytes, offset: int, size_bytes: int) -> Input:
    """Return an input over `size_bytes` bytes of `data` from `offset` on. The caller has checked that `data` has them.

    Raises `WrongSize` if the shape needs another size, `InvalidRequest` for a bad shape.
    """
    count = shape_size(name, shape)
    if code == BYTES:
        return WireTensor(BYTES, tuple(shape), _raw(data, offset, size_bytes))
    expected = count * ITEMSIZE[code]
    if expected != size_bytes:
        raise WrongSize(name, expected, size_bytes)
    if code == BF16:
        return WireTensor(BF16, tuple(shape), _raw(data, offset, size_bytes))
    if not size_bytes:
        return np.empty(tuple(shape), DTYPES[code])
    return np.ndarray(shape, DTYPES[code], data, offset)


class WrongSize(InvalidRequest):
    """The size of an input does not fit its shape and datatype."""

    def __init__(self, name: str, expected_bytes: int, size_bytes: int) -> None:
        super().__init__(f"input '{name}' has {size_bytes} bytes, not {expected_bytes}")
        self.name = name
        self.expected_bytes = expected_bytes
        self.size_bytes = size_bytes

    def for_model(self, model: str) -> str:
        """Return Triton's text for the error."""
        return (
            f"input byte size mismatch for input '{self.name}' for model '{model}'. "
            f"Expected {self.expected_bytes}, got {self.size_bytes}"
        )


def shape_size(name: str, shape: Sequence[int]) -> int:
    """Return the number of elements. Raises `InvalidRequest` for a bad shape."""
    try:
        return check_shape(shape, name)
    except BadTensor as error:
        raise InvalidRequest(str(error)) from None


def _raw(data: Bytes, offset: int, size_bytes: int) -> NDArray[np.uint8]:
    return np.ndarray((size_bytes,), np.uint8, data, offset) if size_bytes else _NO_BYTES


def of_values(name: str, code: int, shape: Sequence[int], values: object) -> Input:
    """Return an input with the values of a JSON array, which is nested like the shape, or flat.

    A `LongArray` is empty afterwards. Raises `BadJson` and `InvalidRequest` with Triton's texts. Numbers that do not
    fit the datatype are refused, while Triton takes their lowest bits.
    """
    if code in (FP16, BF16):
        raise InvalidRequest(
            f"receiving {NAMES[code]} data via JSON is not supported. "
            f"Please use the binary data format for input {name}"
        )
    if not isinstance(values, list | LongArray):
        raise BadJson("data", "attempt to access JSON non-array as array")
    count = shape_size(name, shape)
    flat = values if isinstance(values, LongArray) else _flattened(values)
    if not flat.types <= _TYPES[code]:
        if code == BYTES:
            raise BadStrings
        raise BadJson("data", _WRONG_TYPE[DTYPES[code].kind])
    if len(flat) != count:
        raise BadJson("data", "Shape does not match true shape of 'data' field")
    if code == BYTES:
        return _strings(name, shape, flat)
    array: NDArray[Any] = np.empty(count, DTYPES[code])
    begin = 0
    try:
        # Whole numbers that do not fit are refused, not wrapped; others become infinite.
        with np.errstate(over="ignore"):
            for some in flat.slices():
                array[begin : begin + len(some)] = np.array(some, DTYPES[code])
                begin += len(some)
    except (OverflowError, ValueError):
        raise InvalidRequest(f"input '{name}' has values that do not fit its datatype {NAMES[code]}") from None
    return array.reshape(shape)


class BadJson(MoonpoolError):
    """A member of the JSON has the wrong type. Triton calls that an internal error."""

    def __init__(self, field: str, what: str) -> None:
        super().__init__(f"Unable to parse '{field}': {what}")


class BadStrings(MoonpoolError):
    """A value for a BYTES tensor is not a JSON string."""

    def __init__(self) -> None:
        super().__init__("Unable to parse JSON bytes array: attempt to access JSON non-string as string")


_TYPES: dict[int, frozenset[type]] = {code: frozenset({int}) for code in range(2, 10)}
_TYPES.update({CODES["BOOL"]: frozenset({bool}), BYTES: frozenset({str})})
_TYPES.update({CODES["FP32"]: frozenset({int, float}), CODES["FP64"]: frozenset({int, float})})
_WRONG_TYPE = {
    "b": "attempt to access JSON non-boolean as boolean",
    "u": "attempt to access JSON non-unsigned-integer as unsigned-integer",
    "i": "attempt to access JSON non-signed-integer as signed-integer",
    "f": "attempt to access JSON non-number as double",
}


def _flattened(values: list[Any]) -> LongArray:
    flat = LongArray()
    flat.add(values)
    return flat


def _flat_parts(values: list[Any] | LongArray, level: int) -> Iterator[tuple[list[Any], set[type], int]]:
    """Yield the innermost values in order, in parts, each with its types and level. Arrays in more levels than a tensor
    has dimensions stay as they are.
    """
    if isinstance(values, LongArray):
        level += values.levels
        # They have been looked at, and an array may be in many others.
        types = values.types if level <= MAX_DIMS else values.types | {list}
        for part in values.parts:
            yield part, types, level
        return
    types = _types_in(values)
    arrays = types & ARRAYS
    if not arrays or (types == arrays and level >= MAX_DIMS):
        yield values, types, level
    elif types == {list}:
        for joined in _joined(values):
            yield from _flat_parts(joined, level + 1)
    elif types == arrays:
        for each in values:
            yield from _flat_parts(each, level + 1)
    else:
        # Like Triton, which takes numbers beside arrays of numbers.
        for is_long, some in groupby(_leaves(values), lambda each: type(each) is LongArray):
            if is_long:
                for each in some:
                    yield from _flat_parts(each, level + 1)
                continue
            while leaf_part := list(islice(some, _SLICE)):
                yield leaf_part, _types_in(leaf_part), level + 1


def _joined(rows: list[list[Any]]) -> Iterator[list[Any]]:
    """Yield the elements of rows in order, in parts of some `_SLICE`."""
    if sum(map(len, rows)) <= _SLICE:
        yield list(chain.from_iterable(rows))
        return
    part: list[Any] = []
    for row in rows:
        part += row
        if len(part) >= _SLICE:
            yield part
            part = []
    yield part


def _types_in(values: list[Any]) -> set[type]:
    if len(values) <= _SLICE:
        return set(map(type, values))
    types: set[type] = set()
    for begin in range(0, len(values), _SLICE):
        types.update(map(type, values[begin : begin + _SLICE]))
    return types


def _leaves(values: list[Any]) -> Iterator[Any]:
    """Yield the innermost values, and long arrays as they are."""
    levels: list[Iterator[Any]] = [iter(values)]
    while levels:
        for each in levels[-1]:
            if type(each) is list:
                levels.append(iter(each))
                break
            yield each
        else:
            levels.pop()


def _strings(name: str, shape: Sequence[int], flat: LongArray) -> WireTensor:
    encoded: list[bytes] = []
    count = 0
    try:
        for some in flat.slices():
            encoded.append(_encoded(some, name, count))
            count += len(some)
    except BadTensor as error:  # half of a surrogate pair
        raise InvalidRequest(str(error)) from None
    return WireTensor(BYTES, tuple(shape), np.frombuffer(b"".join(encoded), np.uint8))


def _encoded(texts: list[str], name: str, first: int) -> bytes:
    array = np.empty(len(texts), object)
    array[:] = texts
    return encode_bytes(array, name, first)


def to_bytes(output: WireTensor) -> memoryview:
    """Return the bytes of an output as a view, which keeps the memory of the output."""
    raw = output.raw
    if raw.dtype != np.uint8 or raw.ndim != 1:
        raw = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    return raw.data


def to_values(name: str, output: WireTensor) -> list[Any]:
    """Return the values of an output for JSON, flat. Raises `ModelError` for values that JSON cannot hold."""
    check_in_json(name, output)
    code, data = output.datatype, to_bytes(output)
    if code == BYTES:
        return texts_of(name, output.shape, data)
    values: list[Any] = np.frombuffer(data, DTYPES[code]).tolist() if len(data) else []
    return values


def check_in_json(name: str, output: WireTensor) -> None:
    """Raise `ModelError` for an output of a datatype that JSON cannot hold."""
    if output.datatype in (FP16, BF16):
        raise ModelError(
            f"sending {NAMES[output.datatype]} data via JSON is not supported. "
            f"Please use the binary data format for output '{name}'",
            "INVALID_ARG",
        )


def no_utf8(name: str) -> ModelError:
    """Return the error of an output with a string that JSON cannot hold."""
    return ModelError(
        f"output '{name}' has a string that is not UTF-8, which JSON cannot carry: ask for binary data", "INVALID_ARG"
    )


def texts_of(name: str, shape: Sequence[int], data: memoryview) -> list[str]:
    """Return strings of an output as texts. Raises `ModelError` for those that JSON cannot hold."""
    try:
        strings = decode_bytes(data, shape, name).ravel()
        return [string.decode() for string in strings]
    except UnicodeDecodeError:
        raise no_utf8(name) from None
    except BadTensor as error:
        raise ModelError(f"output '{name}': {error}") from None
