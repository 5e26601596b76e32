"""The data of requests: files of perf_analyzer, arrays of numpy, mixes of them by weight, and captured requests.

Files come from anywhere, so everything in them is checked before it becomes a request.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from moonpool import MoonpoolError
from moonpool.benchmarks.loads import Schedule
from moonpool.ipc.tensors import CODES, DTYPES
from moonpool.runtime.client.request import QuestionTensor
from moonpool.runtime.model.config.model import TensorConfig
from moonpool.runtime.process.files import parsed_object


class BadData(MoonpoolError):
    """A file does not have the data of requests, or its data does not fit the model."""

    code = "INVALID_ARG"


class WrongAnswer(MoonpoolError):
    """A model's answer differs from the expected one."""

    code = "INTERNAL"


@dataclass(frozen=True, slots=True)
class RequestData:
    """The inputs of one request, and the outputs that are expected, if any are."""

    inputs: Sequence[QuestionTensor]
    expected: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the inputs as arrays by name."""
        return {tensor.name: tensor.array() for tensor in self.inputs}

    def check(self, outputs: Mapping[str, NDArray[Any]], where: str) -> None:
        """Raise `WrongAnswer` unless the outputs are those that are expected; floats may differ in the last digits."""
        for name, wanted in self.expected.items():
            found = outputs.get(name)
            if found is None:
                raise WrongAnswer(f"{where}: the answer has no output '{name}'")
            is_equal = found.size == wanted.size and (
                np.allclose(found.ravel(), wanted.ravel(), rtol=1e-4, atol=1e-6, equal_nan=True)
                if wanted.dtype.kind == "f"
                else np.array_equal(found.ravel(), wanted.ravel())
            )
            if not is_equal:
                raise WrongAnswer(
                    f"{where}: output '{name}' is {_short(found)}, and validation_data has {_short(wanted)}"
                )


def _short(array: NDArray[Any]) -> str:
    return f"{array.ravel()[:6].tolist()!r:.80}" + (" and more" if array.size > 6 else "")


@dataclass(frozen=True, slots=True)
class DataMix:
    """Different requests, and the numbers of those in the order in which they are sent, again and again."""

    requests: Sequence[RequestData]
    order: NDArray[np.int32] = field(default_factory=lambda: np.zeros(1, np.int32))


# The length of the order of a mix: the weights hold within a thousandth of it.
_ORDER = 1000


def read_mix(
    specs: Sequence[str], inputs: Sequence[TensorConfig], shapes: Mapping[str, tuple[int, ...]], *, is_batched: bool
) -> DataMix:
    """Read `PATH` or `PATH=WEIGHT` each. Raises `BadData` and OSError.

    PATH is a JSON file in perf_analyzer's form, a .npz file, or a folder of those.
    """

    def read(file: Path) -> list[RequestData]:
        if file.suffix == ".npz":
            return _of_npz(file, inputs)
        return _of_json(file, inputs, shapes, is_batched=is_batched)

    return mixed(specs, read)


def mixed(specs: Sequence[str], read: Callable[[Path], list[RequestData]]) -> DataMix:
    """Read the requests of `PATH` or `PATH=WEIGHT` each, and mix them. Raises as `read`, and `BadData`."""
    requests: list[RequestData] = []
    numbers: list[list[int]] = []
    weights: list[float] = []
    for spec in specs:
        path, weight = _weighed(spec)
        found = [each for file in _files(path) for each in read(file)]
        if not found:
            raise BadData(f"{path} has no requests")
        numbers.append(list(range(len(requests), len(requests) + len(found))))
        requests += found
        weights.append(weight)
    return DataMix(requests, _order(numbers, weights))


def _weighed(spec: str) -> tuple[Path, float]:
    head, equals, tail = spec.rpartition("=")
    if Path(spec).exists() or not equals:
        return Path(spec), 1.0
    try:
        weight = float(tail)
    except ValueError:
        weight = 0.0
    if not 0 < weight < math.inf:
        raise BadData(f"{spec!r} must be PATH or PATH=WEIGHT, with a weight of more than 0")
    return Path(head), weight


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(each for each in path.iterdir() if each.suffix in (".npz", ".json"))


def _order(numbers: Sequence[Sequence[int]], weights: Sequence[float]) -> NDArray[np.int32]:
    """Spread the sources evenly by their weights, and go through the requests of each in turns."""
    if len(numbers) == 1:
        return np.array(numbers[0], np.int32)
    credit = [0.0] * len(weights)
    at = [0] * len(weights)
    order = []
    for _ in range(max(_ORDER, *(2 * len(each) for each in numbers))):
        credit = [left + weight for left, weight in zip(credit, weights, strict=True)]
        source = max(range(len(credit)), key=credit.__getitem__)
        credit[source] -= sum(weights)
        order.append(numbers[source][at[source] % len(numbers[source])])
        at[source] += 1
    return np.array(order, np.int32)


def _of_npz(path: Path, inputs: Sequence[TensorConfig]) -> list[RequestData]:
    tensors = {tensor.name: tensor for tensor in inputs}
    try:
        # For a broken file, numpy would leave its own descriptor open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {name: _array_in(arrays, name) for name in arrays.files}
    except FileNotFoundError:
        raise
    except Exception as error:  # numpy, zipfile and zlib have many for what is no such file
        raise BadData(f"{path} is no .npz file without Python objects: {error}") from error
    if unknown := found.keys() - tensors.keys():
        raise BadData(f"{path}: the model has no input '{min(unknown)}'")
    return [RequestData([_tensor(tensors[name], found[name], path) for name in found])]


def _array_in(arrays: NpzFile, name: str) -> NDArray[Any]:
    """Return an array of a file. numpy returns the bytes of what is in the file and is no array."""
    array = arrays[name]
    if not isinstance(array, np.ndarray):
        raise ValueError(f"'{name}' is not an array")
    return array


def _tensor(tensor: TensorConfig, array: NDArray[Any], path: Path) -> QuestionTensor:
    if tensor.datatype == "BYTES":
        if array.dtype.kind not in "SUO":
            raise BadData(f"{path}: input '{tensor.name}' is BYTES, and the file has {array.dtype}")
        texts = [text if isinstance(text, bytes) else str(text).encode() for text in array.ravel().tolist()]
        filled = np.empty(len(texts), object)
        filled[:] = texts
        return QuestionTensor.of(tensor.name, "BYTES", filled.reshape(array.shape))
    dtype = DTYPES[CODES[tensor.datatype]]
    if array.dtype != dtype:
        raise BadData(f"{path}: input '{tensor.name}' is {tensor.datatype}, and the file has {array.dtype}")
    return QuestionTensor.of(tensor.name, tensor.datatype, array)


def _of_json(
    path: Path, inputs: Sequence[TensorConfig], shapes: Mapping[str, tuple[int, ...]], *, is_batched: bool
) -> list[RequestData]:
    """Read perf_analyzer's form. Streams, which are lists of requests, follow one another."""
    found, entries = _entries(path)
    expected = _flat(found.get("validation_data", []))
    if expected and len(expected) != len(entries):
        raise BadData(f"{path}: `data` has {len(entries)} entries, `validation_data` {len(expected)}")
    tensors = {tensor.name: tensor for tensor in inputs}
    requests = []
    for number, entry in enumerate(entries):
        where = f"{path}, entry {number}"
        if missing := tensors.keys() - entry.keys():
            raise BadData(f"{where} lacks input '{min(missing)}'")
        if unknown := entry.keys() - tensors.keys():
            raise BadData(f"{where}: the model has no input '{min(unknown)}'")
        mine = [
            _json_tensor(tensors[name], value, shapes.get(name), is_batched, where) for name, value in entry.items()
        ]
        wanted = expected[number] if expected else {}
        if not isinstance(wanted, dict):
            raise BadData(f"{path}: an entry of `validation_data` is not an object")
        outputs = {name: _expected(name, value, where) for name, value in wanted.items()}
        requests.append(RequestData(mine, outputs))
    return requests


def _entries(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read a file in perf_analyzer's form; return all of it, and its requests."""
    found = _object(path.read_bytes(), str(path))
    if not isinstance(found.get("data"), list):
        raise BadData(f"{path} has no list `data`, as in perf_analyzer's --input-data")
    entries = _flat(found["data"])
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise BadData(f"{path}, entry {number} is not an object")
    return found, entries


def _object(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        return parsed_object(text, where)
    except ValueError as error:
        raise BadData(str(error)) from error


# For each endpoint of OpenAI's API its path, and the field that a made-up request has beside the model.
OPENAI: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "moonpool"}]}),
    "completions": ("/v1/completions", {"prompt": "moonpool"}),
    "embeddings": ("/v1/embeddings", {"input": "moonpool"}),
}


def openai_mix(endpoint: str, model: str, specs: Sequence[str], values: Mapping[str, object]) -> DataMix:
    """Read the requests of files in perf_analyzer's form, whose entries are fields of a body; without files, make one.

    `values` are fields of all bodies. A request has one tensor, its body. Raises `BadData` and OSError.
    """

    def request(fields: Mapping[str, Any]) -> RequestData:
        always = {} if endpoint == "embeddings" else {"stream": True}
        try:
            body = json.dumps({"model": model, **OPENAI[endpoint][1], **values, **fields, **always}).encode()
        except (TypeError, ValueError) as error:
            raise BadData(f"a field of a request to OpenAI's API is not JSON: {error}") from error
        array = np.empty(1, object)
        array[0] = body
        return RequestData([QuestionTensor.of(endpoint, "BYTES", array)])

    if not specs:
        return DataMix([request({})])
    return mixed(specs, lambda path: [request(entry) for entry in _entries(path)[1]])


def _flat(entries: object) -> list[Any]:
    if not isinstance(entries, list):
        raise BadData("`validation_data` is not a list")
    return [each for entry in entries for each in (entry if isinstance(entry, list) else [entry])]


def _json_tensor(
    tensor: TensorConfig, value: Any, size: tuple[int, ...] | None, is_batched: bool, where: str
) -> QuestionTensor:
    where = f"{where}: input '{tensor.name}'"
    dims: Sequence[int] = size or tensor.dims
    content = value
    if isinstance(value, dict):
        given: object = value.get("shape", list(dims))
        if not isinstance(given, list) or not all(type(dim) is int and dim >= -1 for dim in given):
            raise BadData(f"{where} has no shape: {given!r:.60}")
        dims = given
        content = value.get("content", value.get("b64"))
    shape = (*([1] if is_batched else []), *dims)
    try:
        if isinstance(value, dict) and "b64" in value and "content" not in value:
            data = base64.b64decode(content, validate=True)
            if tensor.datatype == "BYTES":
                array = np.empty(1, object)
                array[0] = data
            else:
                array = np.frombuffer(data, DTYPES[CODES[tensor.datatype]])
        elif tensor.datatype == "BYTES":
            texts = np.array(content, dtype=object)
            if not all(isinstance(text, str) for text in texts.ravel()):
                raise ValueError("it must have strings")
            array = np.frompyfunc(str.encode, 1, 1)(texts)
        else:
            array = np.array(content, DTYPES[CODES[tensor.datatype]])
        # One open dimension follows from the number of elements. With several, nested lists say it.
        if list(dims).count(-1) > 1:
            shape = (*([1] if is_batched else []), *array.shape)
        return QuestionTensor.of(tensor.name, tensor.datatype, np.asarray(array).reshape(shape))
    except (ValueError, TypeError, OverflowError) as error:
        raise BadData(f"{where} is {tensor.datatype} {list(shape)} and not as given: {error}") from error


def _expected(name: str, value: Any, where: str) -> NDArray[Any]:
    content = value.get("content") if isinstance(value, dict) else value
    try:
        array = np.array(content)
        if array.dtype.kind == "U":
            array = np.frompyfunc(str.encode, 1, 1)(array.astype(object))
        if array.dtype.kind not in "biufO" or content is None:
            raise ValueError(f"{content!r:.60}")
    except (ValueError, TypeError) as error:
        raise BadData(f"{where}: expected output '{name}' is not an array: {error}") from error
    return array


# The number of the format of captured requests.
CAPTURE_FORMAT = 1
# About thirty years; nobody captures for longer, and nanoseconds of it fit into 64 bits.
_LONGEST_S = 1e9


def read_capture(path: Path, model: str, speed: float) -> tuple[DataMix, Schedule]:
    """Read the requests to a model that a server has captured, and their times. Raises `BadData`, `BadLoad` and
    OSError.
    """
    times: list[float] = []
    kinds: list[int] = []
    known: dict[str, int] = {}
    requests: list[RequestData] = []
    # What is no UTF-8 is no JSON either, or a text in a field that is left out.
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                entry = _object(line, f"{path}, line {number}")
            except BadData:
                # A server that was killed may have left a part of its last line.
                if number > 1 and not line.endswith("\n"):
                    break
                raise
            if number == 1:
                if entry.get("format") != CAPTURE_FORMAT:
                    raise BadData(f"{path} is not a capture of this version: its format is {entry.get('format')!r}")
                continue
            if entry.get("model") != model:
                continue
            key = json.dumps(entry.get("inputs"))
            if key not in known:
                known[key] = len(requests)
                requests.append(_request_of(entry, f"{path}, line {number}"))
            times.append(_time_of(entry, f"{path}, line {number}"))
            kinds.append(known[key])
    if not requests:
        raise BadData(f"{path} has no request to model '{model}'")
    # A request is written when it is complete, so neighbours may have changed places.
    at = np.argsort(times, kind="stable")
    schedule = Schedule.of(str(path), [times[each] for each in at], speed, np.array(kinds, np.int32)[at])
    return DataMix(requests, np.array(kinds, np.int32)[at]), schedule


def _time_of(entry: Mapping[str, Any], where: str) -> float:
    at_s = entry.get("at_s")
    if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not abs(at_s) <= _LONGEST_S:
        raise BadData(f"{where} has no time `at_s` in seconds: {at_s!r:.40}")
    return float(at_s)


def _request_of(entry: Mapping[str, Any], where: str) -> RequestData:
    tensors = []
    try:
        for each in entry["inputs"]:
            name, datatype, shape = each["name"], each["datatype"], each["shape"]
            if not isinstance(name, str) or datatype not in CODES:
                raise BadData(f"{where}: an input of datatype {datatype!r:.40}")
            if not isinstance(shape, list) or not all(type(dim) is int and dim >= 0 for dim in shape):
                raise BadData(f"{where}: an input of shape {shape!r:.40}")
            data = base64.b64decode(each["b64"], validate=True)
            tensor = QuestionTensor(name, datatype, tuple(shape), data)
            tensor.array()
            tensors.append(tensor)
    except BadData:
        raise
    except (LookupError, TypeError, ValueError, OverflowError, MoonpoolError) as error:
        raise BadData(f"{where} is not a captured request: {error}") from error
    return RequestData(tensors)
