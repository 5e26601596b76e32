"""Presents one of moonpool's own models, a `__call__` on arrays by name, to the loop as a model of Triton's kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from moonpool.ipc.memory import lease_of, offset_in
from moonpool.stub.native.hints import TensorType, is_batched, ragged
from moonpool.stub.native.outputs import NativeOutputs
from moonpool.stub.native.signature import BadHint, Signature, signature_of
from moonpool.stub.pb_utils.config import Json, ModelConfig
from moonpool.stub.pb_utils.errors import InvalidReturn
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor

# The most rows in a batch if the hints say Batch and the model has no max_batch_size.
DEFAULT_MAX_BATCH_SIZE = 64


def native_config(model: Callable[..., object], max_batch_size: int = 0) -> Json:
    """Return the configuration that the model's hints give, in the JSON form of `config.pbtxt`.

    `max_batch_size` is the value of the configuration so far; the model's own value is its upper bound.

    The result has `max_batch_size`, and `input`, `output` and `dynamic_batching` if the hints give them. Raises
    BadHint.
    """
    signature = signature_of(model)
    size = _max_batch_size(model, signature, max_batch_size)
    config: Json = {"max_batch_size": size}
    inputs = [
        {**_tensor_config(name, tensor, size, signature), "optional": tensor.is_optional}
        for name, tensor in signature.inputs.items()
        if tensor is not None
    ]
    outputs = [_tensor_config(name, tensor, size, signature) for name, tensor in signature.outputs.items()]
    if inputs:
        config["input"] = inputs
    if outputs:
        config["output"] = outputs
    if size:
        config["dynamic_batching"] = {}
    return config


def complete_config(model: Callable[..., object], config: ModelConfig) -> ModelConfig:
    """Complete `config` from the model's hints, as `auto_complete_config` would.

    Raises BadHint, and ValueError if hints and configuration contradict each other.
    """
    given = config.as_dict()
    hinted = native_config(model, given["max_batch_size"])
    config.set_max_batch_size(hinted["max_batch_size"])
    added = _added(given)
    padded_ones = signature_of(model).ragged
    for tensor in hinted.get("input", ()):
        if tensor["name"] not in added:
            config.add_input(tensor)
    for tensor in given["input"]:
        if tensor["name"] in padded_ones:
            tensor["allow_ragged_batch"] = True
    # A state is an output for clients, too, if the configuration says so.
    kept = {state["output_name"] for state in _states(given)}
    kept -= {tensor["name"] for tensor in given.get("output", ())}
    for tensor in hinted.get("output", ()):
        if tensor["name"] not in kept:
            config.add_output(tensor)
    if "dynamic_batching" in hinted and "sequence_batching" not in given:
        config.set_dynamic_batching()
    _check_hints(signature_of(model), config.as_dict())
    return config


def _check_hints(signature: Signature, config: Json) -> None:
    """Raise BadHint for parameters, and for a result, of which neither a hint nor the configuration says what they
    are.
    """
    known = {tensor["name"] for tensor in config.get("input", ())} | _added(config)
    missing = signature.required - known
    if missing:
        name = min(missing)
        raise BadHint(
            f"{signature.where}: {_listed(missing)} has no hint; give it one, such as {name}: Float32[Batch, 3], or "
            "name the input in config.pbtxt"
        )
    if not config.get("output"):
        raise BadHint(
            f"{signature.where}: nothing says what it returns; give it a hint, such as -> Float32[Batch, 3], or name "
            "the outputs in config.pbtxt"
        )


def _added(config: Json) -> set[str]:
    """Return the names of the inputs that the sequence batcher adds to every request."""
    controls = config.get("sequence_batching", {}).get("control_input", ())
    names = {control["name"] for control in controls}
    return names | {state["input_name"] for state in _states(config)}


def _states(config: Json) -> list[Json]:
    """Return the states of sequences that the runtime keeps for a model."""
    return list(config.get("sequence_batching", {}).get("state", ()))


def _max_batch_size(model: Callable[..., object], signature: Signature, otherwise: int) -> int:
    size: object = getattr(model, "max_batch_size", None)
    if size is None:
        if otherwise > 0:
            return otherwise
        return DEFAULT_MAX_BATCH_SIZE if signature.is_batched else 0
    if type(size) is not int or size < 0:
        raise BadHint(f"{signature.where}: max_batch_size must be an integer of at least 0, not {size!r}")
    # A configuration may ask for smaller batches than the model can take.
    return otherwise if 0 < otherwise < size else size


def _tensor_config(name: str, tensor: TensorType, size: int, signature: Signature) -> Json:
    dims = tensor.dims
    if dims is None:
        own: list[int] = [-1]
    else:
        if size and not is_batched(tensor):
            raise BadHint(
                f"{signature.where}: the first dimension of {tensor!r}, the hint of '{name}', must "
                f"be Batch, since the model takes batches (its max_batch_size is {size}); write "
                f"{tensor.name}[Batch, …], or max_batch_size = 0"
            )
        # A tensor of no dimensions of its own travels as one element.
        own = [dim if isinstance(dim, int) else -1 for dim in dims[1 if size else 0 :]] or [1]
    return {"name": name, "data_type": tensor.data_type, "dims": own}


class ClassAdapter:
    """Holds one instance of a model of moonpool's own, whatever its methods are. `config` is the complete one."""

    def __init__(self, model: Callable[..., object], config: Json) -> None:
        self._model = model
        self._config = config
        self._name = str(config.get("name", getattr(model, "__name__", "model")))
        self.is_batched = int(config.get("max_batch_size", 0)) > 0
        self._object: Any = None

    def initialize(self, args: Mapping[str, str]) -> None:
        """Make the model's object, unless the model is a function. Its `__init__` gets the configuration if it takes an
        argument.

        That configuration has one more entry, "instance", which holds what Triton's models find in the `args` of
        `initialize`.
        """
        model = self._model
        if not isinstance(model, type):
            return
        import inspect

        takes_config = bool(inspect.signature(model).parameters)
        instance = {key: value for key, value in args.items() if key != "model_config"}
        self._object = model({**self._config, "instance": instance}) if takes_config else model()

    @property
    def model_object(self) -> Any:
        """Return the model's object, None if the model is a function."""
        return self._object

    @property
    def is_ready(self) -> Callable[[], object] | None:
        """Return the model's `is_ready`, if it has one."""
        return getattr(self._object, "is_ready", None)

    def finalize(self) -> None:
        """Call the model's `close`, if it has one."""
        close = getattr(self._object, "close", None)
        if close is not None:
            close()


class NativeAdapter(ClassAdapter):
    """Runs one instance of one of moonpool's own models.

    `config` is the complete configuration. The adapter joins the requests of a batch, calls the model once, and cuts
    the result into the responses. It does not join requests that differ in the names of their inputs, in the kind of
    memory of these, or in a dimension other than the first and those that are Ragged.
    """

    def __init__(self, model: Callable[..., object], config: Json) -> None:
        super().__init__(model, config)
        signature = signature_of(model)
        self._check_inputs(signature)
        # Inputs whose hint has no dimensions of its own. They travel with one dimension more.
        own = int(self.is_batched)
        self._flat = {
            name
            for name, tensor in signature.inputs.items()
            if tensor is not None and tensor.dims is not None and len(tensor.dims) == own
        }
        # The dimensions in which rows are padded, and the parameters for the lengths of the rows.
        self._ragged = signature.ragged if self.is_batched else {}
        self._lengths = signature.lengths
        places = {name: ragged(tensor) for name, tensor in signature.outputs.items()}
        self._cut = {name: place for name, place in places.items() if place is not None}
        self._outputs = NativeOutputs(self._name, config, signature)
        self._call: Callable[..., object] = model

    def _check_inputs(self, signature: Signature) -> None:
        configured = {tensor["name"] for tensor in self._config.get("input", ())}
        configured |= _added(self._config)
        if missing := signature.required - configured:
            raise BadHint(
                f"{signature.where}: the configuration of model '{self._name}' has no input "
                f"{_listed(missing)}; give the parameter a type hint, or name the input in "
                "config.pbtxt"
            )
        unknown = configured - set(signature.inputs)
        if unknown and not signature.takes_any:
            raise BadHint(
                f"{signature.where} has no parameter {_listed(unknown)}, which the configuration "
                f"of model '{self._name}' has as an input"
            )

    def initialize(self, args: Mapping[str, str]) -> None:
        """Make the model's object, which is called from then on."""
        super().initialize(args)
        self._call = self._model if self._object is None else self._object

    def execute(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
        """Return one response for each request. Raises what the model raises, and InvalidReturn."""
        if len(requests) == 1 or not self.is_batched:
            return [self._together([request])[0] for request in requests]
        groups: dict[object, list[int]] = {}
        for index, request in enumerate(requests):
            key = tuple([self._kind(tensor) for tensor in request._inputs])
            groups.setdefault(key, []).append(index)
        if len(groups) == 1:
            return self._together(requests)
        answers: dict[int, InferenceResponse] = {}
        for indices in groups.values():
            answers.update(zip(indices, self._together([requests[i] for i in indices])))
        return [answers[index] for index in range(len(requests))]

    def _kind(self, tensor: Tensor) -> tuple[object, ...]:
        """Return a key that is equal for tensors that can be joined."""
        shape: list[object] = list(tensor._shape[1:])
        place = self._ragged.get(tensor._name)
        if place is not None and not tensor._is_on_device:
            shape[place - 1] = None
        return (tensor._name, tensor._is_on_device, *shape)

    def _together(self, requests: Sequence[InferenceRequest]) -> list[InferenceResponse]:
        arrays: dict[str, Any] = {}
        sizes: list[int] = []
        for place, tensor in enumerate(requests[0]._inputs):
            parts: Sequence[Any] = [request._inputs[place]._as_array() for request in requests]
            dimension = self._ragged.get(tensor._name)
            if dimension is not None:
                sizes = [part.shape[dimension] for part in parts]
                parts = padded(parts, dimension)
                self._add_lengths(arrays, tensor._name, sizes, parts)
            array = joined(parts)
            arrays[tensor._name] = array
        if not self.is_batched:
            return [_response(self.call(arrays, None))]
        counts = [request._inputs[0]._shape[0] for request in requests]
        return self._cut_up(self.call(arrays, sum(counts)), counts, sizes)

    def call(self, arrays: dict[str, Any], rows: int | None) -> dict[str, Any]:
        """Return the outputs of the model for these inputs. `rows` is None if the model takes no batches."""
        for name in self._flat.intersection(arrays):
            arrays[name] = arrays[name].reshape(arrays[name].shape[:-1])
        return self._outputs.check(self._call(**arrays), rows)

    def split(self, outputs: dict[str, Any], counts: Sequence[int]) -> list[InferenceResponse]:
        """Return the response to each request, which has so many of the rows. `counts` is empty if the model takes no
        batches.
        """
        return self._cut_up(outputs, counts, ()) if counts else [_response(outputs)]

    def _cut_up(self, outputs: dict[str, Any], counts: Sequence[int], sizes: Sequence[int]) -> list[InferenceResponse]:
        pieces = {name: cut(array, counts) for name, array in outputs.items()}
        for name, place in self._cut.items():
            pieces[name] = self._trimmed(name, pieces[name], place, sizes)
        return [_response({name: piece[index] for name, piece in pieces.items()}) for index in range(len(counts))]

    def _add_lengths(self, arrays: dict[str, Any], name: str, sizes: Sequence[int], parts: Sequence[Any]) -> None:
        """Add the lengths of all rows of a ragged input, if the model takes them."""
        if name in self._lengths:
            rows = [part.shape[0] for part in parts]
            arrays[self._lengths[name]] = np.repeat(np.array(sizes, np.int64), rows)

    def _trimmed(self, name: str, pieces: Sequence[Any], place: int, sizes: Sequence[int]) -> list[Any]:
        """Return the rows of each request without padding. Raises InvalidReturn if the output has none, or another
        one.
        """
        if not sizes:  # the input is optional
            return list(pieces)
        padded_size = max(sizes)
        for piece in pieces:
            if piece.shape[place] != padded_size:
                raise InvalidReturn(
                    f"model '{self._name}' returned output '{name}' of shape {list(piece.shape)}, and its Ragged "
                    f"dimension must have the size of the padded input, {padded_size}"
                )
        before = (slice(None),) * place
        return [piece[(*before, slice(size))] for piece, size in zip(pieces, sizes)]

    @property
    def sees_rows_only(self) -> bool:
        """Return whether `call` does for a batch what `execute` does, if the rows of each input lie back to back."""
        return not self._ragged


def _response(arrays: Mapping[str, Any]) -> InferenceResponse:
    return InferenceResponse([_tensor(name, array) for name, array in arrays.items()])


def _tensor(name: str, array: Any) -> Tensor:
    if isinstance(array, np.ndarray):
        return Tensor(name, array)
    from moonpool.stub.pb_utils.device_tensor import DeviceTensor

    return DeviceTensor.over(name, array)


def _listed(names: set[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names))


def joined(arrays: Sequence[Any]) -> Any:
    """Return all rows of `arrays`, which have the same dtype, and the same shape but for the first dimension.

    The arrays are numpy's, or all of them lie on a device. If they lie back to back in one block of shared memory,
    where the runtime puts the requests of a batch, the result is a view. Otherwise it is a copy.
    """
    first = arrays[0]
    if len(arrays) == 1:
        return first
    if not isinstance(first, np.ndarray):
        from moonpool.stub.devices import rows as device_rows

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


def padded(arrays: Sequence[Any], place: int) -> Sequence[Any]:
    """Return the arrays with zeros, or empty strings, at the end of dimension `place`, so that it has one size.

    If it has already, they are returned as they are.
    """
    sizes = {array.shape[place] for array in arrays}
    if len(sizes) == 1:
        return arrays
    return [_padded(array, place, max(sizes)) for array in arrays]


def _padded(array: np.ndarray, place: int, size: int) -> np.ndarray:
    shape = list(array.shape)
    shape[place] = size
    # An array of objects would have zeros in it.
    fill: Any = b"" if array.dtype.kind == "O" else 0
    whole = np.full(shape, fill, array.dtype)
    whole[(slice(None),) * place + (slice(array.shape[place]),)] = array
    return whole


def cut(array: Any, counts: Sequence[int]) -> list[Any]:
    """Return the first `counts[0]` rows of `array`, the next `counts[1]`, and so on, as views."""
    if len(counts) == 1:
        return [array]
    if not isinstance(array, np.ndarray):
        from moonpool.stub.devices import rows as device_rows

        return device_rows.cut(array, counts)
    pieces = []
    start = 0
    for count in counts:
        pieces.append(array[start : start + count])
        start += count
    return pieces
