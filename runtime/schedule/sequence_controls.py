"""The control inputs of sequences, and the requests that fill empty places of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.memo import Memo
from moonpool.ipc.tensors import BYTES, CODES, DTYPES, encode_bytes
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.config.model import ModelConfig, SequenceControl
from moonpool.runtime.model.request import Details, InferenceRequest, RequestTensor, Shapes, Waiter
from moonpool.runtime.schedule.sequences import END, START, CorrelationId

_FILLING = Details(outputs=[])
_NOBODY = Waiter()


class SequenceControls:
    """Adds the control inputs of one model to its requests. Not thread-safe: the scheduler's lock guards it."""

    def __init__(self, config: ModelConfig, controls: Sequence[SequenceControl]) -> None:
        self._model = config.name
        self._controls = controls
        self._shape = [1, 1] if config.max_batch_size else [1]
        # Control inputs follow the inputs that callers give.
        self._first = len(config.inputs)
        # The values of START, END and READY for false and for true.
        self._arrays = {
            control.kind: [self._array(control, value) for value in control.values]
            for control in controls
            if control.kind != "CORRID"
        }
        self._id = next((each for each in controls if each.kind == "CORRID"), None)
        self._extended: Memo[Shapes, Shapes] = Memo()
        self._zeros: Memo[Shapes, tuple[list[NDArray[Any]], Shapes]] = Memo()

    def check(self, correlation_id: CorrelationId) -> None:
        """Raise `InvalidRequest` for an id that the model's input for ids cannot hold."""
        control = self._id
        if control is None or control.datatype == "BYTES":
            return
        limits = np.iinfo(DTYPES[CODES[control.datatype]].name)
        if isinstance(correlation_id, str):
            what = "is no number" if correlation_id else ""
        else:
            what = "" if limits.min <= correlation_id <= limits.max else "is out of range"
        if what:
            raise InvalidRequest(
                f"correlation ID {correlation_id!r:.60} {what}; model '{self._model}' takes it as "
                f"input '{control.name}' of data-type {control.datatype}"
            )

    def complete(self, batch: Sequence[InferenceRequest | None]) -> list[InferenceRequest]:
        """Return the batch as the model gets it, with a request of zeros in every empty place."""
        some = next(request for request in batch if request is not None)
        complete = []
        for each in batch:
            request = self._filler(some) if each is None else each
            if self._controls:
                self._tell(request)
            complete.append(request)
        return complete

    def _tell(self, request: InferenceRequest) -> None:
        """Set the control inputs of a request; it may have them already."""
        shapes = self._extended.get(request.shapes)
        arrays = [self._value(control, request) for control in self._controls]
        if shapes is None:
            shapes = self._extend(request.shapes, arrays)
            if shapes.is_shared:
                self._extended.keep(request.shapes, shapes)
                self._extended.keep(shapes, shapes)
        request.arrays = [*request.arrays[: len(shapes.tensors) - len(arrays)], *arrays]
        request.shapes = shapes

    def _value(self, control: SequenceControl, request: InferenceRequest) -> NDArray[Any]:
        if control.kind == "CORRID":
            return self._array(control, request.correlation_id)
        is_true = {
            "START": request.flags & START,
            "END": request.flags & END,
            "READY": not request.fills_place,
        }[control.kind]
        return self._arrays[control.kind][bool(is_true)]

    def _array(self, control: SequenceControl, value: object) -> NDArray[Any]:
        """Return a control input as it is sent. An id of 0 is the empty text."""
        code = CODES[control.datatype]
        if code == BYTES:
            text = np.array([str(value or "").encode()], object)
            return np.frombuffer(encode_bytes(text, control.name), np.uint8)
        return np.full(self._shape, value, DTYPES[code])

    def _extend(self, base: Shapes, arrays: Sequence[NDArray[Any]]) -> Shapes:
        tensors = [tensor for tensor in base.tensors if tensor.number < self._first]
        for place, (control, array) in enumerate(zip(self._controls, arrays, strict=True)):
            code = CODES[control.datatype]
            tensors.append(RequestTensor(self._first + place, code, self._shape, array.nbytes))
        is_shared = base.is_shared and (self._id is None or self._id.datatype != "BYTES")
        return Shapes(tensors, base.batch_size, base.signature, is_shared=is_shared)

    def _filler(self, like: InferenceRequest) -> InferenceRequest:
        """Make a request of zeros and empty strings, in the shapes of another one."""
        found = self._zeros.get(like.shapes)
        if found is None:
            found = _zeros(like.shapes, self._first)
            if like.shapes.is_shared:
                self._zeros.keep(like.shapes, found)
        request = InferenceRequest(*found, _FILLING, has_views=False)
        request.fills_place = request.left = True
        request.waiter = _NOBODY
        return request


def _zeros(shapes: Shapes, first_control: int) -> tuple[list[NDArray[Any]], Shapes]:
    arrays: list[NDArray[Any]] = []
    tensors = []
    for tensor in shapes.tensors:
        if tensor.number >= first_control:
            continue
        if tensor.datatype == BYTES:
            array = np.zeros(prod(tensor.shape) * _EMPTY_STRING_BYTES, np.uint8)
            tensor = tensor._replace(size_bytes=array.nbytes)
        else:
            array = np.zeros(tensor.shape, DTYPES[tensor.datatype])
        arrays.append(array)
        tensors.append(tensor)
    return arrays, Shapes(tensors, shapes.batch_size, shapes.signature, is_shared=shapes.is_shared)


# A string is its length and its bytes.
_EMPTY_STRING_BYTES = len(encode_bytes(np.array([b""], object), ""))
