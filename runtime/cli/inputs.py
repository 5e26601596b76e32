"""Requests from the command line: an address, headers, and inputs as JSON, .npy files, or made up from what a model's
configuration says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.tensors import CODES, DTYPES
from moonpool.runtime.cli.shared import UsageError
from moonpool.runtime.client.request import BadAddress, Endpoint
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.config.model import TensorConfig
from moonpool.runtime.process.files import parsed_json

# What JSON may hold for a datatype, as numpy's kinds.
_FITTING_KINDS = {"B": "b", "U": "iu", "I": "iu", "F": "iuf"}
_WORDS = {"B": "true and false", "U": "whole numbers", "I": "whole numbers", "F": "numbers"}


class TakesInputs(Protocol):
    """The part of a configuration that making inputs needs."""

    @property
    def name(self) -> str: ...
    @property
    def max_batch_size(self) -> int: ...
    @property
    def inputs(self) -> tuple[TensorConfig, ...]: ...


def parse_inputs(arguments: Sequence[str]) -> dict[str, object]:
    """`NAME=JSON` and `NAME=@file.npy` as values by name; files are read. Raises `UsageError`."""
    values: dict[str, object] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not (name and equals):
            raise UsageError(f"--input must be NAME=JSON or NAME=@FILE.npy, not {argument!r}")
        if name in values:
            raise UsageError(f"--input {name} is given twice")
        values[name] = _from_file(name, text[1:]) if text[:1] == "@" else _from_json(name, text)
    return values


def parse_endpoint(option: str, text: str) -> Endpoint:
    """Read the address in an option. Raises `UsageError`."""
    try:
        return Endpoint.parse(text)
    except BadAddress as error:
        raise UsageError(f"{option}: {error}") from error


def parse_header(text: str) -> tuple[str, str]:
    """Read `NAME=VALUE` of an option --header. Raises `UsageError`."""
    name, equals, value = text.partition("=")
    if not (name and equals) or not (text.isascii() and text.isprintable()) or " " in name:
        raise UsageError(f"--header must be NAME=VALUE, not {text!r}")
    return name, value


def _from_file(name: str, path: str) -> NDArray[Any]:
    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "is no .npy file without Python objects"
        raise UsageError(f"--input {name}: {path}: {reason}") from error
    if not isinstance(loaded, np.ndarray):
        loaded.close()
        raise UsageError(f"--input {name}: {path} holds several arrays; give one as .npy")
    return loaded


def _from_json(name: str, text: str) -> object:
    try:
        return parsed_json(text)
    except ValueError as error:
        raise UsageError(f"--input {name}: {text!r} is not JSON: {error}") from error


def as_arrays(values: Mapping[str, object], config: TakesInputs) -> dict[str, NDArray[Any]]:
    """The values as arrays of the model's datatypes. Raises `InvalidRequest`."""
    tensors = {tensor.name: tensor for tensor in config.inputs}
    arrays = {}
    for name, value in values.items():
        if name not in tensors:
            raise InvalidRequest(f"model '{config.name}' has no input '{name}'; {_inputs(config)}")
        arrays[name] = _as_array(value, tensors[name])
    return arrays


def _inputs(config: TakesInputs) -> str:
    batch = [-1] if config.max_batch_size else []
    shown = ", ".join(f"{tensor.name} {tensor.datatype} {[*batch, *tensor.dims]}" for tensor in config.inputs)
    return f"it has {shown}" if shown else "it has none"


def _as_array(value: object, tensor: TensorConfig) -> NDArray[Any]:
    if tensor.datatype == "BYTES":
        return _texts(value, tensor.name)
    if isinstance(value, np.ndarray):
        return value
    dtype = DTYPES[CODES[tensor.datatype]]
    kind = tensor.datatype[0]
    try:
        plain = np.array(value)
        if plain.size and plain.dtype.kind not in _FITTING_KINDS[kind]:
            raise ValueError(f"it must be {_WORDS[kind]}")
        # From the Python numbers, so that those out of range are refused and none is rounded twice.
        return np.array(value, dtype)
    except (ValueError, TypeError, OverflowError) as error:
        shown = json.dumps(value)[:60]
        raise InvalidRequest(f"input '{tensor.name}' is {tensor.datatype} and cannot be {shown}: {error}") from error


def _texts(value: object, name: str) -> NDArray[Any]:
    """An object array of bytes, from JSON's strings or an array of text or bytes."""
    if isinstance(value, np.ndarray) and value.dtype.kind not in "SU":
        raise InvalidRequest(f"input '{name}' is BYTES: its .npy must be of dtype S or U")
    array = np.array(value, dtype=object)
    texts = array.ravel()
    for index, text in enumerate(texts):
        if not isinstance(text, (str, bytes)):
            raise InvalidRequest(f"input '{name}' is BYTES: give strings, not {text!r:.60}")
        texts[index] = text.encode() if isinstance(text, str) else text
    return texts.reshape(array.shape)


def made_up(config: TakesInputs, rows: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[Any]]:
    """Arrays that fit the configuration: random numbers, texts; sizes that it leaves open are 1.

    `shapes` says others, without the batch dimension. Raises `UsageError`.
    """
    unknown = set(shapes) - {tensor.name for tensor in config.inputs}
    if unknown:
        raise UsageError(f"--shape {min(unknown)}: no such input; {_inputs(config)}")
    batch = (rows,) if config.max_batch_size else ()
    arrays = {}
    for tensor in config.inputs:
        dims = shapes.get(tensor.name, tuple(1 if dim == -1 else dim for dim in tensor.dims))
        arrays[tensor.name] = _made_up(tensor.datatype, batch + dims)
    return arrays


def _made_up(datatype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    if datatype == "BYTES":
        return np.full(shape, b"moonpool", dtype=object)
    dtype = DTYPES[CODES[datatype]]
    generator = np.random.default_rng(1)
    if datatype == "BOOL":
        return generator.random(shape) < 0.5
    if datatype.startswith(("INT", "UINT")):
        return generator.integers(0, 10, shape).astype(dtype)
    return generator.standard_normal(shape).astype(dtype)
