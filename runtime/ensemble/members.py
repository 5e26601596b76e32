"""The models of an ensemble's steps: requests to them from ensemble tensors, and the response to the caller from those
that are left.

A model that batches has a batch dimension in front of each tensor, and one that does not batch has none. Between the
two kinds, a batch dimension of 1 is added or taken away, as Triton does it. Shapes that do not fit even so are left to
the model to refuse.

No tensor is copied here. The runtime lends memory of one stub to the next where both may share it, as it does for
tensors of any caller, and copies it where they may not. Strings stay in the form of the wire between models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.memo import Memo
from moonpool.ipc.messages import ANY_MEMORY, SHORT, size_of
from moonpool.ipc.tensors import BYTES, DTYPES, decode_bytes
from moonpool.runtime.ensemble.graph import EnsembleGraph, Flow, fits
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import Details, InferenceRequest, Parameter, Response, WireTensor, allocate
from moonpool.runtime.stubs.calls.requests import Callee

_ndarray = np.ndarray
_START, _END = 1, 2
_MOST_ID = 2**64 - 1
_NO_DETAILS = Details()


class TensorSequence(NamedTuple):
    """The sequence that a request was part of, or that a response names in its parameters."""

    correlation_id: int | str
    flags: int

    @classmethod
    def of(cls, details: Details | None) -> TensorSequence:
        """Return the sequence of a request."""
        details = details or _NO_DETAILS
        return cls(details.correlation_id, details.flags)

    def changed(self, parameters: Mapping[str, Parameter]) -> TensorSequence:
        """Return the sequence after the parameters of a response. Parameters that name no sequence are ignored."""
        correlation_id, flags = self
        given = parameters.get("sequence_id")
        if (type(given) is int and 0 <= given <= _MOST_ID) or (type(given) is str and size_of(given) <= SHORT):
            correlation_id = given
        for name, flag in (("sequence_start", _START), ("sequence_end", _END)):
            value = parameters.get(name)
            if type(value) is bool:
                flags = flags | flag if value else flags & ~flag
        return TensorSequence(correlation_id, flags)


class SequencedTensor(NamedTuple):
    """A tensor whose response named another sequence than its request. All others are plain arrays."""

    array: Any
    sequence: TensorSequence


class Shaping:
    """The shapes that one model, or the ensemble itself, expects of tensors that were written by others."""

    def __init__(self, batches: bool, dims: Mapping[str, Sequence[int]], mixed: Collection[str]) -> None:
        """`mixed` names the tensors that come from the other kind: from models that batch if this one does not."""
        self._batches, self._dims, self._mixed = batches, dims, mixed
        self.is_mixed = bool(mixed)

    def fitted(self, name: str, array: Any) -> Any:
        """Return the array with the batch dimension that this side expects, if that makes it fit."""
        if name not in self._mixed:
            return array
        dims, shape = self._dims[name], tuple(array.shape)
        if self._batches:
            return _reshaped(array, (1, *shape)) if fits(dims, shape) else array
        if shape[:1] == (1,) and not fits(dims, shape) and fits(dims, shape[1:]):
            return _reshaped(array, shape[1:])
        return array


def _reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    if type(array) is WireTensor:
        return array._replace(shape=shape)
    return array.reshape(shape)


class AskedOutputs:
    """The outputs that requests of one flow ask of a step's model."""

    __slots__ = ("feeds_caller", "outputs")

    def __init__(self, outputs: list[str] | None, feeds_caller: bool) -> None:
        # In the model's order; None for all.
        self.outputs = outputs
        self.feeds_caller = feeds_caller


class StepModel:
    """The model of one step, prepared for requests of the ensemble. Thread-safe."""

    __slots__ = ("_asked", "_has_strings", "_outputs", "_shaping", "_step", "hosted")

    def __init__(self, hosted: Callee, step: int, mixed: Collection[str]) -> None:
        """`mixed` is that of `Shaping`, for the model's inputs."""
        self.hosted = hosted
        self._step = step
        config = hosted.model.config
        dims = {tensor.name: tensor.dims for tensor in config.inputs}
        self._shaping = Shaping(config.max_batch_size > 0, dims, mixed)
        self._outputs = [tensor.name for tensor in config.outputs]
        self._has_strings = any(tensor.datatype == "BYTES" for tensor in config.outputs)
        self._asked: Memo[Flow, AskedOutputs] = Memo()

    def inputs(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays for the model's inputs."""
        if not self._shaping.is_mixed:
            return tensors
        fitted = self._shaping.fitted
        return {name: fitted(name, array) for name, array in tensors.items()}

    def request(
        self, flow: Flow, inputs: Mapping[str, Any], sequence: TensorSequence | None, asked_by: InferenceRequest
    ) -> InferenceRequest:
        """Make the request of this step for a request of the ensemble. Raises `InvalidRequest`.

        `sequence` is one that replaces that of the ensemble's request.
        """
        asked = self._asked.get(flow) or self._asked.keep(flow, self._ask(flow))
        details = asked_by.details
        if details is not None:
            memory, device = details.memory, details.device
            if not asked.feeds_caller:
                memory, device = ANY_MEMORY, 0
            if details.outputs is not None or details.memory != memory:
                details = details._replace(outputs=None, memory=memory, device=device)
        if sequence is not None:
            correlation_id, flags = sequence
            details = details or _NO_DETAILS
            details = details._replace(correlation_id=correlation_id, flags=flags)
        signature = self.hosted.signature
        try:
            request = signature.request(inputs, asked.outputs, details)
        except InvalidRequest as error:
            request_id = asked_by.request_id or "<id_unknown>"
            raise InvalidRequest(f"[request id: {request_id}] {error}") from None
        if asked.feeds_caller:
            has_allocator = asked_by.allocator is not None
            request.takes_devices = not has_allocator and not asked_by.is_for_host
            request.wants_wire = self._has_strings or asked_by.wants_wire or has_allocator
        else:
            request.takes_devices, request.wants_wire = True, self._has_strings
        if asked_by.is_cancelled:
            request.is_cancelled = True
        return request

    def _ask(self, flow: Flow) -> AskedOutputs:
        wanted = {output for output, _ in flow.outputs[self._step]}
        outputs = [name for name in self._outputs if name in wanted]
        is_all = len(outputs) == len(self._outputs)
        feeds_caller = flow.feeds_caller(self._step)
        return AskedOutputs(None if is_all else outputs, feeds_caller)


def with_sequence(response: Response, asked: InferenceRequest) -> Mapping[str, Any]:
    """Return the outputs of a response to `asked`, as `SequencedTensor`s if its parameters name another sequence."""
    before = TensorSequence.of(asked.details)
    after = before.changed(response.parameters)
    if after == before:
        return response.outputs
    return {name: SequencedTensor(array, after) for name, array in response.outputs.items()}


def without_sequence(
    tensors: Mapping[str, Any], sequence: TensorSequence | None = None
) -> tuple[dict[str, Any], TensorSequence | None]:
    """Return the arrays of tensors, and the sequence that they name together; `sequence` if they name none."""
    arrays: dict[str, Any] = {}
    flags = 0
    for name, tensor in tensors.items():
        if type(tensor) is SequencedTensor:
            flags |= tensor.sequence.flags
            sequence = TensorSequence(tensor.sequence.correlation_id, flags)
            tensor = tensor.array
        arrays[name] = tensor
    return arrays, sequence


class StepModels:
    """The models of all steps, as they are at the moment. Thread-safe."""

    def __init__(self, graph: EnsembleGraph, find: Callable[[str, int | None], Callee]) -> None:
        """`find` returns the model of a step, as a client would get it. Raises `MoonpoolError` if there is none."""
        self._graph, self._find = graph, find
        self._models: dict[int, StepModel] = {}

    def of(self, step: int) -> StepModel:
        """Return the model of a step. Raises `MoonpoolError` if there is none."""
        wanted, model = self._graph.steps[step], self._models.get(step)
        try:
            hosted = self._find(wanted.model, wanted.version)
        except MoonpoolError:
            if model is None:
                raise
            # It is unloaded with the ensemble, whose requests it still finishes. If it is gone, it refuses them.
            return model
        if model is None or model.hosted is not hosted:
            if model is not None:
                # Those that read its tensors may have to read them in another way now.
                self._models = {}
            # Two threads may do the same here.
            names = [tensor for _, tensor in wanted.inputs]
            mixed = self.mixed(names, hosted.model.config)
            ports = {port for port, tensor in wanted.inputs if tensor in mixed}
            model = self._models[step] = StepModel(hosted, step, ports)
        return model

    def mixed(self, tensors: Iterable[str], reader: ModelConfig | None) -> set[str]:
        """Return those tensors whose writer batches while the reader does not, or the other way round. None is the
        caller.
        """
        reads_batches = (reader or self._graph.config).max_batch_size > 0
        return {tensor for tensor in tensors if self._batches(tensor) is not reads_batches}

    def _batches(self, tensor: str) -> bool:
        """Return True if the writer of a tensor batches."""
        writer, config = self._graph.writer.get(tensor), self._graph.config
        if writer is not None:
            step = self._graph.steps[writer]
            config = self._find(step.model, step.version).model.config
        return config.max_batch_size > 0


class EnsembleCaller:
    """The ensemble as its callers see it: their inputs, and the response to them."""

    def __init__(self, config: ModelConfig, mixed: Collection[str], written: Collection[str]) -> None:
        """`mixed` is that of `Shaping`, for the ensemble's outputs. `written` are those that a step writes."""
        self._names = [tensor.name for tensor in config.inputs]
        dims = {tensor.name: tensor.dims for tensor in config.outputs}
        self._shaping = Shaping(config.max_batch_size > 0, dims, mixed)
        self._outputs = [tensor.name for tensor in config.outputs]
        self._written = written
        # The outputs that a caller who asks for nothing else gets as the models gave them.
        self.as_they_are = frozenset() if self._shaping.is_mixed else frozenset(written)

    def given(self, request: InferenceRequest) -> dict[str, Any]:
        """Return the inputs of a request by the names of their tensors."""
        names, arrays = self._names, request.arrays
        given: dict[str, Any] = {}
        for place, described in enumerate(request.shapes.tensors):
            array: Any = arrays[place]
            if described.datatype == BYTES:
                array = WireTensor(BYTES, tuple(described.shape), array)
            given[names[described.number]] = array
        return given

    def response(self, request: InferenceRequest, tensors: Mapping[str, Any]) -> Response:
        """Make the response of these outputs. As in Triton, its parameters name the sequence that they are part of.

        Raises what the request's allocator raises, and BadTensor for strings that cannot be decoded.
        """
        details = request.details
        if details is None and len(tensors) == 1 and not request.wants_wire and request.allocator is None:
            ((name, array),) = tensors.items()
            if type(array) is _ndarray and name in self.as_they_are:
                return Response({name: array}, _NO_SEQUENCE.copy())
        arrays, sequence = without_sequence(tensors, None if details is None else TensorSequence.of(details))
        if request.allocator is not None:
            request.allocator.start(request.userp)
        outputs: dict[str, Any] = {}
        parameters: dict[str, Parameter] = {}
        for name in self._outputs:
            if name in arrays:
                array = self._shaping.fitted(name, arrays[name])
                outputs[name] = _for_caller(request, name, array)
                if name in self._written:
                    parameters = _parameters(sequence)
        return Response(outputs, parameters, "" if details is None else details.request_id)


def _parameters(sequence: TensorSequence | None) -> dict[str, Parameter]:
    correlation_id, flags = sequence or (0, 0)
    return {"sequence_start": bool(flags & _START), "sequence_end": bool(flags & _END), "sequence_id": correlation_id}


_NO_SEQUENCE = _parameters(None)


def _for_caller(request: InferenceRequest, name: str, array: Any) -> Any:
    if type(array) is _ndarray and not request.wants_wire and request.allocator is None:
        return array
    is_wire = type(array) is WireTensor
    if not is_wire and not isinstance(array, np.ndarray):  # on a device
        return array
    if request.allocator is not None:
        wire = WireTensor.of(array)
        return allocate(request, name, wire.datatype, wire.shape, wire.raw)
    if request.wants_wire:
        return WireTensor.of(array)
    if not is_wire:
        return array
    if array.datatype == BYTES:
        return decode_bytes(array.raw, array.shape, name)
    return array.raw.view(DTYPES[array.datatype]).reshape(array.shape)
