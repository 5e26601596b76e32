"""Joins and cuts the rows of a batch on a device, for moonpool's own models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonpool.ipc.cuda.array import DeviceArray
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.memory import memory_in_use


def joined(arrays: Sequence[DeviceArray]) -> DeviceArray:
    """Return all rows, as `native.model.joined` does. A copy is made on the device of the first array."""
    first = arrays[0]
    rows = sum(array.shape[0] for array in arrays)
    shape = (rows, *first.shape[1:])
    end = first.address
    for array in arrays:
        if first.lease is None or array.lease is not first.lease or array.address != end:
            return _copied(arrays, shape)
        end += array.nbytes
    return first.part(0, shape)


def _copied(arrays: Sequence[DeviceArray], shape: tuple[int, ...]) -> DeviceArray:
    memory = memory_in_use()
    if memory is None:
        raise TritonModelException("There is memory on a device only in a model that is served.")
    first = arrays[0]
    number = first.device.ordinal
    lease = memory.empty_on(number, sum(array.nbytes for array in arrays))
    lane = memory.on_devices().lane(number)
    place = lease.address
    for array in arrays:
        array.enter(lane.stream)
        lane.copy(place, array.address, array.nbytes)
        array.leave(lane.stream)
        place += array.nbytes
    return DeviceArray.over(lease, 0, first.datatype, shape)


def cut(array: DeviceArray, counts: Sequence[int]) -> list[DeviceArray]:
    """Cut the rows, as `native.model.cut` does."""
    pieces = []
    row_bytes = array.nbytes // max(1, array.shape[0])
    start = 0
    for count in counts:
        pieces.append(array.part(start * row_bytes, (count, *array.shape[1:])))
        start += count
    return pieces


def array_on_device(value: Any) -> DeviceArray:
    """Return the array of an object on a device. Raises TypeError if there is none, and what `DeviceArray.of`
    raises.
    """
    memory = memory_in_use()
    stream = None
    if memory is not None and hasattr(value, "__dlpack_device__"):
        stream = memory.on_devices().lane(int(value.__dlpack_device__()[1])).stream
    array = DeviceArray.of(value, stream)
    if array is None:
        raise TypeError("it is in the memory of no device")
    return array
