"""The control inputs and the states of sequences, and the requests that fill empty places of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.memo import Memo
from moonpool.ipc.port import RequestTensor, Shapes
from moonpool.ipc.tensors import BYTES, CODES, DTYPES, encode_bytes
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.config.model import ModelConfig, SequenceControl
from moonpool.runtime.model.request import Details, InferenceRequest, Waiter
from moonpool.runtime.schedule.sequence_states import SequenceStates, State
from moonpool.runtime.schedule.sequences import END, START, CorrelationId

# Zeros up to this size are kept for the next batch. Callers and models choose the shapes.
_KEPT_BYTES = 1 << 16
# The arrays of a request, and their shapes.
_Zeros: TypeAlias = tuple[list[NDArray[Any]], Shapes]
_FILLING = Details(outputs=[])


class _Nobody(Waiter):
    """Waits for nothing."""


_NOBODY = _Nobody()


def _stateless(_: InferenceRequest) -> None:
    """Return no state, for sequences that have just begun."""


class SequenceControls:
    """Adds the control inputs of one model, and its states, to its requests. Not thread-safe: the scheduler's lock
    guards it.
    """

    def __init__(
        self, config: ModelConfig, controls: Sequence[SequenceControl], states: SequenceStates | None = None
    ) -> None:
        self._states = states
        self._model = config.name
        self._controls = controls
        self._shape = [1, 1] if config.max_batch_size else [1]
        # Control inputs follow the inputs that callers give, and states follow these.
        self._first = len(config.inputs)
        # The values of START, END and READY for false and for true.
        self._arrays = {
            control.kind: [self._array(control, value) for value in control.values]
            for control in controls
            if control.kind != "CORRID"
        }
        self._id = next((each for each in controls if each.kind == "CORRID"), None)
        self._extended: Memo[object, Shapes] = Memo()
        self._zeros: Memo[Shapes, _Zeros] = Memo()
        self._blank: Memo[object, State] = Memo()

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

    def complete(
        self, batch: Sequence[InferenceRequest | None], state_of: Callable[[InferenceRequest], Any] = _stateless
    ) -> list[InferenceRequest]:
        """Return the batch as the model gets it, with a request of zeros in every empty place.

        `state_of` returns the last state of a request's sequence, None at its start.
        """
        some = next(request for request in batch if request is not None)
        complete = []
        state = None
        if None in batch:
            zeros = self._zeros_like(some)
            blank = self._blank_like(state_of(some))
        for each in batch:
            request = _filler(zeros) if each is None else each
            if self._states is not None:
                if each is None:
                    state = blank
                else:
                    state = state_of(each) or self._states.initial
                    self._states.begin(each, state)
            if self._controls or state is not None:
                self._tell(request, state)
            complete.append(request)
        return complete

    def _blank_like(self, state: State | None) -> State | None:
        """Return zeros in the shapes of a sequence's last state; None if there are no states."""
        if self._states is None:
            return None
        state = state or self._states.initial
        blank = self._blank.get(state.key)
        if blank is None:
            blank = state.blank()
            if sum(value.raw.nbytes for value in blank.values) <= _KEPT_BYTES:
                self._blank.keep(state.key, blank)
        return blank

    def _tell(self, request: InferenceRequest, state: State | None) -> None:
        """Set the control inputs and states of a request; it may have some already."""
        key = (request.shapes, None if state is None else state.key)
        shapes = self._extended.get(key)
        arrays = [self._value(control, request) for control in self._controls]
        if shapes is None:
            shapes = self._extend(request.shapes, arrays, state)
            if shapes.is_shared:
                self._extended.keep(key, shapes)
                self._extended.keep((shapes, key[1]), shapes)
        if state is not None:
            arrays += [value.raw for value in state.values]
        request.arrays = [*request.arrays[: len(shapes.tensors) - len(arrays)], *arrays]
        request.shapes = shapes

    def _value(self, control: SequenceControl, request: InferenceRequest) -> NDArray[Any]:
        if control.kind == "CORRID":
            return self._array(control, request.correlation_id)
        is_true = {"START": request.flags & START, "END": request.flags & END, "READY": not request.fills_place}[
            control.kind
        ]
        return self._arrays[control.kind][bool(is_true)]

    def _array(self, control: SequenceControl, value: object) -> NDArray[Any]:
        """Return a control input as it is sent. An id of 0 is the empty text."""
        code = CODES[control.datatype]
        if code == BYTES:
            text = np.array([str(value or "").encode()], object)
            return np.frombuffer(encode_bytes(text, control.name), np.uint8)
        return np.full(self._shape, value, DTYPES[code])

    def _extend(self, base: Shapes, arrays: Sequence[NDArray[Any]], state: State | None) -> Shapes:
        tensors = [tensor for tensor in base.tensors if tensor.number < self._first]
        for place, (control, array) in enumerate(zip(self._controls, arrays, strict=True)):
            code = CODES[control.datatype]
            tensors.append(RequestTensor(self._first + place, code, self._shape, array.nbytes))
        is_shared = base.is_shared and (self._id is None or self._id.datatype != "BYTES")
        first = self._first + len(self._controls)
        for place, value in enumerate(() if state is None else state.values):
            is_shared = is_shared and value.datatype != BYTES
            tensors.append(RequestTensor(first + place, value.datatype, list(value.shape), value.raw.nbytes))
        return Shapes(tensors, base.batch_size, base.signature, is_shared=is_shared)

    def _zeros_like(self, like: InferenceRequest) -> _Zeros:
        """Make the inputs of a request of zeros and empty strings, in the shapes of another one's."""
        found = self._zeros.get(like.shapes)
        if found is None:
            found = _zeros(like.shapes, self._first)
            if like.shapes.is_shared and sum(array.nbytes for array in found[0]) <= _KEPT_BYTES:
                self._zeros.keep(like.shapes, found)
        return found


def _filler(zeros: _Zeros) -> InferenceRequest:
    """Make a request that fills an empty place."""
    request = InferenceRequest(*zeros, _FILLING, has_views=False)
    request.fills_place = request.left = True
    request.waiter = _NOBODY
    return request


def _zeros(shapes: Shapes, first_control: int) -> _Zeros:
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
