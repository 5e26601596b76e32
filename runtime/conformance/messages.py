"""Makes messages of the gRPC service, as short as a table of requests needs them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from moonpool.runtime.conformance.tensors import KEY, KEY_BYTES, ONE_TO_FOUR, ONES
from moonpool.runtime.model.protobuf import service_messages

kserve = service_messages()


def with_parameters(message: Any, parameters: dict[str, Any]) -> Any:
    """Set parameters by the type of their values; None sets a parameter that has no value."""
    for name, value in parameters.items():
        parameter = message.parameters[name]
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            setattr(parameter, "uint64_param" if value >= 2**63 else "int64_param", value)
        elif isinstance(value, float):
            parameter.double_param = value
        elif isinstance(value, bytes):
            parameter.bytes_param = value
        elif value is not None:
            parameter.string_param = value
    return message


def tensor(name: str, datatype: str = "FP32", shape: Sequence[int] = (4,), **parameters: Any) -> Any:
    """Make an input whose content is raw, or in shared memory."""
    described = kserve.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=shape)
    return with_parameters(described, parameters)


def typed(field: str, values: Sequence[Any], name: str, datatype: str = "FP32", shape: Sequence[int] = ()) -> Any:
    """Make an input whose content is in a field of its type."""
    described = tensor(name, datatype, shape or [len(values)])
    getattr(described.contents, field).extend(values)
    return described


def output(name: str, **parameters: Any) -> Any:
    wanted = kserve.ModelInferRequest.InferRequestedOutputTensor(name=name)
    return with_parameters(wanted, parameters)


def request(
    model: str,
    inputs: Sequence[Any],
    raw: Sequence[bytes] = (),
    outputs: Sequence[Any] = (),
    version: str = "",
    request_id: str = "",
    **parameters: Any,
) -> Any:
    message = kserve.ModelInferRequest(
        model_name=model, model_version=version, id=request_id, inputs=inputs, outputs=outputs, raw_input_contents=raw
    )
    return with_parameters(message, parameters)


A, B = tensor("INPUT0"), tensor("INPUT1")
RAW = (ONE_TO_FOUR, ONES)


def add_sub(first: Any = A, second: Any = B, raw: Sequence[bytes] = RAW, model: str = "add_sub", **more: Any) -> Any:
    return request(model, [first, second], raw, **more)


def batched(**more: Any) -> Any:
    inputs = [tensor(name, shape=[1, 4]) for name in ("INPUT0", "INPUT1")]
    return request("batched", inputs, RAW, **more)


def fails(how: str, **more: Any) -> Any:
    text = struct.pack("<I", len(how)) + how.encode()
    return request("fails", [tensor("HOW", "BYTES", [1])], [text], **more)


def repeat(count: int, fail: bool | None = None, **more: Any) -> Any:
    inputs, raw = [tensor("COUNT", "INT32", [1])], [struct.pack("<i", count)]
    if fail is not None:
        inputs, raw = [*inputs, tensor("FAIL", "BOOL", [1])], [*raw, struct.pack("?", fail)]
    return request("repeat", inputs, raw, **more)


def told(**parameters: Any) -> Any:
    return request("told", [tensor("X", shape=[1])], [bytes(4)], **parameters)


def sums(**parameters: Any) -> Any:
    inputs = [tensor("X", "INT32", [1, 1])]
    return request("sums", inputs, [struct.pack("<i", 1)], **parameters)


def load(model: str, **parameters: Any) -> Any:
    return with_parameters(kserve.RepositoryModelLoadRequest(model_name=model), parameters)


def unload(model: str, **parameters: Any) -> Any:
    return with_parameters(kserve.RepositoryModelUnloadRequest(model_name=model), parameters)


def register(**change: Any) -> Any:
    usual = {"name": "r", "key": KEY, "offset": 0, "byte_size": KEY_BYTES}
    return kserve.SystemSharedMemoryRegisterRequest(**{**usual, **change})


def shared(make: Any, name: str, **change: Any) -> Any:
    """Make an input or output of 16 bytes in the shared memory `r`."""
    where = {"shared_memory_region": "r", "shared_memory_byte_size": 16, **change}
    return make(name, **{key: value for key, value in where.items() if value is not None})


def trace(model: str = "", **settings: Sequence[str]) -> Any:
    message = kserve.TraceSettingRequest(model_name=model)
    for name, values in settings.items():
        message.settings[name].value.extend(values)
    return message


def logging(**settings: Any) -> Any:
    message = kserve.LogSettingsRequest()
    for name, value in settings.items():
        setting = message.settings[name]
        if isinstance(value, bool):
            setting.bool_param = value
        elif isinstance(value, int):
            setting.uint32_param = value
        else:
            setting.string_param = value
    return message
