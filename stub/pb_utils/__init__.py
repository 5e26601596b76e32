"""Triton's module for models, which they import as `triton_python_backend_utils` and as `c_python_backend_utils`.

Every name exists when the model's file is imported. The module also works outside of a stub,
so a model can be tested like any other Python class:

    import moonpool.stub.pb_utils as pb_utils
"""

from __future__ import annotations

# Models of Triton's find these three in this module, too.
import json  # noqa: F401
import struct  # noqa: F401
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, overload

# A function may return None, but models know when it does not. Type checkers need not ask them for a proof.
from typing import Any as MaybeNone

import numpy as np

from moonpool.ipc.tensors import encode_bytes
from moonpool.stub.pb_utils.config import Json, ModelConfig
from moonpool.stub.pb_utils.errors import TritonError, TritonModelException
from moonpool.stub.pb_utils.host import is_model_ready, load_model, unload_model
from moonpool.stub.pb_utils.logger import Logger
from moonpool.stub.pb_utils.memory import memory_in_use
from moonpool.stub.pb_utils.metrics import Metric, MetricFamily, MetricKind
from moonpool.stub.pb_utils.request import InferenceRequest, InferenceTrace
from moonpool.stub.pb_utils.response import InferenceResponse, InferenceResponseSender, ResponseIterator
from moonpool.stub.pb_utils.tensor import MemoryType, PreferredMemory, Tensor

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from moonpool.ipc.cuda.array import DeviceArray

__all__ = [
    "COUNTER",
    "GAUGE",
    "HISTOGRAM",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "empty",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]


def __dir__() -> list[str]:
    """List what models may use, and not what this module is made of."""
    hidden = (name for name in globals() if name.startswith("__"))
    return sorted({*__all__, "json", "np", "struct", *hidden} - {"__all__", "__dir__"})


COUNTER = MetricKind.COUNTER
GAUGE = MetricKind.GAUGE
HISTOGRAM = MetricKind.HISTOGRAM
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU

# Triton's two tables have different types for booleans, and models compare with either.
_NUMPY_TYPES: dict[int, type] = {
    1: np.bool_,
    2: np.uint8,
    3: np.uint16,
    4: np.uint32,
    5: np.uint64,
    6: np.int8,
    7: np.int16,
    8: np.int32,
    9: np.int64,
    10: np.float16,
    11: np.float32,
    12: np.float64,
    13: np.object_,
}
TRITON_STRING_TO_NUMPY: dict[str, type] = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}


def triton_string_to_numpy(triton_type_string: str) -> type:
    """Return numpy's type for a `data_type` of the configuration. Raises KeyError for unknown ones."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> type | None:
    """Return numpy's type for the number of a datatype, or None."""
    return _NUMPY_TYPES.get(data_type)


def numpy_to_triton_type(data_type: object) -> int | None:
    """Return the number of the datatype for a numpy type, or None. Strings, as object or bytes_, are 13."""
    for number, numpy_type in _NUMPY_TYPES.items():
        if data_type == numpy_type:
            return number
    return 13 if data_type == np.bytes_ else None


def serialize_byte_tensor(input_tensor: NDArray[np.generic]) -> bytes | tuple[()] | None:
    """Return the BYTES form of an array of strings: () for an empty array, None for other dtypes."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return encode_bytes(input_tensor)  # type: ignore[arg-type]


def deserialize_bytes_tensor(encoded_tensor: bytes) -> NDArray[np.object_]:
    """Return the strings of a BYTES form, as a one-dimensional object array of bytes."""
    strings = []
    offset = 0
    while offset < len(encoded_tensor):
        end = offset + 4 + int.from_bytes(encoded_tensor[offset : offset + 4], "little")
        if end > len(encoded_tensor):
            raise TritonModelException(
                "Invalid bytes tensor data: string extends beyond buffer"
                if offset + 4 <= len(encoded_tensor)
                else "Invalid bytes tensor data: incomplete length field"
            )
        strings.append(bytes(encoded_tensor[offset + 4 : end]))
        offset = end
    array = np.empty(len(strings), np.object_)
    array[:] = strings
    return array


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | MaybeNone:
    """Return the request's input of that name, or None."""
    if type(inference_request) is InferenceRequest and inference_request._origin is not None:
        for tensor in inference_request._inputs:
            if tensor._name == name:
                return tensor
        return None
    for tensor in inference_request.inputs():
        if tensor.name() == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | MaybeNone:
    """Return the response's output of that name, or None."""
    for tensor in inference_response.output_tensors():
        if tensor.name() == name:
            return tensor
    return None


def get_input_config_by_name(model_config: Mapping[str, object], name: str) -> Json | MaybeNone:
    """Return the configuration of the input of that name, from the parsed `model_config`, or None."""
    return _config_by_name(model_config, "input", name)


def get_output_config_by_name(model_config: Mapping[str, object], name: str) -> Json | MaybeNone:
    """Return the configuration of the output of that name, from the parsed `model_config`, or None."""
    return _config_by_name(model_config, "output", name)


def _config_by_name(model_config: Mapping[str, object], kind: str, name: str) -> Json | MaybeNone:
    if kind in model_config:
        tensors: list[Json] = model_config[kind]  # type: ignore[assignment]
        for tensor in tensors:
            if tensor["name"] == name:
                return tensor
    return None


def using_decoupled_model_transaction_policy(model_config: Json) -> bool:
    """Return whether the model is decoupled, by the parsed `model_config`."""
    if "model_transaction_policy" in model_config:
        decoupled: bool = model_config["model_transaction_policy"]["decoupled"]
        return decoupled
    return False


# Set by the loader.
_model_dir = [""]


@overload
def empty(shape: int | Sequence[int], dtype: DTypeLike, device: None = ...) -> NDArray[np.generic]: ...
@overload
def empty(shape: int | Sequence[int], dtype: DTypeLike, device: int) -> DeviceArray: ...
def empty(shape: int | Sequence[int], dtype: DTypeLike, device: int | None = None) -> NDArray[np.generic] | DeviceArray:
    """Return an array for an output, in memory that the runtime reads without a copy. Triton has no such function.

    The array is not initialized. Outside of a stub it is an ordinary array.

    With the number of a `device`, the array lies in the memory of that GPU. torch, cupy and others take it without a
    copy (`torch.from_dlpack`, `cupy.from_dlpack`), and `Tensor.from_dlpack` makes it an output. Raises
    TritonModelException outside of a stub, and if there is no such device or no room on it.
    """
    memory = memory_in_use()
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    if device is not None:
        from moonpool.stub.pb_utils.device_tensor import empty_array

        return empty_array(memory, dims, np.dtype(dtype), device)
    if memory is None:
        return np.empty(shape, dtype)
    wanted = np.dtype(dtype)
    size_bytes = wanted.itemsize
    for dim in dims:
        size_bytes *= dim
    if wanted.hasobject or size_bytes <= 0:
        return np.empty(dims, wanted)
    return np.ndarray(dims, wanted, memory.empty(size_bytes))


def get_model_dir() -> str:
    """Return the folder of the model's version, `<repository>/<model>/<version>`."""
    return _model_dir[0]


def set_model_dir(path: str) -> None:
    """Set what `get_model_dir` returns. For the loader."""
    _model_dir[0] = path
