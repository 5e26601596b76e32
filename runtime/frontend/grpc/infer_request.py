"""What a ModelInferRequest asks for, and the request that is made of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as kserve

from moonpool.ipc.memo import Memo
from moonpool.ipc.tensors import BYTES, CODES, DTYPES, MAX_DIMS
from moonpool.runtime.details import details_of
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.frontend.grpc.bounds import parse
from moonpool.runtime.frontend.grpc.infer_parameters import Parameters, parameters_of, place_of
from moonpool.runtime.frontend.grpc.prepared import Prepared
from moonpool.runtime.frontend.grpc.wire import BadMessage, Parts, split
from moonpool.runtime.frontend.requests import make_request, refused
from moonpool.runtime.frontend.tensors import WrongSize, of_bytes

if TYPE_CHECKING:
    from moonpool.runtime.frontend.grpc.infer_parameters import Place
    from moonpool.runtime.frontend.service import Service
    from moonpool.runtime.frontend.submission import Hosted
    from moonpool.runtime.frontend.tensors import Input
    from moonpool.runtime.request import Details, InferenceRequest, Parameter

# What is remembered of requests is small, so that clients cannot make it large.
_MEMORABLE_BYTES = 2048
_MANY_BYTES = 1 << 18
# What is said of fewer is Triton's.
_MANY_DIMS = 1024
# Which field of InferTensorContents each datatype has; FP16 and BF16 have none.
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


class Described(NamedTuple):
    """An input of a request; `code` is 0 for a datatype that is none."""

    name: str
    code: int
    shape: tuple[int, ...]
    place: Place | None


class Plan:
    """What requests with the same head have in common."""

    __slots__ = (
        "classes",
        "details",
        "inputs",
        "is_large",
        "message",
        "model",
        "outputs",
        "parameters",
        "places",
        "prepared",
        "version",
    )

    def __init__(self, message: Any) -> None:
        """Raises `InvalidRequest`."""
        self.model: str = message.model_name
        self.version: str = message.model_version
        self.parameters: Parameters = parameters_of(message.parameters)
        self.details: Details | None = self._details("", None)
        self.inputs = [_described(tensor) for tensor in message.inputs]
        self.outputs: list[str] | None = (
            list(dict.fromkeys(each.name for each in message.outputs)) or None
        )
        # How many classes are wanted of an output in its place, and where outputs go that a client shares memory for.
        self.classes: dict[str, int] = {}
        self.places: dict[str, Place] = {}
        for output in message.outputs:
            self._add_output(output)
        # Where values are in the message itself it is kept with them.
        has_contents = any(tensor.HasField("contents") for tensor in message.inputs)
        self.message = message if has_contents else None
        sizes = [each.place.size_bytes for each in self.inputs if each.place]
        # Whether it may take long to read its tensors.
        self.is_large = sum(sizes) > _MANY_BYTES
        # What one such request was checked to be.
        self.prepared: Prepared | None = None

    def _add_output(self, output: Any) -> None:
        place = place_of(output.name, output.parameters)
        if "classification" in output.parameters:
            parameter = output.parameters["classification"]
            if parameter.WhichOneof("parameter_choice") != "int64_param":
                raise InvalidRequest(
                    "invalid value type for 'classification' parameter, expected int64_param"
                )
            if parameter.int64_param <= 0:
                raise InvalidRequest("invalid value for 'classification' parameter, expected >= 0")
            if place is not None:
                raise InvalidRequest(
                    "output can't set both 'shared_memory_region' and 'classification'"
                )
            self.classes[output.name] = parameter.int64_param
        if place is not None:
            self.places[output.name] = place

    def _details(self, request_id: str, forwarded: dict[str, Parameter] | None) -> Details | None:
        own = self.parameters
        custom = {**own.custom, **forwarded} if forwarded else own.custom
        return details_of(
            request_id, own.sequence_id, own.flags, own.timeout_us, own.priority, custom
        )

    def details_of(self, request_id: str, forwarded: dict[str, Parameter] | None) -> Details | None:
        """The details of one of these requests. Raises `InvalidRequest`."""
        if not (request_id or forwarded):
            return self.details
        return self._details(request_id, forwarded)


class Asked:
    """One message: who is asked under which id, and, once that model is found, the request."""

    __slots__ = ("_message", "_parts", "data", "model", "plan", "read_ns", "request_id", "version")

    def __init__(self, data: bytes) -> None:
        """Raises `BadMessage`, and `InvalidRequest` for more than a message may hold beside its tensors."""
        # In nanoseconds of `time.monotonic_ns`.
        self.read_ns = time.monotonic_ns()
        self.data = data
        self._parts: Parts = split(data)
        head = self._parts.head
        self.plan: Plan | None = _plans.get(head)
        try:
            self.request_id = self._parts.request_id.decode()
            self._message = None
            if self.plan is None:
                self._message = parse(kserve.ModelInferRequest, head)
        except (DecodeError, UnicodeDecodeError):
            raise BadMessage("it does not fit its description") from None
        known: Any = self.plan or self._message
        self.model: str = known.model if self.plan else known.model_name
        self.version: str = known.version if self.plan else known.model_version

    def read(self) -> Plan:
        """What it wants. Raises `InvalidRequest`."""
        if self.plan is None:
            self.plan = Plan(self._message)
            head = self._parts.head
            if self.plan.message is None and len(head) <= _MEMORABLE_BYTES:
                _plans.keep(head, self.plan)
        return self.plan

    def request(
        self,
        service: Service,
        hosted: Hosted,
        forwarded: dict[str, Parameter] | None = None,
    ) -> InferenceRequest:
        """The request for this model. Its inputs are views on the message. Raises `InvalidRequest`."""
        plan = self.read()
        prepared = plan.prepared
        if prepared is not None and prepared.signature is hosted.signature and not forwarded:
            tensors, request_id = self._parts.tensors, self.request_id
            request = prepared.request(service, hosted.model, self.data, tensors, request_id)
            if request is not None:
                if plan.places:
                    service.lend_targets(hosted.model, request, plan.places)
                return request
        try:
            inputs = self._inputs(plan, service, hosted)
        except InvalidRequest as error:
            raise self._refused(error, plan, hosted) from None
        details = plan.details_of(self.request_id, forwarded)
        request = make_request(hosted, inputs, plan.outputs, details)
        if plan.places:
            service.lend_targets(hosted.model, request, plan.places)
        if not forwarded and Prepared.can_be(plan, request):
            plan.prepared = Prepared(plan, hosted, request)
        return request

    def _inputs(self, plan: Plan, service: Service, hosted: Hosted) -> dict[str, Input]:
        tensors, data = self._parts.tensors, self.data
        inputs: dict[str, Input] = {}
        taken = 0
        for index, (name, code, shape, place) in enumerate(plan.inputs):
            if plan.message is not None and plan.message.inputs[index].HasField("contents"):
                inputs[name] = self._of_contents(plan, index)
            elif place is not None:
                inputs[name] = self._of_memory(service, hosted, plan.inputs[index])
            elif taken < len(tensors):
                offset, size_bytes = tensors[taken]
                taken += 1
                if not code:
                    raise InvalidRequest("a datatype that is none")
                inputs[name] = of_bytes(name, code, shape, data, offset, size_bytes)
            else:
                raise _Early(
                    f"unable to find data for input tensor '{name}' for model '{self.model}' in request."
                )
        if len(inputs) != len(plan.inputs):
            raise InvalidRequest("an input twice")
        return inputs

    @staticmethod
    def _of_memory(service: Service, hosted: Hosted, described: Described) -> Input:
        """An input that lies in memory that the client shares."""
        name, code, shape, place = described
        try:
            return service.read_shared(hosted.model, name, code, shape, place)  # type: ignore[arg-type]
        except WrongSize:
            raise
        except InvalidRequest as error:
            raise _Early(str(error)) from None

    def _of_contents(self, plan: Plan, index: int) -> Input:
        """An input whose values are in the message itself."""
        name, code, shape, place = plan.inputs[index]
        where = f"for model '{self.model}'"
        if place is not None:
            raise _Early(
                "unexpected 'content' provided when using shared memory for input tensor "
                f"'{name}' {where}"
            )
        if self._parts.tensors:
            raise _Early(
                f"contents field must not be specified when using raw_input_contents for '{name}' {where}"
            )
        message: Any = plan.message
        datatype, contents = message.inputs[index].datatype, message.inputs[index].contents
        for field, (datatypes, told) in _CONTENTS.items():
            if datatype not in datatypes and len(getattr(contents, field)):
                raise _Early(
                    f"unexpected explicit tensor data for input tensor '{name}' {where} of type "
                    f"'{told}', expected datatype '{datatype}'"
                )
        fields = [field for field, (names, _) in _CONTENTS.items() if datatype in names]
        values = getattr(contents, fields[0]) if fields else ()
        if not len(values):
            raise _Early(f"unable to find data for input tensor '{name}' {where} in request.")
        data = _packed(name, code, values)
        return of_bytes(name, code, shape, data, 0, len(data))

    def _refused(self, error: InvalidRequest, plan: Plan, hosted: Hosted) -> InvalidRequest:
        """The first thing that Triton finds wrong, which may be another one than was found here."""
        if isinstance(error, _Early):
            return error
        try:
            _check_described(plan, hosted)
        except InvalidRequest as found:
            error = found
        return refused(error, hosted, self.request_id)


_plans: Memo[bytes, Plan] = Memo(1024)


class _Early(InvalidRequest):
    """What Triton finds before there is a request whose id it could tell."""


def _described(tensor: Any) -> Described:
    if len(tensor.shape) > _MANY_DIMS:
        raise InvalidRequest(
            f"the shape of input '{tensor.name}' has {len(tensor.shape)} dimensions, and {MAX_DIMS} is the most"
        )
    place = place_of(tensor.name, tensor.parameters)
    return Described(tensor.name, CODES.get(tensor.datatype, 0), tuple(tensor.shape), place)


def _packed(name: str, code: int, values: Any) -> bytes | bytearray:
    """Values of the message as the bytes of a tensor."""
    if code == BYTES:
        # Piece by piece: there may be many that are short, and all of them at once take more than they hold.
        data = bytearray()
        for each in values:
            data += len(each).to_bytes(4, "little")
            data += each
        return data
    try:
        # One by one, as there may be many: no list of them is made.
        return np.fromiter(values, DTYPES[code], len(values)).tobytes()
    except OverflowError:
        raise InvalidRequest(f"input '{name}' has values that do not fit its datatype") from None


def _check_described(plan: Plan, hosted: Hosted) -> None:
    """Raises `InvalidRequest` for what is wrong with names, datatypes and shapes, in Triton's order."""
    seen: set[str] = set()
    stand_ins: dict[str, Any] = {}
    for name, code, shape, _ in plan.inputs:
        if name in seen:
            raise InvalidRequest(f"input '{name}' already exists in request")
        seen.add(name)
        stand_ins[name] = (code, shape)
    hosted.signature.check(stand_ins)
