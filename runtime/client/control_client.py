"""Clients for everything but the measured requests: a model's inputs, statistics, shared memory, single requests."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.tensors import CODES
from moonpool.runtime.client.request import (
    STREAM_METHOD,
    Endpoint,
    MissingPackage,
    Question,
    QuestionTensor,
    Unreachable,
)
from moonpool.runtime.model.config.model import TensorConfig
from moonpool.runtime.process.extras import how_to_install
from moonpool.runtime.process.files import parsed_json


class Refused(MoonpoolError):
    """The server refused a request. The text is the server's own."""

    code = "UNAVAILABLE"


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """Turn the errors of reading a malformed answer, inside, into `Refused`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Refused(f"{what} does not follow the protocol: {error!r:.200}") from error


class ControlClient(Protocol):
    """Asks a server. Every method raises `Refused` and `Unreachable`."""

    def metadata(self, model: str, version: str) -> Mapping[str, Any]:
        """Return inputs and outputs in the form of the protocol."""

    def configuration(self, model: str, version: str) -> Mapping[str, Any] | None:
        """Return the configuration; None if the server lacks Triton's extension."""

    def statistics(self, model: str, version: str) -> Mapping[str, Any] | None:
        """Return the entry of `model_stats`; None if the server has no statistics."""

    def advice(self, model: str, version: str) -> object:
        """Ask a moonpool server for advice on a model, if it has any. The answer is not checked."""

    def register(self, name: str, key: str, size_bytes: int) -> None:
        """Let the server read and write the shared memory with this key."""

    def unregister(self, name: str) -> None:
        """Unregister the region."""

    def output_sizes(self, question: Question) -> Mapping[str, int]:
        """Send a request; return the bytes of each output that is binary."""

    def infer(self, question: Question) -> list[QuestionTensor]:
        """Send a request; return the outputs in the server's order."""

    def stream(self, question: Question) -> Iterator[list[QuestionTensor]]:
        """Send a request to a decoupled model; yield the outputs of each response when it comes."""

    def overview(self) -> Mapping[str, Any]:
        """Return what a moonpool server shows of itself."""

    def instance_pids(self, model: str, version: str) -> Sequence[int]:
        """Return the processes of the instances that are ready, of a moonpool server. From any thread."""

    def close(self) -> None:
        """Close the connection."""


def control_client(endpoint: Endpoint, headers: Sequence[tuple[str, str]], timeout_s: float) -> ControlClient:
    """Return a client for the protocol of that endpoint."""
    if endpoint.scheme == "http":
        return HttpControlClient(endpoint, headers, timeout_s)
    return GrpcControlClient(endpoint, headers, timeout_s)


class HttpControlClient:
    """A `ControlClient` over HTTP. For one thread."""

    def __init__(self, endpoint: Endpoint, headers: Sequence[tuple[str, str]], timeout_s: float) -> None:
        self._endpoint = endpoint
        self._context = None if endpoint.tls is None else endpoint.tls.context("http/1.1")
        self._headers = dict(headers)
        self._timeout_s = timeout_s

    def metadata(self, model: str, version: str) -> Mapping[str, Any]:
        return self._get(_model(model, version))

    def configuration(self, model: str, version: str) -> Mapping[str, Any] | None:
        try:
            return self._get(_model(model, version) + "/config")
        except Refused:
            return None

    def statistics(self, model: str, version: str) -> Mapping[str, Any] | None:
        try:
            entries = self._get(_model(model, version) + "/stats")["model_stats"]
        except (Refused, LookupError):
            return None
        return entries[0] if entries else None

    def trace_settings(self, changes: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Change the settings of the server's traces, and return them."""
        path = "/v2/trace/setting"
        if changes is None:
            return self._get(path)
        _, body = self._ask("POST", path, json.dumps(changes).encode())
        return dict(parsed_json(body))

    def served(self) -> dict[str, int]:
        """Return the number of requests that each model has answered, also those of ensembles and models."""
        entries = self._get("/v2/models/stats")["model_stats"]
        found: dict[str, int] = {}
        for entry in entries:
            count = int(entry["inference_stats"]["success"]["count"])
            found[str(entry["name"])] = found.get(str(entry["name"]), 0) + count
        return found

    def load(self, model: str, configuration: Mapping[str, Any]) -> None:
        """Load a model with a whole configuration, and return when it is ready."""
        body = {"parameters": {"config": json.dumps(configuration)}}
        self._ask("POST", f"/v2/repository/models/{model}/load", json.dumps(body).encode())

    def unready(self) -> dict[str, str]:
        """Return the models of the server's repositories of which no version is ready, each with the reason."""
        _, body = self._ask("POST", "/v2/repository/index", b"{}")
        entries = parsed_json(body)
        ready = {entry["name"] for entry in entries if entry.get("state") == "READY"}
        return {
            str(entry["name"]): str(entry.get("reason", "it is not loaded"))
            for entry in entries
            if entry["name"] not in ready
        }

    def advice(self, model: str, version: str) -> object:
        try:
            return _model_in(self.overview(), model, version).get("advice")
        except (Refused, Unreachable, LookupError, TypeError, AttributeError):
            return None

    def overview(self) -> Mapping[str, Any]:
        return self._get("/v2/moonpool/overview")

    def instance_pids(self, model: str, version: str) -> list[int]:
        try:
            instances = _model_in(self.overview(), model, version)["instances"]
            return [each["pid"] for each in instances if each["state"] == "READY" and each["pid"]]
        except (LookupError, TypeError, AttributeError) as error:
            raise Refused(f"{self._endpoint.url} does not tell its instances: {error}") from error

    def register(self, name: str, key: str, size_bytes: int) -> None:
        body = json.dumps({"key": key, "offset": 0, "byte_size": size_bytes}).encode()
        self._ask("POST", f"/v2/systemsharedmemory/region/{name}/register", body)

    def unregister(self, name: str) -> None:
        self._ask("POST", f"/v2/systemsharedmemory/region/{name}/unregister", b"")

    def output_sizes(self, question: Question) -> Mapping[str, int]:
        outputs, _ = self._answer(question)
        sizes = {}
        for output in outputs:
            parameters = output.get("parameters", {})
            if question.is_json:
                continue
            if "binary_data_size" not in parameters:
                raise Refused(
                    f"the server has no binary tensors: output {output['name']} is JSON; ask it with --json-tensors"
                )
            sizes[output["name"]] = int(parameters["binary_data_size"])
        return sizes

    def infer(self, question: Question) -> list[QuestionTensor]:
        outputs, binary = self._answer(question)
        found, offset = [], 0
        for output in outputs:
            name, datatype = str(output["name"]), str(output["datatype"])
            shape = tuple(int(dim) for dim in output["shape"])
            size = output.get("parameters", {}).get("binary_data_size")
            if size is None:
                found.append(QuestionTensor.of_values(name, datatype, shape, output["data"]))
                continue
            found.append(QuestionTensor(name, datatype, shape, binary[offset : offset + int(size)]))
            offset += int(size)
        return found

    def stream(self, question: Question) -> Iterator[list[QuestionTensor]]:
        """Use Triton's generate extension, which takes one row, and leaves out the shapes of outputs: each has one
        dimension.
        """
        metadata = self.metadata(question.model, question.version)
        datatypes = {output["name"]: output["datatype"] for output in metadata["outputs"]}
        path, body, headers = self._parts_of(question.as_generate_stream(self._endpoint))
        with self._connected("POST", path, body, headers) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                event = parsed_json(line.removeprefix(b"data:"))
                if "error" in event:
                    raise Refused(f"{self._endpoint.url}{path}: {event['error']}")
                yield [
                    QuestionTensor.of_values(name, datatypes[name], (len(values),), values)
                    for name, value in event.items()
                    if name in datatypes
                    for values in [value if isinstance(value, list) else [value]]
                ]

    def _parts_of(self, request: bytes) -> tuple[str, bytes, dict[str, str]]:
        """Split a serialized request into its path, below that of the endpoint, its body and its headers."""
        head, _, body = request.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        path = lines[0].split(" ")[1].removeprefix(self._endpoint.path)
        return path, body, dict(line.split(": ", 1) for line in lines[1:])

    def _answer(self, question: Question) -> tuple[list[dict[str, Any]], bytes]:
        """Return the outputs in the answer's JSON, and the bytes behind it."""
        path, body, headers = self._parts_of(question.as_http(self._endpoint))
        answered, answer = self._ask("POST", path, body, headers)
        length = answered.get("inference-header-content-length")
        size = len(answer) if length is None else int(length)
        try:
            found = parsed_json(answer[:size])
        except ValueError:
            if length is not None:
                raise
            # Some hosts have no way to say where the JSON ends and binary outputs begin.
            found, size = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
        outputs: list[dict[str, Any]] = found["outputs"]
        return outputs, answer[size:]

    def close(self) -> None:
        """Do nothing, since every request has a connection of its own."""

    def _get(self, path: str) -> dict[str, Any]:
        _, body = self._ask("GET", path, None)
        try:
            found = parsed_json(body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Refused(f"{self._endpoint.url}{path} gave no JSON object: {body[:60]!r}")
        return found

    def _ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> tuple[dict[str, str], bytes]:
        with self._connected(method, path, body, headers) as response:
            answer = response.read()
            return {name.lower(): value for name, value in response.getheaders()}, answer

    @contextlib.contextmanager
    def _connected(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> Iterator[Any]:
        """Send a request, and have its response inside, which is a good one."""
        # Importing it takes a fifth of the time that a command needs to start.
        import http.client

        url = self._endpoint.url + path
        host, port, tls = self._endpoint.host, self._endpoint.port, self._endpoint.tls
        if tls is None:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._context)
        try:
            connection.request(method, self._endpoint.path + path, body, {**self._headers, **(headers or {})})
            response = connection.getresponse()
            if response.status != 200:
                raise Refused(f"{url}: {response.status}: {_error(response.read())}")
            yield response
        except OSError as error:
            raise Unreachable(f"no server answers at {url}: {error}") from error
        except http.client.HTTPException as error:
            raise Refused(f"{url}: what answers there does not speak HTTP") from error
        finally:
            connection.close()


def _model_in(overview: Mapping[str, Any], model: str, version: str) -> Mapping[str, Any]:
    """Return the latest version of a model, or the one that is asked for. Raises LookupError."""
    found: Mapping[str, Any] = [
        each for each in overview["models"] if each["name"] == model and version in ("", each["version"])
    ][-1]
    return found


def _model(model: str, version: str) -> str:
    return f"/v2/models/{model}" + (f"/versions/{version}" if version else "")


def _error(body: bytes) -> str:
    try:
        return str(parsed_json(body)["error"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace").strip()[:300]


class GrpcControlClient:
    """A `ControlClient` over gRPC."""

    def __init__(self, endpoint: Endpoint, headers: Sequence[tuple[str, str]], timeout_s: float) -> None:
        # Only gRPC needs this.
        from moonpool.runtime.model.protobuf import service_messages

        self._endpoint = endpoint
        self._messages = service_messages()
        self._metadata = [(name.lower(), value) for name, value in headers]
        self._timeout_s = timeout_s
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = _channel(endpoint, options)

    def metadata(self, model: str, version: str) -> Mapping[str, Any]:
        request = self._messages.ModelMetadataRequest(name=model, version=version)
        return _as_dict(self._ask("ModelMetadata", request))

    def configuration(self, model: str, version: str) -> Mapping[str, Any] | None:
        request = self._messages.ModelConfigRequest(name=model, version=version)
        try:
            found: Mapping[str, Any] = _as_dict(self._ask("ModelConfig", request)).get("config", {})
        except Refused:
            return None
        return found

    def statistics(self, model: str, version: str) -> Mapping[str, Any] | None:
        request = self._messages.ModelStatisticsRequest(name=model, version=version)
        try:
            entries = _as_dict(self._ask("ModelStatistics", request)).get("model_stats")
        except Refused:
            return None
        return entries[0] if entries else None

    def advice(self, model: str, version: str) -> None:
        """Return None, since only the HTTP port has the overview."""

    def overview(self) -> Mapping[str, Any]:
        raise Refused(f"{self._endpoint.url} has no overview: give an http:// address")

    def instance_pids(self, model: str, version: str) -> list[int]:
        del model, version
        raise Refused(f"{self._endpoint.url} does not tell its instances: give an http:// address")

    def register(self, name: str, key: str, size_bytes: int) -> None:
        request = self._messages.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=0, byte_size=size_bytes)
        self._ask("SystemSharedMemoryRegister", request)

    def unregister(self, name: str) -> None:
        request = self._messages.SystemSharedMemoryUnregisterRequest(name=name)
        self._ask("SystemSharedMemoryUnregister", request)

    def output_sizes(self, question: Question) -> Mapping[str, int]:
        return {tensor.name: len(tensor.data) for tensor in self.infer(question)}

    def infer(self, question: Question) -> list[QuestionTensor]:
        request = self._messages.ModelInferRequest.FromString(question.as_grpc())
        return _outputs_of(self._ask("ModelInfer", request))

    def stream(self, question: Question) -> Iterator[list[QuestionTensor]]:
        messages = self._messages
        call = self._channel.stream_stream(
            STREAM_METHOD, request_serializer=None, response_deserializer=messages.ModelStreamInferResponse.FromString
        )
        request = question.as_grpc(is_stream=True)
        with self._refusals("ModelStreamInfer"):
            for answer in call(iter([request]), timeout=self._timeout_s, metadata=self._metadata):
                if answer.error_message:
                    raise Refused(f"{self._endpoint.url}: {answer.error_message}")
                if answer.infer_response.outputs:
                    yield _outputs_of(answer.infer_response)

    def close(self) -> None:
        self._channel.close()

    def _ask(self, method: str, request: Any) -> Any:
        from moonpool.runtime.model.protobuf import SERVICE

        call = self._channel.unary_unary(
            f"/inference.{SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=getattr(self._messages, f"{method}Response").FromString,
        )
        with self._refusals(method):
            return call(request, timeout=self._timeout_s, metadata=self._metadata)

    @contextlib.contextmanager
    def _refusals(self, method: str) -> Iterator[None]:
        """Turn the errors of RPCs inside into `Unreachable` and `Refused`."""
        import grpc

        try:
            yield
        except grpc.RpcError as error:
            code, text = error.code(), error.details()
            if code == grpc.StatusCode.UNAVAILABLE:
                raise Unreachable(f"no server answers at {self._endpoint.url}: {text}") from error
            raise Refused(f"{self._endpoint.url}: {method}: {code.name}: {text}") from error


def _outputs_of(answer: Any) -> list[QuestionTensor]:
    if len(answer.raw_output_contents) != len(answer.outputs):
        raise Refused("the server has no raw outputs: its tensors are typed contents")
    contents = zip(answer.outputs, answer.raw_output_contents, strict=True)
    return [QuestionTensor(output.name, output.datatype, tuple(output.shape), data) for output, data in contents]


def _channel(endpoint: Endpoint, options: Sequence[tuple[str, int]]) -> Any:
    try:
        import grpc
    except ModuleNotFoundError as error:
        needs = how_to_install("grpc")
        raise MissingPackage(f"{endpoint.url} needs the package grpcio: {needs}") from error
    if endpoint.tls is None:
        return grpc.insecure_channel(endpoint.authority, options)
    # The files are checked as for HTTP, since gRPC reports bad ones by a connection that fails.
    endpoint.tls.context("h2")
    files = endpoint.tls.ca, endpoint.tls.key or endpoint.tls.certificate, endpoint.tls.certificate
    texts = [None if file is None else Path(file).read_bytes() for file in files]
    return grpc.secure_channel(endpoint.authority, grpc.ssl_channel_credentials(*texts), options)


def _as_dict(message: Any) -> dict[str, Any]:
    from google.protobuf import json_format

    found: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return found


@dataclass(frozen=True, slots=True)
class Interface:
    """Inputs of a model. Dims leave out the batch dimension, as in a configuration."""

    name: str
    max_batch_size: int
    inputs: tuple[TensorConfig, ...]
    decoupled: bool
    # True if its requests belong to sequences.
    has_sequences: bool


def interface(client: ControlClient, model: str, version: str, *, with_optional: bool = False) -> Interface:
    """Ask a server for the inputs of a model, with or without optional ones.

    Raises `Refused` and `Unreachable`, and the errors that `understood` turns if the answer is malformed.

    A server without Triton's configuration does not tell if the model takes batches. The model is taken to do so if the
    first dimension of all inputs is open.
    """
    metadata = client.metadata(model, version)
    tensors = []
    for entry in metadata.get("inputs", []):
        if entry["datatype"] not in CODES:
            raise Refused(f"input {entry['name']} of {model} is of datatype {entry['datatype']!r}")
        dims = tuple(int(dim) for dim in entry.get("shape", []))
        if not isinstance(entry["name"], str) or min(dims, default=0) < -1:
            raise ValueError(f"input {entry['name']!r} of shape {dims}")
        tensors.append(TensorConfig(entry["name"], entry["datatype"], dims))
    configuration = client.configuration(model, version)
    if configuration is None:
        is_batched = bool(tensors) and all(tensor.dims[:1] == (-1,) for tensor in tensors)
        max_batch_size, optional, is_decoupled = int(is_batched), set(), False
        has_sequences = False
    else:
        max_batch_size = int(configuration.get("max_batch_size", 0))
        optional = {t["name"] for t in configuration.get("input", []) if t.get("optional")}
        policy = configuration.get("model_transaction_policy", {})
        is_decoupled = bool(policy.get("decoupled", False))
        has_sequences = "sequence_batching" in configuration
    inputs = tuple(
        TensorConfig(t.name, t.datatype, t.dims[1:] if max_batch_size else t.dims)
        for t in tensors
        if with_optional or t.name not in optional
    )
    return Interface(model, max_batch_size, inputs, is_decoupled, has_sequences)
