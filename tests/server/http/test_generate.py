"""The generate extension: one flat object in, one out for each response."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest
from tests.server.http.served import served, serving
from tests.server.http.serving import Serving
from tests.waiting import wait_until

__all__ = ["serving"]
ONE, MANY = "/v2/models/speaks/generate", "/v2/models/speaks/generate_stream"
EVENTS = "text/event-stream; charset=utf-8"
SAID = {"model_name": "speaks", "model_version": "1", "text_output": "hi", "told": "{}"}


def events(body: bytes) -> list[Any]:
    lines = body.decode().split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.promise("HTTP", "`generate` returns one object, `generate_stream` an event for each response.")
def test_many_responses_come_as_events(serving: Serving) -> None:
    reply = serving.post(MANY, {"text_input": "hi", "count": 3})

    assert (reply.status, reply.headers["content-type"]) == (200, EVENTS)
    assert reply.headers["transfer-encoding"] == "chunked"
    assert events(reply.body) == [SAID] * 3


@pytest.mark.promise("HTTP", "A key that occurs twice in a request of `generate` is an error.")
@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b'{"text_input": "a", "count": 1, "text_input": "b"}', 400, "input 'text_input' already exists in request"),
        (b'{"text_input": "a", "p": 1, "p": 1}', 400, "the key 'p' occurs twice in one object of the request"),
        (b'{"text_input": "a", "parameters": {"p": 1, "\\u0070": 2}}', 400, "the key 'p' occurs twice in one object of the request"),
        (b'{"text_input": "a", "id": "1", "id": "2"}', 400, "the key 'id' occurs twice in one object of the request"),
        (b'{"text_input": "a", "parameters": {}, "parameters": {}}', 400, "the key 'parameters' occurs twice in one object of the request"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [ONE, MANY])
def test_a_key_that_occurs_twice_is_an_error(serving: Serving, path: str, body: Any, status: int, error: str) -> None:
    reply = serving.post(path, body)

    assert (reply.status, reply.error) == (status, error)
    assert reply.headers["content-type"] == "application/json"


def test_numbers_too_long_for_python_are_read_when_keys_are_compared(serving: Serving) -> None:
    body = b'{"text_input": "a", "p": 1%b}' % (b"0" * 5000)

    assert serving.post(ONE, body).status in (200, 400, 500)
    assert serving.post(ONE, b'{"text_input": "a", "p": 0.1%b}' % (b"0" * 5000)).status == 200


def cancelled(serving: Serving) -> int:
    return int(serving.post(ONE, {"text_input": "cancelled"}).value["told"])


@pytest.mark.promise("HTTP", "If a client goes, at any …")
def test_a_client_that_goes_ends_an_endless_stream(serving: Serving) -> None:
    before = cancelled(serving)
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
    connection.request("POST", MANY, json.dumps({"text_input": "hi", "count": 0}))
    response = connection.getresponse()
    assert events(response.read(len(b"data: %b\n\n" % json.dumps(SAID, separators=(",", ":")).encode())))

    connection.close()
    response.close()

    wait_until(lambda: cancelled(serving) == before + 1)


@pytest.mark.promise("HTTP", "A client that does not read its events cannot fill the server's memory.")
def test_a_client_that_takes_nothing_of_a_stream_does_not_fill_the_memory() -> None:
    with served("speaks") as serving:
        connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
        connection.request("POST", MANY, json.dumps({"text_input": "x" * 10_000, "count": 0}))
        try:
            # The server disconnects the client once too much waits for it, and that ends the request.
            wait_until(lambda: cancelled(serving) == 1, 60.0)
        finally:
            connection.close()
