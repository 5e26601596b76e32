"""Places the inputs of calls to other models where the runtime reads them, and views the outputs of the replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.arena import Block
from moonpool.ipc.errors import BadTensor
from moonpool.ipc.memory import ALIGNMENT, SHARED_BYTES, Lease
from moonpool.ipc.messages import LONG, MAX_DIMS, size_of
from moonpool.ipc.signals import NOWHERE
from moonpool.ipc.tensors import BYTES, DTYPES
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.peers.regions import Regions

if TYPE_CHECKING:
    from moonpool.ipc.cuda.region import DeviceLease


_RAW = np.dtype("u1")


class Placed:
    """Holds placed inputs: blocks and rows as INFER takes them."""

    __slots__ = ("_regions", "blocks", "ours", "rows")

    def __init__(self, regions: Regions, tensors: Sequence[Tensor], ours: list[Block] | None = None) -> None:
        """Place the inputs. Tensors in shared memory stay there, others are copied. Raises `OutOfMemory`, `BadTensor`.

        `ours` gets the blocks of this stub's memory that the runtime holds from now on, each when it is held:
        `Regions.take_back` is for them if the message is not sent.
        """
        self._regions = regions
        if any(tensor._is_on_device for tensor in tensors):
            from moonpool.stub.devices.placement import moved

            tensors = moved(tensors, regions, self._may_name, None)
        self.blocks: list[list[int]] = []
        self.rows: list[list[Any]] = []
        self.ours: list[Block] = [] if ours is None else ours
        copied: list[tuple[list[Any], np.ndarray]] = []
        size_bytes = 0
        for tensor in tensors:
            data = tensor._data
            if len(tensor._shape) > MAX_DIMS:
                raise BadTensor(
                    f"input '{tensor._name}' has {len(tensor._shape)} dimensions, and {MAX_DIMS} is the most"
                )
            if size_of(tensor._name) > LONG:
                raise BadTensor(f"the name of an input has more than {LONG} bytes")
            row = [tensor._name, tensor._datatype, list(tensor._shape), 0, 0, data.nbytes]
            self.rows.append(row)
            if not self._is_there(row, tensor):
                row[4] = size_bytes
                copied.append((row, data))
                size_bytes += (data.nbytes + ALIGNMENT - 1) & -ALIGNMENT
        if copied:
            self._copy(copied, size_bytes)

    def _may_name(self, lease: Lease | DeviceLease) -> bool:
        return lease.region is not None and self._regions.has(lease.region)

    def _is_there(self, row: list[Any], tensor: Tensor) -> bool:
        lease = tensor._lease()
        if lease is None or lease.region is None or not self._regions.has(lease.region):
            return False
        if row[5] < SHARED_BYTES and not tensor._is_on_device:
            return False
        if not isinstance(lease, np.ndarray):
            self._regions.on_devices().touch(lease)
        block = self._regions.block(lease.region.id, lease.offset)
        if block is not None:
            self._regions.hold([block], self.ours)
        row[3:5] = len(self.blocks), tensor._offset_in(lease)
        self.blocks.append([lease.region.id, lease.offset, lease.size])
        return True

    def _copy(self, copied: list[tuple[list[Any], np.ndarray]], size_bytes: int) -> None:
        block = self._regions.allocate(size_bytes, taken=self.ours)
        region, start = block.region, block.offset
        for row, data in copied:
            row[3] = len(self.blocks)
            region.write(start + row[4], data)
        self.blocks.append([region.id, start, size_bytes])


# One output of a reply: name, datatype, shape, the dtype and shape of its view, block and offset.
CallOutput = tuple[str, int, tuple[int, ...], Any, tuple[int, ...], int, int]


def prepared(rows: Sequence[list[Any]]) -> list[CallOutput]:
    """Work out how to view the outputs of a reply. Strings and BF16 are viewed as bytes."""
    outputs: list[CallOutput] = []
    for name, datatype, shape, block, offset, size_bytes in rows:
        is_raw = datatype >= BYTES
        dtype = _RAW if is_raw else DTYPES[datatype]
        dims = (size_bytes,) if is_raw else tuple(shape)
        outputs.append((name, datatype, tuple(shape), dtype, dims, block, offset))
    return outputs


def read_outputs(
    blocks: Sequence[list[int]], outputs: Sequence[CallOutput], regions: Regions, give_back: Callable[[object], object]
) -> tuple[list[Tensor], list[Callable[[], object]]]:
    """Return the tensors of a reply, and the steps, functions of C, from which on they have the blocks that the
    runtime lent.

    In the end `give_back` gets the place of each block. Before those steps nothing has changed.
    """
    leases: list[Lease | DeviceLease] = [
        regions.region(region).lease(offset, size_bytes, NOWHERE.append, (region, offset))
        for region, offset, size_bytes in blocks
    ]
    if regions.devices is not None:
        regions.devices.order(leases)
    tensors: list[Tensor] = []
    for name, datatype, shape, dtype, dims, block, offset in outputs:
        lease = leases[block]
        if isinstance(lease, np.ndarray):
            array = np.ndarray(dims, dtype, lease, offset)
            tensors.append(Tensor.from_wire(name, datatype, shape, array))
        else:
            devices = regions.on_devices()
            tensors.append(devices.tensor(name, datatype, shape, lease, offset))
    return tensors, [partial(setattr, lease, "give_back", give_back) for lease in leases]
