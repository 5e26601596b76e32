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
_NOT_ONE = "generate expects model to produce exactly 1 response, use generate stream for model that generates various number of responses"


def events(body: bytes) -> list[Any]:
    lines = body.decode().split("\n\n")
    assert lines.pop() == ""
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.promise(
    "HTTP",
    "`generate` returns one object, `generate_stream` an event for each response.",
)
def test_one_response_comes_as_an_object_with_its_names_in_order(serving: Serving) -> None:
    reply = serving.post(ONE, {"text_input": "hi"})

    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.body == (
        b'{"model_name":"speaks","model_version":"1","text_output":"hi","told":"{}"}'
    )


@pytest.mark.promise("HTTP", "`generate` returns one object, `generate_stream` an …")
def test_many_responses_come_as_events(serving: Serving) -> None:
    reply = serving.post(MANY, {"text_input": "hi", "count": 3})

    assert (reply.status, reply.headers["content-type"]) == (200, EVENTS)
    assert reply.headers["transfer-encoding"] == "chunked"
    assert events(reply.body) == [SAID] * 3


def test_an_answer_of_many_elements_is_an_array(serving: Serving) -> None:
    four = {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1]}

    assert serving.post("/v2/models/add_sub/generate", four).value == {
        "OUTPUT0": [2.0, 3.0, 4.0, 5.0],
        "OUTPUT1": [0.0, 1.0, 2.0, 3.0],
        "model_name": "add_sub",
        "model_version": "1",
    }


def test_keys_that_are_not_inputs_are_parameters(serving: Serving) -> None:
    given = {"p": 1, "q": "s", "r": True, "parameters": {"a": 1.5}, "sequence_id": 3, "id": "abc"}
    reply = serving.post(ONE, {"text_input": "hi", **given})

    assert reply.value["id"] == "abc"
    assert json.loads(reply.value["told"]) == {
        "p": 1,
        "q": "s",
        "r": True,
        "a": 1.5,
        "sequence_id": 3,
        "id": "abc",
    }


@pytest.mark.promise(
    "HTTP", "In `generate`, a member of `parameters` with the name of an input is that input."
)
def test_inputs_may_lie_in_the_parameters(serving: Serving) -> None:
    reply = serving.post(MANY, {"text_input": "hi", "parameters": {"count": 2, "temperature": 0}})
    assert [json.loads(event["told"]) for event in events(reply.body)] == [{"temperature": 0}] * 2

    twice = serving.post(ONE, {"text_input": "a", "parameters": {"text_input": "b"}})
    text = "Converting keyword: 'parameters': input 'text_input' already exists in request"
    assert (twice.status, twice.error) == (400, text)


@pytest.mark.parametrize(
    ("count", "status", "error"), [(2, 200, _NOT_ONE), (-1, 400, "on purpose")]
)
def test_anything_but_one_response_is_an_error(
    serving: Serving, count: int, status: int, error: str
) -> None:
    reply = serving.post(ONE, {"text_input": "hi", "count": count})

    assert (reply.status, reply.error) == (status, error)


def test_the_first_response_decides_about_the_status(serving: Serving) -> None:
    reply = serving.post(MANY, {"text_input": "hi", "count": -1})

    assert (reply.status, reply.headers["content-type"]) == (400, EVENTS)
    assert events(reply.body) == [{"error": "on purpose"}]


@pytest.mark.promise("HTTP", "A key that occurs twice in a request of `generate` is an error.")
@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        ([], 500, "attempt to get members for non-object"),
        ({"text_input": ["a", "b"]}, 400, "The schema can not convert input 'text_input' to tensor with proper shape"),
        ({"text_input": "a", "count": "x"}, 500, "Unable to parse 'data': attempt to access JSON non-signed-integer as signed-integer"),
        ({"text_input": "a", "o": {}}, 400, "parameter 'o' has invalid type. It should be either 'int', 'bool', or 'string'."),
        ({"text_input": "a", "id": 1}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        (b'{"text_input": "a", "count": 1, "text_input": "b"}', 400, "input 'text_input' already exists in request"),
        (b'{"text_input": "a", "p": 1, "p": 1}', 400, "the key 'p' occurs twice in one object of the request"),
        (b'{"text_input": "a", "parameters": {"p": 1, "\\u0070": 2}}', 400, "the key 'p' occurs twice in one object of the request"),
        (b'{"text_input": "a", "id": "1", "id": "2"}', 400, "the key 'id' occurs twice in one object of the request"),
        (b'{"text_input": "a", "parameters": {}, "parameters": {}}', 400, "the key 'parameters' occurs twice in one object of the request"),
        ({"count": 1}, 400, "[request id: <id_unknown>] expected number of inputs between 1 and 2 but got 1 inputs for model 'speaks'. Got input(s) ['count'], but missing required input(s) ['text_input']. Please provide all required input(s)."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [ONE, MANY])
def test_a_request_that_is_none_is_told_so(
    serving: Serving, path: str, body: Any, status: int, error: str
) -> None:
    reply = serving.post(path, body)

    assert (reply.status, reply.error) == (status, error)
    assert reply.headers["content-type"] == "application/json"


def test_numbers_too_long_for_python_are_read_when_keys_are_compared(serving: Serving) -> None:
    body = b'{"text_input": "a", "p": 1%b}' % (b"0" * 5000)

    assert serving.post(ONE, body).status in (200, 400, 500)
    assert serving.post(ONE, b'{"text_input": "a", "p": 0.1%b}' % (b"0" * 5000)).status == 200


def test_only_models_that_are_there_speak(serving: Serving) -> None:
    assert serving.post("/v2/models/nope/generate", {}).status == 404
    assert serving.post("/v2/models/speaks/versions/2/generate_stream", {}).status == 404
    assert serving.get(ONE).status == 405


def cancelled(serving: Serving) -> int:
    return int(serving.post(ONE, {"text_input": "cancelled"}).value["told"])


@pytest.mark.promise("HTTP", "If a client goes, at any …")
def test_a_client_that_goes_ends_an_endless_stream(serving: Serving) -> None:
    before = cancelled(serving)
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
    connection.request("POST", MANY, json.dumps({"text_input": "hi", "count": 0}))
    response = connection.getresponse()
    assert events(
        response.read(len(b"data: %b\n\n" % json.dumps(SAID, separators=(",", ":")).encode()))
    )

    connection.close()
    response.close()

    wait_until(lambda: cancelled(serving) == before + 1)


@pytest.mark.promise(
    "HTTP", "A client that does not read its events cannot fill the server's memory."
)
def test_a_client_that_takes_nothing_of_a_stream_does_not_fill_the_memory() -> None:
    with served("speaks") as serving:
        connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
        connection.request("POST", MANY, json.dumps({"text_input": "x" * 10_000, "count": 0}))
        try:
            # The server disconnects the client once too much waits for it, and that ends the request.
            wait_until(lambda: cancelled(serving) == 1, 60.0)
        finally:
            connection.close()
