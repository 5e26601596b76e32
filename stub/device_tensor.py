"""A tensor in the memory of a GPU, as a model sees it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from moonpool.ipc import dlpack
from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.errors import BadTensor, MoonpoolError
from moonpool.ipc.tensors import BF16, BYTES, code_of, size_bytes
from moonpool.stub import pb_utils
from moonpool.stub.errors import TritonModelException
from moonpool.stub.tensor import BF16_TO_NUMPY, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

    from moonpool.ipc.cuda.region import DeviceLease
    from moonpool.ipc.dlpack import Foreign
    from moonpool.stub.pb_utils import Memory

_new = object.__new__


class DeviceTensor(Tensor):
    """Models meet these as `Tensor`.

    What takes it says on which stream it is going to work, and the GPU lets that stream wait for whoever wrote the tensor.
    """

    __module__ = "c_python_backend_utils"
    __slots__ = ("_device_array",)

    _device_array: DeviceArray
    _is_on_device = True
    # Whether `as_numpy` copies, as the model's configuration asks for: MOONPOOL_GPU_AS_NUMPY.
    copies_to_numpy = False

    @classmethod
    def over(cls, name: str, array: DeviceArray) -> DeviceTensor:
        """A tensor of that name; the array is kept."""
        tensor = _new(cls)
        tensor._name = name
        tensor._datatype = array.datatype
        tensor._shape = array.shape
        tensor._array = tensor._wire = tensor._strings = None
        tensor._device_array = array
        return tensor

    def is_cpu(self) -> bool:
        return False

    def as_numpy(self) -> NDArray[Any]:
        """Raises, as Triton's does, unless the configuration asks for a copy: then the same one at each call."""
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
        """A DLPack capsule over the tensor's own memory, which it keeps alive.

        It does not say on which stream it is going to be used, so all that was to be waited for is over when this returns.
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
        """As the array API's standard has it: `stream` is a number, and None the default one."""
        return self._device_array.__dlpack__(
            stream=stream, max_version=max_version, dl_device=dl_device, copy=copy
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's name for the GPU."""
        return self._device_array.__dlpack_device__()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, with the stream that is to be waited for."""
        return self._device_array.__cuda_array_interface__

    @property
    def _data(self) -> DeviceArray:
        return self._device_array

    def _lease(self) -> DeviceLease | None:
        return self._device_array.lease

    def _offset_in(self, lease: DeviceLease) -> int:
        return self._device_array.address - lease.address


DeviceTensor.__name__ = DeviceTensor.__qualname__ = "Tensor"


def from_device(
    name: str, source: Any, ordinal: int, check: Callable[[Foreign], object]
) -> DeviceTensor:
    """A tensor over what an object, or a capsule, has on a device.

    `check` raises for what cannot be a tensor, in Triton's words. Raises `TritonModelException`.
    """
    with _in_words(ordinal):
        memory = pb_utils.memory_in_use()
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
        raise TritonModelException(f"What is to be '{name}' has no memory on device {ordinal}.")
    return DeviceTensor.over(name, array)


@contextlib.contextmanager
def _in_words(ordinal: int) -> Iterator[None]:
    try:
        yield
    except MoonpoolError as error:
        raise TritonModelException(f"No tensor on device {ordinal}: {error}") from error


def empty_array(
    memory: Memory | None, dims: tuple[int, ...], dtype: np.dtype[np.generic], device: int
) -> DeviceArray:
    """What `pb_utils.empty` gives on a device. Raises `TritonModelException`."""
    if memory is None:
        raise TritonModelException("There is memory on a device only in a model that is served.")
    with _in_words(device):
        datatype = code_of(dtype)
        if datatype == BYTES:
            raise TritonModelException("Strings cannot lie on a device.")
        lease = memory.empty_on(device, size_bytes(datatype, dims))
    return DeviceArray.over(lease, 0, datatype, dims)
