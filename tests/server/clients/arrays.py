"""One array of each datatype, and both inputs of the model that adds and subtracts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

ARRAYS: dict[str, NDArray[Any]] = {
    "BOOL": np.array([True, False]),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([0, 65535], np.uint16),
    "UINT32": np.array([0, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-(2**15), 7], np.int16),
    "INT32": np.array([-(2**31), 7], np.int32),
    "INT64": np.array([-(2**63), 7], np.int64),
    "FP16": np.array([1.5, -2], np.float16),
    "FP32": np.array([0.1, np.inf], np.float32),
    "FP64": np.array([0.1, 5e-324]),
    "BYTES": np.array(["a", "", "ü"], np.object_),
    "BF16": np.array([1.5, -2], ml_dtypes.bfloat16),
}
LEFT = np.arange(4, dtype=np.float32)
RIGHT = np.full(4, 0.5, np.float32)


def names_of(datatype: str) -> tuple[str, str]:
    """Return the names of input and output of the model `every` for a datatype."""
    kind = "STRING" if datatype == "BYTES" else datatype
    return f"IN_{kind}", f"OUT_{kind}"


def as_sent(array: NDArray[Any]) -> list[Any]:
    """Return the array that a client gets back: texts as bytes."""
    return [each.encode() if isinstance(each, str) else each for each in array.tolist()]


def is_sum(result: Any) -> bool:
    """Return whether a result of tritonclient is `add_sub`'s answer to LEFT and RIGHT."""
    return bool(
        (result.as_numpy("OUTPUT0") == LEFT + RIGHT).all() and (result.as_numpy("OUTPUT1") == LEFT - RIGHT).all()
    )
