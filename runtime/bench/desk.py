"""What the generator has to ask a server besides its requests: what a model takes, and what was counted."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import TYPE_CHECKING, Any, Protocol

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.bench.connection import Unreachable
from moonpool.runtime.bench.question import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from moonpool.runtime.bench.endpoint import Endpoint
    from moonpool.runtime.bench.question import Question


class Refused(MoonpoolError):
    """The server did not do what it was asked for; the text is its own."""

    code = "UNAVAILABLE"


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """Inside, an answer is read; one that is not as the protocol has it is `Refused`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Refused(f"{what} is not as the protocol has it: {error!r:.200}") from error


class Desk(Protocol):
    """Every method raises `Refused` and `Unreachable`."""

    def metadata(self, model: str, version: str) -> Mapping[str, Any]:
        """Inputs and outputs, as the protocol has them."""

    def configuration(self, model: str, version: str) -> Mapping[str, Any] | None:
        """Triton's extension; None where there is none."""

    def statistics(self, model: str, version: str) -> Mapping[str, Any] | None:
        """The entry of `model_stats`; None where there is none."""

    def register(self, name: str, key: str, size_bytes: int) -> None:
        """Let the server read and write the shared memory with this key."""

    def unregister(self, name: str) -> None:
        """The region is no longer meant."""

    def output_sizes(self, question: Question) -> Mapping[str, int]:
        """Ask once; bytes of each output that is binary."""

    def infer(self, question: Question) -> list[Tensor]:
        """Ask once; the outputs, in the server's order."""

    def close(self) -> None:
        """Hang up."""


def desk(endpoint: Endpoint, headers: Sequence[tuple[str, str]], timeout_s: float) -> Desk:
    """The desk of that server."""
    if endpoint.scheme == "http":
        return HttpDesk(endpoint, headers, timeout_s)
    from moonpool.runtime.bench.grpc_desk import GrpcDesk

    return GrpcDesk(endpoint, headers, timeout_s)


class HttpDesk:
    """Over HTTP. For one thread."""

    def __init__(
        self, endpoint: Endpoint, headers: Sequence[tuple[str, str]], timeout_s: float
    ) -> None:
        self._endpoint = endpoint
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
                    f"the server has no binary tensors: output {output['name']} is JSON; "
                    "ask it with --json-tensors"
                )
            sizes[output["name"]] = int(parameters["binary_data_size"])
        return sizes

    def infer(self, question: Question) -> list[Tensor]:
        outputs, binary = self._answer(question)
        found, offset = [], 0
        for output in outputs:
            name, datatype = str(output["name"]), str(output["datatype"])
            shape = tuple(int(dim) for dim in output["shape"])
            size = output.get("parameters", {}).get("binary_data_size")
            if size is None:
                found.append(Tensor.of_values(name, datatype, shape, output["data"]))
                continue
            found.append(Tensor(name, datatype, shape, binary[offset : offset + int(size)]))
            offset += int(size)
        return found

    def _answer(self, question: Question) -> tuple[list[dict[str, Any]], bytes]:
        """The outputs as the JSON of an answer has them, and the bytes behind it."""
        head, _, body = question.as_http(self._endpoint).partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:])
        path = lines[0].split(" ")[1].removeprefix(self._endpoint.path)
        answered, answer = self._ask("POST", path, body, headers)
        size = int(answered.get("inference-header-content-length", str(len(answer))))
        outputs: list[dict[str, Any]] = json.loads(answer[:size])["outputs"]
        return outputs, answer[size:]

    def close(self) -> None:
        """There is nothing to hang up: every question has a connection of its own."""

    def _get(self, path: str) -> dict[str, Any]:
        _, body = self._ask("GET", path, None)
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise Refused(f"{self._endpoint.url}{path} gave no JSON object: {body[:60]!r}")
        return found

    def _ask(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None = None
    ) -> tuple[dict[str, str], bytes]:
        url = self._endpoint.url + path
        connection = http.client.HTTPConnection(
            self._endpoint.host, self._endpoint.port, timeout=self._timeout_s
        )
        try:
            connection.request(
                method, self._endpoint.path + path, body, {**self._headers, **(headers or {})}
            )
            response = connection.getresponse()
            answer = response.read()
        except OSError as error:
            raise Unreachable(f"no server answers at {url}: {error}") from error
        except http.client.HTTPException as error:
            raise Refused(f"{url}: what answers there does not speak HTTP") from error
        finally:
            connection.close()
        if response.status != 200:
            raise Refused(f"{url}: {response.status}: {_error(answer)}")
        return {name.lower(): value for name, value in response.getheaders()}, answer


def _model(model: str, version: str) -> str:
    return f"/v2/models/{model}" + (f"/versions/{version}" if version else "")


def _error(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace").strip()[:300]
