"""The request that a window repeats, and the address of its server."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.tensors import CODES, DTYPES, decode_bytes, encode_bytes

if TYPE_CHECKING:
    import ssl

_DEFAULT_PORTS = {"http": 8000, "grpc": 8001, "https": 443, "grpcs": 8001}


class BadAddress(MoonpoolError):
    """A text is not an address of a server."""

    code = "INVALID_ARG"


class Unreachable(MoonpoolError):
    """No server answers at the address, or no connection can be made."""

    code = "UNAVAILABLE"


class MissingPackage(MoonpoolError):
    """A protocol or a format needs a package that is not installed."""

    code = "UNAVAILABLE"


class Tls(NamedTuple):
    """Files in PEM form for TLS: the roots that the server's certificate must lead to, by default the system's, and our
    own certificate.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def context(self, protocol: str) -> ssl.SSLContext:
        """Return a TLS client context for one ALPN protocol. Raises `BadAddress` if a file is unusable."""
        # Few commands need it.
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ValueError) as error:
            raise BadAddress(f"no certificates can be read from {self.ca}: {error}") from error
        try:
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ValueError) as error:
            files = self.certificate if self.key is None else f"{self.certificate} and {self.key}"
            raise BadAddress(
                f"no certificate of our own with its key can be read from {files}: {error}"
                + (". Is the key in another file (--client-key)?" if self.key is None else "")
            ) from error
        context.set_alpn_protocols([protocol])
        return context


class Endpoint(NamedTuple):
    """Address of a server. `scheme` is http or grpc, over TLS if `tls` is given; for HTTP, `path` comes before the
    protocol's paths.
    """

    scheme: str
    host: str
    port: int
    path: str = ""
    tls: Tls | None = None

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}{'s' if self.tls else ''}://{self.authority}{self.path}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read http://HOST[:PORT][/PATH] or grpc://HOST[:PORT], or https:// or grpcs:// for TLS. Raises
        `BadAddress`.
        """
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise BadAddress(f"{text!r} is not an address: {error}") from error
        if parts.scheme not in _DEFAULT_PORTS or not host or parts.query or parts.fragment:
            raise BadAddress(f"{text!r} must be http://HOST:PORT or grpc://HOST:PORT, or the same with https or grpcs")
        path = parts.path.rstrip("/")
        scheme = parts.scheme.removesuffix("s")
        if path and scheme == "grpc":
            raise BadAddress(f"{text!r}: an address for gRPC has no path")
        if parts.username is not None:
            raise BadAddress(f"{text!r}: give a name and a password in a header (--header)")
        tls = Tls() if parts.scheme != scheme else None
        return cls(scheme, host, port or _DEFAULT_PORTS[parts.scheme], path, tls)


METHOD = "/inference.GRPCInferenceService/ModelInfer"
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


@dataclass(frozen=True, slots=True)
class QuestionTensor:
    """A tensor in the form in which it travels."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, name: str, datatype: str, array: NDArray[Any]) -> QuestionTensor:
        data = encode_bytes(array, name) if datatype == "BYTES" else array.tobytes()
        return cls(name, datatype, array.shape, data)

    @classmethod
    def of_values(cls, name: str, datatype: str, shape: tuple[int, ...], values: list[Any]) -> QuestionTensor:
        """Make it from elements of JSON, flat or nested."""
        dtype = np.dtype(object) if datatype == "BYTES" else DTYPES[CODES[datatype]]
        return cls.of(name, datatype, np.array(values, dtype).reshape(shape))

    def array(self) -> NDArray[Any]:
        """Return the elements. Raises ValueError or BadTensor if bytes and shape do not fit."""
        if self.datatype == "BYTES":
            return decode_bytes(self.data, self.shape)
        return np.frombuffer(self.data, DTYPES[CODES[self.datatype]]).reshape(self.shape)

    def values(self) -> list[Any]:
        """Return the elements in the form of JSON, flat."""
        if self.datatype == "BYTES":
            count = math.prod(self.shape)
            return [text.decode() for text in decode_bytes(self.data, (count,)).tolist()]
        values: list[Any] = np.frombuffer(self.data, DTYPES[CODES[self.datatype]]).tolist()
        return values


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a region of shared memory that is registered at the server by this name."""

    region: str
    offset: int
    size_bytes: int

    def as_dict(self) -> dict[str, str | int]:
        return {
            "shared_memory_region": self.region,
            "shared_memory_offset": self.offset,
            "shared_memory_byte_size": self.size_bytes,
        }


def json_post(endpoint: Endpoint, path: str, headers: Sequence[tuple[str, str]], body: bytes) -> bytes:
    """Serialize a POST of JSON as HTTP/1.1, head and body."""
    lines = [
        f"POST {endpoint.path}{path} HTTP/1.1",
        f"Host: {endpoint.authority}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(frozen=True, slots=True)
class Question:
    """A request to one model. Inputs and outputs that have a place travel in shared memory."""

    model: str
    version: str
    inputs: Sequence[QuestionTensor]
    input_places: Mapping[str, Place] = field(default_factory=dict)
    output_places: Mapping[str, Place] = field(default_factory=dict)
    # Over HTTP: send tensors as JSON, for servers without the binary extension.
    is_json: bool = False
    # The id of a sequence, and whether the request is its first and its last one.
    sequence: tuple[int | str, bool, bool] | None = None

    @property
    def _sequence(self) -> dict[str, int | str | bool]:
        if self.sequence is None:
            return {}
        return dict(zip(("sequence_id", "sequence_start", "sequence_end"), self.sequence, strict=True))

    def as_http(self, endpoint: Endpoint, headers: Sequence[tuple[str, str]] = ()) -> bytes:
        """Serialize the request as HTTP/1.1, head and body."""
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

    def as_generate_stream(self, endpoint: Endpoint, headers: Sequence[tuple[str, str]] = ()) -> bytes:
        """Serialize the request for Triton's generate extension, whose answer is a stream of events. It has one row."""
        values = {tensor.name: tensor.values() for tensor in self.inputs}
        body = json.dumps(
            {name: each[0] if len(each) == 1 else each for name, each in values.items()}, separators=(",", ":")
        ).encode()
        version = f"/versions/{self.version}" if self.version else ""
        return json_post(endpoint, f"/v2/models/{self.model}{version}/generate_stream", headers, body)

    def _json(self) -> tuple[bytes, bytes]:
        inputs: list[dict[str, object]] = []
        binary: list[bytes] = []
        for tensor in self.inputs:
            described: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
            if place := self.input_places.get(tensor.name):
                described["parameters"] = place.as_dict()
            elif self.is_json:
                described["data"] = tensor.values()
            else:
                described["parameters"] = {"binary_data_size": len(tensor.data)}
                binary.append(tensor.data)
            inputs.append(described)
        parameters: dict[str, int | str | bool] = self._sequence
        request: dict[str, object] = {"inputs": inputs}
        if self.output_places:
            request["outputs"] = [
                {"name": name, "parameters": place.as_dict()} for name, place in self.output_places.items()
            ]
        elif not self.is_json:
            parameters["binary_data_output"] = True
        if parameters:
            request["parameters"] = parameters
        return json.dumps(request, separators=(",", ":")).encode(), b"".join(binary)

    def as_grpc(self, *, is_stream: bool = False) -> bytes:
        """Serialize the request as a ModelInferRequest. For a stream it asks for a response that marks the end."""
        from moonpool.runtime.model.protobuf import service_messages

        message = service_messages().ModelInferRequest(model_name=self.model, model_version=self.version)
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
        for name, value in self._sequence.items():
            if isinstance(value, str):
                message.parameters[name].string_param = value
            elif name == "sequence_id":
                message.parameters[name].int64_param = value
            else:
                message.parameters[name].bool_param = bool(value)
        if is_stream:
            message.parameters["triton_enable_empty_final_response"].bool_param = True
        serialized: bytes = message.SerializeToString()
        return serialized


# Two ids of sequences as long as all that are used: eleven digits, or five bytes as a varint. They differ in the first
# digit and the first byte.
_IDS = (11_111_111_111, 22_222_222_222)


def around_id(serialize: Callable[[int], bytes], width: int) -> tuple[bytes, bytes]:
    """Return the parts of a serialized request before and behind the id of its sequence, which takes `width` bytes."""
    one, other = map(serialize, _IDS)
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return one[:at], one[at + width :]


def _set(parameters: Any, place: Place) -> None:
    for name, value in place.as_dict().items():
        if isinstance(value, str):
            parameters[name].string_param = value
        else:
            parameters[name].int64_param = value
