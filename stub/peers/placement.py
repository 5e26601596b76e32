"""Places the outputs of responses in memory that the runtime reads, and describes where they lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.arena import Block
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import CODES, LocalProtocolError, MoonpoolError
from moonpool.ipc.memo import Memo
from moonpool.ipc.memory import ALIGNMENT, Lease, lease_of
from moonpool.ipc.messages import MAX_DIMS, MAX_PARAMETERS, beginning
from moonpool.ipc.signals import at_once, raised_again
from moonpool.ipc.tensors import BYTES, size_bytes
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import ORDINARY, PreferredMemory, Tensor
from moonpool.stub.peers.batch import Batch, Target
from moonpool.stub.peers.regions import Regions
from moonpool.stub.report import describe

if TYPE_CHECKING:
    from moonpool.ipc.cuda.array import DeviceArray
    from moonpool.ipc.cuda.region import DeviceLease

# An output that lies in a block already is passed on from this size on. To copy a smaller one takes less time than to keep
# its block beyond the batch, and to tell the runtime so.
PASSED_BYTES = 256 * 1024
_MEMORABLE_BYTES = 4096
_MAX_TEXT = 65536
_INTERNAL = CODES.index("INTERNAL")
_is_shared = attrgetter("is_shared")


class BadResponse(MoonpoolError):
    """Says why a response of the model cannot be sent."""


class PlacementPlan:
    """Describes how the outputs of one response are sent. All responses of the same names and shapes share one plan."""

    __slots__ = ("block_count", "is_shared", "offsets", "rows", "size_bytes")

    def __init__(self, rows: list[list[Any]], block_count: int, *, is_shared: bool) -> None:
        # The rows of the message, but with the number of the block within the response.
        self.rows = rows
        self.block_count = block_count
        self.is_shared = is_shared
        # The size of the block for copies, and the offset of each output in it.
        self.size_bytes = 0
        self.offsets: list[int] = []


# How one response is placed: its plan; the arrays to copy into one block, as the plan says; the blocks in which the
# other outputs lie, and those of them that are this stub's own; and outputs for memory of clients, which is among
# those blocks.
_Placement = tuple[
    PlacementPlan,
    list[np.ndarray],
    Sequence[list[int]],
    Sequence[Block],
    Sequence[tuple[Target, np.ndarray]],
]
_NO_TARGETS: Mapping[int, Target] = {}
NO_OUTPUTS = PlacementPlan([], 0, is_shared=True)


class Placer:
    """Places the outputs of response after response. Any thread may call any method."""

    __slots__ = ("_indices", "_regions", "layouts", "plans")

    def __init__(self, regions: Regions, start: dict[str, Any]) -> None:
        self._regions = regions
        self._indices = {name: index for index, name in enumerate(start["outputs"])}
        self.plans: Memo[tuple[object, ...], PlacementPlan] = Memo()
        self.layouts: Memo[tuple[PlacementPlan, ...], bytes] = Memo()

    def answer(
        self,
        response: InferenceResponse,
        names: Collection[str],
        blocks: list[list[int]],
        passable: Batch | None = None,
        targets: Mapping[int, Target] | None = None,
        wish: PreferredMemory | None = None,
    ) -> tuple[PlacementPlan | None, list[Any] | None]:
        """Place the requested outputs of a response. Returns the plan, and the remark that goes with it.

        A response that cannot be sent becomes an error without outputs. The model may have made it without its
        constructor, or changed its fields, so anything may be raised while it is read, also by code of the model's.
        What a signal handler raises is passed on, and no type tells the two apart. So the response is read first,
        which takes a moment and changes nothing, and once more if that raises (`signals.raised_again`). What takes
        longer comes after that, to wait for memory and to copy: there, only our own errors are the fault of the
        response.

        If this raises, `blocks` may have got blocks, which go back by `give_back`.
        """
        try:
            try:
                placement, remark = self._read(response, names, passable, targets, wish)
            except MoonpoolError:
                raise
            except Exception:
                error = raised_again(partial(self._read, response, names, passable, targets, wish))
                if error is None:
                    raise
                return None, refusal_remark(error)
            if placement is None:
                return None, remark
            plan, arrays, there, *_ = placement
            if there:
                self._place_apart(placement, blocks)
            elif arrays:
                place_copies(self._regions, arrays, plan, blocks)
        except MoonpoolError as error:
            return None, refusal_remark(error)
        return plan, remark

    def give_back(self, blocks: list[list[int]]) -> None:
        """Take back the blocks of a response that is not sent."""
        self._regions.returned.extend([(region, offset) for region, offset, _ in blocks])

    def wanted(self, outputs: list[Tensor], names: Collection[str]) -> list[Tensor]:
        """Return the requested outputs. As in Triton, all others are left out without a check."""
        return [tensor for tensor in outputs if tensor._name in names]

    def _read(
        self,
        response: InferenceResponse,
        names: Collection[str],
        passable: Batch | None,
        targets: Mapping[int, Target] | None,
        wish: PreferredMemory | None,
    ) -> tuple[_Placement | None, list[Any] | None]:
        """Return how to place a response and its remark, or an error as a remark.

        Raises what the model's objects raise.
        """
        error = response._error
        if error is not None:
            return None, error_remark(int(error.code()), error.message())
        parameters = response._parameters and checked_parameters(response._parameters)
        remark = [parameters, None] if parameters else None
        outputs = response._outputs
        if len(names) != len(self._indices):
            outputs = self.wanted(outputs, names)
        placement = None
        if targets is None and (wish is None or wish.is_ordinary):
            placement = self._copied(outputs)
        if placement is None:
            outputs = self.wanted(outputs, self._indices)
            placement = self._apart(outputs, passable, wish, targets or _NO_TARGETS)
        return placement, remark

    def _copied(self, outputs: list[Tensor]) -> _Placement | None:
        """Describe outputs that are all copied. Returns None if one of them is not."""
        key: list[object] = []
        arrays = arrays_to_copy(outputs, key)
        if arrays is None:
            return None
        known = tuple(key)
        plan = self.plans.get(known)
        if plan is None:
            ours = self.wanted(outputs, self._indices)
            if len(ours) < len(outputs):
                return self._copied(ours)
            plan = self.plans.keep(known, self._plan(outputs, arrays))
        return plan, arrays, (), (), ()

    def _plan(self, outputs: list[Tensor], arrays: list[np.ndarray]) -> PlacementPlan:
        """Make the plan for outputs that are all copied. Raises `BadResponse`."""
        rows = [self._row(tensor, array) for tensor, array in zip(outputs, arrays)]
        _check_names(outputs)
        plan = PlacementPlan(rows, 1 if rows else 0, is_shared=True)
        _lay_out(plan, rows, 0)
        return plan

    def _apart(
        self,
        outputs: list[Tensor],
        passable: Batch | None,
        wish: PreferredMemory | None,
        targets: Mapping[int, Target],
    ) -> _Placement:
        """Describe outputs of which some lie in a region already, or go to a client's memory or to a device.

        Outputs may stay in blocks of the batch `passable`. `wish` is the memory that the client would like them in.
        """
        if targets:
            wish = ORDINARY
        if wish is not None and not (wish.is_ordinary and all(t.is_cpu() for t in outputs)):
            outputs = self._moved(outputs, passable, wish)
        rows: list[list[Any]] = []
        copied: list[list[Any]] = []
        arrays: list[np.ndarray] = []
        there: list[list[int]] = []
        ours: list[Block] = []
        delivered: list[tuple[Target, np.ndarray]] = []
        for tensor in outputs:
            data = tensor._data
            row = self._row(tensor, data)
            rows.append(row)
            target = targets.get(row[0])
            if target is not None and 0 < data.nbytes <= target.size_bytes:
                row[3] = len(there)
                there.append([target.region.id, target.offset, data.nbytes])
                delivered.append((target, data))
                continue
            lease = self._shared(tensor, passable, ours)
            if tensor._is_on_device:
                if lease is None:
                    outputs = self._moved(outputs, passable, None)
                    return self._apart(outputs, passable, None, targets)
                self._regions.on_devices().touch(lease)  # type: ignore[arg-type]
            if lease is None:
                copied.append(row)
                arrays.append(data)
            else:
                row[3:5] = len(there), tensor._offset_in(lease)
                there.append([*lease.token, lease.size])  # type: ignore[misc]
        _check_names(outputs)
        plan = PlacementPlan(rows, len(there) + (1 if copied else 0), is_shared=False)
        _lay_out(plan, copied, len(there))
        return plan, arrays, there, ours, delivered

    def _place_apart(self, placement: _Placement, blocks: list[list[int]]) -> None:
        """Do the same as `place_copies` if some outputs are not copied.

        Raises `CutShort`, too; memory of a client may have been written to then.
        """
        plan, arrays, there, ours, delivered = placement
        for target, data in delivered:
            target.region.write(target.offset, data)
        named = list(there)
        held: list[Block] = []
        steps = (partial(blocks.extend, named), held.clear)
        try:
            self._regions.hold(ours, held)
            if arrays:
                place_copies(self._regions, arrays, plan, named, *steps)
            else:
                at_once(*steps)
        except BaseException:  # a signal handler of the model's may raise
            self._regions.take_back(held)
            raise

    def _moved(
        self, outputs: list[Tensor], passable: Batch | None, wish: PreferredMemory | None
    ) -> list[Tensor]:
        from moonpool.stub.devices.placement import moved

        def may_name(lease: DeviceLease) -> bool:
            is_lent = passable is not None and passable.has_lent(lease)
            return is_lent or self._regions.find(lease) is not None

        return moved(outputs, self._regions, may_name, wish)

    def _row(self, tensor: Tensor, data: np.ndarray | DeviceArray) -> list[Any]:
        if len(tensor._shape) > MAX_DIMS:
            raise BadResponse(
                f"output '{tensor._name}' has {len(tensor._shape)} dimensions, and {MAX_DIMS} is "
                "the most"
            )
        if tensor._datatype != BYTES and data.nbytes != size_bytes(tensor._datatype, tensor._shape):
            raise BadResponse(
                f"output '{tensor._name}' of shape {list(tensor._shape)} has {data.nbytes} bytes: its "
                "array was resized after the tensor was made"
            )
        index = self._indices[tensor._name]
        return [index, tensor._datatype, list(tensor._shape), 0, 0, data.nbytes]

    def _shared(
        self, tensor: Tensor, passable: Batch | None, ours: list[Block]
    ) -> Lease | DeviceLease | None:
        """Return the lease in which a tensor lies, of a block of the batch or of memory from `empty`; else None.

        Adds blocks from `empty` to `ours`, as the runtime will hold them, too.
        """
        lease = tensor._lease()
        if lease is None or (tensor._data.nbytes < PASSED_BYTES and not tensor._is_on_device):
            return None
        if passable is None or not passable.has_lent(lease):
            block = self._regions.find(lease)
            if block is None:
                return None  # an input that the model kept from an earlier batch
            ours.append(block)
        return lease

    def publish(self) -> None:
        """Order the work on devices. To be called right before the message that names placed responses."""
        self._regions.publish()

    def layout(self, responses: tuple[PlacementPlan, ...]) -> bytes:
        """Return the packed description of these responses, whose blocks follow each other."""
        packed = self.layouts.get(responses)
        if packed is None:
            packed = _packed(responses)
            if len(packed) <= _MEMORABLE_BYTES and all(map(_is_shared, responses)):
                self.layouts.keep(responses, packed)
        return packed


def error_remark(code: int, message: str) -> list[Any]:
    """Return the remark that stands for an error."""
    return [None, [code, beginning(message, _MAX_TEXT)]]


def refusal_remark(error: Exception) -> list[Any]:
    """Return the remark on a response that cannot be sent because of this error."""
    if isinstance(error, MoonpoolError):
        return error_remark(CODES.index(error.code), str(error))
    return error_remark(_INTERNAL, f"the response cannot be sent: {describe(error)}")


def checked_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a response. Raises `BadResponse` if they cannot travel."""
    if len(parameters) > MAX_PARAMETERS:
        raise BadResponse(
            f"the response has {len(parameters)} parameters, and {MAX_PARAMETERS} is the most"
        )
    try:
        encode(parameters)
    except LocalProtocolError as error:
        raise BadResponse(f"the parameters of the response: {error}") from error
    return parameters


def arrays_to_copy(
    tensors: Iterable[Tensor], key: list[object], passed_bytes: int = PASSED_BYTES
) -> list[np.ndarray] | None:
    """Return the arrays of tensors that are all copied, and add to `key` what their plan depends on. None if one is not copied.

    An array of `passed_bytes` or more is not copied if it lies in a block.
    """
    arrays = []
    for tensor in tensors:
        array = tensor._array
        # Strings have no fixed size, and large arrays in shared memory stay there.
        if array is None or (array.nbytes >= passed_bytes and lease_of(array) is not None):
            return None
        arrays.append(array)
        key += (tensor._name, tensor._datatype, tensor._shape, array.nbytes)
    return arrays


def place_copies(
    regions: Regions,
    arrays: Iterable[np.ndarray],
    plan: PlacementPlan,
    blocks: list[list[int]],
    *steps: Callable[[], object],
) -> None:
    """Copy arrays into a block as the plan says, and add the block to `blocks`, at once with further steps, functions of C.

    Raises `OutOfMemory`. Whatever this raises, nothing has changed then.
    """
    ours: list[Block] = []
    try:
        block = regions.allocate(plan.size_bytes, taken=ours)
        region, start = block.region, block.offset
        write = region.write
        for data, offset in zip(arrays, plan.offsets):
            write(start + offset, data)
        row = [region.id, start, plan.size_bytes]
        at_once(partial(blocks.append, row), ours.clear, *steps)
    except BaseException:  # a signal handler of the model's may raise
        regions.take_back(ours)
        raise


def _lay_out(plan: PlacementPlan, rows: list[list[Any]], block: int) -> None:
    """Place these rows of a plan one after another in the block of that number."""
    for row in rows:
        row[3:5] = block, plan.size_bytes
        plan.offsets.append(plan.size_bytes)
        plan.size_bytes += (row[5] + ALIGNMENT - 1) & -ALIGNMENT


def _packed(responses: tuple[PlacementPlan, ...]) -> bytes:
    layout = []
    first = 0
    for plan in responses:
        layout.append([[*row[:3], first + row[3], *row[4:]] for row in plan.rows])
        first += plan.block_count
    return encode(*layout)


def _check_names(outputs: list[Tensor]) -> None:
    names = {tensor._name for tensor in outputs}
    if len(names) != len(outputs):
        given = [tensor._name for tensor in outputs]
        twice = next(name for name in given if given.count(name) > 1)
        raise BadResponse(f"output '{twice}' is given twice")
