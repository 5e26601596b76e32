"""What a model takes and gives, and turning a caller's arrays into a request for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.bytes_tensor import encode_bytes
from moonpool.ipc.errors import BadTensor
from moonpool.ipc.tensors import BF16, BYTES, CODES, DTYPES, MAX_DIMS, NAMES, code_of
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.request import NO_DETAILS, Details, InferenceRequest, Placement

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from moonpool.runtime.config import ModelConfig, TensorConfig

_PYTHON_VALUES = (list, tuple, int, float, bool, str, bytes)
# However a caller names the sizes, no tensor is larger; the regions' limit comes on top.
_MAX_BYTES = 1 << 40


class _Input:
    """One input of the configuration, ready for comparing."""

    __slots__ = ("code", "dims", "index", "is_fixed", "name", "optional")

    def __init__(self, index: int, tensor: TensorConfig) -> None:
        self.index = index
        self.name = tensor.name
        self.code = CODES[tensor.datatype]
        self.dims = tensor.dims
        self.is_fixed = -1 not in tensor.dims
        self.optional = tensor.optional


class Signature:
    """Checks requests against a model's configuration. Thread-safe."""

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self._max_batch_size = config.max_batch_size
        self._inputs = {t.name: _Input(i, t) for i, t in enumerate(config.inputs)}
        self._in_order = list(self._inputs.values())
        self._required = {t.name for t in config.inputs if not t.optional}
        self._outputs = {tensor.name: i for i, tensor in enumerate(config.outputs)}

    def request(
        self,
        inputs: Mapping[str, object],
        outputs: Sequence[str] | None = None,
        details: Details = NO_DETAILS,
    ) -> InferenceRequest:
        """A request for the scheduler. Raises `InvalidRequest`, in Triton's words where it has some."""
        if not isinstance(inputs, Mapping):
            raise InvalidRequest(
                f"the inputs for model '{self._model}' must be a mapping of names to arrays, not "
                f"{type(inputs).__name__}"
            )
        if len(inputs) != len(self._in_order):
            self._check_count(inputs)
        placements: list[Placement] = []
        batch_size = 1
        signature: Hashable = None
        shapes: list[tuple[int, tuple[int, ...]]] = []
        for spec in self._in_order:
            value = inputs.get(spec.name)
            if value is None:
                if spec.name not in inputs and spec.optional:
                    continue
                if spec.name not in inputs:
                    self._check_count(inputs)
                raise InvalidRequest(f"input '{spec.name}' for model '{self._model}' is None")
            array = self._array(spec, value)
            shape = array.shape
            if self._max_batch_size:
                rows = self._rows(spec, shape)
                if placements and rows != batch_size:
                    raise InvalidRequest(
                        f"input '{spec.name}' batch size does not match other inputs for "
                        f"'{self._model}': {rows} and {batch_size}"
                    )
                batch_size = rows
                shapes.append((spec.index, shape[1:]))
                shape = shape[1:]
            if shape != spec.dims and not self._fits(spec, shape):
                raise self._wrong_shape(spec, array.shape)
            placements.append(self._placement(spec, array))
        if len(placements) != len(inputs):
            self._check_count(inputs)
        if self._max_batch_size:
            signature = tuple(shapes)
        if outputs is not None:
            details = self._with_outputs(outputs, details)
        return InferenceRequest(placements, batch_size, signature, details)

    def empty_dtype(self, name: str, shape: tuple[int, ...]) -> tuple[np.dtype[Any], int]:
        """Dtype and size in bytes of an input array. Raises `InvalidRequest`."""
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

    def _array(self, spec: _Input, value: object) -> NDArray[Any]:
        if not isinstance(value, np.ndarray):
            value = self._from_python(spec, value)
        try:
            code = code_of(value.dtype, spec.name)
        except BadTensor as error:
            raise InvalidRequest(f"{error} (model '{self._model}')") from error
        if code != spec.code and not (spec.code == BF16 and code == CODES["UINT16"]):
            raise InvalidRequest(
                f"inference input '{spec.name}' data-type is '{NAMES[code]}', but model "
                f"'{self._model}' expects '{NAMES[spec.code]}'"
            )
        return value

    def _from_python(self, spec: _Input, value: object) -> NDArray[Any]:
        try:
            if isinstance(value, (np.generic, *_PYTHON_VALUES)):
                dtype = np.dtype(object) if spec.code == BYTES else DTYPES[spec.code]
                return np.asarray(value, dtype)
            if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
                return np.asarray(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(
                f"input '{spec.name}' for model '{self._model}' cannot be made an array: {error}"
            ) from error
        raise InvalidRequest(
            f"input '{spec.name}' for model '{self._model}' must be a numpy array, not "
            f"{type(value).__name__}"
        )

    def _rows(self, spec: _Input, shape: tuple[int, ...]) -> int:
        if not shape or len(shape) != len(spec.dims) + 1:
            raise self._wrong_shape(spec, shape)
        rows = shape[0]
        if rows > self._max_batch_size:
            raise InvalidRequest(
                f"inference request batch-size must be <= {self._max_batch_size} for "
                f"'{self._model}'"
            )
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
            f"Expected {expected}, got {got}"
        )

    def _placement(self, spec: _Input, array: NDArray[Any]) -> Placement:
        shape = list(array.shape)
        if spec.code == BYTES:
            try:
                wire = np.frombuffer(encode_bytes(array, spec.name), np.uint8)
            except BadTensor as error:
                raise InvalidRequest(f"{error} (model '{self._model}')") from error
            return Placement(spec.index, BYTES, shape, wire, wire.nbytes)
        return Placement(spec.index, spec.code, shape, array, array.nbytes)

    def _with_outputs(self, outputs: Sequence[str], details: Details) -> Details:
        indices = []
        for name in outputs:
            index = self._outputs.get(name)
            if index is None:
                raise InvalidRequest(
                    f"unexpected inference output '{name}' for model '{self._model}'"
                )
            indices.append(index)
        return details._replace(outputs=indices)

    def _check_count(self, inputs: Mapping[str, object]) -> None:
        for name in inputs:
            if name not in self._inputs:
                raise InvalidRequest(
                    f"unexpected inference input '{name}' for model '{self._model}'"
                )
        missing = [name for name in self._inputs if name in self._required - set(inputs)]
        if missing:
            got = ",".join(f"'{name}'" for name in inputs)
            lacking = ",".join(f"'{name}'" for name in missing)
            raise InvalidRequest(
                f"expected {len(self._required)} inputs but got {len(inputs)} inputs for model "
                f"'{self._model}'. Got input(s) [{got}], but missing required input(s) "
                f"[{lacking}]. Please provide all required input(s)."
            )


def _shown(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
