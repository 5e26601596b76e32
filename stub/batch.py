"""The requests of one EXECUTE as objects for the model, and the memory they lie in."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from moonpool.ipc.tensors import DTYPES
from moonpool.stub.request import InferenceRequest
from moonpool.stub.tensor import Tensor

if TYPE_CHECKING:
    from typing import Any

    from moonpool.ipc.memory import Lease
    from moonpool.stub.regions import Regions

_NO_DETAILS: list[Any] = ["", 0, 0, 0, 0, None, None]
_RAW = np.dtype("u1")


class Batch:
    """Opens batch after batch; knows which blocks the model still looks at."""

    __slots__ = ("_inputs", "_let_go", "_outputs", "_regions", "_returned", "kept", "places")

    def __init__(self, regions: Regions, start: dict[str, Any]) -> None:
        self._regions = regions
        self._inputs: list[str] = start["inputs"]
        self._outputs: list[str] = start["outputs"]
        # Places of blocks, appended by whichever thread drops the last view of one.
        self._returned: deque[object] = deque()
        self._let_go = self._returned.append
        self.places: list[object] = []
        self.kept = 0

    def open(self, blocks: list[list[int]], requests: list[list[Any]]) -> list[InferenceRequest]:
        """The batch as the model sees it: views on the region, writable, no copy."""
        leases = []
        self.places = places = []
        for region_id, offset, size_bytes in blocks:
            place = (region_id, offset)
            places.append(place)
            region = self._regions.request_region(region_id)
            leases.append(region.lease(offset, size_bytes, self._let_go, place))
        return [self._request(inputs, details, leases) for inputs, details in requests]

    def _request(
        self, inputs: list[list[Any]], details: list[Any] | None, leases: list[Lease]
    ) -> InferenceRequest:
        names = self._inputs
        tensors = []
        for index, datatype, shape, block, offset, size_bytes in inputs:
            lease = leases[block]
            if datatype < 13:
                array = np.ndarray(shape, DTYPES[datatype], lease, offset)
            else:
                array = np.ndarray((size_bytes,), _RAW, lease, offset)
            tensors.append(Tensor.from_wire(names[index], datatype, shape, array))
        request_id, correlation_id, flags, timeout_us, priority, parameters, outputs = (
            details or _NO_DETAILS
        )
        wanted = self._outputs if outputs is None else [self._outputs[i] for i in outputs]
        return InferenceRequest.from_wire(
            request_id, correlation_id, flags, timeout_us, parameters, wanted, tensors, priority
        )

    def let_go(self) -> tuple[list[object], list[object]]:
        """The blocks of this batch that the model keeps, and those of earlier ones it let go of now.

        To be called when everything else that refers to the batch's objects is gone.
        """
        returned = self._returned
        if not self.kept and len(returned) == len(self.places):
            returned.clear()
            return [], []
        released = []
        while returned:
            released.append(returned.popleft())
        held = []
        for place in self.places:
            if place in released:
                released.remove(place)
            else:
                held.append(place)
        self.kept += len(held) - len(released)
        return held, released
