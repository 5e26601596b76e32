"""Defines the tensors in the memory of a GPU, as a model sees them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc import dlpack
from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.dlpack import Foreign
from moonpool.ipc.errors import BadTensor, MoonpoolError
from moonpool.ipc.tensors import BF16, BYTES, code_of, size_bytes
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.memory import Memory, memory_in_use
from moonpool.stub.pb_utils.tensor import BF16_TO_NUMPY, Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

    from moonpool.ipc.cuda.region import DeviceLease

_new: Any = Tensor.__new__


class DeviceTensor(Tensor):
    """Is a tensor on a device. Models see it as a `Tensor`.

    A library that takes the tensor names the stream on which it will work. The GPU lets that stream wait for the writer
    of the tensor.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_device_array",)

    _device_array: DeviceArray
    _is_on_device = True
    # True if `as_numpy` copies, by the option MOONPOOL_GPU_AS_NUMPY.
    copies_to_numpy = False

    @classmethod
    def over(cls, name: str, array: DeviceArray) -> DeviceTensor:
        """Make a tensor over an array, which it keeps."""
        tensor: DeviceTensor = _new(cls)
        tensor._name = name
        tensor._datatype = array.datatype
        tensor._shape = array.shape
        tensor._array = tensor._wire = tensor._strings = None
        tensor._device_array = array
        return tensor

    def is_cpu(self) -> bool:
        return False

    def as_numpy(self) -> NDArray[Any]:
        """Return a copy if the configuration asks for it, the same one at each call. Otherwise raise, as Triton
        does.
        """
        if not self.copies_to_numpy:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        if self._datatype == BF16:
            raise TritonModelException(BF16_TO_NUMPY)
        if self._strings is None:
            self._strings = self._device_array.to_host()
        return self._strings

    def _as_array(self) -> DeviceArray:  # type: ignore[override]
        return self._device_array

    def to_dlpack(self) -> CapsuleType:
        """Return a DLPack capsule over the tensor's own memory, which the capsule keeps alive.

        The caller names no stream, so this waits until the tensor is written.
        """
        self._device_array.settle()
        return self._device_array.__dlpack__(stream=-1)

    def __dlpack__(
        self,
        stream: Any = None,
        *,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """Return a capsule by the array API's standard: `stream` is a number, or None for the default one."""
        return self._device_array.__dlpack__(stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's name for the GPU."""
        return self._device_array.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Return version 3 of the interface, with the stream to wait for."""
        return self._device_array.__cuda_array_interface__

    @property
    def _data(self) -> DeviceArray:
        return self._device_array

    def _lease(self) -> DeviceLease | None:
        return self._device_array.lease

    def _offset_in(self, lease: DeviceLease) -> int:
        return self._device_array.address - lease.address


DeviceTensor.__name__ = DeviceTensor.__qualname__ = "Tensor"


def from_device(name: str, source: Any, ordinal: int, check: Callable[[Foreign], object]) -> DeviceTensor:
    """Make a tensor over the memory of an object, or of a capsule, on a device.

    `check` raises Triton's errors for capsules that cannot become a tensor. Raises `TritonModelException`.
    """
    if isinstance(source, DeviceTensor):
        return DeviceTensor.over(name, source._device_array)
    with _in_words(ordinal):
        memory = memory_in_use()
        stream = None if memory is None else memory.on_devices().lane(ordinal).stream
        try:
            array = DeviceArray.of(source, stream)
        except BadTensor:
            is_capsule = dlpack.look(source) is not None
            foreign = dlpack.look(source if is_capsule else dlpack.capsule_of(source, stream))
            if foreign is not None:
                check(foreign)
            raise
    if array is None:
        raise TritonModelException(f"The object for tensor '{name}' has no memory on device {ordinal}.")
    return DeviceTensor.over(name, array)


@contextlib.contextmanager
def _in_words(ordinal: int) -> Iterator[None]:
    try:
        yield
    except MoonpoolError as error:
        raise TritonModelException(f"No tensor on device {ordinal}: {error}") from error


def empty_array(memory: Memory | None, dims: tuple[int, ...], dtype: np.dtype[np.generic], device: int) -> DeviceArray:
    """Allocate the array that `pb_utils.empty` returns for a device. Raises `TritonModelException`."""
    if memory is None:
        raise TritonModelException("There is memory on a device only in a model that is served.")
    with _in_words(device):
        datatype = code_of(dtype)
        if datatype == BYTES:
            raise TritonModelException("Strings cannot lie on a device.")
        lease = memory.empty_on(device, size_bytes(datatype, dims))
    return DeviceArray.over(lease, 0, datatype, dims)
