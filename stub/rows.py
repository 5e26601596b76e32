"""The rows of a batch: requests' arrays joined into one, and one cut into each request's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.memory import lease_of, offset_in

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any


def joined(arrays: Sequence[Any]) -> Any:
    """All rows of `arrays`, which have the same dtype and the same shape but for the first dimension.

    They are numpy's, or all of them lie on a device.

    Without a copy where they lie back to back in one block of shared memory, as the runtime puts
    the requests of a batch; a copy otherwise.
    """
    first = arrays[0]
    if len(arrays) == 1:
        return first
    if not isinstance(first, np.ndarray):
        from moonpool.stub import device_rows

        return device_rows.joined(arrays)
    lease = lease_of(first)
    if lease is None:
        return np.concatenate(arrays)
    start = end = offset_in(lease, first)
    rows = 0
    for array in arrays:
        if lease_of(array) is not lease or offset_in(lease, array) != end:
            return np.concatenate(arrays)
        end += array.nbytes
        rows += array.shape[0]
    return np.ndarray((rows, *first.shape[1:]), first.dtype, lease, start)


def cut(array: Any, counts: Sequence[int]) -> list[Any]:
    """The first `counts[0]` rows of `array`, the next `counts[1]`, and so on, as views."""
    if len(counts) == 1:
        return [array]
    if not isinstance(array, np.ndarray):
        from moonpool.stub import device_rows

        return device_rows.cut(array, counts)
    pieces = []
    start = 0
    for count in counts:
        pieces.append(array[start : start + count])
        start += count
    return pieces
