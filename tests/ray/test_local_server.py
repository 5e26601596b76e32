"""A server without a port answers as one with ports. Needs no Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ray.repository import write_models
from tests.waiting import wait_until
from tritonclient.grpc import service_pb2

import moonpool
from moonpool.ray.local_server import HttpReply, HttpRequest, LocalServer, RpcReply
from moonpool.runtime.server.http.options import HttpLimits
from moonpool.runtime.server.service import Service

X = np.array([[1.0, 2.0]], np.float32)
HEADER = "inference-header-content-length"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = write_models(tmp_path_factory.mktemp("models"), "double", "repeats")
    with moonpool.Runtime(folder) as runtime:
        yield Service(runtime)


def in_loop(service: Service, ask: Any, limits: HttpLimits | None = None) -> Any:
    """Return what `ask` returns for a server in an event loop."""

    async def run() -> Any:
        server = LocalServer(service, limits)
        try:
            return await ask(server)
        finally:
            server.close()

    return asyncio.run(run())


def http(
    service: Service,
    method: str,
    path: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    limits: HttpLimits | None = None,
) -> HttpReply:
    raw = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
    request = HttpRequest(method, path.encode(), raw, body)
    reply: HttpReply = in_loop(service, lambda server: server.http(request), limits)
    return reply


def test_metadata_is_answered(service: Service) -> None:
    reply = http(service, "GET", "/v2/models/double")

    assert reply.status == 200
    assert json.loads(reply.body)["name"] == "double"


def test_json_is_inferred(service: Service) -> None:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    body = json.dumps({"id": "7", "inputs": [tensor]}).encode()
    reply = http(service, "POST", "/v2/models/double/infer", body)

    found = json.loads(reply.body)
    assert found["id"] == "7"
    assert found["outputs"][0]["data"] == [2.0, 4.0]


def test_binary_tensors_are_inferred(service: Service) -> None:
    described: dict[str, Any] = {"name": "X", "datatype": "FP32", "shape": [1, 2]}
    described["parameters"] = {"binary_data_size": X.nbytes}
    outputs = [{"name": "Y", "parameters": {"binary_data": True}}]
    text = json.dumps({"inputs": [described], "outputs": outputs}).encode()
    reply = http(service, "POST", "/v2/models/double/infer", text + X.tobytes(), {HEADER: str(len(text))})

    length = dict(reply.headers)[b"Inference-Header-Content-Length"]
    assert np.frombuffer(reply.body[int(length) :], np.float32).tolist() == [2.0, 4.0]


def test_errors_have_the_codes_and_texts_of_a_port(service: Service) -> None:
    reply = http(service, "POST", "/v2/models/nobody/infer", b"{}")

    assert reply.status == 404
    assert json.loads(reply.body) == {"error": "Request for unknown model: 'nobody' is not found"}


def test_a_body_over_the_limit_is_refused(service: Service) -> None:
    reply = http(service, "POST", "/v2/models/double/infer", b"x" * 100, limits=HttpLimits(body_bytes=99))

    assert reply.status == 413


def test_events_come_in_pieces(service: Service) -> None:
    request = HttpRequest("POST", b"/v2/models/repeats/generate_stream", (), b'{"X": 3}')

    async def ask(server: LocalServer) -> list[Any]:
        return [piece async for piece in server.http_stream(request)]

    head, *events = in_loop(service, ask)
    assert head.status == 200
    values = [json.loads(each.removeprefix(b"data: "))["Y"] for each in events]
    assert values == [0.0, 1.0, 2.0]


def test_leaving_a_response_cancels_the_request(service: Service) -> None:
    request = HttpRequest("POST", b"/v2/models/repeats/generate_stream", (), b'{"X": 100000}')

    async def ask(server: LocalServer) -> None:
        pieces = server.http_stream(request)
        await anext(pieces)
        await pieces.aclose()  # type: ignore[attr-defined]

    in_loop(service, ask)
    scheduler = service.models.find("repeats").scheduler
    wait_until(lambda: scheduler.in_flight == 0, 120, "the end of the cancelled request")


def rpc(service: Service, name: str, message: Any) -> list[RpcReply]:
    path = f"/inference.GRPCInferenceService/{name}".encode()

    async def ask(server: LocalServer) -> list[RpcReply]:
        data = message.SerializeToString()
        if name != "ModelStreamInfer":
            return [await server.rpc(path, (), data)]
        return [reply async for reply in server.rpc_stream(path, (), data)]

    found: list[RpcReply] = in_loop(service, ask)
    return found


def infer_request(model: str, x: Any = X) -> Any:
    message = service_pb2.ModelInferRequest(model_name=model)
    message.inputs.add(name="X", datatype="FP32", shape=x.shape)
    message.raw_input_contents.append(x.tobytes())
    return message


def test_an_rpc_is_answered(service: Service) -> None:
    (reply,) = rpc(service, "ModelInfer", infer_request("double"))

    assert reply.message is not None
    found = service_pb2.ModelInferResponse.FromString(reply.message)
    assert np.frombuffer(found.raw_output_contents[0], np.float32).tolist() == [2.0, 4.0]


def test_an_rpc_fails_with_its_status(service: Service) -> None:
    (reply,) = rpc(service, "ModelInfer", infer_request("nobody"))

    assert reply == (None, "NOT_FOUND", "Request for unknown model: 'nobody' is not found")


def test_a_request_of_a_stream_gets_its_responses_and_a_status(service: Service) -> None:
    *replies, status = rpc(service, "ModelStreamInfer", infer_request("repeats", np.array([3], np.float32)))

    found = [service_pb2.ModelStreamInferResponse.FromString(each.message) for each in replies]
    values = [np.frombuffer(r.infer_response.raw_output_contents[0], np.float32)[0] for r in found]
    assert values == [0.0, 1.0, 2.0]
    assert status == (None, "OK", "")


WRITER = Path(__file__).parents[1] / "models" / "writer.py"


@pytest.fixture(scope="module")
def writer() -> Iterator[Service]:
    with moonpool.Runtime() as runtime:
        runtime.load("writer", WRITER)
        yield Service(runtime)


def chat(said: str, **fields: Any) -> bytes:
    return json.dumps({"model": "writer", "messages": [{"role": "user", "content": said}], **fields}).encode()


def test_a_chat_is_answered_whole_and_as_a_stream(writer: Service) -> None:
    whole = http(writer, "POST", "/v1/chat/completions", chat("one two"))
    streamed = http(writer, "POST", "/v1/chat/completions", chat("one two", stream=True))
    wrong = http(writer, "POST", "/v1/chat/completions", chat("x", temperature=3))

    assert json.loads(whole.body)["choices"][0]["message"]["content"] == "one two "
    assert dict(streamed.headers)[b"Content-Type"].startswith(b"text/event-stream")
    assert streamed.body.count(b"data: ") == 5
    assert streamed.body.endswith(b"data: [DONE]\n\n")
    assert (wrong.status, json.loads(wrong.body)["error"]["param"]) == (422, "temperature")


def test_a_client_that_leaves_a_chat_ends_the_models_iterator(writer: Service) -> None:
    async def leave(server: LocalServer) -> str:
        request = HttpRequest("POST", b"/v1/chat/completions", [], chat("waits ray", stream=True))
        async for piece in server.http_stream(request):
            if b"first" in piece:
                break
        said = ""
        async with asyncio.timeout(60):
            while not said:
                reply = await server.http(HttpRequest("POST", b"/v1/chat/completions", [], chat("left")))
                said = json.loads(reply.body)["choices"][0]["message"]["content"]
        return said

    assert in_loop(writer, leave) == "ray"
