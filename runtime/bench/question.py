"""The request that a window repeats: tensors as bytes, and where a server finds them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.bytes_tensor import decode_bytes, encode_bytes
from moonpool.ipc.tensors import CODES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from moonpool.runtime.bench.endpoint import Endpoint

METHOD = "/inference.GRPCInferenceService/ModelInfer"
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input as it travels."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, name: str, datatype: str, array: NDArray[Any]) -> Tensor:
        data = encode_bytes(array, name) if datatype == "BYTES" else array.tobytes()
        return cls(name, datatype, array.shape, data)

    @classmethod
    def of_values(
        cls, name: str, datatype: str, shape: tuple[int, ...], values: list[Any]
    ) -> Tensor:
        """From elements as JSON has them, flat or nested."""
        dtype = np.dtype(object) if datatype == "BYTES" else DTYPES[CODES[datatype]]
        return cls.of(name, datatype, np.array(values, dtype).reshape(shape))

    def array(self) -> NDArray[Any]:
        """The elements. Raises ValueError or BadTensor where bytes and shape do not fit."""
        if self.datatype == "BYTES":
            return decode_bytes(self.data, self.shape)
        return np.frombuffer(self.data, DTYPES[CODES[self.datatype]]).reshape(self.shape)

    def values(self) -> list[Any]:
        """The elements, as JSON has them."""
        if self.datatype == "BYTES":
            count = math.prod(self.shape)
            return [text.decode() for text in decode_bytes(self.data, (count,)).tolist()]
        values: list[Any] = np.frombuffer(self.data, DTYPES[CODES[self.datatype]]).tolist()
        return values


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes of a region of shared memory that the server knows by this name."""

    region: str
    offset: int
    size_bytes: int

    def as_dict(self) -> dict[str, str | int]:
        return {
            "shared_memory_region": self.region,
            "shared_memory_offset": self.offset,
            "shared_memory_byte_size": self.size_bytes,
        }


@dataclass(frozen=True, slots=True)
class Question:
    """A request of one model. Inputs and outputs that have a place travel in shared memory."""

    model: str
    version: str
    inputs: Sequence[Tensor]
    input_places: Mapping[str, Place] = field(default_factory=dict)
    output_places: Mapping[str, Place] = field(default_factory=dict)
    # Over HTTP: whether tensors are numbers in the JSON, as servers want them that know no binary ones.
    is_json: bool = False

    def as_http(self, endpoint: Endpoint, headers: Sequence[tuple[str, str]] = ()) -> bytes:
        """Head and body of a request."""
        header, binary = self._json()
        kind = "json" if self.is_json else "octet-stream"
        version = f"/versions/{self.version}" if self.version else ""
        lines = [
            f"POST {endpoint.path}/v2/models/{self.model}{version}/infer HTTP/1.1",
            f"Host: {endpoint.authority}",
            f"Content-Type: application/{kind}",
            *([] if self.is_json else [f"Inference-Header-Content-Length: {len(header)}"]),
            f"Content-Length: {len(header) + len(binary)}",
            *(f"{name}: {value}" for name, value in headers),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + header + binary

    def _json(self) -> tuple[bytes, bytes]:
        inputs: list[dict[str, object]] = []
        binary: list[bytes] = []
        for tensor in self.inputs:
            described: dict[str, object] = {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": tensor.shape,
            }
            if place := self.input_places.get(tensor.name):
                described["parameters"] = place.as_dict()
            elif self.is_json:
                described["data"] = tensor.values()
            else:
                described["parameters"] = {"binary_data_size": len(tensor.data)}
                binary.append(tensor.data)
            inputs.append(described)
        request: dict[str, object] = {"inputs": inputs}
        if self.output_places:
            request["outputs"] = [
                {"name": name, "parameters": place.as_dict()}
                for name, place in self.output_places.items()
            ]
        elif not self.is_json:
            request["parameters"] = {"binary_data_output": True}
        return json.dumps(request, separators=(",", ":")).encode(), b"".join(binary)

    def as_grpc(self, *, is_stream: bool = False) -> bytes:
        """A serialized ModelInferRequest; of a stream it asks to be told of its end."""
        from tritonclient.grpc import service_pb2

        message = service_pb2.ModelInferRequest(model_name=self.model, model_version=self.version)
        for tensor in self.inputs:
            described = message.inputs.add()
            described.name, described.datatype = tensor.name, tensor.datatype
            described.shape.extend(tensor.shape)
            if place := self.input_places.get(tensor.name):
                _set(described.parameters, place)
            else:
                message.raw_input_contents.append(tensor.data)
        for name, place in self.output_places.items():
            wanted = message.outputs.add()
            wanted.name = name
            _set(wanted.parameters, place)
        if is_stream:
            message.parameters["triton_enable_empty_final_response"].bool_param = True
        serialized: bytes = message.SerializeToString()
        return serialized


def _set(parameters: Any, place: Place) -> None:
    for name, value in place.as_dict().items():
        if isinstance(value, str):
            parameters[name].string_param = value
        else:
            parameters[name].int64_param = value
