"""DLPack for tensors in ordinary memory: capsules out and in, without a copy.

numpy speaks DLPack itself, but makes arrays of foreign memory read-only, has no BF16, and reports
faults in its own words; so foreign capsules are read here, field by field.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.tensors import BF16, BYTES, DTYPES
from moonpool.stub.errors import TritonModelException, bad_arguments, not_offered
from moonpool.stub.tensor import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

_NAME = b"dltensor"
# The capsule keeps a pointer to this name, so it must live for ever.
_USED_NAME = b"used_dltensor"
_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_BFLOAT = 4
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
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
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

    managed: _DLTensor

    def __del__(self) -> None:
        managed = getattr(self, "managed", None)
        if managed is not None and managed.deleter:
            managed.deleter(ctypes.addressof(managed))


def export(tensor: Tensor) -> CapsuleType:
    """A capsule named "dltensor" that keeps the tensor's memory alive."""
    if tensor._datatype == BYTES:
        raise TritonModelException("DLPack does not have support for string tensors.")
    if tensor._array is not None:
        return _capsule(tensor._array)
    if tensor._wire is None:
        raise TritonModelException("The tensor has no memory of its own.")
    # numpy has no BF16: exported as 16-bit integers, then called by its name.
    capsule = _capsule(tensor._wire.view(np.uint16).reshape(tuple(tensor._shape)))
    _DLTensor.from_address(_pointer(capsule, _NAME)).code = _BFLOAT
    return capsule


def _capsule(array: NDArray[np.generic]) -> CapsuleType:
    if not array.flags.writeable:
        # DLPack has no word for memory that must not be written to.
        array = array.copy()
    return array.__dlpack__()  # type: ignore[misc]


def load(name: str, source: object) -> Tensor:
    """A tensor over the memory of a capsule, or of an object that makes one."""
    if not isinstance(name, str):
        raise bad_arguments("Tensor.from_dlpack", "arg0: str, arg1: object", name, source)
    if not name:
        raise TritonModelException("Tensor name cannot be an empty string.")
    if hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
        _check_device(int(source.__dlpack_device__()[0]))
        source = source.__dlpack__()
    if not _is_valid(source, _NAME):
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule "
            "        or have `__dlpack__` and `__dlpack_device__` attributes"
        )
    managed = _DLTensor.from_address(_pointer(source, _NAME))
    datatype, shape = _checked(managed)
    array = _adopt(source, managed, shape)
    if datatype == BF16:
        return Tensor.from_wire(name, datatype, shape, array)
    # A plain array: what models get has no surprising class.
    return Tensor.from_wire(name, datatype, shape, np.ndarray(shape, DTYPES[datatype], array))


def _check_device(device_type: int) -> None:
    if device_type in (_CUDA, _CUDA_MANAGED):
        raise not_offered("tensors in GPU memory (Tensor.from_dlpack)")
    if device_type not in (_CPU, _CUDA_HOST):
        raise TritonModelException(f"DLDevice type {device_type} is not support by Python backend.")


def _checked(managed: _DLTensor) -> tuple[int, list[int]]:
    _check_device(managed.device_type)
    if managed.code == _BFLOAT and managed.bits != 16:
        raise TritonModelException(f"Expected BF16 tensor to have 16 bits, but had: {managed.bits}")
    datatype = _DATATYPES.get((managed.code, managed.bits))
    if datatype is None or managed.lanes != 1:
        raise TritonModelException(f'DType code "{managed.code}" is not supported.')
    shape = managed.shape[: managed.ndim]
    if managed.strides and 0 not in shape:
        expected = 1
        for size, stride in zip(reversed(shape), reversed(managed.strides[: managed.ndim])):
            if size != 1 and stride != expected:
                raise TritonModelException(
                    "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are "
                    "stored in C-Order are supported."
                )
            expected *= size
    return datatype, shape


def _adopt(capsule: object, managed: _DLTensor, shape: list[int]) -> NDArray[np.uint8]:
    size_bytes = managed.bits // 8
    for size in shape:
        size_bytes *= size
    if size_bytes == 0:
        return np.empty(0, np.uint8)
    memory = (ctypes.c_uint8 * size_bytes).from_address(managed.data + managed.byte_offset)
    array = _Foreign((size_bytes,), np.uint8, memory)
    _rename(capsule, _USED_NAME)
    array.managed = managed
    return array
