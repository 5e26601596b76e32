"""The JSON of a request for inference, and the tensors that it describes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from moonpool.ipc.tensors import BYTES, CODES, ITEMSIZE
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.frontend.http.json_text import NotJson, loads
from moonpool.runtime.frontend.parameters import request_details
from moonpool.runtime.frontend.tensors import BadJson, WrongSize, code_of, of_bytes, of_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moonpool.runtime.config import ModelConfig
    from moonpool.runtime.frontend.http.exchange import Body
    from moonpool.runtime.frontend.http.prepared import Prepared
    from moonpool.runtime.frontend.tensors import Bytes, Input
    from moonpool.runtime.request import Details

Place = tuple[str, int, int]
_UINT64 = 2**64 - 1
# Inputs of a request, and outputs; of a shape's dimensions far fewer are good.
_MOST_TENSORS = 65_536


class InputPlan(NamedTuple):
    """Where the values of an input are: in the JSON, in the body behind it, or in a client's region."""

    name: str
    code: int
    shape: list[int]
    values: Input | None
    size_bytes: int
    place: Place | None


class OutputPlan(NamedTuple):
    """How a client wants an output."""

    is_binary: bool
    classes: int = 0
    place: Place | None = None


class Plan:
    """What the JSON of a request says. It may serve many requests of the same JSON: nothing else changes it."""

    __slots__ = (
        "details",
        "has_shared",
        "inputs",
        "is_plain",
        "outputs",
        "places",
        "prepared",
        "request_id",
        "rest",
        "wanted",
    )

    def __init__(self, request: Any) -> None:
        """From the value of the JSON. Raises `BadJson`, `InvalidRequest`."""
        # Kept by whoever made a request of it.
        self.prepared: Prepared | None = None
        root = request if isinstance(request, dict) else {}
        if "id" in root and type(root["id"]) is not str:
            raise BadJson("id", _WRONG["string"])
        self.request_id: str = root.get("id", "")
        if type(root.get("parameters", {})) is not dict:
            raise NotJson("failed to get request params.: attempt to get members for non-object")
        parameters = root.get("parameters", {})
        self.details: Details | None = request_details(self.request_id, parameters)
        self.inputs = [_input(each) for each in _array(root, "inputs")]
        names = set()
        for each in self.inputs:
            if each.name in names:
                raise InvalidRequest(
                    f"[request id: {self.request_id or '<id_unknown>'}] input '{each.name}' "
                    "already exists in request"
                )
            names.add(each.name)
        self.has_shared = any(each.place is not None for each in self.inputs)
        is_binary = parameters.get("binary_data_output", False)
        if type(is_binary) is not bool:
            raise BadJson("binary_data_output", _WRONG["boolean"])
        # How all outputs are wanted where none is named, and those that are.
        self.rest = OutputPlan(is_binary)
        wanted = _array(root, "outputs") if "outputs" in root else []
        self.wanted = dict(map(_output, wanted))
        self.places = {
            name: each.place for name, each in self.wanted.items() if each.place is not None
        }
        self.outputs = list(self.wanted) or None
        # Whether no output is to be found in the JSON of the response.
        self.is_plain = all(
            (each.is_binary or each.place is not None) and not each.classes
            for each in (self.wanted.values() or (self.rest,))
        )

    def arrays(self, model: str, body: Bytes, offset: int) -> dict[str, Input]:
        """The inputs that are no client's memory: views on `body`, from `offset` on, where they are binary.

        Raises `InvalidRequest`.
        """
        arrays: dict[str, Input] = {}
        end = len(body)
        for name, code, shape, values, size_bytes, place in self.inputs:
            if values is not None:
                arrays[name] = values
            elif place is None:
                if offset + size_bytes > end:
                    raise InvalidRequest(
                        f"unexpected size for input '{name}', expecting {offset + size_bytes - end} "
                        f"additional bytes for model '{model}'"
                    )
                arrays[name] = of_bytes(name, code, shape, body, offset, size_bytes)
                offset += size_bytes
        if offset != end:
            raise InvalidRequest(f"unexpected additional input data for model '{model}'")
        return arrays


def read_plan(text: Body) -> Plan:
    """The plan of a request. Raises `NotJson`, `BadJson`, `InvalidRequest`."""
    return Plan(loads(text))


def raw_plan(config: ModelConfig, body: Body) -> tuple[Plan, Body]:
    """The plan of a request without JSON, whose body is the only input; and the bytes that this travels as.

    What comes back is binary. Raises `InvalidRequest`.
    """
    if len(config.inputs) != 1:
        raise InvalidRequest(
            "[request id: <id_unknown>] Raw request must only have 1 input (found 1) to be deduced but "
            f"got {len(config.inputs)} inputs in '{config.name}' model configuration"
        )
    tensor = config.inputs[0]
    code = CODES[tensor.datatype]
    shape = list(tensor.dims)
    if code == BYTES:
        # The whole body is one string.
        shape = [1 if dim < 0 else dim for dim in shape]
        body = len(body).to_bytes(4, "little") + body
    elif shape.count(-1) == 1:
        row_bytes = ITEMSIZE[code] * prod(dim for dim in shape if dim >= 0)
        shape[shape.index(-1)] = len(body) // row_bytes if row_bytes else 0
    if config.max_batch_size:
        shape.insert(0, 1)
    expected_bytes = ITEMSIZE[code] * prod(shape)
    if code != BYTES and len(body) != expected_bytes:
        raise WrongSize("raw_input", expected_bytes, len(body))
    described = {
        "name": tensor.name,
        "datatype": tensor.datatype,
        "shape": shape,
        "parameters": {"binary_data_size": len(body)},
    }
    return Plan({"inputs": [described], "parameters": {"binary_data_output": True}}), body


_WRONG = {
    "string": "attempt to access JSON non-string as string",
    "boolean": "attempt to access JSON non-boolean as boolean",
    "number": "attempt to access JSON non-unsigned-integer as unsigned-integer",
    "array": "attempt to access JSON non-array as array",
}


def _missing(name: str) -> BadJson:
    return BadJson(name, f"attempt to access non-existing object member '{name}'")


def _array(root: Mapping[str, Any], name: str) -> list[Any]:
    if name not in root:
        raise _missing(name)
    value = root[name]
    if type(value) is not list:
        raise BadJson(name, _WRONG["array"])
    if len(value) > _MOST_TENSORS:
        raise InvalidRequest(f"'{name}' has {len(value)} elements, and {_MOST_TENSORS} is the most")
    return value


def _object(root: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A member that is an object; an empty one for everything else."""
    value = root.get(name)
    return value if type(value) is dict else {}


def _text(root: Mapping[str, Any], name: str) -> str:
    if name not in root:
        raise _missing(name)
    value = root[name]
    if type(value) is not str:
        raise BadJson(name, _WRONG["string"])
    return value


def _number(root: Mapping[str, Any], name: str) -> int:
    """A member that is a whole number; 0 where there is none."""
    value = root.get(name, 0)
    if type(value) is not int or not 0 <= value <= _UINT64:
        raise BadJson(name, _WRONG["number"])
    return value


def _place(parameters: Mapping[str, Any]) -> Place | None:
    if "shared_memory_region" not in parameters:
        return None
    return (
        _text(parameters, "shared_memory_region"),
        _number(parameters, "shared_memory_offset"),
        _number(parameters, "shared_memory_byte_size"),
    )


_FIELDS = "'data', 'binary_data_size' in 'parameters', 'shared_memory_region' in 'parameters'. But "


def _input(value: object) -> InputPlan:
    given: dict[str, Any] = value if isinstance(value, dict) else {}
    parameters = _object(given, "parameters")
    found = ["data"] if "data" in given else []
    found += [key for key in ("binary_data_size", "shared_memory_region") if key in parameters]
    if len(found) != 1:
        shown = "set " + " ".join(f"'{key}'" for key in found) if found else "no field is set"
        raise InvalidRequest(f"Input must set only one of the following fields: {_FIELDS}{shown}")
    name = _text(given, "name")
    code = code_of(_text(given, "datatype"), name)
    shape = _array(given, "shape")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= _UINT64:
            raise BadJson("shape", _WRONG["number"])
    if found == ["data"]:
        return InputPlan(name, code, shape, of_values(name, code, shape, given["data"]), 0, None)
    place = _place(parameters)
    size_bytes = 0 if place else _number(parameters, "binary_data_size")
    return InputPlan(name, code, shape, None, size_bytes, place)


def _output(value: object) -> tuple[str, OutputPlan]:
    given: dict[str, Any] = value if isinstance(value, dict) else {}
    name = _text(given, "name")
    parameters = _object(given, "parameters")
    is_binary = parameters.get("binary_data", False)
    if type(is_binary) is not bool:
        raise BadJson("binary_data", _WRONG["boolean"])
    classes = parameters.get("classification", 0)
    if type(classes) is not int or not 0 <= classes <= _UINT64:
        raise NotJson(f"Unable to set 'classification': {_WRONG['number']}")
    place = _place(parameters)
    for other in ("binary_data", "classification"):
        if place is not None and parameters.get(other):
            raise InvalidRequest(f"Output can't set both 'shared_memory_region' and '{other}'")
    return name, OutputPlan(is_binary, classes, place)
