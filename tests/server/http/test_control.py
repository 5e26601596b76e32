"""All routes over HTTP except for inference, and their answers to bad requests."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest
from tests.server.certificates import self_signed
from tests.server.http.served import served, serving
from tests.server.http.serving import Serving
from tests.server.repositories import write
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.server.http.options import HttpOptions
from moonpool.runtime.server.http.server import HttpServer
from moonpool.runtime.server.openai.routes import OpenAIEndpoints
from moonpool.runtime.server.tracing.settings import trace_options
from moonpool.runtime.server.tracing.traces import Traces

__all__ = ["serving"]
SUMS = "/v2/models/add_sub"
# One test at a time has an object of this name in /dev/shm.
KEY = f"/moonpool_test_{os.getpid()}"


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Start a server with a repository of which nothing is loaded."""
    repository = tmp_path_factory.mktemp("repository")
    write(repository, "one")
    write(repository, "bad", "raise ValueError('boom')\n")
    with moonpool.Runtime(repository, models=[]) as runtime, Serving(runtime) as made:
        yield made


@pytest.mark.promise("HTTP", "Each path answers only its methods. Other paths are not found.")
@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/v2/health/live", "application/json"),
        ("/v2/health/ready", "application/json"),
        ("/v2", "application/json"),
        (SUMS, "application/json"),
        (SUMS + "/versions/1", "application/json"),
        (SUMS + "/versions/01/config", "application/json"),
        (SUMS + "/ready", "application/json"),
        (SUMS + "/config", "application/json"),
        (SUMS + "/stats", "application/json"),
        ("/v2/models/stats", "application/json"),
        ("/v2/systemsharedmemory/status", "application/json"),
        ("/v2/cudasharedmemory/status", "application/json"),
        ("/v2/trace/setting", "application/json"),
        (SUMS + "/trace/setting", "application/json"),
        ("/v2/logging", "application/json"),
        ("/v2/health/live?x=1", "application/json"),
    ],
)
def test_read_only_routes_answer_get_only(serving: Serving, path: str, media_type: str) -> None:
    reply = serving.get(path)

    assert reply.status == 200
    assert reply.headers["content-type"] == media_type
    for method in ("HEAD", "PUT", "DELETE", "OPTIONS"):
        refused = serving.ask(method, path)
        assert refused.status == 405
        assert method == "HEAD" or refused.error == "Method Not Allowed"


@pytest.mark.promise("HTTP", "Health checks are answered in the JSON form of KServe v2.")
def test_health_is_told_as_json(serving: Serving) -> None:
    assert serving.get("/v2/health/live").value == {"live": True}
    assert serving.get("/v2/health/ready").value == {"ready": True}
    name = SUMS.rpartition("/")[2]
    assert serving.get(f"{SUMS}/ready").value == {"name": name, "ready": True}


@pytest.mark.promise("HTTP", "Each path answers only its methods. …")
@pytest.mark.parametrize(
    "path",
    ["/v2/", "/v2/nothing", "//v2", "/V2", "/v2/models/", SUMS + "/", SUMS + "/x",
     SUMS + "/versions/x", SUMS + "/versions/-1", "/v2/models/a/b/c",
     "/v2/systemsharedmemory/region//register"],
)  # fmt: skip
def test_missing_names_are_not_found(serving: Serving, path: str) -> None:
    reply = serving.get(path)

    assert (reply.status, reply.error) == (404, "Not Found")
    assert reply.headers["content-type"] == "text/plain"


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("models/nope/load", b"", 500, "failed to load 'nope', failed to poll from model repository"),
        ("models/one/load", {"parameters": {"file:1/model.py": "!"}}, 400, "'file:1/model.py' is not base64"),
    ],
)  # fmt: skip
def test_control_that_fails_says_why(controlled: Serving, path: str, body: Any, status: int, error: str) -> None:
    reply = controlled.post("/v2/repository/" + path, body)

    assert (reply.status, reply.error[: len(error)]) == (status, error)


def test_large_tensors_travel_in_the_memory_of_clients() -> None:
    with served("plain") as serving:
        exchange_much_in_memory(serving)


def exchange_much_in_memory(serving: Serving) -> None:
    size_bytes = 3 << 20
    memory = posix_ipc.SharedMemory(KEY, posix_ipc.O_CREX, size=2 * size_bytes)
    data = np.random.default_rng(1).integers(0, 256, size_bytes, np.uint8).tobytes()
    try:
        with open(memory.fd, "r+b", buffering=0, closefd=False) as file:
            file.write(data)
            key = {"key": KEY, "byte_size": 2 * size_bytes}
            path = "/v2/systemsharedmemory/region/large/"
            assert serving.post(path + "register", key).status == 200
            place = {"shared_memory_region": "large", "shared_memory_byte_size": size_bytes}
            given = {"name": "X", "datatype": "UINT8", "shape": [size_bytes], "parameters": place}
            there = {"name": "OUT_X", "parameters": {**place, "shared_memory_offset": size_bytes}}
            request = {"inputs": [given], "outputs": [there]}
            assert serving.post("/v2/models/plain/infer", request).status == 200
            file.seek(size_bytes)
            assert file.read() == data
            file.truncate(size_bytes // 2)
            reply = serving.post("/v2/models/plain/infer", request)
            assert (reply.status, "shorter now" in reply.error) == (400, True)
    finally:
        serving.post("/v2/systemsharedmemory/unregister")
        memory.close_fd()
        memory.unlink()


def test_metrics_have_a_port_of_their_own(serving: Serving) -> None:
    port = serving.server.ports["metrics"]
    reply = serving.ask("GET", "/metrics", port=port)

    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert b'nv_inference_request_success{model="add_sub",version="1"}' in reply.body
    assert b'moonpool_frontend_requests_total{protocol="http",status="200"}' in reply.body
    assert serving.ask("POST", "/metrics", port=port).status == 405
    assert serving.ask("GET", "/v2", port=port).status == 404


def test_an_unforeseen_error_is_a_general_error(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving.service.metadata, "server_metadata", lambda: 1 // 0)

    reply = serving.get("/v2")

    assert (reply.status, reply.error) == (500, "internal error; see the server's log")
    wait_until(lambda: "ZeroDivisionError" in caplog.text)


@pytest.mark.promise("gRPC", "Models that are loading, or do …")
def test_metrics_are_told_while_others_wait_for_models(serving: Serving) -> None:
    is_over = threading.Event()
    _, patient = serving.pools
    waiting = [patient.submit(is_over.wait, 60) for _ in range(patient.most)]

    assert serving.ask("GET", "/metrics", port=serving.server.ports["metrics"]).status == 200

    is_over.set()
    assert all(each.result() for each in waiting)


@pytest.mark.promise("At the limits", "If no thread can be started …")
def test_requests_for_which_there_is_no_thread_are_refused_and_the_next_are_not(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise moonpool.OutOfThreads("the runtime has no thread")

    body = gzip.compress(b"{}")
    with monkeypatch.context() as patch:
        for pool in serving.pools:
            patch.setattr(pool, "submit", refuse)
        replies = [
            serving.get(f"{SUMS}/ready"),
            serving.get("/v2/moonpool/overview"),
            serving.ask("POST", f"{SUMS}/infer", body, {"Content-Encoding": "gzip"}),
        ]

    assert [(each.status, each.error) for each in replies] == [(503, "the runtime has no thread")] * 3
    assert serving.get(f"{SUMS}/ready").status == 200


def test_the_page_is_served(serving: Serving) -> None:
    reply = serving.get("/")

    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert serving.get("/v2/moonpool/overview").value["models"]
    refused = serving.post("/v2/moonpool/overview")
    assert (refused.status, refused.error) == (405, "Method Not Allowed")


@pytest.mark.promise("HTTP", "Requests over HTTP are traced from the first byte to the last.")
def test_requests_are_traced(tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    options = trace_options([f"triton,file={file}", "level=TIMESTAMPS", "rate=1"])
    inputs = [
        {"name": name, "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]} for name in ("INPUT0", "INPUT1")
    ]
    with served("add_sub") as traced:
        traced.service.traces = Traces(options)
        assert traced.post(SUMS + "/infer", {"id": "me", "inputs": inputs}).status == 200
        assert traced.post(SUMS + "/infer", {"id": "bad", "inputs": []}).status == 400
    traced.service.traces.close()
    lines = json.loads(file.read_text())
    names = [stamp["name"] for line in lines for stamp in line.get("timestamps", [])]

    assert [line["request_id"] for line in lines if "request_id" in line] == ["me"]
    assert names[:2] == ["HTTP_RECV_START", "HTTP_RECV_END"]
    assert {"REQUEST_START", "COMPUTE_START", "REQUEST_END"} <= set(names)
    assert {"HTTP_SEND_START", "HTTP_SEND_END"} <= set(names)


@pytest.mark.parametrize("is_tls", [False, True])
def test_of_two_servers_that_start_at_once_the_second_to_listen_is_refused_the_port(
    controlled: Serving, tmp_path: Path, is_tls: bool
) -> None:
    key, certificate = self_signed(tmp_path)
    files: Any = {"certificate": certificate, "private_key": key} if is_tls else {}

    async def start_both() -> None:
        servers = [HttpServer(controlled.service, HttpOptions(port=0, metrics_port=None, **files), OpenAIEndpoints)]
        try:
            await servers[0].bind()
            port = servers[0].ports["http"]
            servers.append(
                HttpServer(controlled.service, HttpOptions(port=port, metrics_port=None, **files), OpenAIEndpoints)
            )
            await servers[1].bind()
            await servers[0].start()
            with pytest.raises(moonpool.MoonpoolError, match=rf"port {port} \(http\): Address already in use"):
                await servers[1].start()
        finally:
            for server in servers:
                server.close()

    controlled.run(start_both)
