"""Reads requests for inference over gRPC: their parameters, and where their tensors lie."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from moonpool.ipc.messages import MAX_PARAMETERS
from moonpool.ipc.tensors import BYTES, CODES, DTYPES, MAX_DIMS
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.details import details_of, with_id
from moonpool.runtime.model.protobuf import BadProtobuf, service_messages
from moonpool.runtime.model.request import Details, InferenceRequest, Parameter
from moonpool.runtime.server.grpc import wire
from moonpool.runtime.server.grpc.wire import MOST_PARTS, parse, tensors_from
from moonpool.runtime.server.inference import request as requests
from moonpool.runtime.server.inference.request import (
    END,
    MAX_SEQUENCE_ID_BYTES,
    START,
    Hosted,
    InputPlan,
    LongSequenceId,
    RegionPlace,
    refused,
)
from moonpool.runtime.server.inference.tensors import Input, WrongSize, of_bytes
from moonpool.runtime.server.service import Service

kserve = service_messages()
# Fields of ModelInferRequest, of its inputs and of its outputs, as tags: eight times the number, and 2 if they have a
# length.
_MODEL, _VERSION, _ID, _PARAMETERS, _INPUTS, _OUTPUTS, _TENSORS = range(10, 59, 8)
_NAME, _DATATYPE, _SHAPE, _DIM = 10, 18, 26, 24
# The parameters of an input, and of an output: entries of a map. Their keys and values, and what a value may be.
_INPUT_PARAMETER, _OUTPUT_PARAMETER, _KEY, _VALUE, _FLAG, _NUMBER, _TEXT = 34, 18, 10, 18, 8, 16, 26
# An input with more fields is for the library. Most have three.
_USUAL_FIELDS = 8
_MANY_BYTES = 1 << 18
# For fewer dimensions the error is Triton's.
_MANY_DIMS = 1024
# The fields of InferTensorContents, their datatypes, and how Triton's errors name those. FP16 and BF16 have no field.
_CONTENTS = {
    "bool_contents": (("BOOL",), "BOOL"),
    "int_contents": (("INT8", "INT16", "INT32"), "INT32"),
    "int64_contents": (("INT64",), "INT64"),
    "uint_contents": (("UINT8", "UINT16", "UINT32"), "UINT32"),
    "uint64_contents": (("UINT64",), "UINT64"),
    "fp32_contents": (("FP32",), "FP32"),
    "fp64_contents": (("FP64",), "FP64"),
    "bytes_contents": (("BYTES",), "BYTES"),
}
_LONG_ID = 1000
_UINT64 = 2**64 - 1
_EMPTY_FINAL = "triton_enable_empty_final_response"
_RESERVED = "triton_"
_FLAGS = {"sequence_start": START, "sequence_end": END}


class Parameters(NamedTuple):
    """The parameters of a request. The model gets those in `custom`."""

    sequence_id: int | str = 0
    flags: int = 0
    priority: int = 0
    timeout_us: int = 0
    wants_empty_final: bool = False
    custom: dict[str, Parameter] = {}  # noqa: RUF012 - nobody changes it


class GrpcRequestPlan(requests.RequestPlan):
    """Everything of a request but the bytes of its tensors."""

    __slots__ = ("classes", "contents", "is_large", "parameters")

    def __init__(
        self,
        inputs: list[InputPlan | None],
        outputs: list[str | None],
        places: dict[str, RegionPlace],
        rest: Any,
        wants_empty_final: bool = False,
    ) -> None:
        """Plan inputs and outputs, and outputs in memory of the client.

        `rest` is a ModelInferRequest with those that are None, and all parameters; it has none of them if
        `wants_empty_final` is the only one. It is None if there is nothing in it. Raises `InvalidRequest`.
        """
        self.clear()
        self.parameters = _EMPTY_FINAL_ALONE if wants_empty_final else _NONE
        # Inputs whose values are in the message itself, by their places among the inputs.
        self.contents: dict[int, Any] = {}
        # Outputs of which the client wants the best classes, and how many.
        self.classes: dict[str, int] = {}
        # If reading its tensors may take long.
        self.is_large = False
        self.places = places
        if rest is not None:
            if not wants_empty_final:
                self.parameters = _parameters_of(rest.parameters)
            self.details = self._details("", None)
            inputs = self._planned(inputs, rest.inputs)
            for output in rest.outputs:
                self._add_output(output)
            names = iter([output.name for output in rest.outputs])
            outputs = [next(names) if name is None else name for name in outputs]
        self.inputs = inputs  # type: ignore[assignment]
        sizes = [each.place.size_bytes for each in self.inputs if each.place is not None]
        self.has_shared, self.is_large = bool(sizes), sum(sizes) > _MANY_BYTES
        if outputs:
            named: Any = outputs
            self.outputs = named if len(named) == len(set(named)) else list(dict.fromkeys(named))

    def _planned(self, inputs: list[InputPlan | None], tensors: Any) -> list[InputPlan | None]:
        """Return the inputs, with plans of these tensors in the places of None."""
        inputs, others = inputs.copy(), iter(tensors)
        for index, each in enumerate(inputs):
            if each is None:
                tensor = next(others)
                inputs[index] = _input_plan(tensor)
                if tensor.HasField("contents"):
                    self.contents[index] = tensor
        return inputs

    def _add_output(self, output: Any) -> None:
        place = _place_of(output.name, output.parameters)
        if "classification" in output.parameters:
            parameter = output.parameters["classification"]
            if parameter.WhichOneof("parameter_choice") != "int64_param":
                raise InvalidRequest("invalid value type for 'classification' parameter, expected int64_param")
            if parameter.int64_param <= 0:
                raise InvalidRequest("invalid value for 'classification' parameter, expected >= 0")
            if place is not None:
                raise InvalidRequest("output can't set both 'shared_memory_region' and 'classification'")
            self.classes[output.name] = parameter.int64_param
            self.has_classes = True
        if place is not None:
            self.places[output.name] = place

    def _details(self, request_id: str, forwarded: Mapping[str, str] | None) -> Details | None:
        own = self.parameters
        custom = {**own.custom, **forwarded} if forwarded else own.custom
        return details_of(request_id, own.sequence_id, own.flags, own.timeout_us, own.priority, custom)

    def details_of(self, request_id: str, forwarded: Mapping[str, str] | None) -> Details | None:
        """Return the details of one of these requests. Raises `InvalidRequest`."""
        if forwarded or len(request_id) > _LONG_ID:
            return self._details(request_id, forwarded)
        # All others have been checked, and such an id fits into every message.
        return self.details if not request_id else with_id(self.details, request_id)


class InferMessage:
    """One ModelInferRequest: the model and the id that it names, and, once the model is found, the request.

    A large one may be received into memory that stubs see: `begun` reads what lies before its tensors, and with `place`
    and `complete` it becomes whole. A stub may write to that memory at any time, and must not make another request of
    this one, which may ask another model or name memory of clients. So nothing is read there but the sizes of tensors.
    """

    __slots__ = (
        "_inputs",
        "_outputs",
        "_places",
        "_rest",
        "_wants_empty_final",
        "data",
        "is_placed",
        "model",
        "plan",
        "read_ns",
        "request_id",
        "tensors",
        "version",
    )

    def __init__(self, data: bytes, is_cut: bool = False) -> None:
        """Take the message apart. Raises `BadProtobuf`, and `InvalidRequest` if it has too many fields.

        With `is_cut`, it is the beginning of one, and nothing is read behind the place of its first tensor.
        """
        # The time of `time.monotonic_ns`.
        self.read_ns = time.monotonic_ns()
        self.data: Any = data
        self.is_placed = False
        self.plan: GrpcRequestPlan | None = None
        self.model = self.version = self.request_id = ""
        self._inputs: list[InputPlan | None] = []
        self._outputs: list[str | None] = []
        # Outputs in memory of the client.
        self._places: dict[str, RegionPlace] = {}
        # The places of the tensors, each as (offset, size in bytes).
        self.tensors: list[tuple[int, int]] = []
        self._rest: Any = None
        # Triton's client in C++ says so in each request.
        self._wants_empty_final = False
        try:
            rest = self._take_apart(wire.FieldReader(data, 0, len(data), is_cut), is_cut)
            if rest:
                self._rest = parse(kserve.ModelInferRequest, b"".join(rest))
        except (DecodeError, UnicodeDecodeError):
            raise BadProtobuf("it does not fit its description") from None

    def _take_apart(self, reader: wire.FieldReader, is_cut: bool) -> list[bytes]:
        """Read the fields of the message. Returns those that are for the library."""
        rest: list[bytes] = []
        parameters: list[bytes] = []
        others = 0
        inner = wire.FieldReader(self.data, 0, 0)
        fields = 0
        while reader.next():
            fields += 1
            if fields > MOST_PARTS:
                raise BadProtobuf(f"more than {MOST_PARTS} fields")
            tag = reader.tag
            if tag == _TENSORS:
                self.tensors.append((reader.begin, reader.size))
                if is_cut:
                    break
            elif tag == _INPUTS:
                self._inputs.append(_usual_input(reader.inner(inner)))
                if self._inputs[-1] is None:
                    rest.append(reader.field())
            elif tag == _OUTPUTS:
                self._outputs.append(_usual_output(reader.inner(inner), self._places))
                if self._outputs[-1] is None:
                    rest.append(reader.field())
            elif tag == _MODEL:
                self.model = reader.text()
            elif tag == _VERSION:
                self.version = reader.text()
            elif tag == _ID:
                self.request_id = reader.text()
            elif tag == _PARAMETERS:
                parameters.append(reader.field())
                flags: dict[str, Any] = {}
                if _add_parameter(reader, flags) and type(flags.get(_EMPTY_FINAL)) is bool:
                    self._wants_empty_final = flags[_EMPTY_FINAL]
                else:
                    others += 1
        if others:
            self._wants_empty_final = False
            rest += parameters
        return rest

    @property
    def tensors_at(self) -> int:
        """The place of the first tensor."""
        return self.tensors[0][0]

    def place(self, array: NDArray[np.uint8]) -> None:
        """Have the message received into this array, which stubs see."""
        self.data = array
        self.is_placed = True

    @property
    def memory(self) -> memoryview:
        """The memory that a placed message is received into."""
        memory: memoryview = self.data.data
        return memory

    def complete(self) -> InferMessage:
        """Return the message with all its tensors, once it has come. Raises `BadProtobuf`, `InvalidRequest`."""
        self.tensors = tensors_from(self.memory, self.tensors[0])
        self.read_ns = time.monotonic_ns()
        return self

    def read(self) -> GrpcRequestPlan:
        """Return the plan of the request. Raises `InvalidRequest`."""
        if self.plan is None:
            self.plan = GrpcRequestPlan(self._inputs, self._outputs, self._places, self._rest, self._wants_empty_final)
        return self.plan

    def usual(self, service: Service, hosted: Hosted, forwarded: Mapping[str, str]) -> InferenceRequest | None:
        """Return the request for this model if it is usual (`RequestPlan.usual`), else None.

        Its inputs are views on the message. `forwarded` are parameters from headers. Raises as `request`.
        """
        plan = self.read()
        if forwarded or plan.contents:
            return None
        details = plan.details_of(self.request_id, forwarded)
        tensors = self.tensors
        return plan.usual(service, hosted, self.data, 0, tensors, details, has_views=self.is_placed)

    def request(self, service: Service, hosted: Hosted, forwarded: Mapping[str, str]) -> InferenceRequest:
        """Return the request for this model, which is checked. Its inputs are views on the message.

        Raises `InvalidRequest`, `SharedMemoryError`.
        """
        plan = self.read()
        try:
            inputs = self._arrays(plan, service, hosted)
        except InvalidRequest as error:
            raise self._refused(error, plan, hosted) from None
        details = plan.details_of(self.request_id, forwarded)
        return plan.make(service, hosted, inputs, details)

    def _arrays(self, plan: GrpcRequestPlan, service: Service, hosted: Hosted) -> dict[str, Input]:
        tensors, data = self.tensors, self.data
        inputs: dict[str, Input] = {}
        used = 0
        for index, (name, code, shape, place, *_) in enumerate(plan.inputs):
            if index in plan.contents:
                inputs[name] = self._of_contents(plan, index)
            elif place is not None:
                inputs[name] = _of_memory(service, hosted, name, code, shape, place)
            elif used < len(tensors):
                offset, size_bytes = tensors[used]
                used += 1
                if not code:
                    raise InvalidRequest("unknown datatype")
                inputs[name] = of_bytes(name, code, shape, data, offset, size_bytes)
            else:
                raise _Early(f"unable to find data for input tensor '{name}' for model '{self.model}' in request.")
        if len(inputs) != len(plan.inputs):
            raise InvalidRequest("an input twice")
        return inputs

    def _of_contents(self, plan: GrpcRequestPlan, index: int) -> Input:
        """Return an input whose values are in the message itself."""
        name, code, shape, place, *_ = plan.inputs[index]
        where = f"for model '{self.model}'"
        if place is not None:
            raise _Early(f"unexpected 'content' provided when using shared memory for input tensor '{name}' {where}")
        if self.tensors:
            raise _Early(f"contents field must not be specified when using raw_input_contents for '{name}' {where}")
        tensor = plan.contents[index]
        datatype, contents = tensor.datatype, tensor.contents
        for field, (datatypes, shown) in _CONTENTS.items():
            if datatype not in datatypes and len(getattr(contents, field)):
                raise _Early(
                    f"unexpected explicit tensor data for input tensor '{name}' {where} of type "
                    f"'{shown}', expected datatype '{datatype}'"
                )
        fields = [field for field, (names, _) in _CONTENTS.items() if datatype in names]
        values = getattr(contents, fields[0]) if fields else ()
        if not len(values):
            raise _Early(f"unable to find data for input tensor '{name}' {where} in request.")
        data = _packed(name, code, values)
        return of_bytes(name, code, shape, data, 0, len(data))

    def _refused(self, error: InvalidRequest, plan: GrpcRequestPlan, hosted: Hosted) -> InvalidRequest:
        """Return the first error that Triton finds, which may be another one than was found here."""
        if isinstance(error, _Early):
            return error
        try:
            _check_described(plan, hosted)
        except InvalidRequest as found:
            error = found
        return refused(error, hosted, self.request_id)


def begun(first: bytes) -> InferMessage | None:
    """Return the message with these first bytes, without its tensors; None if the first tensor begins behind them.

    Raises as `InferMessage`.
    """
    message = InferMessage(first, True)
    return message if message.tensors else None


def _usual_input(reader: wire.FieldReader) -> InputPlan | None:
    """Return an input that has nothing but a name, a datatype, a shape and a place in memory of the client, else
    None.
    """
    name = datatype = ""
    shape: list[int] = []
    parameters: dict[str, Any] = {}
    fields = 0
    while reader.next():
        fields += 1
        tag = reader.tag
        if fields > _USUAL_FIELDS:
            return None
        if tag == _NAME:
            name = reader.text()
        elif tag == _DATATYPE:
            datatype = reader.text()
        elif tag == _INPUT_PARAMETER:
            if not _add_parameter(reader, parameters):
                return None
        elif tag not in (_SHAPE, _DIM) or not reader.numbers(shape, MAX_DIMS):
            return None
    place = _usual_place(parameters) if parameters else None
    if parameters and place is None:
        return None
    # The class' own way would be interpreted.
    return tuple.__new__(InputPlan, (name, CODES.get(datatype, 0), tuple(shape), place, 0, None))


def _usual_output(reader: wire.FieldReader, places: dict[str, RegionPlace]) -> str | None:
    """Return the name of an output of which the message says no more than a place in memory of the client, else None.

    Adds the place.
    """
    if not reader.next() or reader.tag != _NAME:
        return None
    name = reader.text()
    parameters: dict[str, Any] = {}
    while reader.next():
        if reader.tag != _OUTPUT_PARAMETER or not _add_parameter(reader, parameters):
            return None
    if parameters:
        place = _usual_place(parameters)
        if place is None:
            return None
        places[name] = place
    return name


def _add_parameter(reader: wire.FieldReader, parameters: dict[str, Any]) -> bool:
    """Read a parameter that is a text, a flag, or a number that is not negative. Returns False for any other one."""
    entry = reader.inner(wire.FieldReader(reader.message, 0, 0))
    if len(parameters) == _USUAL_FIELDS or not entry.next() or entry.tag != _KEY:
        return False
    key = entry.text()
    if key in parameters or not entry.next() or entry.tag != _VALUE:
        return False
    value = entry.inner(wire.FieldReader(reader.message, 0, 0))
    if entry.next() or not value.next():
        return False
    if value.tag == _TEXT:
        parameters[key] = value.text()
    elif value.tag == _NUMBER and not value.number >> 63:
        parameters[key] = value.number
    elif value.tag == _FLAG:
        parameters[key] = value.number != 0
    else:
        return False
    return not value.next()


def _usual_place(parameters: dict[str, Any]) -> RegionPlace | None:
    """Return the place that these parameters are for and nothing else, as `_place_of` does; else None."""
    region, size_bytes = parameters.get("shared_memory_region"), parameters.get("shared_memory_byte_size")
    offset = parameters.get("shared_memory_offset", 0)
    if type(region) is not str or type(size_bytes) is not int or type(offset) is not int:
        return None
    if len(parameters) != (3 if "shared_memory_offset" in parameters else 2):
        return None
    return tuple.__new__(RegionPlace, (region, offset, size_bytes))


def _of_memory(
    service: Service, hosted: Hosted, name: str, code: int, shape: Sequence[int], place: RegionPlace
) -> Input:
    """Return an input that lies in memory that the client shares."""
    try:
        return service.read_shared(hosted.model, name, code, shape, place)
    except WrongSize:
        raise
    except InvalidRequest as error:
        raise _Early(str(error)) from None


class _Early(InvalidRequest):
    """An error that Triton finds before it has a request whose id it could name."""


def _input_plan(tensor: Any) -> InputPlan:
    if len(tensor.shape) > _MANY_DIMS:
        raise InvalidRequest(
            f"the shape of input '{tensor.name}' has {len(tensor.shape)} dimensions, and {MAX_DIMS} is the most"
        )
    place = _place_of(tensor.name, tensor.parameters)
    return InputPlan(tensor.name, CODES.get(tensor.datatype, 0), tuple(tensor.shape), place)


def _packed(name: str, code: int, values: Any) -> bytes | bytearray:
    """Return values of the message as the bytes of a tensor. Raises `InvalidRequest`."""
    if code == BYTES:
        # One by one: many short strings take more memory as a list than as bytes.
        data = bytearray()
        for each in values:
            data += len(each).to_bytes(4, "little")
            data += each
        return data
    try:
        # Without a list of them, as there may be many.
        return np.fromiter(values, DTYPES[code], len(values)).tobytes()
    except OverflowError:
        raise InvalidRequest(f"input '{name}' has values that do not fit its datatype") from None


def _check_described(plan: GrpcRequestPlan, hosted: Hosted) -> None:
    """Check names, datatypes and shapes in Triton's order. Raises `InvalidRequest`."""
    seen: set[str] = set()
    described: dict[str, Any] = {}
    for name, code, shape, *_ in plan.inputs:
        if name in seen:
            raise InvalidRequest(f"input '{name}' already exists in request")
        seen.add(name)
        described[name] = (code, shape)
    hosted.signature.check(described)


_NONE, _EMPTY_FINAL_ALONE = Parameters(), Parameters(wants_empty_final=True)


def _parameters_of(given: Any) -> Parameters:
    """Return the parameters of a request. Raises `InvalidRequest`, `LongSequenceId`."""
    if not given:
        return _NONE
    if len(given) > MAX_PARAMETERS:
        raise InvalidRequest(f"a request has at most {MAX_PARAMETERS} parameters")
    sequence_id: int | str = 0
    flags = priority = timeout_us = 0
    wants_empty_final = False
    custom: dict[str, Parameter] = {}
    for name, parameter in given.items():
        kind = parameter.WhichOneof("parameter_choice")
        value: Any = None if kind is None else getattr(parameter, kind)
        if name == "sequence_id":
            _check(name, kind, "int64_param", "string_param")
            if kind == "string_param" and len(value.encode()) > MAX_SEQUENCE_ID_BYTES:
                raise LongSequenceId
            sequence_id = value & _UINT64 if kind == "int64_param" else value
        elif name in _FLAGS:
            _check(name, kind, "bool_param")
            flags |= _FLAGS[name] if value else 0
        elif name == "priority":
            _check(name, kind, "int64_param", "uint64_param")
            if value < 0:
                raise InvalidRequest("invalid value for 'priority', expected value >= 0.")
            priority = value
        elif name == "timeout":
            _check(name, kind, "int64_param")
            timeout_us = value & _UINT64
        elif name == _EMPTY_FINAL:
            _check(name, kind, "bool_param")
            wants_empty_final = value
        elif name.startswith(_RESERVED):
            raise InvalidRequest(
                f"parameter keys starting with '{_RESERVED}' are reserved for Triton usage. Only the "
                f"following keys starting with '{_RESERVED}' are allowed: {_EMPTY_FINAL}"
            )
        elif value is None:
            raise InvalidRequest(
                f"invalid value type for '{name}' parameter, expected int64_param, bool_param, or string_param."
            )
        else:
            custom[name] = value
    return Parameters(sequence_id, flags, priority, timeout_us, wants_empty_final, custom)


def _check(name: str, kind: str | None, *wanted: str) -> None:
    if kind not in wanted:
        raise InvalidRequest(f"invalid value type for '{name}' parameter, expected {' or '.join(wanted)}.")


def _place_of(tensor: str, parameters: Mapping[str, Any]) -> RegionPlace | None:
    """Return the place of a tensor in memory of the client, or None if it is in the message. Raises
    `InvalidRequest`.
    """
    if not parameters:
        return None
    region = _value(tensor, parameters, "shared_memory_region", "string_param")
    size_bytes = _value(tensor, parameters, "shared_memory_byte_size", "int64_param")
    offset = _value(tensor, parameters, "shared_memory_offset", "int64_param")
    for name, value in (("byte_size", size_bytes), ("offset", offset)):
        if region is None and value is not None:
            raise InvalidRequest(
                f"'shared_memory_{name}' can not be specified without 'shared_memory_region' "
                f"parameter for tensor '{tensor}'"
            )
    if region is None:
        return None
    if size_bytes is None:
        raise InvalidRequest(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' "
            f"parameter for tensor '{tensor}'"
        )
    return RegionPlace(region, offset or 0, size_bytes)


def _value(tensor: str, parameters: Mapping[str, Any], name: str, kind: str) -> Any:
    if name not in parameters:
        return None
    if parameters[name].WhichOneof("parameter_choice") != kind:
        raise InvalidRequest(f"invalid value type for '{name}' parameter for tensor '{tensor}', expected {kind}.")
    return getattr(parameters[name], kind)
