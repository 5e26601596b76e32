"""The messages of gRPC's own services, health and reflection, and the answers of reflection.

Packages of others have these messages, and none of them is a dependency. So they are described here. Pools of descriptors do not take the
same file twice, and a program may have one of those packages, so there is a pool of our own.

A stream of reflection has one message at a time: the next question is read when the client has the answer to the one before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from moonpool.runtime.server.grpc.call import GrpcCall, Method
from moonpool.runtime.server.grpc.status import ENDING, UNREADABLE, Status

HEALTH_SERVICE = "grpc.health.v1.Health"
# Questions are names.
_MOST_BYTES = 64 << 10
_NOT_FOUND = Status("NOT_FOUND", "not found")
_FIELD = descriptor_pb2.FieldDescriptorProto
_KINDS = {"string": _FIELD.TYPE_STRING, "bytes": _FIELD.TYPE_BYTES, "int32": _FIELD.TYPE_INT32}
# Fields as `kind name = number`, a `*` for many. Those behind `|` are of a oneof, whose name comes first.
_HEALTH = {
    "HealthCheckRequest": "string service = 1",
    "HealthCheckResponse": "ServingStatus status = 1",
}
_STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
_REFLECTION = {
    "ServerReflectionRequest": "string host = 1 | message_request, string file_by_filename = 3, string file_containing_symbol = 4, "
    "ExtensionRequest file_containing_extension = 5, string all_extension_numbers_of_type = 6, string list_services = 7",
    "ExtensionRequest": "string containing_type = 1, int32 extension_number = 2",
    "ServerReflectionResponse": "string valid_host = 1, ServerReflectionRequest original_request = 2 | message_response, "
    "FileDescriptorResponse file_descriptor_response = 4, ExtensionNumberResponse all_extension_numbers_response = 5, "
    "ListServiceResponse list_services_response = 6, ErrorResponse error_response = 7",
    "FileDescriptorResponse": "bytes* file_descriptor_proto = 1",
    "ExtensionNumberResponse": "string base_type_name = 1, int32* extension_number = 2",
    "ListServiceResponse": "ServiceResponse* service = 1",
    "ServiceResponse": "string name = 1",
    "ErrorResponse": "int32 error_code = 1, string error_message = 2",
}


def _add_fields(message: Any, package: str, fields: str) -> None:
    plain, _, chosen = fields.partition(" | ")
    group, *members = chosen.split(", ") if chosen else [""]
    if group:
        message.oneof_decl.add(name=group)
    for each in (*plain.split(", "), *members):
        kind, name, _, number = each.split()
        many = _FIELD.LABEL_REPEATED if kind.endswith("*") else _FIELD.LABEL_OPTIONAL
        field = message.field.add(name=name, number=int(number), label=many)
        kind = kind.rstrip("*")
        if kind in _KINDS:
            field.type = _KINDS[kind]
        elif kind == "ServingStatus":
            field.type, field.type_name = (
                _FIELD.TYPE_ENUM,
                f".{package}.{message.name}.ServingStatus",
            )
        else:
            field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{package}.{kind}"
        if each in members:
            field.oneof_index = 0


def _file(name: str, package: str, messages: dict[str, str], *method: str) -> Any:
    """Describe a file with one service, which has one method: service, method, request, response."""
    file = descriptor_pb2.FileDescriptorProto(name=name, package=package, syntax="proto3")
    for kind, fields in messages.items():
        message = file.message_type.add(name=kind)
        if "ServingStatus" in fields:
            status = message.enum_type.add(name="ServingStatus")
            for number, word in enumerate(_STATUSES):
                status.value.add(name=word, number=number)
        _add_fields(message, package, fields)
    service, rpc, asked, answered = method
    file.service.add(name=service).method.add(
        name=rpc,
        input_type=f".{package}.{asked}",
        output_type=f".{package}.{answered}",
        client_streaming=service != "Health",
        server_streaming=service != "Health",
    )
    return file


def _make_pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    served = service_pb2.DESCRIPTOR
    for each in (*served.dependencies, served):
        pool.AddSerializedFile(each.serialized_pb)
    health = ("Health", "Check", "HealthCheckRequest", "HealthCheckResponse")
    pool.Add(_file("grpc/health/v1/health.proto", "grpc.health.v1", _HEALTH, *health))
    asking = ("ServerReflectionInfo", "ServerReflectionRequest", "ServerReflectionResponse")
    for package in _PACKAGES:
        path = f"{package.replace('.', '/')}/reflection.proto"
        pool.Add(_file(path, package, _REFLECTION, "ServerReflection", *asking))
    return pool


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(name))


# Both versions have the same messages.
_PACKAGES = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
_pool = _make_pool()
_SERVICES = tuple(
    sorted(
        (
            "inference.GRPCInferenceService",
            HEALTH_SERVICE,
            *(f"{each}.ServerReflection" for each in _PACKAGES),
        )
    )
)
HealthCheckRequest = _message("grpc.health.v1.HealthCheckRequest")
HealthCheckResponse = _message("grpc.health.v1.HealthCheckResponse")
_Asked = _message("grpc.reflection.v1.ServerReflectionRequest")
_Answer = _message("grpc.reflection.v1.ServerReflectionResponse")


def reflection_methods() -> dict[bytes, Method]:
    """Return the methods of reflection by their paths. They belong to the metadata where protocols are restricted."""
    method = Method(_handle, "metadata")
    return {f"/{each}.ServerReflection/ServerReflectionInfo".encode(): method for each in _PACKAGES}


def _handle(call: GrpcCall) -> None:
    call.when_draining(partial(call.fail, ENDING))
    call.receive(partial(_received, call))


def _received(call: GrpcCall, data: bytes | None) -> None:
    if data is None:
        call.finish()
        return
    if len(data) > _MOST_BYTES:
        text = f"the question has {len(data)} bytes, and {_MOST_BYTES} is the most"
        call.fail(Status("INVALID_ARGUMENT", text))
        return
    try:
        asked = _Asked.FromString(data)
    except DecodeError:
        call.fail(UNREADABLE)
        return
    answer = _answer(asked).SerializeToString()
    call.send((answer,), partial(call.receive, partial(_received, call)))


def _answer(asked: Any) -> Any:
    answer = _Answer(valid_host=asked.host, original_request=asked)
    kind = asked.WhichOneof("message_request")
    try:
        if kind == "list_services":
            for name in _SERVICES:
                answer.list_services_response.service.add(name=name)
        elif kind == "file_by_filename":
            _add_files(answer, _pool.FindFileByName(asked.file_by_filename))
        elif kind == "file_containing_symbol":
            _add_files(answer, _pool.FindFileContainingSymbol(asked.file_containing_symbol))
        elif kind == "all_extension_numbers_of_type":
            # proto3 has no extensions.
            found = _pool.FindMessageTypeByName(asked.all_extension_numbers_of_type)
            answer.all_extension_numbers_response.base_type_name = found.full_name
        else:
            raise KeyError
    except KeyError:
        status = _NOT_FOUND
        if kind is None:
            status = Status("INVALID_ARGUMENT", "the request asks nothing that reflection knows")
        answer.error_response.error_code = status.number
        answer.error_response.error_message = status.text
    return answer


def _add_files(answer: Any, file: Any) -> None:
    """Add a file, with those that it needs behind it."""
    known = {file.name: file}
    for each in file.dependencies:
        known[each.name] = each
    serialized = (each.serialized_pb for each in known.values())
    answer.file_descriptor_response.file_descriptor_proto.extend(serialized)
