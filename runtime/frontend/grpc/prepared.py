"""Requests of which all but the numbers is known already: clients send the same message again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.tensors import DTYPES
from moonpool.runtime.request import Details, InferenceRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moonpool.runtime.frontend.grpc.infer_request import Plan
    from moonpool.runtime.frontend.submission import Hosted

_NO_DETAILS = Details()
# Longer ones are looked at more closely.
_LONG_ID = 1000


class Prepared:
    """Makes requests that are like one that was checked before, but for the bytes of its tensors."""

    __slots__ = ("_details", "_shapes", "_sizes", "_tensors", "signature")

    def __init__(self, plan: Plan, hosted: Hosted, request: InferenceRequest) -> None:
        """`request` was made of `plan`, and `can_be` of it."""
        numbers = {each.name: number for number, each in enumerate(plan.inputs)}
        names = [tensor.name for tensor in hosted.model.config.inputs]
        # What was checked holds as long as the model has this very signature.
        self.signature = hosted.signature
        self._shapes, self._details = request.shapes, request.details
        if self._details is not None:
            self._details = self._details._replace(request_id="")
        # By the order of the model: which tensor of the message each is.
        self._tensors = [
            (tuple(tensor.shape), DTYPES[tensor.datatype], numbers[names[tensor.number]])
            for tensor in request.shapes.tensors
        ]
        sizes = {numbers[names[each.number]]: each.size_bytes for each in request.shapes.tensors}
        self._sizes = [sizes[number] for number in range(len(sizes))]

    @staticmethod
    def can_be(plan: Plan, request: InferenceRequest) -> bool:
        """Whether nothing but the bytes of tensors in the message differs between requests with this plan."""
        return (
            plan.message is None
            and request.shapes.is_shared
            and all(each.place is None for each in plan.inputs)
            and all(tensor.size_bytes for tensor in request.shapes.tensors)
        )

    def request(
        self, data: bytes, tensors: list[tuple[int, int]], request_id: str
    ) -> InferenceRequest | None:
        """The request whose tensors lie in `data`, as (offset, size in bytes); None where it is not like the others."""
        if [size for _, size in tensors] != self._sizes or len(request_id) > _LONG_ID:
            return None
        details = self._details
        if request_id:
            details = (details or _NO_DETAILS)._replace(request_id=request_id)
        arrays: list[NDArray[Any]] = [
            np.ndarray(shape, dtype, data, tensors[number][0])
            for shape, dtype, number in self._tensors
        ]
        request = InferenceRequest(arrays, self._shapes, details, has_views=False)
        request.wants_wire = True
        return request
