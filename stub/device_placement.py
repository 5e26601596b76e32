"""Tensors on their way to the runtime that lie on a device, or are to.

What lies in a block that can be named stays where it is. Anything else is copied once: device to device on the device, between device
and ordinary memory straight into a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.errors import CudaError, CudaUnavailable, OutOfMemory
from moonpool.ipc.messages import NO_DEVICE
from moonpool.ipc.tensors import BYTES, DTYPES
from moonpool.stub.device_tensor import DeviceTensor
from moonpool.stub.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.ipc.cuda.region import DeviceLease
    from moonpool.stub.preferred_memory import PreferredMemory
    from moonpool.stub.regions import Regions


def moved(
    tensors: Sequence[Tensor],
    regions: Regions,
    may_name: Callable[[DeviceLease], bool],
    wish: PreferredMemory | None,
) -> list[Tensor]:
    """These tensors where they are wished to be: on a device only in blocks that can be named.

    `may_name`: whether a message may name a block. Where no device has room for what is wished there, it stays in ordinary memory.
    Raises `OutOfMemory`, `CudaUnavailable`, `CudaError`.
    """
    device = None if wish is None else wish.device
    there: list[Tensor] = []
    for tensor in tensors:
        if isinstance(tensor, DeviceTensor):
            if device == NO_DEVICE:
                there.append(_fetched(tensor, regions))
            else:
                there.append(_named(tensor, regions, may_name, device))
        elif device is None or device == NO_DEVICE or tensor._datatype == BYTES:
            there.append(tensor)
        else:
            there.append(_sent(tensor, regions, device))
    return there


def _fetched(tensor: DeviceTensor, regions: Regions) -> Tensor:
    """A copy in ordinary memory."""
    source = tensor._device_array
    lane = regions.on_devices().lane(source.device.ordinal)
    lease = regions.empty(source.nbytes)
    if lease.region is not None:
        source.device.pin(lease.region)
    source.enter(lane.stream)
    lane.to_host(lease, source.address)
    dtype, shape = DTYPES.get(source.datatype), source.shape
    array = lease[: source.nbytes] if dtype is None else np.ndarray(shape, dtype, lease)
    return Tensor.from_wire(tensor._name, source.datatype, shape, array)


def _named(
    tensor: DeviceTensor,
    regions: Regions,
    may_name: Callable[[DeviceLease], bool],
    device: int | None,
) -> DeviceTensor:
    """The tensor itself where it lies in a block that may be named; else a copy on the device."""
    source = tensor._device_array
    devices = regions.on_devices()
    lease = source.lease or devices.lease_at(source.address, source.nbytes)
    if lease is not None and device in (None, source.device.ordinal) and may_name(lease):
        if source.lease is None:
            offset = source.address - lease.address
            source = DeviceArray.over(lease, offset, source.datatype, source.shape)
        return DeviceTensor.over(tensor._name, source)
    ordinal = source.device.ordinal if device is None else device
    block = regions.empty_on(ordinal, source.nbytes)
    lane = devices.lane(ordinal)
    source.enter(lane.stream)
    lane.copy(block.address, source.address, source.nbytes)
    source.leave(lane.stream)
    lane.keep(source)
    return _over(tensor, block)


def _sent(tensor: Tensor, regions: Regions, device: int) -> Tensor:
    """A copy on a device, or the tensor itself where there is no room, or no such device."""
    data: np.ndarray = tensor._data
    try:
        block = regions.empty_on(device, data.nbytes)
        regions.on_devices().lane(device).from_host(block.address, data)
    except (OutOfMemory, CudaUnavailable, CudaError):
        return tensor
    return _over(tensor, block)


def _over(tensor: Tensor, block: DeviceLease) -> DeviceTensor:
    array = DeviceArray.over(block, 0, tensor._datatype, tuple(tensor._shape))
    return DeviceTensor.over(tensor._name, array)
