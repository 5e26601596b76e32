"""Datatypes and shapes: the tables that turn a tensor's description into numpy's and back.

A dtype is always looked up in these tables by an integer code, never built from text: what a peer
sends can choose one of fourteen entries and nothing else.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.errors import BadTensor
from moonpool.ipc.messages import MAX_DIMS as MAX_DIMS

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """The table below, completed when a BF16 tensor is met: ml_dtypes is slow to import."""

    def __missing__(self, code: int) -> np.dtype[np.generic]:
        if code == BF16:
            self[BF16] = _bfloat16()
            return self[BF16]
        if code == BYTES:
            raise BadTensor(
                "BYTES elements have no fixed size, so there is no dtype to view them by"
            )
        raise BadTensor(f"{code!r} is no datatype code; codes run from 1 (BOOL) to {BF16} (BF16)")


def _bfloat16() -> np.dtype[np.generic]:
    """ml_dtypes' bfloat16, or raw 16-bit words where that package is missing."""
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
# Bytes an element takes; 0 for BYTES, whose elements have no fixed size.
ITEMSIZE: dict[int, int] = {code: dtype.itemsize for code, dtype in DTYPES.items()}
ITEMSIZE.update({BYTES: 0, BF16: 2})

# The other way round, as far as it was met; see `code_of`.
CODE_OF: dict[np.dtype[np.generic], int] = {dtype: code for code, dtype in DTYPES.items()}
CODE_OF[np.dtype(np.object_)] = BYTES

# So that no product of a shape and an item size can pass what a signed 64-bit size holds.
MAX_ELEMENTS = 2**59


def code_of(dtype: np.dtype[np.generic], name: str = "") -> int:
    """The datatype code of an array's dtype; object and S arrays are BYTES.

    Raises BadTensor, naming the tensor where `name` is given, for a dtype that no datatype has.
    """
    code = CODE_OF.get(dtype)
    return _rare_code_of(dtype, name) if code is None else code


def _rare_code_of(dtype: np.dtype[np.generic], name: str) -> int:
    if dtype.kind == "S":
        return BYTES
    # An array of this dtype can only exist where the package has been imported.
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
    """How many elements a shape that is known to be good has; 1 for a shape without dimensions."""
    count = 1
    for size in shape:
        count *= size
    return count


def check_shape(shape: Sequence[int], name: str = "") -> int:
    """Makes sure that a shape from outside is one, and returns its number of elements.

    Raises BadTensor for more than MAX_DIMS dimensions, a dimension that is no integer or is
    negative, and for a product above MAX_ELEMENTS (zero-size dimensions left aside).
    """
    if len(shape) > MAX_DIMS:
        raise BadTensor(
            f"{_shape_of(name)} has {len(shape)} dimensions, and {MAX_DIMS} is the most"
        )
    count = bound = 1
    for size in shape:
        # A bool is an int to isinstance, and numpy's integers do not stay exact when multiplied.
        if type(size) is not int or size < 0:
            raise BadTensor(
                f"{_shape_of(name)} has the dimension {size!r:.40}; "
                "each dimension must be an integer of at least 0"
            )
        count *= size
        bound *= size or 1
        if bound > MAX_ELEMENTS:
            raise BadTensor(f"{_shape_of(name)} has more than 2**59 elements")
    return count


def _shape_of(name: str) -> str:
    return f"the shape of tensor '{name}'" if name else "the shape of the tensor"


def size_bytes(code: int, shape: Sequence[int]) -> int:
    """The bytes that a tensor of fixed-size elements takes; `shape` is known to be good."""
    return DTYPES[code].itemsize * element_count(shape)


def view(memory: Buffer, offset: int, code: int, shape: Sequence[int]) -> NDArray[np.generic]:
    """An array over `memory` from `offset` on, without a copy; it keeps `memory` alive.

    It is writable where `memory` is. Raises BadTensor for a tensor that does not lie within
    `memory`, for a bad shape, for BYTES, and for an unknown code.
    """
    dtype = DTYPES[code]
    # Checked here, because numpy itself takes a negative offset and points before the memory.
    end = offset + check_shape(shape) * dtype.itemsize
    flat = memoryview(memory)
    if offset < 0 or end > flat.nbytes:
        raise BadTensor(
            f"a {NAMES[code]} tensor of shape {list(shape)} at offset {offset} does not lie "
            f"within its memory of {flat.nbytes} bytes"
        )
    return np.ndarray(shape, dtype, buffer=flat, offset=offset)
