"""Answers of one side, in a form in which two sides can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Inputs = Mapping[str, Any]
Parameter = bool | int | float | str

DATATYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "u2",
    "UINT32": "u4",
    "UINT64": "u8",
    "INT8": "i1",
    "INT16": "i2",
    "INT32": "i4",
    "INT64": "i8",
    "FP16": "f2",
    "FP32": "f4",
    "FP64": "f8",
    "BYTES": "O",
}
_NAMES = {np.dtype(dtype): name for name, dtype in DATATYPES.items()}


def datatype_of(array: NDArray[Any]) -> str:
    """Triton's name for an array's datatype."""
    if array.dtype.kind in "SU":
        return "BYTES"
    return "BF16" if array.dtype.name == "bfloat16" else _NAMES[array.dtype]


class Output(NamedTuple):
    """One tensor; `data` are its bytes, for BYTES its elements."""

    datatype: str
    shape: tuple[int, ...]
    data: bytes | tuple[bytes, ...]


class Answer(NamedTuple):
    """A response. `final` is whether it was said to be the last one."""

    outputs: dict[str, Output]
    parameters: dict[str, Parameter]
    request_id: str = ""


class Failure(NamedTuple):
    """An error in Triton's terms: the code by its name in `TritonError`, and the text."""

    code: str
    text: str


class LogLine(NamedTuple):
    """One line that a model logged. `level` is I, W, E or V."""

    level: str
    place: str
    text: str


Outcome = Answer | Failure


def output_of(array: NDArray[Any]) -> Output:
    """An array as an output."""
    datatype = datatype_of(array)
    if datatype == "BYTES":
        return Output(datatype, array.shape, tuple(array.reshape(-1).tolist()))
    return Output(datatype, array.shape, array.tobytes())
