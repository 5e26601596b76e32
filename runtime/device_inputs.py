"""What becomes of arrays on devices: lent to a stub where they are, or copied there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.ipc.memory import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moonpool.ipc.cuda.array import DeviceArray
    from moonpool.runtime.loans import Loans
    from moonpool.runtime.request import InferenceRequest

    # The request in the batch, the number of its input, and that.
    Input = tuple[int, int, DeviceArray]


def place(
    inputs: Iterable[Input],
    loans: Loans,
    blocks: list[list[int]],
    found: dict[tuple[int, int], tuple[int, int]],
) -> None:
    """Have a stub see these inputs of a batch: adds the blocks that they lie in, and in which each lies and where.

    What may not be lent is copied on the device, the rows of each input back to back. Raises what
    `Loans.allocate_on` raises.
    """
    copied: dict[int, list[Input]] = {}
    for each in inputs:
        request, number, array = each
        lent = loans.lend_on_device(array)
        if lent is None:
            copied.setdefault(loans.lanes.nearest(array.device.ordinal), []).append(each)
        else:
            found[request, number] = len(blocks), lent[1]
            blocks.append(lent[0])
    for gpu, some in copied.items():
        some.sort(key=lambda each: (each[1], each[0]))
        offsets, size_bytes = _in_rows(some)
        for (request, number, _), offset in zip(some, offsets, strict=True):
            found[request, number] = len(blocks), offset
        arrays = [array for _, _, array in some]
        blocks.append(_copy(arrays, offsets, size_bytes, gpu, loans, keep=False))


def lend_or_copy(array: DeviceArray, loans: Loans, *, keep: bool) -> tuple[list[int], int]:
    """Have a stub see an array: its block, and the offset in that. Raises as `place` does."""
    lent = loans.lend_on_device(array, keep=keep)
    if lent is not None:
        return lent
    gpu = loans.lanes.nearest(array.device.ordinal)
    return _copy([array], [0], array.nbytes, gpu, loans, keep=keep), 0


def hand_back(requests: Iterable[InferenceRequest], loans: Loans) -> None:
    """What callers, models among them, do with arrays that they lent comes from now on after what the stub did with them."""
    lanes = loans.lanes
    for request in requests:
        for array in request.arrays:
            lease = getattr(array, "lease", None)
            if lease is None or not loans.has_lent(lease.region):
                continue
            device_array: DeviceArray = array  # type: ignore[assignment]
            lane = lanes.lane(lanes.nearest(device_array.device.ordinal))
            device_array.leave(lane.stream)
            if lease.lane is not None and lease.lane is not lane:
                lease.lane.follow(lane)


def _in_rows(inputs: Iterable[Input]) -> tuple[list[int], int]:
    """Where each lies in a block, those of one number back to back, and how large the block is."""
    offsets = []
    end, before = 0, -1
    for _, number, array in inputs:
        if number != before:
            end = (end + ALIGNMENT - 1) & -ALIGNMENT
        offsets.append(end)
        end, before = end + array.nbytes, number
    return offsets, end


def _copy(
    arrays: Iterable[DeviceArray],
    offsets: Iterable[int],
    size_bytes: int,
    gpu: int,
    loans: Loans,
    *,
    keep: bool,
) -> list[int]:
    """Queue the copies of arrays into one block, which is returned."""
    block, lane = loans.allocate_on(gpu, size_bytes, keep=keep), loans.lanes.lane(gpu)
    start = block.region.address + block.offset  # type: ignore[attr-defined]
    for array, offset in zip(arrays, offsets, strict=True):
        array.enter(lane.stream)
        lane.copy(start + offset, array.address, array.nbytes)
        # Who owns it may change it, or have it freed, as soon as the caller has his answer.
        array.leave(lane.stream)
        lane.keep(array)
    return [block.region.id, block.offset, size_bytes]
