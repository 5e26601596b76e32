"""Requests of which all but the numbers is known already: clients send the same message again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.tensors import DTYPES
from moonpool.runtime.request import Details, InferenceRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moonpool.runtime.backend import Model
    from moonpool.runtime.frontend.grpc.infer_request import Plan
    from moonpool.runtime.frontend.service import Service
    from moonpool.runtime.frontend.submission import Hosted

_NO_DETAILS = Details()
# Longer ones are looked at more closely.
_LONG_ID = 1000


class Prepared:
    """Makes requests that are like one that was checked before, but for the bytes of its tensors."""

    __slots__ = ("_details", "_has_places", "_shapes", "_sizes", "_tensors", "signature")

    def __init__(self, plan: Plan, hosted: Hosted, request: InferenceRequest) -> None:
        """`request` was made of `plan`, and `can_be` of it."""
        # Where tensors lie in the client's memory, and the numbers of the others among those of the message.
        places = {each.name: each.place for each in plan.inputs}
        sent = [each.name for each in plan.inputs if each.place is None]
        numbers = {name: number for number, name in enumerate(sent)}
        names = [tensor.name for tensor in hosted.model.config.inputs]
        # What was checked holds as long as the model has this very signature.
        self.signature = hosted.signature
        self._shapes, self._details = request.shapes, request.details
        if self._details is not None:
            self._details = self._details._replace(request_id="")
        # By the order of the model: which tensor of the message each is.
        self._tensors = [
            (tuple(tensor.shape), DTYPES[tensor.datatype], numbers.get(name, 0), places[name])
            for tensor in request.shapes.tensors
            for name in [names[tensor.number]]
        ]
        sizes = {names[each.number]: each.size_bytes for each in request.shapes.tensors}
        self._sizes = [sizes[name] for name in sent]
        self._has_places = len(sent) < len(plan.inputs)

    @staticmethod
    def can_be(plan: Plan, request: InferenceRequest) -> bool:
        """Whether nothing but the bytes of tensors differs between requests with this plan."""
        return (
            plan.message is None
            and request.shapes.is_shared
            and all(tensor.size_bytes for tensor in request.shapes.tensors)
        )

    def request(
        self,
        service: Service,
        model: Model,
        data: bytes,
        tensors: list[tuple[int, int]],
        request_id: str,
    ) -> InferenceRequest | None:
        """The request whose tensors lie in `data`, as (offset, size in bytes), or in memory that clients lend.

        None where it is not like the others, or a tensor is not lent. Raises `InvalidRequest`, `SharedMemoryError`.
        """
        if [size for _, size in tensors] != self._sizes or len(request_id) > _LONG_ID:
            return None
        details = self._details
        if request_id:
            details = (details or _NO_DETAILS)._replace(request_id=request_id)
        arrays: list[NDArray[Any]] = []
        for shape, dtype, number, place in self._tensors:
            if place is None:
                arrays.append(np.ndarray(shape, dtype, data, tensors[number][0]))
                continue
            lent = service.lend(model, shape, dtype, place)
            if lent is None:
                return None
            arrays.append(lent)
        request = InferenceRequest(arrays, self._shapes, details, has_views=self._has_places)
        request.wants_wire = True
        return request
