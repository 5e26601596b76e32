"""Reads requests for inference over HTTP: their JSON, and the tensors that it describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from moonpool.ipc.extension import is_wanted, load_if_there
from moonpool.ipc.tensors import BYTES, CODES, ITEMSIZE
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.details import details_of
from moonpool.runtime.model.request import Details, Parameter
from moonpool.runtime.server.http.head import Body
from moonpool.runtime.server.http.json_text import UINT64, WRONG, NotJson, dumps, loads
from moonpool.runtime.server.inference import request as requests
from moonpool.runtime.server.inference.request import (
    END,
    MAX_SEQUENCE_ID_BYTES,
    START,
    InputPlan,
    LongSequenceId,
    RegionPlace,
)
from moonpool.runtime.server.inference.tensors import (
    BadJson,
    Bytes,
    Input,
    LongArray,
    WrongSize,
    code_of,
    of_bytes,
    of_values,
)

# Reads the JSON of most requests with binary tensors in one step; None for what `loads` has to read. Only compiled.
_extension = load_if_there("moonpool.runtime.server.http._scan") if is_wanted() else None
scan: Callable[[bytes], Any] | None = None if _extension is None else _extension.scanner(InputPlan, CODES)
# The most inputs, outputs or dimensions of a request. No model needs nearly so many.
_MOST_ELEMENTS = 65_536
# Parameters that the protocol itself uses. The model does not get them.
_OWN = frozenset({"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"})
# What binary requests have, mostly.
_BINARY_ALONE = ["binary_data_output"]
_RESERVED = "triton_"


class OutputPlan(NamedTuple):
    """The form in which a client wants an output."""

    is_binary: bool
    classes: int = 0
    place: RegionPlace | None = None


_BINARY, _VALUES = OutputPlan(True), OutputPlan(False)


class HttpRequestPlan(requests.RequestPlan):
    """The JSON of a request."""

    __slots__ = ("id_text", "is_plain", "request_id", "rest", "wanted")

    def __init__(self, request: Any) -> None:
        """Read the value of the JSON, or what `scan` has found in it. Raises `NotJson`, `BadJson`, `InvalidRequest`."""
        self.clear()
        self.wanted: dict[str, OutputPlan] = {}
        if type(request) is tuple:
            self._take(request)
            return
        root: dict[str, Any] = request if type(request) is dict else {}
        self.request_id: str = root.get("id", "")
        if type(self.request_id) is not str:
            raise BadJson("id", WRONG[str])
        parameters = root.get("parameters")
        if parameters is None and "parameters" not in root:
            parameters = {}
        if type(parameters) is not dict:
            raise NotJson(f"failed to get request params.: {WRONG[dict]}")
        self.details = request_details(self.request_id, parameters)
        # As the response has it; empty without an id.
        self.id_text = dumps(self.request_id) if self.request_id else b""
        self._add_inputs(_array(root, "inputs"))
        is_binary = _flag(parameters, "binary_data_output")
        # The form of all outputs if none is named, and of each that is.
        self.rest = _BINARY if is_binary else _VALUES
        # If the JSON of the response has no values of outputs.
        self.is_plain = True
        if "outputs" in root:
            self._add_outputs(_array(root, "outputs"))
        if not self.wanted:
            self.is_plain = is_binary

    def _take(self, found: tuple[str, bytes, dict[str, Any], list[InputPlan], dict[str, bool]]) -> None:
        """Take what was found in a request of the usual form: the id twice, parameters, inputs, and which of the
        outputs that are named are to be binary.
        """
        self.request_id, self.id_text, parameters, self.inputs, outputs = found
        self.details = request_details(self.request_id, parameters)
        is_binary = _flag(parameters, "binary_data_output")
        self.rest = _BINARY if is_binary else _VALUES
        self.is_plain = True
        for name in outputs:
            if outputs[name]:
                self.wanted[name] = _BINARY
            else:
                self.wanted[name] = _VALUES
                self.is_plain = False
        if outputs:
            self.outputs = list(outputs)
        else:
            self.is_plain = is_binary

    def _add_inputs(self, values: list[Any]) -> None:
        names = set()
        for value in values:
            plan = _input(value)
            self.inputs.append(plan)
            names.add(plan[0])
            if plan[3] is not None:
                self.has_shared = True
        if len(names) != len(self.inputs):
            self._refuse_repeated()

    def _refuse_repeated(self) -> None:
        names = set()
        for each in self.inputs:
            if each.name in names:
                raise InvalidRequest(
                    f"[request id: {self.request_id or '<id_unknown>'}] input '{each.name}' already exists in request"
                )
            names.add(each.name)

    def _add_outputs(self, values: list[Any]) -> None:
        for value in values:
            name, how = _output(value)
            self.wanted[name] = how
        for name, how in self.wanted.items():
            if how is _BINARY:
                continue
            if how.place is not None:
                self.places[name] = how.place
            if how.classes:
                self.has_classes = True
            if how.classes or not (how.is_binary or how.place):
                self.is_plain = False
        self.outputs = list(self.wanted) or None

    def arrays(self, model: str, body: Bytes, offset: int) -> dict[str, Input]:
        """Return the inputs that do not lie in memory of a client. Binary ones are views on `body`, from `offset` on.

        Raises `InvalidRequest`.
        """
        arrays: dict[str, Input] = {}
        end = len(body)
        for name, code, shape, place, size_bytes, values in self.inputs:
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


def read_plan(text: Body) -> HttpRequestPlan:
    """Return the plan of a request with this JSON. Raises `NotJson`, `BadJson`, `InvalidRequest`."""
    found = scan(text) if scan is not None and type(text) is bytes else None
    return HttpRequestPlan(loads(text) if found is None else found)


def raw_plan(config: ModelConfig, body: Body) -> tuple[HttpRequestPlan, Body]:
    """Return the plan of a request without JSON, whose body is the only input, and the bytes that the input travels as.

    Outputs come back binary. Raises `InvalidRequest`.
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
    return HttpRequestPlan({"inputs": [described], "parameters": {"binary_data_output": True}}), body


_MISSING: Any = object()


def _missing(name: str) -> BadJson:
    return BadJson(name, f"attempt to access non-existing object member '{name}'")


def _array(root: dict[str, Any], name: str) -> list[Any]:
    value = root.get(name, _MISSING)
    if type(value) is list and len(value) <= _MOST_ELEMENTS:
        return value
    if value is _MISSING:
        raise _missing(name)
    if not isinstance(value, list | LongArray):
        raise BadJson(name, WRONG[list])
    raise InvalidRequest(f"'{name}' has {len(value)} elements, and {_MOST_ELEMENTS} is the most")


def _object(root: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a member that is an object, or an empty object for anything else."""
    value = root.get(name)
    return value if type(value) is dict else {}


def _text(root: dict[str, Any], name: str) -> str:
    value = root.get(name, _MISSING)
    if type(value) is str:
        return value
    raise _missing(name) if value is _MISSING else BadJson(name, WRONG[str])


def _number(root: dict[str, Any], name: str) -> int:
    """Return a member that is a whole number, or 0 if it is missing. Raises `BadJson`."""
    value = root.get(name, 0)
    if type(value) is not int or not 0 <= value <= UINT64:
        raise BadJson(name, WRONG[int])
    return value


def _place(parameters: dict[str, Any]) -> RegionPlace | None:
    if "shared_memory_region" not in parameters:
        return None
    return RegionPlace(
        _text(parameters, "shared_memory_region"),
        _number(parameters, "shared_memory_offset"),
        _number(parameters, "shared_memory_byte_size"),
    )


_FIELDS = "'data', 'binary_data_size' in 'parameters', 'shared_memory_region' in 'parameters'. But "


def _input(value: object) -> InputPlan:
    given: dict[str, Any] = value if type(value) is dict else {}
    parameters = _object(given, "parameters")
    has_data, has_region = "data" in given, "shared_memory_region" in parameters
    if has_data + has_region + ("binary_data_size" in parameters) != 1:
        raise _ambiguous(given, parameters)
    name = _text(given, "name")
    code = code_of(_text(given, "datatype"), name)
    shape = _array(given, "shape")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim <= UINT64:
            raise BadJson("shape", WRONG[int])
    if has_data:
        values = of_values(name, code, shape, given["data"])
        return InputPlan(name, code, shape, None, values=values)
    place = _place(parameters) if has_region else None
    size_bytes = 0 if has_region else _number(parameters, "binary_data_size")
    # The class' own way would be interpreted.
    return tuple.__new__(InputPlan, (name, code, shape, place, size_bytes, None))


def _ambiguous(given: dict[str, Any], parameters: dict[str, Any]) -> InvalidRequest:
    found = ["data"] if "data" in given else []
    found += [key for key in ("binary_data_size", "shared_memory_region") if key in parameters]
    shown = "set " + " ".join([f"'{key}'" for key in found]) if found else "no field is set"
    return InvalidRequest(f"Input must set only one of the following fields: {_FIELDS}{shown}")


def _output(value: object) -> tuple[str, OutputPlan]:
    given: dict[str, Any] = value if type(value) is dict else {}
    name = _text(given, "name")
    parameters = _object(given, "parameters")
    is_binary = parameters.get("binary_data", False)
    if type(is_binary) is not bool:
        raise BadJson("binary_data", WRONG[bool])
    classes = parameters.get("classification", 0)
    if type(classes) is not int or not 0 <= classes <= UINT64:
        raise NotJson(f"Unable to set 'classification': {WRONG[int]}")
    place = _place(parameters)
    if place is None and not classes:
        return name, _BINARY if is_binary else _VALUES
    for other in ("binary_data", "classification"):
        if place is not None and parameters.get(other):
            raise InvalidRequest(f"Output can't set both 'shared_memory_region' and '{other}'")
    return name, OutputPlan(is_binary, classes, place)


def request_details(request_id: str, parameters: dict[str, Any]) -> Details | None:
    """Return the parameters of a request as its details. Raises `InvalidRequest`, `BadJson`, `LongSequenceId`.

    `sequence_id` (a number or a text), `sequence_start`, `sequence_end`, `priority` and `timeout` (µs in the queue)
    mean what they mean in Triton. The model gets the others.
    """
    if not parameters or [*parameters] == _BINARY_ALONE:
        return details_of(request_id, 0, 0, 0, 0, None, None)
    flags = 0
    if _flag(parameters, "sequence_start"):
        flags |= START
    if _flag(parameters, "sequence_end"):
        flags |= END
    return details_of(
        request_id,
        _sequence(parameters),
        flags,
        _number(parameters, "timeout"),
        _number(parameters, "priority"),
        _custom(parameters),
        None,
    )


def _custom(parameters: Mapping[str, object]) -> dict[str, Parameter]:
    custom = {}
    for name, value in parameters.items():
        if name in _OWN:
            continue
        if name.startswith(_RESERVED):
            raise InvalidRequest(
                f"parameter keys starting with '{_RESERVED}' are reserved for Triton usage and should not be specified."
            )
        if type(value) not in (bool, int, float, str):
            raise InvalidRequest(
                f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
            )
        custom[name] = value
    return custom  # type: ignore[return-value]


def _flag(parameters: Mapping[str, object], name: str) -> bool:
    value = parameters.get(name, False)
    if type(value) is not bool:
        raise BadJson(name, WRONG[bool])
    return value


def _sequence(parameters: Mapping[str, object]) -> int | str:
    value = parameters.get("sequence_id", 0)
    if type(value) is str:
        if len(value.encode()) > MAX_SEQUENCE_ID_BYTES:
            raise LongSequenceId
        return value
    if type(value) is not int or not 0 <= value <= UINT64:
        raise BadJson("sequence_id", WRONG[str])
    return value
