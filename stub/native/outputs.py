"""Checks what one of moonpool's own models returned against its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from moonpool.ipc.tensors import CODES, DTYPES
from moonpool.stub.native.signature import Signature
from moonpool.stub.pb_utils.config import Json
from moonpool.stub.pb_utils.errors import InvalidReturn


class Expected(NamedTuple):
    """Describes one output of the configuration."""

    data_type: str
    # None for strings, whose arrays may be of several dtypes.
    dtype: np.dtype[np.generic] | None
    dims: tuple[int, ...]


class NativeOutputs:
    """Checks the results of calls against the outputs of a model."""

    def __init__(self, model_name: str, config: Json, signature: Signature) -> None:
        self._model = model_name
        self._expected = {tensor["name"]: _expected(tensor) for tensor in config.get("output", ())}
        for state in config.get("sequence_batching", {}).get("state", ()):
            self._expected[state["output_name"]] = _expected(state)
        own = int(int(config.get("max_batch_size", 0)) > 0)
        for name, hint in signature.outputs.items():
            if name in self._expected and hint.dims is not None and len(hint.dims) == own:
                self._expected[name] = self._expected[name]._replace(dims=())

    def check(self, returned: object, rows: int | None) -> dict[str, Any]:
        """Return the arrays to send, numpy's or on a device. `rows` is None if the model takes no batches.

        Raises InvalidReturn, which names the output and the fault.
        """
        expected = self._expected
        if not isinstance(returned, dict):
            if len(expected) != 1 or returned is None:
                raise self._error(
                    f"returned {_kind(returned)}, and must return a dict with the arrays {_listed(expected)}"
                )
            returned = dict.fromkeys(expected, returned)
        if returned.keys() != expected.keys():
            raise self._error(
                f"returned the outputs {_listed(returned)}, and its configuration has {_listed(expected)}"
            )
        return {name: self._array(name, expected[name], value, rows) for name, value in returned.items()}

    def _array(self, name: str, expected: Expected, value: object, rows: int | None) -> Any:
        array = self._converted(name, expected, value)
        dims = expected.dims if rows is None else (rows, *expected.dims)
        shape = array.shape
        if len(shape) != len(dims) or any(dim not in (-1, size) for dim, size in zip(dims, shape)):
            of_rows = "" if rows is None else f" for this batch of {rows} rows"
            raise self._error(
                f"returned output '{name}' of shape {list(shape)}, and its configuration asks for "
                f"{list(dims)}{of_rows} (-1 is any size)"
            )
        return array if expected.dims else array.reshape((*shape, 1))

    def _converted(self, name: str, expected: Expected, value: Any) -> Any:
        dtype = expected.dtype
        if not isinstance(value, np.ndarray):
            value = self._made(name, expected, value)
        if dtype is None and value.dtype.kind == "U":
            return value.astype(np.object_)
        if value.dtype != dtype if dtype is not None else value.dtype.kind not in "OS":
            advice = "object" if dtype is None else f"numpy.{dtype.name}"
            raise self._error(
                f"returned output '{name}' as {value.dtype}, and its configuration says "
                f"{expected.data_type}; convert it: array.astype({advice})"
            )
        return value

    def _made(self, name: str, expected: Expected, value: Any) -> Any:
        """Make an array of another object. An array on a device stays there."""
        # Numbers and lists have no dtype of their own. Tensors of torch and others have one.
        plain = isinstance(value, (bool, int, float, str, bytes, list, tuple))
        try:
            if not plain and _lies_on_device(value):
                from moonpool.stub.devices.rows import array_on_device

                return array_on_device(value)
            array = np.asarray(value, (expected.dtype or np.object_) if plain else None)
            if array.dtype == np.object_ and expected.dtype is not None:
                raise TypeError("it is neither an array nor a number nor a list of numbers")
            return array
        except Exception as error:
            raise self._error(
                f"returned {_kind(value)} as output '{name}', and it cannot be made an array "
                f"of {expected.data_type}: {error}"
            ) from error

    def _error(self, text: str) -> InvalidReturn:
        return InvalidReturn(f"model '{self._model}' {text}")


def _expected(tensor: Json) -> Expected:
    data_type = str(tensor["data_type"])
    is_text = data_type == "TYPE_STRING"
    dtype = None if is_text else DTYPES[CODES[data_type[len("TYPE_") :]]]
    dims = tensor["reshape"]["shape"] if tensor.get("reshape") else tensor["dims"]
    return Expected(data_type, dtype, tuple(int(dim) for dim in dims))


def _lies_on_device(value: Any) -> bool:
    from moonpool.ipc.dlpack import CUDA, CUDA_MANAGED

    ask = getattr(value, "__dlpack_device__", None)
    if ask is None:
        return hasattr(value, "__cuda_array_interface__")
    return int(ask()[0]) in (CUDA, CUDA_MANAGED)


def _kind(value: object) -> str:
    return "nothing" if value is None else f"an object of type {type(value).__name__}"


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"
