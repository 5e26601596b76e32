"""The intake of inputs on devices: a model takes them in place, or they are copied to ordinary memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moonpool.ipc import dlpack
from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.memory import lease_of
from moonpool.ipc.tensors import DTYPES
from moonpool.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moonpool.ipc.cuda.array import DeviceArray


def is_on_device(value: object) -> bool:
    """Return True if an array of any library says that it lies on a device. Loads no library to find out."""
    place = getattr(value, "__dlpack_device__", None)
    if place is not None:
        return int(place()[0]) in (dlpack.CUDA, dlpack.CUDA_MANAGED)
    return hasattr(value, "__cuda_array_interface__")


class InputMemory(Protocol):
    """Memory that callers of a model write inputs into, and its stubs can read. Any thread may call any method."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], size_bytes: int) -> NDArray[np.generic]:
        """Return an array with any content. Raises `OutOfMemory`, `Closed`."""

    def own(self, array: DeviceArray) -> DeviceArray:
        """Return the array as one of this memory if it lies there, else as it is."""


class DeviceIntake:
    """Takes the inputs of one model. Any thread may call any method."""

    def __init__(self, memory: InputMemory | None = None, *, takes_devices: bool = False) -> None:
        """`memory` is the one that callers of the model write inputs into. `takes_devices`: inputs stay in place."""
        self._memory = memory
        self.takes_devices = takes_devices

    def take(self, value: object, subject: str) -> DeviceArray:
        """Take an input that lies on a device, without a copy. Raises `InvalidRequest` about the `subject`."""
        from moonpool.ipc.cuda.array import DeviceArray

        try:
            array = DeviceArray.of(value)
        except (MoonpoolError, ValueError, TypeError, RuntimeError, BufferError) as error:
            raise InvalidRequest(f"{subject} cannot be read where it lies: {error}") from error
        if array is None:
            raise InvalidRequest(f"{subject} does not lie where it says that it does")
        return array if self._memory is None else self._memory.own(array)

    def to_host(self, array: DeviceArray) -> NDArray[Any]:
        """Copy an array to memory that stubs of the model can read. Waits for all work on the array so far.

        Raises `OutOfMemory`, `CudaError`.
        """
        if self._memory is None:
            return array.to_host()
        host = self._memory.empty(array.shape, DTYPES[array.datatype], array.nbytes)
        lease = lease_of(host)
        if lease is not None and lease.region is not None:
            array.device.pin(lease.region)
        return array.to_host(host)
