"""The messages of gRPC's own services, health and reflection, and the answers of reflection.

Packages of others have these messages, and none of them is a dependency. So they are described here. Pools of
descriptors do not take the same file twice, and a program may have one of those packages, so there is a pool of our
own.

A stream of reflection has one message at a time: the next question is read when the client has the answer to the one
before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from moonpool.runtime.model.config.schema import read_fields
from moonpool.runtime.model.protobuf import SERVICE, FileWriter, described_files
from moonpool.runtime.server.grpc.call import GrpcCall, Method
from moonpool.runtime.server.grpc.status import ENDING, UNREADABLE, Status

HEALTH_SERVICE = "grpc.health.v1.Health"
# Questions are names.
_MOST_BYTES = 64 << 10
_NOT_FOUND = Status("NOT_FOUND", "not found")
# Tables as in `config/schema.py`.
_HEALTH = """
HealthCheckRequest = service:string=1
HealthCheckResponse = status:HealthCheckResponse.ServingStatus=1
"""
_STATUSES = {"HealthCheckResponse.ServingStatus": ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")}
_REFLECTION = """
ServerReflectionRequest = host:string=1 file_by_filename:string=3/message_request
    file_containing_symbol:string=4/message_request file_containing_extension:ExtensionRequest=5/message_request
    all_extension_numbers_of_type:string=6/message_request list_services:string=7/message_request
ExtensionRequest = containing_type:string=1 extension_number:int32=2
ServerReflectionResponse = valid_host:string=1 original_request:ServerReflectionRequest=2
    file_descriptor_response:FileDescriptorResponse=4/message_response
    all_extension_numbers_response:ExtensionNumberResponse=5/message_response
    list_services_response:ListServiceResponse=6/message_response error_response:ErrorResponse=7/message_response
FileDescriptorResponse = file_descriptor_proto:bytes*=1
ExtensionNumberResponse = base_type_name:string=1 extension_number:int32*=2
ListServiceResponse = service:ServiceResponse*=1
ServiceResponse = name:string=1
ErrorResponse = error_code:int32=1 error_message:string=2
"""


def _health_file() -> Any:
    file = FileWriter("grpc/health/v1/health.proto", "grpc.health.v1")
    file.add(read_fields(_HEALTH), _STATUSES)
    service = file.described.service.add(name="Health")
    messages = "HealthCheckRequest", "HealthCheckResponse"
    file.add_method(service, "Check", *messages, is_stream=False)
    return file.described


def _reflection_file(package: str) -> Any:
    file = FileWriter(f"{package.replace('.', '/')}/reflection.proto", package)
    file.add(read_fields(_REFLECTION), {})
    service = file.described.service.add(name="ServerReflection")
    messages = "ServerReflectionRequest", "ServerReflectionResponse"
    file.add_method(service, "ServerReflectionInfo", *messages, is_stream=True)
    return file.described


def _make_pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for each in (*described_files(), _health_file(), *map(_reflection_file, _PACKAGES)):
        pool.Add(each)
    return pool


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(name))


# Both versions have the same messages.
_PACKAGES = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
_pool = _make_pool()
_SERVICES = tuple(sorted((f"inference.{SERVICE}", HEALTH_SERVICE, *(f"{each}.ServerReflection" for each in _PACKAGES))))
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
