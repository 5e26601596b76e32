"""The ingress refuses what it must, in this process and without a cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here; bash .ci/run ray installs it apart")

from ray.exceptions import RayTaskError
from starlette.requests import Request
from starlette.responses import Response
from tritonclient.grpc import service_pb2

from moonpool.ray.ingress import Ingress
from moonpool.ray.options import Traits
from moonpool.ray.rpc_stream import RpcStream
from moonpool.runtime.server.http.options import HttpLimits

SECRET = "/srv/private/secret.txt"


class Fails:
    """A handle of Ray's whose replica has a defect."""

    def options(self, **_: Any) -> Fails:
        return self

    @property
    def http(self) -> Any:
        async def remote(*_: Any, **__: Any) -> None:
            raise RayTaskError("http", f"Traceback: {SECRET}", KeyError(SECRET))

        return SimpleNamespace(remote=remote)

    @property
    def http_stream(self) -> Any:
        async def remote(*_: Any, **__: Any) -> AsyncIterator[bytes]:
            raise RayTaskError("http_stream", f"Traceback: {SECRET}", KeyError(SECRET))
            yield b""

        return SimpleNamespace(remote=remote)


def post(path: str, *parts: bytes, models: Any = None) -> Response:
    """Ask an ingress in this process."""
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
    left = list(parts)

    async def receive() -> dict[str, Any]:
        body = left.pop(0) if left else b""
        return {"type": "http.request", "body": body, "more_body": bool(left)}

    async def ask() -> Response:
        names = models or {}
        traits = {name: Traits(name) for name in names}
        return await Ingress(names, traits, ("http",))(Request(scope, receive))

    return run(ask())


def run(asking: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(asking, 120))


def error_of(response: Response) -> str:
    text: str = json.loads(bytes(response.body))["error"]
    return text


@pytest.mark.parametrize("path", ["/v2/logging?", "/v2/trace/setting?x"])
def test_a_decoded_question_mark_is_part_of_the_path(path: str) -> None:
    # With a question mark that ends the path, the server would change its own settings.
    assert post(path, b'{"log_info": false}').status_code == 404


def test_settings_cannot_be_changed() -> None:
    response = post("/v2/logging", b'{"log_info": false}')

    assert (response.status_code, "cannot change them" in error_of(response)) == (501, True)


def test_a_body_over_the_limit_is_refused_before_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = dataclasses.replace(HttpLimits(), body_bytes=10)
    monkeypatch.setattr("moonpool.ray.ingress.HttpLimits", lambda: limits)

    response = post("/v2/models/m/infer", b"x" * 6, b"x" * 6, b"x" * 6)

    assert response.status_code == 413
    assert error_of(response) == "request body of at least 12 bytes exceeds the maximum of 10 bytes"


@pytest.mark.promise("Ray Serve", "An error that nobody foresaw is in the log, and clients get none of its text.")
@pytest.mark.parametrize("kind", ["infer", "generate_stream"])
def test_an_unexpected_error_of_a_replica_stays_in_the_log(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    with caplog.at_level(logging.ERROR, "moonpool"):
        response = post(f"/v2/models/m/{kind}", b"{}", models={"m": Fails()})

    assert (response.status_code, error_of(response)) == (500, "internal error; see the server's log")
    assert SECRET in caplog.text


def test_an_unexpected_error_of_the_ingress_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Fails):
        def options(self, **_: Any) -> Fails:
            raise KeyError(SECRET)

    with caplog.at_level(logging.ERROR, "moonpool"):
        response = post("/v2/models/m/generate_stream", b"{}", models={"m": Broken()})

    assert (response.status_code, error_of(response)) == (500, "internal error; see the server's log")
    assert SECRET in caplog.text


def streamed(*messages: bytes) -> tuple[list[Any], Any]:
    """Send messages to an ingress without models. Returns the answers and the status."""

    async def ask() -> tuple[list[Any], Any]:
        async def requests() -> AsyncIterator[bytes]:
            for message in messages:
                yield message

        stream = RpcStream(Ingress({}, {}, ("grpc",)).read, {}, ())
        kind = service_pb2.ModelStreamInferResponse
        found = [kind.FromString(each) async for each in stream.answers(requests())]
        return found, stream.status

    answers: tuple[list[Any], Any] = run(ask())
    return answers


def test_an_error_in_a_stream_has_the_id_of_its_request() -> None:
    asked = service_pb2.ModelInferRequest(model_name="nobody", id="7").SerializeToString()

    (answer,), status = streamed(asked)

    assert answer.infer_response.id == "7"
    assert answer.error_message == "Request for unknown model: 'nobody' is not found"
    assert status is None


def test_bytes_that_are_no_message_end_a_stream() -> None:
    answers, status = streamed(b"\xff\xff\xff")

    assert answers == []
    assert (status.code, status.details) == ("INTERNAL", "Unable to parse request")
