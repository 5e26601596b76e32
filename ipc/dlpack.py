"""DLPack's capsules: what is in a foreign one, and ours over memory that we have. Nothing is copied here.

The layout is that of `dlpack.h`, https://github.com/dmlc/dlpack; capsules of both forms, before and after version 1.0.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from moonpool.ipc.tensors import BF16

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import CapsuleType

# DLDeviceType
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
BFLOAT = 4
# Of the versions of the protocol that have numbers, the one that is read and made here, and its first flag.
MAJOR = 1
READ_ONLY = 1
# DLPack's type code and width to the datatype.
DATATYPES = {
    (6, 8): 1,
    (1, 8): 2,
    (1, 16): 3,
    (1, 32): 4,
    (1, 64): 5,
    (0, 8): 6,
    (0, 16): 7,
    (0, 32): 8,
    (0, 64): 9,
    (2, 16): 10,
    (2, 32): 11,
    (2, 64): 12,
    (BFLOAT, 16): BF16,
}
_TYPES = {datatype: kind for kind, datatype in DATATYPES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", _Deleter),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# By the name of the capsule: what is in it, and its name once it has been used. A capsule keeps a pointer
# to its name, so these live for ever.
_KINDS: tuple[tuple[bytes, type[_Managed | _Versioned], bytes], ...] = (
    (b"dltensor", _Managed, b"used_dltensor"),
    (b"dltensor_versioned", _Versioned, b"used_dltensor_versioned"),
)


class Foreign:
    """What a capsule says of a tensor. Once it is taken, the memory is valid until this is gone."""

    __slots__ = (
        "_capsule", "_managed", "_used_name", "address", "bits", "code", "device_id",
        "device_type", "is_contiguous", "is_read_only", "lanes", "major", "shape",
    )  # fmt: skip

    def take(self) -> None:
        """Own the memory from now on. The capsule is used up."""
        raise NotImplementedError

    @property
    def datatype(self) -> int | None:
        """The code in `ipc.tensors`; None where there is none."""
        raise NotImplementedError

    @property
    def size_bytes(self) -> int:
        raise NotImplementedError


def look(source: object) -> Foreign | None:
    """What a capsule says, None for what is no capsule of DLPack that was not used yet. Nothing is taken."""
    raise NotImplementedError


def capsule_of(source: Any, stream: int | None = None) -> object:
    """What `source.__dlpack__` makes, in the later form where it can; `stream` is only named where it is given.

    Raises TypeError where that is no capsule, and whatever the method raises.
    """
    raise NotImplementedError


def make(
    owner: object,
    address: int,
    device: tuple[int, int],
    datatype: int,
    shape: Sequence[int],
    max_version: tuple[int, int] | None = None,
    *,
    is_read_only: bool = False,
) -> CapsuleType:
    """A capsule over memory that `owner` keeps; it is kept until the capsule's consumer is done.

    It is of the first form, "dltensor", unless `max_version` takes a later one. The first form has no word for read-only memory:
    BufferError.
    """
    raise NotImplementedError
