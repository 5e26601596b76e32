"""Writes responses over gRPC as bytes: of a model, of a stream, with and without an error."""

from __future__ import annotations

from moonpool.ipc.memo import Memo
from moonpool.ipc.tensors import NAMES
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.protobuf import service_messages
from moonpool.runtime.model.request import Response, WireTensor
from moonpool.runtime.server.grpc.call import Message
from moonpool.runtime.server.grpc.infer_request import GrpcRequestPlan
from moonpool.runtime.server.grpc.wire import join, text_field
from moonpool.runtime.server.inference.response import classified
from moonpool.runtime.server.inference.tensors import to_bytes
from moonpool.runtime.server.service import Service

kserve = service_messages()
_ID = 3
_IN_STREAM = bytes([2 << 3 | 2])
_NOTHING = memoryview(b"")
# Joining small messages costs less than sending their pieces.
_JOIN_BYTES = 16 << 10
_INT64 = 2**63 - 1
Head = tuple[str, int, tuple[tuple[str, int, tuple[int, ...]], ...], bool | None]
_heads: Memo[Head, bytes] = Memo(1024)


def answer(service: Service, model: Model, plan: GrpcRequestPlan, request_id: str, response: Response) -> Message:
    """Return a ModelInferResponse. The pieces of a large one are views of the outputs.

    Writes outputs into the memory that the client shares for them. Raises `ModelError` and `SharedMemoryError`.
    """
    pieces = _pieces(service, model, plan, request_id, response, None)
    return b"".join(pieces) if sum(map(len, pieces)) <= _JOIN_BYTES else tuple(pieces)


def answer_in_stream(
    service: Service, model: Model, plan: GrpcRequestPlan, request_id: str, response: Response, final: bool
) -> bytes:
    """Return a ModelStreamInferResponse. `final` says if it is the last one of its request.

    The outputs are copied, as many responses may wait for the client, and the model's memory is not for that. Does and
    raises what `answer` does.
    """
    return b"".join(_pieces(service, model, plan, request_id, response, final))


def _pieces(
    service: Service, model: Model, plan: GrpcRequestPlan, request_id: str, response: Response, final: bool | None
) -> list[bytes | memoryview]:
    tensors: list[memoryview] = []
    described = []
    for name, array in response.outputs.items():
        output = WireTensor.of(array)
        if name in plan.classes:
            output = classified(service.models.find, model, name, output, plan.classes[name])
        if name in plan.places:
            service.write_shared(name, output, plan.places[name])
            tensors.append(_NOTHING)
        else:
            tensors.append(to_bytes(output))
        described.append((name, output.datatype, tuple(output.shape)))
    head = _head((model.name, model.version, tuple(described), final))
    if request_id:
        head += text_field(_ID, request_id.encode())
    if response.parameters:
        message = kserve.ModelInferResponse()
        for key, value in response.parameters.items():
            _set(message.parameters[key], value)
        head += message.SerializeToString()
    return join(head, tensors, b"" if final is None else _IN_STREAM)


def _head(key: Head) -> bytes:
    """Return the fields that responses with outputs of the same shapes have in common."""
    known = _heads.get(key)
    if known is not None:
        return known
    name, version, outputs, final = key
    message = kserve.ModelInferResponse(model_name=name, model_version=str(version))
    if final is not None:
        message.parameters["triton_final_response"].bool_param = final
    for output, code, shape in outputs:
        message.outputs.add(name=output, datatype=NAMES[code], shape=shape)
    head: bytes = message.SerializeToString()
    return _heads.keep(key, head)


def _set(parameter: object, value: object) -> None:
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    kind = kinds[type(value)]
    if kind == "int64_param" and value > _INT64:  # type: ignore[operator]
        kind = "uint64_param"
    setattr(parameter, kind, value)


def last_in_stream(model: str, request_id: str) -> bytes:
    """Return the message that a request has had all its responses."""
    message = kserve.ModelStreamInferResponse()
    response = message.infer_response
    response.model_name, response.id = model, request_id
    response.parameters["triton_final_response"].bool_param = True
    data: bytes = message.SerializeToString()
    return data


def error_in_stream(text: str, request_id: str, model: str = "", final: bool | None = None) -> bytes:
    """Return an error in a stream.

    If it is an error of a model, `model` is its name, and `final` says if it is the last response.
    """
    message = kserve.ModelStreamInferResponse(error_message=text)
    message.infer_response.id = request_id
    if final is not None:
        message.infer_response.model_name = model
        message.infer_response.parameters["triton_final_response"].bool_param = final
    data: bytes = message.SerializeToString()
    return data
