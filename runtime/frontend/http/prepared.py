"""Requests of which all but the numbers is known already: clients send the same JSON again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.tensors import DTYPES
from moonpool.runtime.request import InferenceRequest

if TYPE_CHECKING:
    from moonpool.runtime.frontend.http.infer_request import Plan
    from moonpool.runtime.frontend.submission import Hosted


class Prepared:
    """Makes requests that are like one that was checked before, but for the bytes of its tensors."""

    __slots__ = ("_details", "_shapes", "_size_bytes", "_tensors", "signature")

    def __init__(self, plan: Plan, hosted: Hosted, request: InferenceRequest) -> None:
        """`request` was made of `plan`, and `can_be` of it."""
        offsets, offset = {}, 0
        for each in plan.inputs:
            offsets[each.name] = offset
            offset += each.size_bytes
        names = [tensor.name for tensor in hosted.model.config.inputs]
        # What was checked holds as long as the model has this very signature.
        self.signature = hosted.signature
        self._size_bytes = offset
        self._shapes, self._details = request.shapes, request.details
        self._tensors = [
            (tuple(tensor.shape), DTYPES[tensor.datatype], offsets[names[tensor.number]])
            for tensor in request.shapes.tensors
        ]

    @staticmethod
    def can_be(plan: Plan, request: InferenceRequest) -> bool:
        """Whether nothing but bytes behind the JSON differs between requests with this plan."""
        return request.shapes.is_shared and all(
            each.values is None and each.place is None and each.size_bytes for each in plan.inputs
        )

    def request(self, data: Any, offset: int, *, has_views: bool) -> InferenceRequest | None:
        """The request whose tensors lie in `data` from `offset` on; None where that has another size.

        `has_views` says that `data` may be memory that stubs see.
        """
        if len(data) - offset != self._size_bytes:
            return None
        arrays = [
            np.ndarray(shape, dtype, data, offset + begin) for shape, dtype, begin in self._tensors
        ]
        request = InferenceRequest(arrays, self._shapes, self._details, has_views=has_views)
        request.wants_wire = True
        return request
