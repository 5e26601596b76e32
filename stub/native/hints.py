"""Defines the type hints of moonpool's own models, from which their configuration is read.

from moonpool import Batch, Float32, Outputs

class AddSub:
    def __call__(
        self, A: Float32[Batch, 4], B: Float32[Batch, 4]
    ) -> Outputs(SUM=Float32[Batch, 4], DIFFERENCE=Float32[Batch, 4]):
        return {"SUM": A + B, "DIFFERENCE": A - B}
"""

from __future__ import annotations

import sys
from typing import Union

import numpy as np

from moonpool.ipc.errors import BadTensor

__all__ = [
    "Batch",
    "Bool",
    "Bytes",
    "Float16",
    "Float32",
    "Float64",
    "Int8",
    "Int16",
    "Int32",
    "Int64",
    "Outputs",
    "Ragged",
    "TensorType",
    "UInt8",
    "UInt16",
    "UInt32",
    "UInt64",
]

# The first dimension, in which moonpool joins the rows of several requests. A name, because formatters take quotes off
# hints. "batch" in quotes means the same.
Batch = "batch"
# A dimension in which rows of one batch may differ: the model gets the rows padded. "ragged" in quotes means the same.
Ragged = "ragged"
Dim = Union[int, str, None]


class TensorType:
    """Is a datatype with dimensions in brackets.

    A dimension is a number for a fixed size, or `:` (or -1, None, a name in quotes) for any size. Only the first may be
    `Batch`, and one of the others `Ragged`.
    """

    __slots__ = ("data_type", "dims", "dtype", "is_optional", "name")

    def __init__(
        self,
        name: str,
        data_type: str,
        dtype: np.dtype[np.generic],
        dims: tuple[Dim, ...] | None = None,
        is_optional: bool = False,
    ) -> None:
        self.name = name
        self.data_type = data_type
        self.dtype = dtype
        self.dims = dims
        self.is_optional = is_optional

    def __getitem__(self, dims: Dim | slice | tuple[Dim | slice, ...]) -> TensorType:
        parts = dims if isinstance(dims, tuple) else (dims,)
        given = tuple([_dim(self.name, dim, place) for place, dim in enumerate(parts)])
        if given.count(Ragged) > (given[:1] == (Batch,)):
            raise BadTensor(f"{self.name}[…]: at most one dimension is Ragged, behind Batch")
        return TensorType(self.name, self.data_type, self.dtype, given, self.is_optional)

    def optional(self) -> TensorType:
        """Return the same type for an input that a request may leave out."""
        return TensorType(self.name, self.data_type, self.dtype, self.dims, is_optional=True)

    def __call__(self, values: object) -> np.ndarray:
        """Make an array of this datatype, as in `Float32(values)`."""
        # Before Python 3.11, `typing` accepts only callable objects as types.
        return np.asarray(values, self.dtype)

    def __or__(self, other: object) -> TensorType:
        """Make the input optional, as in `Float32[4] | None`."""
        if other is not None and other is not type(None):
            return NotImplemented
        return self.optional()

    def __repr__(self) -> str:
        if self.dims is None:
            return self.name
        names: dict[Dim, str] = {Batch: "Batch", Ragged: "Ragged", None: ":"}
        dims = [names.get(dim) or repr(dim) for dim in self.dims]
        return f"{self.name}[{', '.join(dims) or '()'}]"


def is_batched(tensor: TensorType) -> bool:
    """Return whether the first dimension is Batch."""
    return tensor.dims is not None and tensor.dims[:1] == (Batch,)


def ragged(tensor: TensorType) -> int | None:
    """Return the place of the dimension that is Ragged; None if there is none."""
    return tensor.dims.index(Ragged) if tensor.dims and Ragged in tensor.dims else None


def _dim(name: str, dim: object, place: int) -> Dim:
    if dim == Batch and place:
        raise BadTensor(f"{name}[…]: Batch can only be the first dimension")
    if dim is None or dim == slice(None) or (type(dim) is int and dim == -1):
        return None
    if isinstance(dim, str) or (type(dim) is int and dim >= 0):
        return dim
    raise BadTensor(f"{name}[…]: a dimension is Batch, a number of at least 0, or `:` for any size; not {dim!r}")


class Outputs:
    """Names the outputs of a model, as the hint for what `__call__` returns."""

    __slots__ = ("tensors",)

    def __init__(self, **tensors: object) -> None:
        self.tensors = tensors


Bool = TensorType("Bool", "TYPE_BOOL", np.dtype(np.bool_))
UInt8 = TensorType("UInt8", "TYPE_UINT8", np.dtype(np.uint8))
UInt16 = TensorType("UInt16", "TYPE_UINT16", np.dtype(np.uint16))
UInt32 = TensorType("UInt32", "TYPE_UINT32", np.dtype(np.uint32))
UInt64 = TensorType("UInt64", "TYPE_UINT64", np.dtype(np.uint64))
Int8 = TensorType("Int8", "TYPE_INT8", np.dtype(np.int8))
Int16 = TensorType("Int16", "TYPE_INT16", np.dtype(np.int16))
Int32 = TensorType("Int32", "TYPE_INT32", np.dtype(np.int32))
Int64 = TensorType("Int64", "TYPE_INT64", np.dtype(np.int64))
Float16 = TensorType("Float16", "TYPE_FP16", np.dtype(np.float16))
Float32 = TensorType("Float32", "TYPE_FP32", np.dtype(np.float32))
Float64 = TensorType("Float64", "TYPE_FP64", np.dtype(np.float64))
Bytes = TensorType("Bytes", "TYPE_STRING", np.dtype(np.object_))

TENSOR_TYPES = (Bool, UInt8, UInt16, UInt32, UInt64, Int8, Int16, Int32, Int64, Float16, Float32, Float64, Bytes)


def publish() -> None:
    """Put the names of `__all__` into the package `moonpool`, unless it has them.

    In a stub that package holds only `ipc` and `stub`.
    """
    package = sys.modules["moonpool"]
    for name in __all__:
        if not hasattr(package, name):
            setattr(package, name, globals()[name])
