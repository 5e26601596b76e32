"""What the generator has to ask a server besides its requests, over gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

from moonpool.runtime.bench.connection import Unreachable
from moonpool.runtime.bench.desk import Refused
from moonpool.runtime.bench.question import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moonpool.runtime.bench.endpoint import Endpoint
    from moonpool.runtime.bench.question import Question


class GrpcDesk:
    """A `Desk`."""

    def __init__(
        self, endpoint: Endpoint, headers: Sequence[tuple[str, str]], timeout_s: float
    ) -> None:
        self._endpoint = endpoint
        self._metadata = [(name.lower(), value) for name, value in headers]
        self._timeout_s = timeout_s
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.insecure_channel(endpoint.authority, options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def metadata(self, model: str, version: str) -> Mapping[str, Any]:
        request = service_pb2.ModelMetadataRequest(name=model, version=version)
        return _as_dict(self._ask("ModelMetadata", request))

    def configuration(self, model: str, version: str) -> Mapping[str, Any] | None:
        request = service_pb2.ModelConfigRequest(name=model, version=version)
        try:
            found: Mapping[str, Any] = _as_dict(self._ask("ModelConfig", request)).get("config", {})
        except Refused:
            return None
        return found

    def statistics(self, model: str, version: str) -> Mapping[str, Any] | None:
        request = service_pb2.ModelStatisticsRequest(name=model, version=version)
        try:
            entries = _as_dict(self._ask("ModelStatistics", request)).get("model_stats")
        except Refused:
            return None
        return entries[0] if entries else None

    def register(self, name: str, key: str, size_bytes: int) -> None:
        request = service_pb2.SystemSharedMemoryRegisterRequest(
            name=name, key=key, offset=0, byte_size=size_bytes
        )
        self._ask("SystemSharedMemoryRegister", request)

    def unregister(self, name: str) -> None:
        request = service_pb2.SystemSharedMemoryUnregisterRequest(name=name)
        self._ask("SystemSharedMemoryUnregister", request)

    def output_sizes(self, question: Question) -> Mapping[str, int]:
        return {tensor.name: len(tensor.data) for tensor in self.infer(question)}

    def infer(self, question: Question) -> list[Tensor]:
        request = service_pb2.ModelInferRequest.FromString(question.as_grpc())
        answer = self._ask("ModelInfer", request)
        if len(answer.raw_output_contents) != len(answer.outputs):
            raise Refused("the server has no raw outputs: its tensors are typed contents")
        contents = zip(answer.outputs, answer.raw_output_contents, strict=True)
        return [
            Tensor(output.name, output.datatype, tuple(output.shape), data)
            for output, data in contents
        ]

    def close(self) -> None:
        self._channel.close()

    def _ask(self, method: str, request: Any) -> Any:
        try:
            return getattr(self._stub, method)(
                request, timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            code, text = error.code(), error.details()
            if code == grpc.StatusCode.UNAVAILABLE:
                raise Unreachable(f"no server answers at {self._endpoint.url}: {text}") from error
            raise Refused(f"{self._endpoint.url}: {method}: {code.name}: {text}") from error


def _as_dict(message: Any) -> dict[str, Any]:
    found: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return found
