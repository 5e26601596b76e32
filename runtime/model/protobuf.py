"""Protobuf's messages of Triton's protocol: the configuration of a model, and the service over gRPC.

Triton publishes both as `.proto` files, and its client for Python has the code that a compiler made of them. That
client brings much that moonpool does not need, and its code wants certain versions of protobuf. So the messages are
made here, when they are first needed, of tables: of those in `config/schema.py`, and of the one below. They have a pool
of their own, because a program may have that client, too, and a pool takes no name twice.

Theory of operation. Any thread may be the first to need a message. Protobuf that is written in Python, as on musl,
shows a class to other threads before the classes of its fields are there. So one thread at a time makes classes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from moonpool.runtime.model.config.schema import ENUMS, FIELDS, FieldRow, read_fields

SERVICE = "GRPCInferenceService"
_PACKAGE = "inference"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_FIELD, f"TYPE_{name.upper()}")
    for name in ["string", "bytes", "bool", "int32", "int64", "uint32", "uint64", "float", "double"]
}
# Each has a request and a response of its name.
_METHODS = """
ServerLive ServerReady ModelReady ServerMetadata ModelMetadata ModelInfer ModelConfig ModelStatistics RepositoryIndex
RepositoryModelLoad RepositoryModelUnload SystemSharedMemoryStatus SystemSharedMemoryRegister
SystemSharedMemoryUnregister CudaSharedMemoryStatus CudaSharedMemoryRegister CudaSharedMemoryUnregister TraceSetting
LogSettings
"""
# As in `config/schema.py`.
_SERVICE_FIELDS = """
ServerLiveRequest =
ServerLiveResponse = live:bool=1
ServerReadyRequest =
ServerReadyResponse = ready:bool=1
ModelReadyRequest = name:string=1 version:string=2
ModelReadyResponse = ready:bool=1
ServerMetadataRequest =
ServerMetadataResponse = name:string=1 version:string=2 extensions:string*=3
ModelMetadataRequest = name:string=1 version:string=2
ModelMetadataResponse = name:string=1 versions:string*=2 platform:string=3
    inputs:ModelMetadataResponse.TensorMetadata*=4 outputs:ModelMetadataResponse.TensorMetadata*=5
ModelMetadataResponse.TensorMetadata = name:string=1 datatype:string=2 shape:int64*=3
InferParameter = bool_param:bool=1/parameter_choice int64_param:int64=2/parameter_choice
    string_param:string=3/parameter_choice double_param:double=4/parameter_choice
    uint64_param:uint64=5/parameter_choice
InferTensorContents = bool_contents:bool*=1 int_contents:int32*=2 int64_contents:int64*=3 uint_contents:uint32*=4
    uint64_contents:uint64*=5 fp32_contents:float*=6 fp64_contents:double*=7 bytes_contents:bytes*=8
ModelInferRequest = model_name:string=1 model_version:string=2 id:string=3 parameters:{string}InferParameter=4
    inputs:ModelInferRequest.InferInputTensor*=5 outputs:ModelInferRequest.InferRequestedOutputTensor*=6
    raw_input_contents:bytes*=7
ModelInferRequest.InferInputTensor = name:string=1 datatype:string=2 shape:int64*=3
    parameters:{string}InferParameter=4 contents:InferTensorContents=5
ModelInferRequest.InferRequestedOutputTensor = name:string=1 parameters:{string}InferParameter=2
ModelInferResponse = model_name:string=1 model_version:string=2 id:string=3 parameters:{string}InferParameter=4
    outputs:ModelInferResponse.InferOutputTensor*=5 raw_output_contents:bytes*=6
ModelInferResponse.InferOutputTensor = name:string=1 datatype:string=2 shape:int64*=3
    parameters:{string}InferParameter=4 contents:InferTensorContents=5
ModelStreamInferResponse = error_message:string=1 infer_response:ModelInferResponse=2
ModelConfigRequest = name:string=1 version:string=2
ModelConfigResponse = config:ModelConfig=1
ModelStatisticsRequest = name:string=1 version:string=2
StatisticDuration = count:uint64=1 ns:uint64=2
InferStatistics = success:StatisticDuration=1 fail:StatisticDuration=2 queue:StatisticDuration=3
    compute_input:StatisticDuration=4 compute_infer:StatisticDuration=5 compute_output:StatisticDuration=6
    cache_hit:StatisticDuration=7 cache_miss:StatisticDuration=8
InferResponseStatistics = compute_infer:StatisticDuration=1 compute_output:StatisticDuration=2
    success:StatisticDuration=3 fail:StatisticDuration=4 empty_response:StatisticDuration=5 cancel:StatisticDuration=6
InferBatchStatistics = batch_size:uint64=1 compute_input:StatisticDuration=2 compute_infer:StatisticDuration=3
    compute_output:StatisticDuration=4
MemoryUsage = type:string=1 id:int64=2 byte_size:uint64=3
ModelStatistics = name:string=1 version:string=2 last_inference:uint64=3 inference_count:uint64=4
    execution_count:uint64=5 inference_stats:InferStatistics=6 batch_stats:InferBatchStatistics*=7
    memory_usage:MemoryUsage*=8 response_stats:{string}InferResponseStatistics=9
ModelStatisticsResponse = model_stats:ModelStatistics*=1
ModelRepositoryParameter = bool_param:bool=1/parameter_choice int64_param:int64=2/parameter_choice
    string_param:string=3/parameter_choice bytes_param:bytes=4/parameter_choice
RepositoryIndexRequest = repository_name:string=1 ready:bool=2
RepositoryIndexResponse = models:RepositoryIndexResponse.ModelIndex*=1
RepositoryIndexResponse.ModelIndex = name:string=1 version:string=2 state:string=3 reason:string=4
RepositoryModelLoadRequest = repository_name:string=1 model_name:string=2
    parameters:{string}ModelRepositoryParameter=3
RepositoryModelLoadResponse =
RepositoryModelUnloadRequest = repository_name:string=1 model_name:string=2
    parameters:{string}ModelRepositoryParameter=3
RepositoryModelUnloadResponse =
SystemSharedMemoryStatusRequest = name:string=1
SystemSharedMemoryStatusResponse = regions:{string}SystemSharedMemoryStatusResponse.RegionStatus=1
SystemSharedMemoryStatusResponse.RegionStatus = name:string=1 key:string=2 offset:uint64=3 byte_size:uint64=4
SystemSharedMemoryRegisterRequest = name:string=1 key:string=2 offset:uint64=3 byte_size:uint64=4
SystemSharedMemoryRegisterResponse =
SystemSharedMemoryUnregisterRequest = name:string=1
SystemSharedMemoryUnregisterResponse =
CudaSharedMemoryStatusRequest = name:string=1
CudaSharedMemoryStatusResponse = regions:{string}CudaSharedMemoryStatusResponse.RegionStatus=1
CudaSharedMemoryStatusResponse.RegionStatus = name:string=1 device_id:uint64=2 byte_size:uint64=3
CudaSharedMemoryRegisterRequest = name:string=1 raw_handle:bytes=2 device_id:int64=3 byte_size:uint64=4
CudaSharedMemoryRegisterResponse =
CudaSharedMemoryUnregisterRequest = name:string=1
CudaSharedMemoryUnregisterResponse =
TraceSettingRequest = settings:{string}TraceSettingRequest.SettingValue=1 model_name:string=2
TraceSettingRequest.SettingValue = value:string*=1
TraceSettingResponse = settings:{string}TraceSettingResponse.SettingValue=1
TraceSettingResponse.SettingValue = value:string*=1
LogSettingsRequest = settings:{string}LogSettingsRequest.SettingValue=1
LogSettingsRequest.SettingValue = bool_param:bool=1/parameter_choice uint32_param:uint32=2/parameter_choice
    string_param:string=3/parameter_choice
LogSettingsResponse = settings:{string}LogSettingsResponse.SettingValue=1
LogSettingsResponse.SettingValue = bool_param:bool=1/parameter_choice uint32_param:uint32=2/parameter_choice
    string_param:string=3/parameter_choice
"""


class FileWriter:
    """Describes a file of messages and services in protobuf's own form."""

    def __init__(self, name: str, package: str, needs: Sequence[str] = ()) -> None:
        """`needs` are the names of the files whose messages and enums this one uses."""
        self.described = descriptor_pb2.FileDescriptorProto(
            name=name, package=package, syntax="proto3", dependency=needs
        )
        self._messages: dict[str, Any] = {}

    def add(
        self,
        fields: Mapping[str, Sequence[FieldRow]],
        enums: Mapping[str, Sequence[str]],
        known_enums: Collection[str] = (),
    ) -> None:
        """Add messages and enums. `known_enums` are those of other files."""
        for name in fields:
            self._add_message(name)
        for name, values in enums.items():
            self._add_enum(name, values)
        for name, rows in fields.items():
            for row in rows:
                self._add_field(self._messages[name], name, row, {*enums, *known_enums})

    def add_method(self, service: Any, name: str, asked: str, answered: str, *, is_stream: bool) -> None:
        """Add a method to a service of the file. With `is_stream`, there are many requests and many responses."""
        service.method.add(
            name=name,
            input_type=f".{self.described.package}.{asked}",
            output_type=f".{self.described.package}.{answered}",
            client_streaming=is_stream or None,
            server_streaming=is_stream or None,
        )

    def _add_message(self, name: str) -> None:
        outer, _, own = name.rpartition(".")
        if outer and outer not in self._messages:
            self._add_message(outer)
        if name not in self._messages:
            siblings = self._messages[outer].nested_type if outer else self.described.message_type
            self._messages[name] = siblings.add(name=own)

    def _add_enum(self, name: str, values: Sequence[str]) -> None:
        outer, _, own = name.rpartition(".")
        siblings = self._messages[outer].enum_type if outer else self.described.enum_type
        enum = siblings.add(name=own)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)

    def _add_field(self, message: Any, path: str, row: FieldRow, enums: Collection[str]) -> None:
        type_, is_many = row.type.rstrip("*"), row.type.endswith("*")
        if type_.startswith("{"):
            key, _, value = type_[1:].partition("}")
            type_, is_many = f"{path}.{_entry_of(row.name)}", True
            entry = message.nested_type.add(name=_entry_of(row.name))
            entry.options.map_entry = True
            for number, (name, inner) in enumerate((("key", key), ("value", value)), 1):
                self._add_field(entry, type_, FieldRow(name, inner, number, ""), enums)
        field = message.field.add(
            name=row.name, number=row.number, label=_FIELD.LABEL_REPEATED if is_many else _FIELD.LABEL_OPTIONAL
        )
        if type_ in _SCALARS:
            field.type = _SCALARS[type_]
        else:
            field.type = _FIELD.TYPE_ENUM if type_ in enums else _FIELD.TYPE_MESSAGE
            field.type_name = f".{self.described.package}.{type_}"
        if row.group:
            groups = [group.name for group in message.oneof_decl]
            if row.group not in groups:
                message.oneof_decl.add(name=row.group)
                groups.append(row.group)
            field.oneof_index = groups.index(row.group)


def _entry_of(field: str) -> str:
    """Return the name that protobuf gives the entries of a map."""
    return "".join(part.capitalize() for part in field.split("_")) + "Entry"


# A signal handler may ask for a message on the thread that makes one.
_making = threading.RLock()


class Messages:
    """The messages of one file, as attributes by their names."""

    def __init__(self, pool: descriptor_pool.DescriptorPool, file: str) -> None:
        self.DESCRIPTOR: Any = pool.FindFileByName(file)

    def __getattr__(self, name: str) -> Any:
        try:
            descriptor = self.DESCRIPTOR.message_types_by_name[name]
        except KeyError:
            raise AttributeError(f"{self.DESCRIPTOR.name} has no message {name}") from None
        with _making:
            found = message_factory.GetMessageClass(descriptor)
        # The next access does not come here.
        setattr(self, name, found)
        return found


def described_files() -> list[Any]:
    """Describe both files in protobuf's own form, each after those that it needs."""
    config = FileWriter("model_config.proto", _PACKAGE)
    config.add(FIELDS, ENUMS)
    served = FileWriter("grpc_service.proto", _PACKAGE, [config.described.name])
    served.add(read_fields(_SERVICE_FIELDS), {}, ENUMS)
    service = served.described.service.add(name=SERVICE)
    for name in _METHODS.split():
        served.add_method(service, name, f"{name}Request", f"{name}Response", is_stream=False)
    streamed = "ModelInferRequest", "ModelStreamInferResponse"
    served.add_method(service, "ModelStreamInfer", *streamed, is_stream=True)
    return [config.described, served.described]


@functools.cache
def _files() -> tuple[Messages, Messages]:
    pool = descriptor_pool.DescriptorPool()
    described = described_files()
    for each in described:
        pool.Add(each)
    config, served = (Messages(pool, each.name) for each in described)
    return config, served


def config_messages() -> Messages:
    """Return the messages of configurations: `config_messages().ModelConfig`."""
    return _files()[0]


def service_messages() -> Messages:
    """Return the messages of the service: `service_messages().ModelInferRequest`."""
    return _files()[1]


class BadProtobuf(Exception):
    """The bytes are not a message."""


def varint(number: int) -> bytes:
    """Return a number as it travels."""
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def read_varint(message: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return a number and the offset behind it. Raises `BadProtobuf`, `IndexError`."""
    number = shift = 0
    while True:
        byte = message[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
        if shift > 63:
            raise BadProtobuf("a number of more than 64 bits")
