"""Places the outputs of responses in memory that the runtime reads, and describes where they lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moonpool.ipc.arena import Block
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import CODES, LocalProtocolError, MoonpoolError
from moonpool.ipc.memory import ALIGNMENT, Lease
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

# An output that lies in a block already is passed on from this size on. To copy a smaller one takes less time than to
# keep its block beyond the batch, and to tell the runtime so.
PASSED_BYTES = 256 * 1024
_MAX_TEXT = 65536
_INTERNAL = CODES.index("INTERNAL")


class BadResponse(MoonpoolError):
    """Says why a response of the model cannot be sent."""


class _Placement(NamedTuple):
    """Describes how one response is sent."""

    # The packed rows of the message.
    layout: bytes
    # The arrays to copy into a block of that size, each with its offset there. They follow the other blocks.
    copies: list[tuple[int, np.ndarray]]
    size_bytes: int
    # The blocks in which the other outputs lie, and those of them that are this stub's own.
    there: Sequence[list[int]]
    ours: Sequence[Block]
    # Outputs for memory of clients, which is among those blocks.
    delivered: Sequence[tuple[Target, np.ndarray]]


_NO_TARGETS: Mapping[int, Target] = {}
# The description of a response without outputs.
NO_OUTPUTS = encode()


class Placer:
    """Places the outputs of response after response. Any thread may call any method."""

    __slots__ = ("_regions", "indices")

    def __init__(self, regions: Regions, start: dict[str, Any]) -> None:
        self._regions = regions
        # The outputs of the model, by their names.
        self.indices: dict[str, int] = {name: index for index, name in enumerate(start["outputs"])}

    def answer(
        self,
        response: InferenceResponse,
        names: Collection[str],
        blocks: list[list[int]],
        passable: Batch | None = None,
        targets: Mapping[int, Target] | None = None,
        wish: PreferredMemory | None = None,
        first: int = 0,
    ) -> tuple[bytes | None, list[Any] | None]:
        """Place the requested outputs of a response.

        Returns their packed description and the remark that goes with it. `first` is the number that the message gives
        to its first block.

        A response that cannot be sent becomes an error without outputs. The model may have made it without its
        constructor, or changed its fields, so anything may be raised while it is read, also by code of the model's.
        What a signal handler raises is passed on, and no type tells the two apart. So the response is read first,
        which takes a moment and changes nothing, and once more if that raises (`signals.raised_again`). What takes
        longer comes after that, to wait for memory and to copy: there, only our own errors are the fault of the
        response.

        If this raises, `blocks` may have got blocks, which go back by `give_back`.
        """
        read = partial(self._read, response, names, passable, targets, wish, first)
        try:
            try:
                placement, remark = read()
            except MoonpoolError:
                raise
            except Exception:
                error = raised_again(read)
                if error is None:
                    raise
                return None, refusal_remark(error)
            if placement is None:
                return None, remark
            self._place(placement, blocks)
        except MoonpoolError as error:
            return None, refusal_remark(error)
        return placement.layout, remark

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
        first: int,
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
        if len(names) != len(self.indices):
            outputs = self.wanted(outputs, names)
        outputs = self.wanted(outputs, self.indices)
        return self._placed(outputs, passable, wish, targets or _NO_TARGETS, first), remark

    def _placed(
        self,
        outputs: list[Tensor],
        passable: Batch | None,
        wish: PreferredMemory | None,
        targets: Mapping[int, Target],
        first: int,
    ) -> _Placement:
        """Describe outputs. Some may lie in a region already, or go to a client's memory or to a device.

        Outputs may stay in blocks of the batch `passable`. `wish` is the memory that the client would like them in.
        Raises `BadResponse`.
        """
        if targets:
            wish = ORDINARY
        if wish is not None and not (wish.is_ordinary and all(t.is_cpu() for t in outputs)):
            outputs = self._moved(outputs, passable, wish)
        rows: list[list[Any]] = []
        copied: list[tuple[list[Any], np.ndarray]] = []
        there: list[list[int]] = []
        ours: list[Block] = []
        delivered: list[tuple[Target, np.ndarray]] = []
        for tensor in outputs:
            data = tensor._data
            row = self._row(tensor, data)
            rows.append(row)
            target = targets.get(row[0])
            if target is not None and 0 < data.nbytes <= target.size_bytes:
                row[3] = first + len(there)
                there.append([target.region.id, target.offset, data.nbytes])
                delivered.append((target, data))
                continue
            lease = self._shared(tensor, passable, ours)
            if tensor._is_on_device:
                if lease is None:
                    outputs = self._moved(outputs, passable, None)
                    return self._placed(outputs, passable, None, targets, first)
                self._regions.on_devices().touch(lease)  # type: ignore[arg-type]
            if lease is None:
                copied.append((row, data))
            else:
                row[3:5] = first + len(there), tensor._offset_in(lease)
                there.append([*lease.token, lease.size])  # type: ignore[misc]
        _check_names(outputs)
        size_bytes, copies = 0, []
        for row, data in copied:
            row[3:5] = first + len(there), size_bytes
            copies.append((size_bytes, data))
            size_bytes += (row[5] + ALIGNMENT - 1) & -ALIGNMENT
        return _Placement(encode(*rows), copies, size_bytes, there, ours, delivered)

    def _place(self, placement: _Placement, blocks: list[list[int]]) -> None:
        """Copy outputs to where the placement says, and add its blocks to `blocks`.

        Raises `OutOfMemory` and `CutShort`; memory of a client may have been written to then.
        """
        _, copies, size_bytes, there, ours, delivered = placement
        if not there:
            if copies:
                place_copies(self._regions, copies, size_bytes, blocks)
            return
        for target, data in delivered:
            target.region.write(target.offset, data)
        named = list(there)
        held: list[Block] = []
        steps = (partial(blocks.extend, named), held.clear)
        try:
            self._regions.hold(ours, held)
            if copies:
                place_copies(self._regions, copies, size_bytes, named, *steps)
            else:
                at_once(*steps)
        except BaseException:  # a signal handler of the model's may raise
            self._regions.take_back(held)
            raise

    def _moved(self, outputs: list[Tensor], passable: Batch | None, wish: PreferredMemory | None) -> list[Tensor]:
        from moonpool.stub.devices.placement import moved

        def may_name(lease: DeviceLease) -> bool:
            is_lent = passable is not None and passable.has_lent(lease)
            return is_lent or self._regions.find(lease) is not None

        return moved(outputs, self._regions, may_name, wish)

    def _row(self, tensor: Tensor, data: np.ndarray | DeviceArray) -> list[Any]:
        if len(tensor._shape) > MAX_DIMS:
            raise BadResponse(
                f"output '{tensor._name}' has {len(tensor._shape)} dimensions, and {MAX_DIMS} is the most"
            )
        if tensor._datatype != BYTES and data.nbytes != size_bytes(tensor._datatype, tensor._shape):
            raise BadResponse(
                f"output '{tensor._name}' of shape {list(tensor._shape)} has {data.nbytes} bytes: its "
                "array was resized after the tensor was made"
            )
        index = self.indices[tensor._name]
        return [index, tensor._datatype, list(tensor._shape), 0, 0, data.nbytes]

    def _shared(self, tensor: Tensor, passable: Batch | None, ours: list[Block]) -> Lease | DeviceLease | None:
        """Return the lease in which a tensor lies, of a block of the batch or of memory from `empty`; else None.

        Adds blocks from `empty` to `ours`, as the runtime will hold them, too.
        """
        if tensor._data.nbytes < PASSED_BYTES and not tensor._is_on_device:
            return None
        lease = tensor._lease()
        if lease is None:
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
        raise BadResponse(f"the response has {len(parameters)} parameters, and {MAX_PARAMETERS} is the most")
    try:
        encode(parameters)
    except LocalProtocolError as error:
        raise BadResponse(f"the parameters of the response: {error}") from error
    return parameters


def place_copies(
    regions: Regions,
    copies: Iterable[tuple[int, np.ndarray]],
    size_bytes: int,
    blocks: list[list[int]],
    *steps: Callable[[], object],
) -> None:
    """Copy arrays into a block, and add it to `blocks`, at once with further steps, functions of C.

    Raises `OutOfMemory`. Whatever this raises, nothing has changed then.
    """
    ours: list[Block] = []
    try:
        block = regions.allocate(size_bytes, taken=ours)
        region, start = block.region, block.offset
        write = region.write
        for offset, data in copies:
            write(start + offset, data)
        row = [region.id, start, size_bytes]
        at_once(partial(blocks.append, row), ours.clear, *steps)
    except BaseException:  # a signal handler of the model's may raise
        regions.take_back(ours)
        raise


def _check_names(outputs: list[Tensor]) -> None:
    names = {tensor._name for tensor in outputs}
    if len(names) != len(outputs):
        given = [tensor._name for tensor in outputs]
        twice = next(name for name in given if given.count(name) > 1)
        raise BadResponse(f"output '{twice}' is given twice")
