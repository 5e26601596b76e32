"""Makes DLPack capsules of tensors and tensors of capsules, without a copy, and with Triton's texts for refusals.

numpy reads DLPack itself, but makes arrays over foreign memory read-only, has no BF16, and has other texts. So
`ipc.dlpack` reads foreign capsules. `tensor.py` imports this module when a model first uses DLPack, as few models do.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moonpool.ipc import dlpack as capsules
from moonpool.ipc.dlpack import Foreign
from moonpool.ipc.tensors import BF16, BYTES, DTYPES
from moonpool.stub.pb_utils.errors import TritonModelException, as_text, shown

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

_ON_DEVICE = (capsules.CUDA, capsules.CUDA_MANAGED)
_ORDINARY = (capsules.CPU, capsules.CUDA_HOST)


class _Foreign(np.ndarray):
    """Holds the bytes of a capsule, which go back to their owner with the last view."""

    # numpy keeps an array of another class in the `.base` chain of its views, and so this object alive.
    __slots__ = ("keeps",)

    keeps: Foreign


class InMemory(NamedTuple):
    """A tensor over the memory of a capsule, in the order of `Tensor.from_wire`."""

    name: str
    datatype: int
    shape: Sequence[int]
    buffer: NDArray[np.generic]


class OnDevice(NamedTuple):
    """An object or a capsule with memory on a device."""

    name: str
    source: Any
    ordinal: int


def export(
    datatype: int,
    array: NDArray[np.generic] | None,
    wire: NDArray[np.uint8] | None,
    shape: Sequence[int],
    max_version: tuple[int, int] | None = None,
    copy: bool | None = None,
) -> CapsuleType:
    """Return a capsule that keeps the memory of a tensor alive: of its array, or of its bytes on the wire.

    The capsule has the protocol's first form, "dltensor", unless `max_version` allows a later one. `copy` is as in the
    protocol: if the form cannot say that memory is read-only, None copies it and False refuses.
    """
    if datatype == BYTES:
        raise TritonModelException("DLPack does not have support for string tensors.")
    if array is not None:
        return _capsule(array, max_version, copy)
    if wire is None:
        raise TritonModelException("The tensor has no memory of its own.")
    # numpy has no BF16.
    raw = wire.copy() if copy else wire
    if not raw.flags.writeable and not _is_later(max_version) and copy is None:
        raw = raw.copy()
    return capsules.make(
        raw,
        raw.__array_interface__["data"][0],
        (capsules.CPU, 0),
        BF16,
        shape,
        max_version,
        is_read_only=not raw.flags.writeable,
    )


def _capsule(array: NDArray[np.generic], max_version: tuple[int, int] | None, copy: bool | None) -> CapsuleType:
    if copy:
        array = array.copy()
    if _is_later(max_version):
        with contextlib.suppress(TypeError):  # numpy before 2.1
            return array.__dlpack__(max_version=(capsules.MAJOR, 0))  # type: ignore[misc]
    if not array.flags.writeable:
        if copy is False:
            raise BufferError("The tensor is read-only, which DLPack before 1.0 has no word for.")
        array = array.copy()
    return array.__dlpack__()  # type: ignore[misc]


def _is_later(max_version: tuple[int, int] | None) -> bool:
    """Return whether the consumer of the capsule knows the later form."""
    return max_version is not None and tuple(max_version) >= (capsules.MAJOR, 0)


def load(name: str, source: object) -> InMemory | OnDevice:
    """Return the memory of a capsule, or of an object that makes one."""
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
        device_type, ordinal = source.__dlpack_device__()
        _check_device(int(device_type))
        if device_type in _ON_DEVICE:
            return OnDevice(name, source, int(ordinal))
        source = capsules.capsule_of(source)
    foreign = capsules.look(source)
    if foreign is None:
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule "
            "        or have `__dlpack__` and `__dlpack_device__` attributes"
        )
    datatype = checked(foreign)
    if foreign.device_type in _ON_DEVICE:
        return OnDevice(name, source, foreign.device_id)
    return _adopt(name, foreign, datatype)


def _check_device(device_type: int) -> None:
    if device_type not in _ON_DEVICE + _ORDINARY:
        raise TritonModelException(f"DLDevice type {device_type} is not support by Python backend.")


def checked(tensor: Foreign) -> int:
    """Return the datatype of a capsule. Raises `TritonModelException` if it cannot become a tensor."""
    if tensor.major not in (0, capsules.MAJOR):
        raise TritonModelException(f"DLPack version {tensor.major} is not supported.")
    _check_device(tensor.device_type)
    if tensor.code == capsules.BFLOAT and tensor.bits != 16:
        raise TritonModelException(f"Expected BF16 tensor to have 16 bits, but had: {tensor.bits}")
    datatype = tensor.datatype
    if datatype is None:
        raise TritonModelException(f'DType code "{tensor.code}" is not supported.')
    if not tensor.is_contiguous:
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    if tensor.size_bytes and not tensor.address:
        raise TritonModelException("DLPack tensor has elements but no memory.")
    return datatype


def _adopt(name: str, foreign: Foreign, datatype: int) -> InMemory:
    memory = _memory(foreign)
    foreign.take()
    memory.keeps = foreign
    if foreign.is_read_only:
        memory.flags.writeable = False
    if datatype == BF16:
        return InMemory(name, datatype, foreign.shape, memory)
    # A plain array: models should not meet a surprising class.
    array: NDArray[np.generic] = np.ndarray(foreign.shape, DTYPES[datatype], memory)
    return InMemory(name, datatype, foreign.shape, array)


def _memory(foreign: Foreign) -> _Foreign:
    size_bytes = foreign.size_bytes
    if size_bytes == 0:
        return _Foreign((0,), np.uint8)
    bytes_there: Any = (ctypes.c_uint8 * size_bytes).from_address(foreign.address)
    return _Foreign((size_bytes,), np.uint8, bytes_there)
