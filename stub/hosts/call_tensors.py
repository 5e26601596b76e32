"""Places the inputs of calls to other models where the runtime reads them, and views the outputs of the replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.arena import Block
from moonpool.ipc.errors import BadTensor
from moonpool.ipc.memory import ALIGNMENT, Lease
from moonpool.ipc.messages import LONG, MAX_DIMS, size_of
from moonpool.ipc.tensors import BYTES, DTYPES
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.peers.regions import Regions

if TYPE_CHECKING:
    from moonpool.ipc.cuda.region import DeviceLease


class Placed:
    """Holds placed inputs: blocks and rows as INFER takes them."""

    __slots__ = ("_regions", "blocks", "ours", "rows")

    def __init__(self, regions: Regions, tensors: Sequence[Tensor]) -> None:
        """Place the inputs. Tensors in shared memory stay there, others are copied. Raises `OutOfMemory`, `BadTensor`."""
        self._regions = regions
        if any(tensor._is_on_device for tensor in tensors):
            from moonpool.stub.devices.placement import moved

            tensors = moved(tensors, regions, self._may_name, None)
        self.blocks: list[list[int]] = []
        self.rows: list[list[Any]] = []
        # Blocks of this stub's memory, which the runtime holds from now on.
        self.ours: list[Block] = []
        copied: list[tuple[list[Any], np.ndarray]] = []
        size_bytes = 0
        for tensor in tensors:
            data = tensor._data
            if len(tensor._shape) > MAX_DIMS:
                raise BadTensor(
                    f"input '{tensor._name}' has {len(tensor._shape)} dimensions, and {MAX_DIMS} "
                    "is the most"
                )
            if size_of(tensor._name) > LONG:
                raise BadTensor(f"the name of an input has more than {LONG} bytes")
            row = [tensor._name, tensor._datatype, list(tensor._shape), 0, 0, data.nbytes]
            self.rows.append(row)
            if not self._is_there(row, tensor):
                row[4] = size_bytes
                copied.append((row, data))
                size_bytes += (data.nbytes + ALIGNMENT - 1) & -ALIGNMENT
        regions.hold(self.ours)
        if copied:
            self._copy(copied, size_bytes)

    def _may_name(self, lease: Lease | DeviceLease) -> bool:
        return lease.region is not None and self._regions.has(lease.region)

    def _is_there(self, row: list[Any], tensor: Tensor) -> bool:
        lease = tensor._lease()
        if lease is None or lease.region is None or not self._regions.has(lease.region):
            return False
        if not isinstance(lease, np.ndarray):
            self._regions.on_devices().touch(lease)
        block = self._regions.block(lease.region.id, lease.offset)
        if block is not None:
            self.ours.append(block)
        row[3:5] = len(self.blocks), tensor._offset_in(lease)
        self.blocks.append([lease.region.id, lease.offset, lease.size])
        return True

    def _copy(self, copied: list[tuple[list[Any], np.ndarray]], size_bytes: int) -> None:
        try:
            block = self._regions.allocate(size_bytes)
        except BaseException:
            self.take_back()
            raise
        region, start = block.region, block.offset
        for row, data in copied:
            row[3] = len(self.blocks)
            region.write(start + row[4], data)
        self.blocks.append([region.id, start, size_bytes])
        self.ours.append(block)

    def take_back(self) -> None:
        """Free the blocks again, as INFER was not sent."""
        self._regions.returned.extend([(each.region.id, each.offset) for each in self.ours])


def read_outputs(
    blocks: Sequence[list[int]],
    rows: Sequence[list[Any]],
    regions: Regions,
    give_back: Callable[[object], object],
) -> list[Tensor]:
    """Return the tensors of a reply: views of blocks that the runtime lent. `give_back` gets the place of each in the end."""
    leases: list[Lease | DeviceLease] = [
        regions.region(region).lease(offset, size_bytes, give_back, (region, offset))
        for region, offset, size_bytes in blocks
    ]
    if regions.devices is not None:
        regions.devices.order(leases)
    tensors: list[Tensor] = []
    for name, datatype, shape, block, offset, size_bytes in rows:
        lease = leases[block]
        if not isinstance(lease, np.ndarray):
            devices = regions.on_devices()
            tensors.append(devices.tensor(name, datatype, tuple(shape), lease, offset))
            continue
        if datatype >= BYTES:
            array: np.ndarray = np.ndarray((size_bytes,), np.uint8, lease, offset)
        else:
            array = np.ndarray(shape, DTYPES[datatype], lease, offset)
        tensors.append(Tensor.from_wire(name, datatype, tuple(shape), array))
    return tensors
