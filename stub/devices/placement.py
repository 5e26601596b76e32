"""Moves tensors for the runtime to or from devices.

A tensor in a block that a message may name stays there. Any other is copied once: between devices on the device,
between a device and ordinary memory directly into a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.errors import CudaError, CudaUnavailable, OutOfMemory
from moonpool.ipc.messages import NO_DEVICE
from moonpool.ipc.tensors import BYTES, DTYPES
from moonpool.stub.pb_utils.device_tensor import DeviceTensor
from moonpool.stub.pb_utils.memory import Memory
from moonpool.stub.pb_utils.tensor import PreferredMemory, Tensor

if TYPE_CHECKING:
    from moonpool.ipc.cuda.region import DeviceLease


def moved(
    tensors: Sequence[Tensor], memory: Memory, may_name: Callable[[DeviceLease], bool], wish: PreferredMemory | None
) -> list[Tensor]:
    """Return the tensors in the memory that `wish` names, on a device only in blocks that a message may name.

    `may_name` says so of a lease. If the wished device has no room, a tensor stays in ordinary memory.
    Raises `OutOfMemory`, `CudaUnavailable`, `CudaError`.
    """
    device = None if wish is None else wish.device
    there: list[Tensor] = []
    for tensor in tensors:
        if isinstance(tensor, DeviceTensor):
            if device == NO_DEVICE:
                there.append(_fetched(tensor, memory))
            else:
                there.append(_named(tensor, memory, may_name, device))
        elif device is None or device == NO_DEVICE or tensor._datatype == BYTES:
            there.append(tensor)
        else:
            there.append(_sent(tensor, memory, device))
    return there


def _fetched(tensor: DeviceTensor, memory: Memory) -> Tensor:
    """Copy a tensor to ordinary memory."""
    source = tensor._device_array
    lane = memory.on_devices().lane(source.device.ordinal)
    lease = memory.empty(source.nbytes)
    if lease.region is not None:
        source.device.pin(lease.region)
    source.enter(lane.stream)
    lane.to_host(lease, source.address)
    dtype, shape = DTYPES.get(source.datatype), source.shape
    array = lease[: source.nbytes] if dtype is None else np.ndarray(shape, dtype, lease)
    return Tensor.from_wire(tensor._name, source.datatype, shape, array)


def _named(
    tensor: DeviceTensor, memory: Memory, may_name: Callable[[DeviceLease], bool], device: int | None
) -> DeviceTensor:
    """Return the tensor itself if it lies in a block that may be named, else a copy on the device."""
    source = tensor._device_array
    devices = memory.on_devices()
    lease = source.lease or devices.lease_at(source.address, source.nbytes)
    if lease is not None and device in (None, source.device.ordinal) and may_name(lease):
        if source.lease is None:
            offset = source.address - lease.address
            source = DeviceArray.over(lease, offset, source.datatype, source.shape)
        return DeviceTensor.over(tensor._name, source)
    ordinal = source.device.ordinal if device is None else device
    block = memory.empty_on(ordinal, source.nbytes)
    lane = devices.lane(ordinal)
    source.enter(lane.stream)
    lane.copy(block.address, source.address, source.nbytes)
    source.leave(lane.stream)
    lane.keep(source)
    return _over(tensor, block)


def _sent(tensor: Tensor, memory: Memory, device: int) -> Tensor:
    """Return a copy on a device, or the tensor itself if there is no such device or no room on it."""
    data: np.ndarray = tensor._data
    try:
        block = memory.empty_on(device, data.nbytes)
        memory.on_devices().lane(device).from_host(block.address, data)
    except (OutOfMemory, CudaUnavailable, CudaError):
        return tensor
    return _over(tensor, block)


def _over(tensor: Tensor, block: DeviceLease) -> DeviceTensor:
    array = DeviceArray.over(block, 0, tensor._datatype, tuple(tensor._shape))
    return DeviceTensor.over(tensor._name, array)
