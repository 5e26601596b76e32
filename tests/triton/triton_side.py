"""The real server, asked over gRPC."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import struct
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from tests.triton.answers import Answer, Failure, Inputs, LogLine, Outcome, Output, Parameter, datatype_of
from tests.triton.recording import RECORDING, Recording, recorded
from tests.triton.server import TritonServer, interpreter, running
from tests.waiting import wait_until
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

CODES = {"INVALID_ARGUMENT": "INVALID_ARG", "UNIMPLEMENTED": "UNSUPPORTED"}
TIMEOUT_S = 60.0
# Of the lines so far, those that somebody waits for; None as long as some are missing.
Chosen = Callable[[list[LogLine]], list[LogLine] | None]
# The time is for all models of the zoo, which are loaded at once.
LOAD_TIMEOUT_S = 300.0
# `I1121 19:19:08.019713 6297 model.py:12] "text"`; a stub that is not connected yet has no quotes.
_LINE = re.compile(
    r"^([IWEF])\d{4} [\d:.]+ \d+ (model\.py:\d+)\]  ?(?:\"(.*?)\"|([^\"\n]+))$", re.DOTALL | re.MULTILINE
)


class TritonSide:
    """One server and a channel to it, or what was recorded of one."""

    def __init__(self, server: TritonServer | None, recording: Recording | None = None) -> None:
        self._server = server
        self.recording = recording
        # The names of the models that were loaded and not unloaded.
        self.loaded: set[str] = set()
        self._heard = 0
        if server is not None:
            self._connect()

    @property
    def server(self) -> TritonServer:
        """The server, which must be there."""
        if self._server is None:
            raise RuntimeError("no tritonserver is asked: its answers are recorded")
        return self._server

    @property
    def has_died(self) -> bool:
        """True if there is a server, and it ended without being stopped."""
        return self._server is not None and self._server.has_died

    def _connect(self) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self.server.grpc_port}")
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._heard = 0
        self._stub.ModelReady(pb.ModelReadyRequest(name="none of that name"), timeout=TIMEOUT_S)

    def close(self) -> None:
        if self._server is not None:
            self._channel.close()

    def restart(self) -> None:
        """After its death, with the models that were loaded."""
        self.close()
        self.server.stop()
        self.server.start()
        self._connect()
        assert [*filter(None, self._load_all(sorted(self.loaded)).values())] == []

    @recorded
    def load(self, model: str) -> Failure | None:
        """Load a model of the repository; what hinders it, if anything does."""
        return self._load(model)

    def _load(self, model: str) -> Failure | None:
        with _failures() as failed:
            self._stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name=model), timeout=LOAD_TIMEOUT_S)
            self.loaded.add(model)
        return _load_failure(failed[0]) if failed else None

    def load_all(self, models: Sequence[str]) -> dict[str, Failure | None]:
        """Load models at once, because the server waits for seconds in each load; what hinders each, if anything
        does.
        """
        found = {} if self._server is None else self._load_all(models)
        if self.recording is None:
            return found
        return {name: self.recording.ask(f"load({name!r})", functools.partial(found.get, name)) for name in models}

    def _load_all(self, models: Sequence[str]) -> dict[str, Failure | None]:
        for tries in range(3):
            try:
                with ThreadPoolExecutor(16) as threads:
                    return dict(zip(models, threads.map(self._load, models), strict=True))
            except pytest.fail.Exception:
                # It dies in a load now and then.
                if tries == 2 or not self.has_died:
                    raise
                self.restart()
        return {}

    def unload(self, model: str) -> None:
        """Return when the model is unloaded: a server that is asked again sooner may die."""
        if self._server is None:
            return
        self.loaded.discard(model)
        self._stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name=model), timeout=TIMEOUT_S)
        wait_until(lambda: self._state(model) != "UNLOADING", TIMEOUT_S, f"{model} to be unloaded")

    def unload_all(self, models: Sequence[str]) -> None:
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(self.unload, models))

    def _state(self, model: str) -> str:
        index = self._stub.RepositoryIndex(pb.RepositoryIndexRequest(), timeout=TIMEOUT_S)
        (state,) = {entry.state for entry in index.models if entry.name == model}
        return str(state)

    @recorded
    def ready(self, model: str) -> bool:
        answer = self._stub.ModelReady(pb.ModelReadyRequest(name=model), timeout=TIMEOUT_S)
        return bool(answer.ready)

    @recorded
    def infer(self, model: str, inputs: Inputs, **options: Any) -> Outcome:
        return self._infer(model, inputs, **options)

    def _infer(self, model: str, inputs: Inputs, **options: Any) -> Outcome:
        request = _request(model, inputs, **options)
        with _failures() as failed:
            return _answer(self._stub.ModelInfer(request, timeout=TIMEOUT_S))
        return failed[0]

    @recorded
    def together(self, model: str, requests: Sequence[Inputs]) -> list[Outcome]:
        """The outcomes of requests that come at the same time."""
        return at_once(self._infer, model, requests)

    @recorded
    def post(self, path: str, body: Any) -> Any:
        """The JSON that the server answers over HTTP."""
        return posted(self.server.http_port, path, body)

    @recorded
    def stream(self, model: str, inputs: Inputs, **options: Any) -> list[Outcome]:
        """All responses to one request of a decoupled model."""
        request = _request(model, inputs, **options)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        outcomes: list[Outcome] = []
        with _failures() as failed:
            for said in self._stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S):
                if said.error_message:
                    outcomes.append(Failure("", said.error_message))
                    continue
                answer = _answer(said.infer_response)
                is_final = answer.parameters.pop("triton_final_response", False)
                if answer.outputs or answer.parameters or not is_final:
                    outcomes.append(answer)
        return [*outcomes, *failed]

    @recorded
    def first_of_stream(self, model: str, inputs: Inputs) -> Outcome:
        """The first response to a request that is cancelled then."""
        call = self._stub.ModelStreamInfer(iter([_request(model, inputs)]), timeout=TIMEOUT_S)
        try:
            return _answer(next(call).infer_response)
        finally:
            call.cancel()

    @recorded
    def config(self, model: str) -> dict[str, Any]:
        """The configuration as the server completed it."""
        config = self._stub.ModelConfig(pb.ModelConfigRequest(name=model), timeout=TIMEOUT_S).config
        return dict(MessageToDict(config, preserving_proto_field_name=True))

    @recorded
    def metadata(self, model: str) -> dict[str, Any]:
        """The metadata in its JSON form."""
        found = self._stub.ModelMetadata(pb.ModelMetadataRequest(name=model), timeout=TIMEOUT_S)
        sides = {"inputs": found.inputs, "outputs": found.outputs}
        return {
            "name": found.name,
            "versions": list(found.versions),
            "platform": found.platform,
            **{side: [_tensor(each) for each in tensors] for side, tensors in sides.items()},
        }

    @recorded
    def metrics(self, pattern: str) -> list[Any]:
        """Return what `re.findall` finds in the lines of the exposition. Measured values are not to be recorded."""
        address = f"http://127.0.0.1:{self.server.metrics_port}/metrics"
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            return sorted(re.findall(pattern, answer.read().decode(), re.MULTILINE))

    @recorded
    def counts(self, model: str) -> dict[str, Any]:
        """The statistics of a model that has one version, without times."""
        address = f"http://127.0.0.1:{self.server.http_port}/v2/models/{model}/stats"
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            (counts,) = json.load(answer, object_hook=_without_times)["model_stats"]
        return dict(counts)

    @recorded
    def lines(self, chosen: Chosen) -> list[LogLine]:
        """Wait until models have logged these lines since the last look, and return them."""
        return lines_of(self._log, chosen)

    def forget_log(self) -> None:
        """Let the next look begin here."""
        if self._server is not None:
            self._log()

    def _log(self) -> list[LogLine]:
        # Only whole lines count, because the last one may be incomplete.
        text, end, _ = self.server.log()[self._heard :].rpartition("\n")
        self._heard += len(text + end)
        return [LogLine(a, b, c or d) for a, b, c, d in _LINE.findall(text)]

    @recorded
    def text_of(self, file: str) -> str:
        """The text of a file that a model has written."""
        return Path(file).read_text()

    @recorded
    def has_logged(self, text: str) -> bool:
        """True if the server's log has this text."""
        wait_until(lambda: text in self.server.log(), TIMEOUT_S, text)
        return True


def _without_times(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if name not in ("ns", "last_inference")}


def at_once(infer: Callable[[str, Inputs], Outcome], model: str, requests: Sequence[Inputs]) -> list[Outcome]:
    """Send requests at the same time, and return their outcomes."""
    with ThreadPoolExecutor(len(requests)) as threads:
        return list(threads.map(infer, [model] * len(requests), requests))


def posted(port: int, path: str, body: Any) -> Any:
    """Send JSON over HTTP, and return the JSON of the answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


def lines_of(log: Callable[[], list[LogLine]], chosen: Chosen) -> list[LogLine]:
    """Wait for the lines, and return them."""
    lines: list[LogLine] = []

    def found() -> tuple[list[LogLine]] | None:
        lines.extend(log())
        those = chosen(lines)
        return None if those is None else (those,)

    return wait_until(found, TIMEOUT_S, f"{chosen} in the log")[0]  # type: ignore[index]


@contextlib.contextmanager
def asked(repository: Path, folder: Path, options: Sequence[str] = ()) -> Iterator[TritonSide]:
    """A tritonserver over this repository, or what was recorded of one."""
    RECORDING.name(repository)
    RECORDING.paths[str(folder)] = "{server}"
    if not RECORDING.is_live:
        yield TritonSide(None, RECORDING)
        return
    with running(interpreter(), repository, folder, options=options) as server:
        side = TritonSide(server, RECORDING)
        try:
            yield side
        finally:
            side.close()


@contextlib.contextmanager
def _failures() -> Iterator[list[Failure]]:
    """Catches what gRPC raises, into the list."""
    caught: list[Failure] = []
    try:
        yield caught
    except grpc.RpcError as error:
        code = error.code().name
        if "Socket closed" in str(error) or "Connection refused" in str(error):
            pytest.fail("tritonserver has died", pytrace=False)
        caught.append(Failure(CODES.get(code, code), error.details() or ""))


def _load_failure(failure: Failure) -> Failure:
    """The model's own words, out of what the server makes of them for each version."""
    found = re.search(r"UNAVAILABLE state: (.*?): (.*);\n?$", failure.text, re.DOTALL)
    if found is None:
        return failure
    code = found[1].upper().replace(" ", "_")
    return Failure(CODES.get(code, code), found[2])


def _tensor(found: Any) -> dict[str, Any]:
    return {"name": found.name, "datatype": found.datatype, "shape": list(found.shape)}


def _request(
    model: str,
    inputs: Inputs,
    *,
    outputs: Iterable[str] = (),
    request_id: str = "",
    parameters: dict[str, Parameter] | None = None,
    **known: Any,
) -> Any:
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    for name, value in inputs.items():
        array = np.asarray(value)
        datatype = datatype_of(array)
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(_encoded(array, datatype))
    for name in outputs:
        request.outputs.add(name=name)
    for key, given in {**(parameters or {}), **_known(**known)}.items():
        kind = {bool: "bool", int: "int64", float: "double", str: "string"}[type(given)]
        setattr(request.parameters[key], f"{kind}_param", given)
    return request


def _known(
    correlation_id: int | str = 0, flags: int = 0, queue_timeout_us: int = 0, priority: int = 0
) -> dict[str, Parameter]:
    """Return moonpool's arguments as the parameters that the protocol reserves for them."""
    known: dict[str, Parameter] = {}
    if correlation_id:
        known["sequence_id"] = correlation_id
    if flags & 1:
        known["sequence_start"] = True
    if flags & 2:
        known["sequence_end"] = True
    if queue_timeout_us:
        known["timeout"] = queue_timeout_us
    if priority:
        known["priority"] = priority
    return known


def _encoded(array: Any, datatype: str) -> bytes:
    if datatype != "BYTES":
        return bytes(array.tobytes())
    encoded = b""
    for item in array.reshape(-1):
        text = item if isinstance(item, bytes) else str(item).encode()
        encoded += struct.pack("<I", len(text)) + text
    return encoded


def _decoded(datatype: str, raw: bytes) -> bytes | tuple[bytes, ...]:
    if datatype != "BYTES":
        return raw
    strings, offset = [], 0
    while offset < len(raw):
        (length,) = struct.unpack_from("<I", raw, offset)
        strings.append(raw[offset + 4 : offset + 4 + length])
        offset += 4 + length
    return tuple(strings)


def _answer(response: Any) -> Answer:
    outputs = {
        output.name: Output(output.datatype, tuple(output.shape), _decoded(output.datatype, raw))
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    parameters = {
        key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in response.parameters.items()
    }
    return Answer(outputs, parameters, response.id)
