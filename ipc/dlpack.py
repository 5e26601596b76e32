"""Reads DLPack capsules of other libraries, and makes capsules over memory of ours. Nothing is copied.

The layout is that of `dlpack.h`, https://github.com/dmlc/dlpack, in both forms, before and after version 1.0.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moonpool.ipc.tensors import BF16, MAX_DIMS

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

# DLDeviceType
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
BFLOAT = 4
# The version of the protocol that is read and made here, and its first flag.
MAJOR = 1
READ_ONLY = 1
# The datatype for each of DLPack's type codes and widths.
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
    _fields_ = (("tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _Deleter))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# The names of capsules, each with its structure and its name after use. A capsule keeps a pointer
# to its name, so these must never be freed.
_KINDS: tuple[tuple[bytes, type[_Managed | _Versioned], bytes], ...] = (
    (b"dltensor", _Managed, b"used_dltensor"),
    (b"dltensor_versioned", _Versioned, b"used_dltensor_versioned"),
)


_api = ctypes.pythonapi
_name = ctypes.c_char_p
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, _name)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, _name)(("PyCapsule_GetPointer", _api))
_rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, _name)(("PyCapsule_SetName", _api))
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, _name, ctypes.c_void_p)(("PyCapsule_New", _api))
# For a capsule in its destructor, by address: as an object, it would be revived.
_is_valid_at = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, _name)(("PyCapsule_IsValid", _api))
_pointer_at = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, _name)(("PyCapsule_GetPointer", _api))


class Foreign:
    """A tensor as a capsule describes it. After `take`, its memory is valid as long as this object lives."""

    __slots__ = (
        "_capsule", "_is_ours", "_managed", "_used_name", "address", "bits", "code", "device_id",
        "device_type", "is_contiguous", "is_read_only", "lanes", "major", "shape",
    )  # fmt: skip

    def __init__(self, capsule: object, managed: _Managed | _Versioned, used_name: bytes) -> None:
        """Takes over the capsule. Called by `look` alone."""
        self._capsule = capsule
        self._managed = managed
        self._used_name = used_name
        self._is_ours = False
        is_versioned = isinstance(managed, _Versioned)
        # 0 for a capsule of the first form.
        self.major = managed.major if is_versioned else 0
        self.is_read_only = is_versioned and bool(managed.flags & READ_ONLY)
        # In a later form, only the number of the version is at its place for sure.
        tensor = managed.tensor if self.major <= MAJOR else _Tensor()
        self.device_type, self.device_id = tensor.device_type, tensor.device_id
        self.code, self.bits, self.lanes = tensor.code, tensor.bits, tensor.lanes
        # A negative number of dimensions gives an empty slice. A shape with too many is cut, and refused later.
        self.shape: tuple[int, ...] = tuple(tensor.shape[: min(tensor.ndim, MAX_DIMS + 1)])
        self.is_contiguous = _is_contiguous(tensor, self.shape)
        self.address = int((tensor.data or 0) + tensor.byte_offset)

    def take(self) -> None:
        """Own the memory from now on. The capsule is marked as used."""
        _rename(self._capsule, self._used_name)
        self._capsule = None
        self._is_ours = True

    @property
    def datatype(self) -> int | None:
        """The datatype's code in `ipc.tensors`; None if no datatype matches."""
        return DATATYPES.get((self.code, self.bits)) if self.lanes == 1 else None

    @property
    def size_bytes(self) -> int:
        """The size of the tensor, if it is contiguous."""
        size = int(self.bits) // 8
        for dimension in self.shape:
            size *= dimension
        return size

    def __del__(self) -> None:
        if self._is_ours and self._managed.deleter:
            self._managed.deleter(ctypes.addressof(self._managed))


def _is_contiguous(tensor: _Tensor, shape: tuple[int, ...]) -> bool:
    if not tensor.strides or 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(tensor.strides[: len(shape)])):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def look(source: object) -> Foreign | None:
    """Read a capsule without taking it. Returns None for an object that is no unused capsule of DLPack."""
    for name, kind, used_name in _KINDS:
        if _is_valid(source, name):
            return Foreign(source, kind.from_address(_pointer(source, name)), used_name)
    return None


def capsule_of(source: Any, stream: int | None = None) -> object:
    """Return the capsule of `source.__dlpack__`, in the later form if it can make one. `stream` is passed on if given.

    Raises TypeError if the result is no capsule, and all that the method raises.
    """
    named = {} if stream is None else {"stream": stream}
    try:
        # Only the later form can mark memory as read-only.
        capsule = source.__dlpack__(max_version=(MAJOR, 0), **named)
    except TypeError:
        capsule = source.__dlpack__(**named)
    if type(capsule).__name__ != "PyCapsule":
        kind = type(capsule).__name__
        raise TypeError(f"Object of type '{kind}' is not an instance of 'capsule'")
    return capsule


# The objects that each capsule of ours keeps until its consumer is done, by the address of its struct.
_kept: dict[int, tuple[object, ...]] = {}


def _delete(address: int, kept: dict[int, tuple[object, ...]] = _kept) -> None:
    kept.pop(address, None)


def _end(
    capsule: int,
    names: tuple[bytes, ...] = (_KINDS[0][0], _KINDS[1][0]),
    is_valid: Any = _is_valid_at,
    pointer: Any = _pointer_at,
    kept: dict[int, tuple[object, ...]] = _kept,
) -> None:
    """Drop the objects of a capsule that is destroyed without having been used."""
    for name in names:
        if is_valid(capsule, name):
            kept.pop(pointer(capsule, name), None)


_deleter = _Deleter(_delete)
_destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_end)
# Consumers may call them while the interpreter ends and this module is gone, so the two must never be freed.
for _lasting in (_deleter, _destructor):
    _api.Py_IncRef(ctypes.py_object(_lasting))


_deleter_at = ctypes.cast(_deleter, ctypes.c_void_p).value
_destructor_at = ctypes.cast(_destructor, ctypes.c_void_p).value
# The structures above, for `struct`; they have no gaps.
_MANAGED = struct.Struct("=QiiiBBHQQQQQ")
_VERSIONED = struct.Struct("=IIQQQQiiiBBHQQQ")


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
    """Make a capsule over C-contiguous memory that `owner` keeps alive. The capsule keeps `owner` until its consumer is
    done.

    It has the first form, "dltensor", unless `max_version` allows a later one. The first form cannot mark memory as
    read-only, so read-only memory raises BufferError there.
    """
    is_versioned = max_version is not None and tuple(max_version) >= (MAJOR, 0)
    if is_read_only and not is_versioned:
        raise BufferError("The tensor is read-only, which DLPack before 1.0 has no word for.")
    dims = len(shape)
    form = _VERSIONED if is_versioned else _MANAGED
    # Packed in one piece, because to set the fields of structures one by one takes several times as long.
    words = form.size // 8
    memory = (ctypes.c_int64 * (words + 2 * dims))()
    place = ctypes.addressof(memory)
    shape_at, strides_at = place + 8 * words, place + 8 * (words + dims)
    code, bits = _TYPES[datatype]
    tensor = (address, *device, dims, code, bits, 1, shape_at, strides_at, 0)
    if is_versioned:
        flags = READ_ONLY if is_read_only else 0
        form.pack_into(memory, 0, MAJOR, 0, 0, _deleter_at, flags, *tensor)
    else:
        form.pack_into(memory, 0, *tensor, 0, _deleter_at)
    step = 1
    for i in range(dims - 1, -1, -1):
        memory[words + i] = shape[i]
        memory[words + dims + i] = step
        step *= shape[i]
    _kept[place] = (memory, owner)
    name = _KINDS[1][0] if is_versioned else _KINDS[0][0]
    return _new(place, name, _destructor_at)  # type: ignore[no-any-return]
