"""Where the outputs of a response go: the caller's memory, if the caller says so.

Without an allocator outputs are views on the region that the model wrote them to. With one, the order of
calls for each response is the one that Triton's clients know: `start`, then `alloc` once an output, then,
when the caller no longer holds an output, `release` for its buffer.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.memory import Lease
from moonpool.ipc.tensors import BYTES, DTYPES, NAMES

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    from numpy.typing import NDArray

    from moonpool.runtime.request import InferenceRequest


class ResponseAllocator:
    """Override `alloc`; the others may stay as they are.

    One allocator may serve many requests; calls for different requests come from different threads at the
    same time. `userp` is the object given with the request. An exception from `start` or `alloc`
    becomes the outcome of the request.
    """

    def start(self, userp: object) -> None:
        """A response begins."""

    def alloc(
        self, name: str, datatype: str, shape: tuple[int, ...], size_bytes: int, userp: object
    ) -> Buffer:
        """A writable contiguous buffer of at least `size_bytes` for one output.

        BYTES outputs come in their wire form: each string behind its length in four bytes.
        """
        raise NotImplementedError

    def release(self, buffer: Buffer, userp: object) -> None:
        """The caller dropped the last view of the buffer. May come from any thread."""


def allocate(
    request: InferenceRequest, name: str, datatype: int, shape: tuple[int, ...], raw: NDArray[Any]
) -> NDArray[Any]:
    """Copy one output into memory of the request's allocator; raises what `alloc` raises.

    Returns an array in that memory: of the output's dtype and shape, or for BYTES of `uint8`.
    """
    allocator, userp = request.allocator, request.userp
    if allocator is None:
        raise ValueError("the request has no allocator")
    buffer = allocator.alloc(name, NAMES[datatype], shape, raw.nbytes, userp)
    try:
        # ctypes' arrays are no ndarrays, so the lease stays in the chain of bases; see `Lease`.
        memory = (ctypes.c_ubyte * raw.nbytes).from_buffer(buffer)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the allocator's buffer for output {name!r} must be writable and hold "
            f"{raw.nbytes} bytes: {error}"
        ) from error
    lease = Lease((raw.nbytes,), "u1", memory)  # type: ignore[arg-type]
    lease.give_back = lambda token: allocator.release(token, userp)
    lease.token = buffer
    lease.region = None
    lease[...] = raw
    if datatype == BYTES:
        return np.ndarray(lease.shape, np.uint8, lease)
    return np.ndarray(shape, DTYPES[datatype], lease)
