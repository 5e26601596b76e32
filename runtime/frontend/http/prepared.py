"""Requests of which all but the numbers is known already: clients send the same JSON again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.tensors import DTYPES
from moonpool.runtime.request import InferenceRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moonpool.runtime.backend import Model
    from moonpool.runtime.frontend.http.infer_request import Plan
    from moonpool.runtime.frontend.service import Service
    from moonpool.runtime.frontend.submission import Hosted


class Prepared:
    """Makes requests that are like one that was checked before, but for the bytes of its tensors."""

    __slots__ = ("_details", "_has_places", "_shapes", "_size_bytes", "_tensors", "signature")

    def __init__(self, plan: Plan, hosted: Hosted, request: InferenceRequest) -> None:
        """`request` was made of `plan`, and `can_be` of it."""
        offsets, offset = {}, 0
        for each in plan.inputs:
            offsets[each.name] = offset
            offset += each.size_bytes
        places = {each.name: each.place for each in plan.inputs}
        names = [tensor.name for tensor in hosted.model.config.inputs]
        # What was checked holds as long as the model has this very signature.
        self.signature = hosted.signature
        self._size_bytes = offset
        self._shapes, self._details = request.shapes, request.details
        self._tensors = [
            (tuple(tensor.shape), DTYPES[tensor.datatype], offsets[name], places[name])
            for tensor in request.shapes.tensors
            for name in [names[tensor.number]]
        ]
        self._has_places = plan.has_shared

    @staticmethod
    def can_be(plan: Plan, request: InferenceRequest) -> bool:
        """Whether nothing but bytes differs between requests with this plan."""
        return request.shapes.is_shared and all(
            each.values is None and (each.place is not None or each.size_bytes)
            for each in plan.inputs
        )

    def request(
        self, service: Service, model: Model, data: Any, offset: int, *, has_views: bool
    ) -> InferenceRequest | None:
        """The request whose tensors lie in `data` from `offset` on, or in memory that clients lend.

        None where the data has another size, or a tensor is not lent. `has_views` says that `data` may be memory
        that stubs see. Raises `InvalidRequest`, `SharedMemoryError`.
        """
        if len(data) - offset != self._size_bytes:
            return None
        arrays: list[NDArray[Any]] = []
        for shape, dtype, begin, place in self._tensors:
            if place is None:
                arrays.append(np.ndarray(shape, dtype, data, offset + begin))
                continue
            lent = service.lend(model, shape, dtype, place)
            if lent is None:
                return None
            arrays.append(lent)
        has_views = has_views or self._has_places
        request = InferenceRequest(arrays, self._shapes, self._details, has_views=has_views)
        request.wants_wire = True
        return request
