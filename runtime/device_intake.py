"""Inputs on devices as a model takes them: where they are, or in ordinary memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moonpool.ipc import dlpack
from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.memory import lease_of
from moonpool.ipc.tensors import DTYPES
from moonpool.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moonpool.ipc.cuda.array import DeviceArray
    from moonpool.runtime.regions import CallerMemory


def is_on_device(value: object) -> bool:
    """Whether an array, of whatever library, says that it lies on a device. Nothing is loaded to find out."""
    place = getattr(value, "__dlpack_device__", None)
    if place is not None:
        return int(place()[0]) in (dlpack.CUDA, dlpack.CUDA_MANAGED)
    return hasattr(value, "__cuda_array_interface__")


class DeviceIntake:
    """Of one model. Any thread may call any method."""

    def __init__(self, memory: CallerMemory | None = None, *, takes_devices: bool = False) -> None:
        """`memory` is where callers of the model write inputs in place. `takes_devices`: inputs stay where they are."""
        self._memory = memory
        self.takes_devices = takes_devices

    def take(self, value: object, subject: str) -> DeviceArray:
        """What lies on a device, without a copy. Raises `InvalidRequest` about the `subject`."""
        from moonpool.ipc.cuda.array import DeviceArray

        try:
            array = DeviceArray.of(value)
        except (MoonpoolError, ValueError, TypeError, RuntimeError, BufferError) as error:
            raise InvalidRequest(f"{subject} cannot be read where it lies: {error}") from error
        if array is None:
            raise InvalidRequest(f"{subject} does not lie where it says that it does")
        return array if self._memory is None else self._memory.own(array)

    def to_host(self, array: DeviceArray) -> NDArray[Any]:
        """A copy in memory that stubs of the model can read. Waits for all that was done to the array before.

        Raises `OutOfMemory`, `CudaError`.
        """
        if self._memory is None:
            return array.to_host()
        host = self._memory.empty(array.shape, DTYPES[array.datatype], array.nbytes)
        lease = lease_of(host)
        if lease is not None and lease.region is not None:
            array.device.pin(lease.region)
        return array.to_host(host)
