"""The signature of a model: its inputs and outputs. Turns a caller's arrays into a request that fits them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.errors import BadTensor
from moonpool.ipc.memo import Memo
from moonpool.ipc.memory import is_lendable
from moonpool.ipc.port import RequestTensor, Shapes, Spec, key_of
from moonpool.ipc.tensors import (
    BF16,
    BYTES,
    CODES,
    DTYPES,
    ITEMSIZE,
    MAX_DIMS,
    NAMES,
    check_bytes,
    code_of,
    encode_bytes,
)
from moonpool.runtime.arguments import OF_REQUEST
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.config.model import ModelConfig, TensorConfig
from moonpool.runtime.model.config.schema import suggestion
from moonpool.runtime.model.details import details_of
from moonpool.runtime.model.device_intake import DeviceIntake, is_on_device
from moonpool.runtime.model.request import Details, InferenceRequest, Parameter, ResponseAllocator, WireTensor
from moonpool.runtime.model.reshaping import of_inputs

if TYPE_CHECKING:
    from moonpool.ipc.cuda.array import DeviceArray


_ndarray = np.ndarray
_PYTHON_VALUES = (list, tuple, int, float, bool, str, bytes)
# The kinds of numbers that a Python value may become. V is BF16.
_BECOMES = {"b": "biufV", "i": "iufV", "u": "iufV", "f": "fV"}
# No tensor may be larger. The limit of the regions applies, too.
_MAX_BYTES = 1 << 40
# What a message can say.
_LARGEST_BYTES = (1 << 63) - 1

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be "
    "prepended to each input shape. If you want to specify the full shape including the batch dim "
    "in your input dims config, try setting max_batch_size to zero. See the model configuration "
    "docs for more info on max_batch_size."
)


def _memory(array: Any) -> NDArray[Any]:
    """Return the array that has the memory of an input."""
    return array.raw if type(array) is WireTensor else array


class _Input:
    """One input of the configuration, prepared for comparison with arrays."""

    __slots__ = ("code", "dims", "dtype", "index", "is_fixed", "is_ragged", "name", "optional")

    def __init__(self, index: int, tensor: TensorConfig) -> None:
        self.index = index
        self.is_ragged = tensor.ragged
        self.name = tensor.name
        self.code = CODES[tensor.datatype]
        # Most arrays have this very object as dtype. That of BF16 is not looked up before it is needed.
        self.dtype = np.dtype(object) if self.code == BYTES else DTYPES.get(self.code)
        self.dims = tensor.dims
        self.is_fixed = -1 not in tensor.dims
        self.optional = tensor.optional


class Signature:
    """Checks requests against a model's configuration. Thread-safe."""

    def __init__(self, config: ModelConfig, intake: DeviceIntake | None = None, *, is_native: bool = False) -> None:
        """`intake` is for inputs that lie on devices. Authors of `is_native` models write hints, and no
        configuration.
        """
        self._model = config.name
        self._note = _BATCH_NOTE if config.max_batch_size and not is_native else ""
        self._intake = intake or DeviceIntake()
        self._max_batch_size = config.max_batch_size
        self._inputs = {t.name: _Input(i, t) for i, t in enumerate(config.inputs)}
        self._reshaped = of_inputs(config)
        self._in_order = list(self._inputs.values())
        self._usual = [(spec.name, spec.dtype, spec) for spec in self._in_order]
        self._required = {t.name for t in config.inputs if not t.optional}
        # A request that names all of these, in this order, is as one that names none.
        self._all_outputs = [tensor.name for tensor in config.outputs]
        self._outputs = {tensor.name: i for i, tensor in enumerate(config.outputs)}
        self._shapes: Memo[tuple[tuple[int, ...] | None, ...], Shapes] = Memo()
        rows = [(t.name, CODES[t.datatype], t.dims, t.ragged, t.name in self._reshaped) for t in config.inputs]
        # Makes usual requests.
        self.usual = Spec(InferenceRequest, rows, config.max_batch_size)

    def request(
        self, inputs: Mapping[str, object], outputs: Sequence[str] | None = None, details: Details | None = None
    ) -> InferenceRequest:
        """Make a request for the scheduler. Raises `InvalidRequest`, with Triton's texts where Triton has some."""
        request: InferenceRequest | None = self.usual.request(inputs)
        if request is None:
            request = self._request(inputs)
        return self._detailed(request, outputs, details)

    def request_in(
        self,
        described: list[Any],
        data: object,
        offset: int,
        sent: list[tuple[int, int]] | None,
        outputs: Sequence[str] | None,
        details: Details | None,
        *,
        has_views: bool,
        lend: Callable[..., object] | None = None,
    ) -> InferenceRequest | None:
        """Make a request whose inputs lie in a message (`Spec.request_in`). Its outputs come as `WireTensor`.

        Returns None for any other, which `request` takes or refuses. Raises `InvalidRequest` for its outputs.
        """
        request = self.usual.request_in(described, data, offset, sent, has_views, lend)
        return None if request is None else self._detailed(request, outputs, details)

    def _detailed(
        self, request: InferenceRequest, outputs: Sequence[str] | None, details: Details | None
    ) -> InferenceRequest:
        if outputs is not None and outputs != self._all_outputs:
            details = self._with_outputs(outputs, details or Details())
        if details is not None:
            request.detail(details)
        return request

    def _request(self, inputs: Mapping[str, object]) -> InferenceRequest:
        """Make a request of inputs that are not exactly the model's arrays."""
        if type(inputs) is not dict and not isinstance(inputs, Mapping):
            raise InvalidRequest(
                f"the inputs for model '{self._model}' must be a mapping of names to arrays, not "
                f"{type(inputs).__name__}"
            )
        if len(inputs) != len(self._in_order):
            self._check_count(inputs)
        arrays: list[NDArray[Any]] = []
        dims: list[tuple[int, ...] | None] = []
        has_views = False
        for name, dtype, spec in self._usual:
            array = inputs.get(name)
            # Most callers give such an array. Any other value is checked more closely and converted.
            if type(array) is not _ndarray or array.dtype is not dtype:
                array = self._array(spec, inputs)
                if array is None:
                    dims.append(None)
                    continue
                if _is_elsewhere(array):
                    has_views = True
                    arrays.append(array)
                    dims.append(array.shape)
                    continue
            if array.base is not None and is_lendable(_memory(array)):
                has_views = True
            arrays.append(array)
            dims.append(array.shape)
        if len(arrays) != len(inputs):
            self._check_count(inputs)
        key = tuple(dims)
        shapes = self._shapes.get(key)
        if shapes is None:
            tensors, batch_size, signature = self._check_shapes(key)
            self._check_sizes(tensors)
            is_shared = all(tensor.datatype != BYTES for tensor in tensors)
            group = key_of(signature) if self._max_batch_size else None
            shapes = self._shapes.keep(key, Shapes(tensors, batch_size, group, is_shared=is_shared))
        if not shapes.is_shared:
            arrays, shapes = self._encoded(arrays, shapes)
        return InferenceRequest(arrays, shapes, has_views=has_views)

    def _check_sizes(self, tensors: Sequence[RequestTensor]) -> None:
        """Raise `InvalidRequest` for an array that only seems to be so large, as no memory is."""
        for tensor in tensors:
            if tensor.size_bytes > _LARGEST_BYTES:
                name = self._in_order[tensor.number].name
                raise InvalidRequest(f"input '{name}' of shape {tensor.shape} is too large")

    def _check_shapes(
        self, dims: tuple[tuple[int, ...] | None, ...]
    ) -> tuple[list[RequestTensor], int, list[tuple[int, tuple[int, ...] | None]]]:
        """Check the shapes of inputs, None for those left out. They may be a stranger's, of any size.

        Returns the tensors, the rows, and what requests have in common that may share a batch.
        """
        tensors: list[RequestTensor] = []
        batch_size = 1
        signature: list[tuple[int, tuple[int, ...] | None]] = []
        for spec, shape in zip(self._in_order, dims, strict=True):
            if shape is None:
                continue
            own = shape
            if self._max_batch_size:
                rows = self._rows(spec, shape)
                if tensors and rows != batch_size:
                    raise InvalidRequest(
                        f"input '{spec.name}' batch size does not match other inputs for "
                        f"'{self._model}': {rows} and {batch_size}"
                    )
                batch_size = rows
                own = shape[1:]
                signature.append((spec.index, None if spec.is_ragged else own))
            if own != spec.dims and not self._fits(spec, own):
                raise self._wrong_shape(spec, shape)
            size_bytes = prod(shape) * ITEMSIZE[spec.code]
            reshaping = self._reshaped.get(spec.name)
            seen = list(shape) if reshaping is None else reshaping.of(shape)
            tensors.append(RequestTensor(spec.index, spec.code, seen, size_bytes))
        return tensors, batch_size, signature

    def _encoded(self, arrays: list[NDArray[Any]], shapes: Shapes) -> tuple[list[NDArray[Any]], Shapes]:
        """Return the arrays with strings in their wire form, and shapes with the sizes of these."""
        tensors = []
        wire = []
        for array, tensor in zip(arrays, shapes.tensors, strict=True):
            if tensor.datatype == BYTES:
                array = self._strings(array, self._in_order[tensor.number].name)
                tensor = tensor._replace(size_bytes=array.nbytes)
            wire.append(array)
            tensors.append(tensor)
        return wire, Shapes(tensors, shapes.batch_size, shapes.signature, is_shared=False)

    def _strings(self, array: NDArray[Any] | WireTensor, name: str) -> NDArray[Any]:
        try:
            if type(array) is WireTensor:
                check_bytes(array.raw, array.shape, name)  # type: ignore[arg-type]
                return array.raw
            return np.frombuffer(encode_bytes(array, name), np.uint8)  # type: ignore[arg-type]
        except BadTensor as error:
            raise InvalidRequest(f"{error} (model '{self._model}')") from error

    def check(self, described: Mapping[str, tuple[int, tuple[int, ...]]]) -> None:
        """Raise `InvalidRequest` if inputs of these datatypes (codes) and shapes make no request."""
        if not described.keys() <= self._inputs.keys() or self._required - described.keys():
            self._check_count(described)
        for spec in self._in_order:
            if spec.name in described:
                self._check_datatype(spec, described[spec.name][0])
        for name, (_, shape) in described.items():
            if -1 in shape:
                raise InvalidRequest(
                    f"All input dimensions should be specified for input '{name}' for model "
                    f"'{self._model}', got {_shown(shape)}"
                )
        shapes = [described.get(spec.name) for spec in self._in_order]
        self._check_shapes(tuple(None if each is None else each[1] for each in shapes))

    def empty_dtype(self, name: str, shape: tuple[int, ...]) -> tuple[np.dtype[Any], int]:
        """Return the dtype and the size in bytes of an input array. Raises `InvalidRequest`."""
        spec = self._inputs.get(name)
        if spec is None:
            raise InvalidRequest(f"unexpected inference input '{name}' for model '{self._model}'")
        if spec.code == BYTES:
            raise InvalidRequest(
                f"input '{name}' of model '{self._model}' is BYTES; strings have no fixed size, so "
                "they cannot be written in place"
            )
        if len(shape) > MAX_DIMS or any(dim < 0 for dim in shape):
            raise InvalidRequest(f"input '{name}' cannot have the shape {list(shape)}")
        dtype = DTYPES[spec.code]
        size_bytes = dtype.itemsize
        for dim in shape:
            size_bytes *= dim
        if size_bytes > _MAX_BYTES:
            raise InvalidRequest(f"input '{name}' of shape {list(shape)} is too large")
        return dtype, size_bytes

    def _array(self, spec: _Input, inputs: Mapping[str, object]) -> Any:
        """Return the input as an array of its datatype, perhaps on a device. None for an optional one that is not
        given.
        """
        value = inputs.get(spec.name)
        if value is None:
            if spec.name in inputs:
                raise InvalidRequest(f"input '{spec.name}' for model '{self._model}' is None")
            if not spec.optional:
                self._check_count(inputs)
            return None
        if type(value) is WireTensor:
            self._check_datatype(spec, value.datatype)
            if spec.code == BYTES:
                return value
            return value.raw.view(DTYPES[spec.code]).reshape(value.shape)
        if not isinstance(value, np.ndarray):
            if is_on_device(value):
                return self._from_device(spec, value)
            value = self._from_python(spec, value)
        try:
            code = code_of(value.dtype, spec.name)
        except BadTensor as error:
            raise InvalidRequest(f"{error} (model '{self._model}')") from error
        if not (spec.code == BF16 and code == CODES["UINT16"]):
            self._check_datatype(spec, code)
        return value

    def _check_datatype(self, spec: _Input, code: int) -> None:
        if code != spec.code:
            raise InvalidRequest(
                f"inference input '{spec.name}' data-type is '{NAMES.get(code, '<invalid>')}', but model "
                f"'{self._model}' expects '{NAMES[spec.code]}'"
            )

    def has_to_copy(self, inputs: Iterable[object]) -> bool:
        """Return True if any of these inputs must be `fetched` first, which waits for the work of its maker."""
        if self._intake.takes_devices:
            return False
        return any(map(_is_elsewhere, inputs))

    def fetched(self, value: Any) -> Any:
        """Return the array in ordinary memory, copied if it lies on a device. Raises `OutOfMemory`, `CudaError`."""
        return self._intake.to_host(value) if _is_elsewhere(value) else value

    def _from_device(self, spec: _Input, value: object) -> DeviceArray | NDArray[Any]:
        array = self._intake.take(value, f"input '{spec.name}' for model '{self._model}'")
        self._check_datatype(spec, array.datatype)
        return array if self._intake.takes_devices else self._intake.to_host(array)

    def _from_python(self, spec: _Input, value: object) -> NDArray[Any]:
        try:
            if isinstance(value, (np.generic, *_PYTHON_VALUES)):
                dtype = np.dtype(object) if spec.code == BYTES else DTYPES[spec.code]
                natural = np.asarray(value)
                kinds = _BECOMES.get(natural.dtype.kind, "")
                if spec.code != BYTES and natural.size and dtype.kind not in kinds:
                    raise ValueError(f"{natural.dtype} does not go into {dtype} without loss")
                return np.asarray(value, dtype)
            if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
                return np.asarray(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(
                f"input '{spec.name}' for model '{self._model}' cannot be made an array: {error}"
            ) from error
        raise InvalidRequest(
            f"input '{spec.name}' for model '{self._model}' must be a numpy array, not {type(value).__name__}"
        )

    def _rows(self, spec: _Input, shape: tuple[int, ...]) -> int:
        if not shape or len(shape) != len(spec.dims) + 1:
            raise self._wrong_shape(spec, shape)
        rows = shape[0]
        if rows > self._max_batch_size:
            raise InvalidRequest(f"inference request batch-size must be <= {self._max_batch_size} for '{self._model}'")
        if rows == 0:
            raise InvalidRequest(f"inference request batch-size must be > 0 for '{self._model}'")
        return rows

    @staticmethod
    def _fits(spec: _Input, shape: tuple[int, ...]) -> bool:
        if spec.is_fixed or len(shape) != len(spec.dims):
            return False
        return all(want in (-1, have) for want, have in zip(spec.dims, shape, strict=True))

    def _wrong_shape(self, spec: _Input, shape: tuple[int, ...]) -> InvalidRequest:
        wanted = [-1, *spec.dims] if self._max_batch_size else list(spec.dims)
        expected, got = _shown(wanted), _shown(shape)
        return InvalidRequest(
            f"unexpected shape for input '{spec.name}' for model '{self._model}'. "
            f"Expected {expected}, got {got}. {self._note}"
        )

    def _with_outputs(self, outputs: Sequence[str], details: Details) -> Details:
        indices = []
        if type(outputs) is not list:
            outputs = OF_REQUEST.texts("outputs", outputs, "a list of names of outputs")
        for name in outputs:
            index = self._outputs.get(name)
            if index is None:
                raise InvalidRequest(f"unexpected inference output '{name}' for model '{self._model}'")
            indices.append(index)
        # One that is asked for twice comes once, as in Triton. The stub takes their number for a proof that all are
        # wanted.
        return details._replace(outputs=list(dict.fromkeys(indices)))

    def _check_count(self, inputs: Mapping[str, object]) -> None:
        for name in inputs:
            if name not in self._inputs:
                raise InvalidRequest(f"unexpected inference input '{name}' for model '{self._model}'")
        missing = [name for name in self._inputs if name in self._required - set(inputs)]
        if missing:
            got = ",".join(f"'{name}'" for name in inputs)
            lacking = ",".join(f"'{name}'" for name in missing)
            least, most = len(self._required), len(self._inputs)
            wanted = f"{most} inputs" if least == most else f"number of inputs between {least} and {most}"
            raise InvalidRequest(
                f"expected {wanted} but got {len(inputs)} inputs for model '{self._model}'. Got input(s) [{got}], but "
                f"missing required input(s) [{lacking}]. Please provide all required input(s)."
            )


def _is_elsewhere(array: object) -> bool:
    """Return True if an array that a signature has checked lies on a device."""
    return not isinstance(array, (np.ndarray, WireTensor))


def _shown(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


class RequestOptions(TypedDict, total=False):
    """The options of a request, the same for all ways of sending one. All have defaults."""

    outputs: Sequence[str] | None
    """The names of the outputs that you want; all by default."""
    request_id: str
    correlation_id: int | str
    """The id of the sequence that the request is part of; 0 or empty for none."""
    flags: int
    """1 for the start of a sequence, 2 for its end, 3 for both."""
    priority: int
    """For the model's queue policy, as `queue_timeout_us`."""
    queue_timeout_us: int
    parameters: Mapping[str, Parameter] | None
    trace_context: str | None
    """The trace that the request is part of. The model gets it from `request.trace().get_context()`."""
    allocator: ResponseAllocator | None
    """Allocates memory for the outputs. Its methods get `userp`."""
    userp: object
    outputs_in: str | None
    """The memory for the outputs: `cpu` for ordinary memory, `gpu` or `gpu:1` for a GPU if the model can. By default
    they stay where the model leaves them. On a GPU they are `DeviceArray`s."""


def request_with(signature: Signature, inputs: Mapping[str, Any], options: RequestOptions) -> InferenceRequest:
    """Make a request with these options. Raises `InvalidRequest`, and TypeError for an option that does not exist."""
    if not options:
        return signature.request(inputs)
    try:
        return make_request(signature, inputs, **options)
    except TypeError:
        for name in options.keys() - RequestOptions.__annotations__.keys():
            hint = suggestion(name, RequestOptions.__annotations__)
            raise TypeError(f"there is no option {name!r} of a request{hint}") from None
        raise


def make_request(
    signature: Signature,
    inputs: Mapping[str, Any],
    *,
    outputs: Sequence[str] | None = None,
    request_id: str = "",
    correlation_id: int | str = 0,
    flags: int = 0,
    priority: int = 0,
    queue_timeout_us: int = 0,
    parameters: Mapping[str, Parameter] | None = None,
    trace_context: str | None = None,
    allocator: ResponseAllocator | None = None,
    userp: object = None,
    outputs_in: str | None = None,
) -> InferenceRequest:
    """Make a request with the options of `RequestOptions`. Raises `InvalidRequest`."""
    details = details_of(
        request_id, correlation_id, flags, queue_timeout_us, priority, parameters, trace_context, outputs_in
    )
    if allocator is not None:
        OF_REQUEST.one("allocator", allocator, ResponseAllocator, "a moonpool.ResponseAllocator")
    request = signature.request(inputs, outputs, details)
    if allocator is not None:
        request.allocator = allocator
        request.userp = userp
    return request
