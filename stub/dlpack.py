"""DLPack for tensors in ordinary memory: capsules out and in, without a copy.

numpy speaks DLPack itself, but makes arrays of foreign memory read-only, has no BF16, and reports
faults in its own words; so foreign capsules are read here, field by field.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.tensors import BF16, BYTES, DTYPES
from moonpool.stub.errors import TritonModelException, as_text, not_offered, shown
from moonpool.stub.tensor import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_BFLOAT = 4
# Of the versions of the protocol that have numbers, the one read here, and its first flag.
_MAJOR = 1
_READ_ONLY = 1
# DLPack's type code and width to the datatype.
_DATATYPES = {
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
    (_BFLOAT, 16): BF16,
}


class _DLTensor(ctypes.Structure):
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


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


# By the name of the capsule: what is in it, and its name once it has been used. A capsule keeps a pointer
# to its name, so these live for ever.
_KINDS: tuple[tuple[bytes, type[_Managed | _Versioned], bytes], ...] = (
    (b"dltensor", _Managed, b"used_dltensor"),
    (b"dltensor_versioned", _Versioned, b"used_dltensor_versioned"),
)

_api = ctypes.pythonapi
_is_valid = _api.PyCapsule_IsValid
_is_valid.argtypes, _is_valid.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_pointer = _api.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
_rename = _api.PyCapsule_SetName
_rename.argtypes, _rename.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int


class _Foreign(np.ndarray):
    """The bytes of a capsule; gives them back to their owner with the last view of them."""

    # As an array class of its own it stays in the chain of `.base` of what is viewed from it.
    __slots__ = ("managed",)

    managed: _Managed | _Versioned

    def __del__(self) -> None:
        managed = getattr(self, "managed", None)
        if managed is not None and managed.deleter:
            managed.deleter(ctypes.addressof(managed))


def export(
    tensor: Tensor, max_version: tuple[int, int] | None = None, copy: bool | None = None
) -> CapsuleType:
    """A capsule that keeps the tensor's memory alive.

    It is of the protocol's first form, "dltensor", unless `max_version` takes a later one. `copy` is
    the protocol's: None copies read-only memory where the form has no word for it, False refuses.
    """
    if tensor._datatype == BYTES:
        raise TritonModelException("DLPack does not have support for string tensors.")
    if tensor._array is not None:
        return _capsule(tensor._array, max_version, copy)
    if tensor._wire is None:
        raise TritonModelException("The tensor has no memory of its own.")
    # numpy has no BF16: exported as 16-bit integers, then called by its name.
    integers = tensor._wire.view(np.uint16).reshape(tuple(tensor._shape))
    capsule = _capsule(integers, max_version, copy)
    for name, kind, _ in _KINDS:
        if _is_valid(capsule, name):
            kind.from_address(_pointer(capsule, name)).tensor.code = _BFLOAT
    return capsule


def _capsule(
    array: NDArray[np.generic], max_version: tuple[int, int] | None, copy: bool | None
) -> CapsuleType:
    if copy:
        array = array.copy()
    if max_version is not None and tuple(max_version) >= (_MAJOR, 0):
        with contextlib.suppress(TypeError):  # numpy before 2.1
            return array.__dlpack__(max_version=(_MAJOR, 0))  # type: ignore[misc]
    if not array.flags.writeable:
        if copy is False:
            raise BufferError("The tensor is read-only, which DLPack before 1.0 has no word for.")
        array = array.copy()
    return array.__dlpack__()  # type: ignore[misc]


def load(name: str, source: object) -> Tensor:
    """A tensor over the memory of a capsule, or of an object that makes one."""
    if not isinstance(name, (str, bytes)):
        raise TypeError(
            "from_dlpack(): incompatible function arguments. The following argument types are "
            "supported:\n    1. (self: str, arg0: object) -> c_python_backend_utils.Tensor\n\n"
            f"Invoked with: {shown(name)}, {shown(source)}"
        )
    name = as_text(name)
    if not name:
        raise TritonModelException("Tensor name cannot be an empty string.")
    if hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
        _check_device(int(source.__dlpack_device__()[0]))
        source = _capsule_of(source)
    for capsule_name, kind, used_name in _KINDS:
        if _is_valid(source, capsule_name):
            managed = kind.from_address(_pointer(source, capsule_name))
            return _adopt(name, source, managed, used_name)
    raise TritonModelException(
        "Provided tensor is not supported. Tensor must be a DLPack capsule "
        "        or have `__dlpack__` and `__dlpack_device__` attributes"
    )


def _capsule_of(source: Any) -> object:
    try:
        # Only the later form can say that memory is read-only.
        capsule = source.__dlpack__(max_version=(_MAJOR, 0))
    except TypeError:
        capsule = source.__dlpack__()
    if type(capsule).__name__ != "PyCapsule":
        kind = type(capsule).__name__
        raise TypeError(f"Object of type '{kind}' is not an instance of 'capsule'")
    return capsule


def _check_device(device_type: int) -> None:
    if device_type in (_CUDA, _CUDA_MANAGED):
        raise not_offered("tensors in GPU memory (Tensor.from_dlpack)")
    if device_type not in (_CPU, _CUDA_HOST):
        raise TritonModelException(f"DLDevice type {device_type} is not support by Python backend.")


def _checked(tensor: _DLTensor) -> tuple[int, tuple[int, ...]]:
    _check_device(tensor.device_type)
    if tensor.code == _BFLOAT and tensor.bits != 16:
        raise TritonModelException(f"Expected BF16 tensor to have 16 bits, but had: {tensor.bits}")
    datatype = _DATATYPES.get((tensor.code, tensor.bits))
    if datatype is None or tensor.lanes != 1:
        raise TritonModelException(f'DType code "{tensor.code}" is not supported.')
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and 0 not in shape:
        expected = 1
        for size, stride in zip(reversed(shape), reversed(tensor.strides[: tensor.ndim])):
            if size != 1 and stride != expected:
                raise TritonModelException(
                    "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are "
                    "stored in C-Order are supported."
                )
            expected *= size
    return datatype, shape


def _adopt(name: str, capsule: object, managed: _Managed | _Versioned, used_name: bytes) -> Tensor:
    is_versioned = isinstance(managed, _Versioned)
    if is_versioned and managed.major != _MAJOR:
        raise TritonModelException(f"DLPack version {managed.major} is not supported.")
    datatype, shape = _checked(managed.tensor)
    memory = _memory(managed.tensor, shape)
    _rename(capsule, used_name)
    memory.managed = managed
    if is_versioned and managed.flags & _READ_ONLY:
        memory.flags.writeable = False
    if datatype == BF16:
        return Tensor.from_wire(name, datatype, shape, memory)
    # A plain array: what models get has no surprising class.
    return Tensor.from_wire(name, datatype, shape, np.ndarray(shape, DTYPES[datatype], memory))


def _memory(tensor: _DLTensor, shape: tuple[int, ...]) -> _Foreign:
    size_bytes = tensor.bits // 8
    for size in shape:
        size_bytes *= size
    if size_bytes == 0:
        return _Foreign((0,), np.uint8)
    if not tensor.data:
        raise TritonModelException("DLPack tensor has elements but no memory.")
    bytes_there = (ctypes.c_uint8 * size_bytes).from_address(tensor.data + tensor.byte_offset)
    return _Foreign((size_bytes,), np.uint8, bytes_there)
