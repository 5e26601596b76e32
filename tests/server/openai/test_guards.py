"""Guards of requests: what KServe's API has, OpenAI's has on both of its ports: headers, queues, permits, TLS."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.server.certificates import self_signed
from tests.server.http.serving import TIMEOUT_S, Serving
from tests.waiting import wait_until

import moonpool

MODEL = str(Path(__file__).parents[2] / "models" / "patient_writer.py")
CHAT = "/v1/chat/completions"
INFERENCE = (
    CHAT,
    "/v1/completions",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
)


@contextlib.contextmanager
def started(config: Any = None, *, rate_limit: list[str] | None = None, **options: Any) -> Iterator[Serving]:
    with moonpool.Runtime(rate_limit=rate_limit) as runtime:
        runtime.load("writer", MODEL, config=config)
        with Serving(runtime, **{"openai_port": 0, **options}) as made:
            yield made


def chat(said: str, **fields: Any) -> dict[str, Any]:
    return {"model": "writer", "messages": [{"role": "user", "content": said}], **fields}


def answer(serving: Serving, said: str, headers: dict[str, str] | None = None, port: str = "http") -> str:
    reply = serving.ask("POST", CHAT, chat(said), headers, serving.server.ports[port])
    assert reply.status == 200, reply.body
    text: str = reply.value["choices"][0]["message"]["content"]
    return text


@contextlib.contextmanager
def held(serving: Serving) -> Iterator[None]:
    """Hold the model with a stream that does not end before its client leaves."""
    body = json.dumps(chat("waits", stream=True)).encode()
    with socket.create_connection(("127.0.0.1", serving.port)) as client:
        client.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
        )
        client.settimeout(TIMEOUT_S)
        received = b""
        while b"begun" not in received:
            received += client.recv(65536)
        yield


@pytest.mark.promise("OpenAI", "`--http-restricted-api` and header forwarding cover this API on both of its ports.")
def test_restricted_groups_cover_this_api() -> None:
    keys = {"inference": ("infer-key", "i"), "metadata": ("meta-key", "m"), "model-repository": ("admin-key", "a")}
    asked = {
        "inference": [("POST", path) for path in INFERENCE],
        "metadata": [("GET", "/v1/models"), ("GET", "/v1/models/writer")],
        "model-repository": [("POST", "/v1/models/%20/load"), ("POST", "/v1/models/%20/unload")],
    }
    with started(restricted=keys) as serving:
        for port in serving.server.ports["http"], serving.server.ports["openai"]:
            for group, requests in asked.items():
                key, value = keys[group]
                for method, path in requests:
                    refused = serving.ask(method, path, b"{}", {key: "wrong"}, port)
                    assert (refused.status, refused.value["error"]["type"]) == (403, "permission_error")
                    assert key in refused.value["error"]["message"]
                    assert serving.ask(method, path, b"{}", {key: value}, port).status != 403


@pytest.mark.promise("OpenAI", "`--http-restricted-api` and header forwarding …")
def test_headers_are_passed_on() -> None:
    with started(header_forward_pattern="x-my-.*") as serving:
        for port in "http", "openai":
            assert answer(serving, "headers", {"X-My-Key": "v", "Other": "w"}, port) == "[('X-My-Key', 'v')]"


QUEUE = {"max_queue_size": 1}
SHORT = {"timeout_action": "REJECT", "default_timeout_microseconds": 1000}


@pytest.mark.promise("OpenAI", "A full queue is a 429, a wait beyond its time a 503, an answer beyond its time a 504.")
def test_a_full_queue_says_so() -> None:
    config = {"dynamic_batching": {"default_queue_policy": QUEUE}}
    with started(config) as serving, ThreadPoolExecutor(1) as pool:
        with held(serving):
            waiting = pool.submit(serving.post, CHAT, chat("times"))
            scheduler = serving.service.models.find("writer").scheduler
            wait_until(lambda: scheduler.queued == 1, TIMEOUT_S, "a request in the queue")
            reply = serving.post(CHAT, chat("times"))
        assert (reply.status, reply.value["error"]["code"]) == (429, "queue_full")
        assert reply.value["error"]["type"] == "rate_limit_error"
        assert waiting.result().status == 200


@pytest.mark.promise("OpenAI", "A full queue is a 429, …")
def test_a_request_that_waits_too_long_is_told() -> None:
    with started({"dynamic_batching": {"default_queue_policy": SHORT}}) as serving, held(serving):
        reply = serving.post(CHAT, chat("x"))

        assert (reply.status, reply.value["error"]["code"]) == (503, "model_unavailable")
        assert reply.value["error"]["type"] == "server_error"


@pytest.mark.promise("OpenAI", "A full queue is a 429, …")
def test_a_model_that_takes_too_long_is_told() -> None:
    config = {"parameters": {"MOONPOOL_EXECUTE_TIMEOUT_S": {"string_value": "0.2"}}}
    with started(config) as serving:
        reply = serving.post(CHAT, chat("hangs"))

        assert (reply.status, reply.value["error"]["code"]) == (504, "timeout")
        assert reply.headers["x-should-retry"] == "false"


@pytest.mark.promise("OpenAI", "The rate limiter limits what executes at the same time for this API, too.")
def test_no_more_execute_at_once_than_resources_allow() -> None:
    group = {"count": 2, "kind": "KIND_CPU", "rate_limiter": {"resources": [{"name": "R", "global": True, "count": 1}]}}
    with started({"instance_group": [group]}, rate_limit=["R:1"]) as serving, ThreadPoolExecutor(4) as pool:
        times = sorted(pool.map(lambda _: tuple(map(float, answer(serving, "times").split())), range(40)))

    assert all(ended <= began for (_, ended), (began, _) in pairwise(times))


@pytest.mark.promise("OpenAI", "Its ports speak TLS if that for HTTP does.")
def test_both_ports_speak_tls(tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with started(certificate=certificate, private_key=key) as serving:
        for port in serving.server.ports["http"], serving.server.ports["openai"]:
            connection = http.client.HTTPSConnection("localhost", port, timeout=TIMEOUT_S, context=trusting)
            with contextlib.closing(connection):
                connection.request("POST", CHAT, json.dumps(chat("headers", stream=True)))
                reply = connection.getresponse()
                assert (reply.status, reply.read().endswith(b"data: [DONE]\n\n")) == (200, True)
