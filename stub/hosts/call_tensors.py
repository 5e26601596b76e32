"""Places the inputs of calls to other models where the runtime reads them, and views the outputs of the replies.

A model mostly makes the same request again, with other values. `UsualInputs` remembers how such requests are placed, and then takes no
more than one look at each tensor, a block and the copies. It leaves all others to `Placed`: strings, tensors that lie in shared memory
already, and the first request of each kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moonpool.ipc.arena import Block
from moonpool.ipc.codec import packed
from moonpool.ipc.errors import BadTensor
from moonpool.ipc.memo import Memo
from moonpool.ipc.memory import ALIGNMENT, SHARED_BYTES, Lease, lease_of
from moonpool.ipc.messages import LONG, MAX_DIMS, NO_DETAILS, size_of
from moonpool.ipc.signals import NOWHERE
from moonpool.ipc.tensors import BYTES, DTYPES
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.tensor import Tensor
from moonpool.stub.peers.regions import Regions

if TYPE_CHECKING:
    from moonpool.ipc.cuda.region import DeviceLease


_RAW = np.dtype("u1")


class Placed:
    """Holds placed inputs: blocks and rows as INFER takes them."""

    __slots__ = ("_regions", "blocks", "has_shared", "ours", "rows")

    def __init__(
        self, regions: Regions, tensors: Sequence[Tensor], ours: list[Block] | None = None
    ) -> None:
        """Place the inputs. Tensors in shared memory stay there, others are copied. Raises `OutOfMemory`, `BadTensor`.

        `ours` gets the blocks of this stub's memory that the runtime holds from now on, each when it is held: `Regions.take_back` is
        for them if the message is not sent.
        """
        self._regions = regions
        if any(tensor._is_on_device for tensor in tensors):
            from moonpool.stub.devices.placement import moved

            tensors = moved(tensors, regions, self._may_name, None)
        self.blocks: list[list[int]] = []
        self.rows: list[list[Any]] = []
        # True if any input stays where it is.
        self.has_shared = False
        self.ours: list[Block] = [] if ours is None else ours
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
        self.has_shared = True
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


class CopyPlan(NamedTuple):
    """Describes how the inputs of a request are sent if all are copied into one block."""

    # The rows of INFER.
    rows: list[list[Any]]
    offsets: list[int]
    size_bytes: int
    # The bytes of INFER between the number and the places, and behind the blocks.
    head: bytes
    tail: bytes


class UsualInputs:
    """Places the inputs of requests that differ from earlier ones in nothing but values. Any thread may call any method."""

    __slots__ = ("_regions", "plans")

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self.plans: Memo[tuple[object, ...], CopyPlan] = Memo()

    def place(
        self, request: InferenceRequest, ours: list[Block] | None = None
    ) -> tuple[list[list[int]], list[list[Any]]] | None:
        """Copy the inputs into a block, which `ours` gets. Returns the block and the rows as INFER takes them.

        Returns None, and has done nothing, for a request of a new kind. Raises `OutOfMemory`.
        """
        known = self._key(request)
        if known is None:
            return None
        key, arrays = known
        try:
            plan = self.plans.get(key)
        except TypeError:  # fields that the model has changed
            return None
        if plan is None:
            return None
        rows, offsets, size_bytes, _, _ = plan
        block = self._regions.allocate(size_bytes, taken=ours)
        write, start = block.region.write, block.offset
        for array, offset in zip(arrays, offsets):
            write(start + offset, array)
        return [[block.region.id, start, size_bytes]], rows

    def learn(self, request: InferenceRequest, placed: Placed) -> None:
        """Remember how a request was placed, which has passed all checks, if all inputs were copied."""
        rows = placed.rows
        if len(placed.blocks) != 1 or placed.has_shared:
            return
        known = self._key(request)
        if known is not None:
            head = packed(request._model_name, request._model_version, False, 0)
            tail = packed(rows, request._requested_output_names, None)
            plan = CopyPlan(rows, [row[4] for row in rows], placed.blocks[0][2], head, tail)
            with contextlib.suppress(TypeError):  # as above
                self.plans.keep(known[0], plan)

    def _key(self, request: InferenceRequest) -> tuple[tuple[object, ...], list[np.ndarray]] | None:
        """Return all fields that the plan depends on, and the arrays. None for a request with more than inputs to copy."""
        if (
            request._details is not NO_DETAILS
            or request._trace._context is not None
            or request._preferred_memory is not None
        ):
            return None
        names = request._requested_output_names
        key: list[object] = [request._model_name, request._model_version, len(names), *names]
        arrays = _arrays_to_copy(request._inputs, key)
        return None if arrays is None else (tuple(key), arrays)


def _arrays_to_copy(tensors: Iterable[Tensor], key: list[object]) -> list[np.ndarray] | None:
    """Return the arrays of tensors that are all copied, and add to `key` what their plan depends on. None if one is
    not copied.
    """
    arrays = []
    for tensor in tensors:
        array = tensor._array
        # Strings have no fixed size, and large arrays in shared memory stay there.
        if array is None or (array.nbytes >= SHARED_BYTES and lease_of(array) is not None):
            return None
        arrays.append(array)
        key += (tensor._name, tensor._datatype, tensor._shape, array.nbytes)
    return arrays


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
    blocks: Sequence[list[int]],
    outputs: Sequence[CallOutput],
    regions: Regions,
    give_back: Callable[[object], object],
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
