"""Tensors between models: out of the caller's memory, and into memory that it can read."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.memory import ALIGNMENT
from moonpool.ipc.tensors import BYTES, DTYPES, ITEMSIZE
from moonpool.runtime import device_inputs
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.request import Wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moonpool.ipc.cuda.array import DeviceArray
    from moonpool.ipc.cuda.region import DeviceLease
    from moonpool.runtime.loans import Loans


def read_inputs(rows: Sequence[list[Any]], leases: Sequence[Any]) -> dict[str, Any]:
    """The inputs of a call as a signature takes them: views on these leases, some of which may be of devices.

    Raises `RemoteProtocolError` for what does not lie in them, `InvalidRequest` for a name that is there twice.
    """
    if len(leases) > len(rows):
        raise RemoteProtocolError(f"{len(leases)} blocks for {len(rows)} inputs")
    inputs: dict[str, Any] = {}
    for name, datatype, shape, block, offset, size_bytes in rows:
        if block >= len(leases) or offset + size_bytes > leases[block].size:
            raise RemoteProtocolError(f"input {name!r:.80} does not lie in its block")
        if name in inputs:
            raise InvalidRequest(f"input '{name}' is given twice")
        if datatype != BYTES and prod(shape) * ITEMSIZE[datatype] != size_bytes:
            raise RemoteProtocolError(f"input {name!r:.80} of shape {shape} has {size_bytes} bytes")
        dims = tuple(shape)
        if not isinstance(leases[block], np.ndarray):
            inputs[name] = _on_device(name, datatype, dims, leases[block], offset)
            continue
        if datatype >= BYTES:
            raw = leases[block][offset : offset + size_bytes]
            inputs[name] = Wire(datatype, dims, raw)
            continue
        try:
            if not size_bytes:
                inputs[name] = np.empty(dims, DTYPES[datatype])
            else:
                inputs[name] = np.ndarray(dims, DTYPES[datatype], leases[block], offset)
        except (ValueError, OverflowError) as bad:  # a huge dimension beside an empty one
            raise RemoteProtocolError(f"input {name!r:.80} of shape {shape}: {bad}") from bad
    return inputs


def _on_device(
    name: str, datatype: int, shape: tuple[int, ...], lease: DeviceLease, offset: int
) -> DeviceArray:
    from moonpool.ipc.cuda.array import DeviceArray

    if datatype == BYTES:
        raise RemoteProtocolError(f"input {name!r:.80} is BYTES and lies on a device")
    return DeviceArray.over(lease, offset, datatype, shape)


def write_outputs(
    outputs: Mapping[str, Any], loans: Loans, blocks: list[list[int]], rows: list[list[Any]]
) -> None:
    """Lend outputs to a stub until it lets go of them, and describe them.

    Large ones stay where they are, if they may be seen there; the others are copied into one block, and those on
    devices into one each. Raises `OutOfMemory`, `CudaError`; what was lent until then is in `blocks`.
    """
    copied: list[tuple[list[Any], Any]] = []
    total_bytes = 0
    for name, output in outputs.items():
        if not isinstance(output, (Wire, np.ndarray)):
            block_of, offset = device_inputs.lend_or_copy(output, loans, keep=True)
            shape = list(output.shape)
            rows.append([name, output.datatype, shape, len(blocks), offset, output.nbytes])
            blocks.append(block_of)
            continue
        datatype, dims, array = Wire.of(output)
        shape = list(dims)
        lent = loans.lend(array, keep=True)
        if lent is None:
            row: list[Any] = [name, datatype, shape, 0, total_bytes, array.nbytes]
            copied.append((row, array))
            total_bytes += (array.nbytes + ALIGNMENT - 1) & -ALIGNMENT
        else:
            row = [name, datatype, shape, len(blocks), lent[1], array.nbytes]
            blocks.append(lent[0])
        rows.append(row)
    if not copied:
        return
    block = loans.allocate(total_bytes, keep=True)
    region, start = block.region, block.offset
    for row, array in copied:
        row[3] = len(blocks)
        region.write(start + row[4], array)
    blocks.append([region.id, start, total_bytes])
