"""Inference over HTTP: what clients send, and what they get."""

from __future__ import annotations

import gzip
import http.client
import json
import tracemalloc
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tests.server.http.served import LARGE, arrays_of, serving, triton_echo
from tests.server.http.serving import Reply, Serving
from tests.waiting import wait_until

__all__ = ["serving"]

ADD_SUB = "/v2/models/add_sub/infer"
ECHO = "/v2/models/echo/infer"
FOUR = [b"\0\0\x80?" * 4, b"\0\0\0@" * 4]


def tensor(name: str, values: list[Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": [1, 4], "datatype": "FP32", "data": values, **more}


def add_sub(**more: Any) -> dict[str, Any]:
    inputs = [tensor("INPUT0", [1, 2, 3, 4]), tensor("INPUT1", [1, 1, 1, 1.5])]
    return {"inputs": inputs, **more}


def binary_add_sub(**more: Any) -> dict[str, Any]:
    inputs = []
    for name in ("INPUT0", "INPUT1"):
        inputs.append(tensor(name, [], parameters={"binary_data_size": 16}))
        del inputs[-1]["data"]
    return {"inputs": inputs, **more}


def post_binary(
    serving: Serving, path: str, header: dict[str, Any], tensors: bytes, headers: Mapping[str, str] | None = None
) -> Reply:
    text = json.dumps(header).encode()
    length = {"Inference-Header-Content-Length": str(len(text))}
    return serving.post(path, text + tensors, {**length, **(headers or {})})


def test_json_goes_in_and_out(serving: Serving) -> None:
    reply = serving.post(ADD_SUB, add_sub(id="42"))

    assert reply.status == 200
    assert reply.headers == {"content-type": "application/json", "content-length": str(len(reply.body))}
    assert reply.body == (
        b'{"id":"42","model_name":"add_sub","model_version":"1","outputs":[{"name":"OUTPUT0",'
        b'"datatype":"FP32","shape":[1,4],"data":[2.0,3.0,4.0,5.5]},{"name":"OUTPUT1","datatype":'
        b'"FP32","shape":[1,4],"data":[0.0,1.0,2.0,2.5]}]}'
    )


def test_binary_tensors_go_in_and_out(serving: Serving) -> None:
    parameters = {"binary_data_output": True}
    for _ in range(2):  # the server remembers the first request for the second
        reply = post_binary(serving, ADD_SUB, binary_add_sub(parameters=parameters), b"".join(FOUR))
        length = int(reply.headers["inference-header-content-length"])

        assert reply.headers["content-type"] == "application/octet-stream"
        assert [each["parameters"] for each in json.loads(reply.body[:length])["outputs"]] == [
            {"binary_data_size": 16}
        ] * 2
        assert np.frombuffer(reply.body[length:], "f4").tolist() == [3.0] * 4 + [-1.0] * 4


def test_requests_with_one_head_are_each_read(serving: Serving) -> None:
    parameters = {"binary_data_output": True}
    for given in ("a1", "a2", "a2", '"\\', "\u00e9", "a1"):
        text = binary_add_sub(id=given, parameters=parameters)
        reply = post_binary(serving, ADD_SUB, text, b"".join(FOUR))
        length = int(reply.headers["inference-header-content-length"])
        assert json.loads(reply.body[:length])["id"] == given
        assert reply.body[:length].startswith(b'{"id":"')
        wrong = post_binary(serving, ADD_SUB, {**text, "id": 1234567}, b"".join(FOUR))
        assert "Unable to parse 'id'" in wrong.error


def test_only_the_outputs_that_are_wanted_come(serving: Serving) -> None:
    outputs = serving.post(ADD_SUB, add_sub(outputs=[{"name": "OUTPUT1"}])).value["outputs"]

    assert [each["name"] for each in outputs] == ["OUTPUT1"]
    wanted = [{"name": "OUTPUT1", "parameters": {"binary_data": True}}]
    for _ in range(2):  # the second request is not checked again
        reply = post_binary(serving, ADD_SUB, binary_add_sub(outputs=wanted), b"".join(FOUR))
        length = int(reply.headers["inference-header-content-length"])
        assert [each["name"] for each in json.loads(reply.body[:length])["outputs"]] == ["OUTPUT1"]


def test_numbers_that_json_does_not_have_travel_as_triton_writes_them(serving: Serving) -> None:
    body = b'{"inputs":[{"name":"FP32","datatype":"FP32","shape":[3],"data":[NaN,Infinity,-Infinity]}]}'

    assert b'"data":[NaN,Infinity,-Infinity]' in serving.post(ECHO, body).body


@pytest.mark.promise("HTTP", "A parameter of a request or a response is never NaN or infinite in JSON.")
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("path", ["infer", "generate", "generate_stream"])
def test_a_response_parameter_that_json_does_not_have_is_an_error(serving: Serving, number: str, path: str) -> None:
    inputs = [{"name": "X", "datatype": "BYTES", "shape": [1], "data": [number]}]
    reply = serving.post(f"/v2/models/not_finite/{path}", {"inputs": inputs} if path == "infer" else {"X": number})

    text = reply.body.removeprefix(b"data: ").decode()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "error": f"parameter 'score' must be a finite number, not {number}"
    }
    assert reply.status == 400


@pytest.mark.promise("HTTP", "A parameter of a request or …")
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_request_parameter_that_json_does_not_have_is_refused(serving: Serving, number: str) -> None:
    inputs = '[{"name":"X","datatype":"BYTES","shape":[1],"data":["1"]}]'
    for path, body in (
        ("text/infer", f'{{"inputs":{inputs},"parameters":{{"p":{number}}}}}'),
        ("speaks/generate", f'{{"text_input":"a","p":{number}}}'),
        ("speaks/generate_stream", f'{{"text_input":"a","parameters":{{"p":{number}}}}}'),
    ):
        reply = serving.post(f"/v2/models/{path}", body.encode())
        assert reply.status == 400
        assert reply.error.startswith("parameter 'p' must be a finite number, not ")


@pytest.mark.promise(
    "HTTP",
    "Triton's client gets what it sent: all kinds of tensors, binary or as JSON, compressed or "
    "not, in its own shared memory.",
)
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("count", [4, LARGE])
def test_triton_s_client_gets_what_it_sent(serving: Serving, compression: str | None, count: int) -> None:
    arrays = arrays_of(count)
    for _ in range(2):
        for name, array in triton_echo(serving, arrays, compression).items():
            assert array.tolist() == arrays[name].tolist(), name


def _input(**changes: Any) -> dict[str, Any]:
    first = {**tensor("INPUT0", [1, 2, 3, 4]), **changes}
    return {"inputs": [first, tensor("INPUT1", [1, 1, 1, 1.5])]}


_ONE_OF = (
    "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
    "'shared_memory_region' in 'parameters'. But "
)


@pytest.mark.promise("HTTP", "Malformed requests and false lengths are rejected with Triton's error texts.")
@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"[" * 100_000, 500, "failed to parse the request JSON buffer: Invalid value. at"),
        (b"[" * 100_000 + b"NaN", 500, "failed to parse the request JSON buffer: "),
        (b'{"inputs":[{"name":"\xff"}]}', 500, "failed to parse the request JSON buffer: "),
        ({"inputs": [1]}, 400, _ONE_OF + "no field is set"),
        (_input(shape=[2**40]), 500, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
    ],
)  # fmt: skip
def test_a_request_that_is_worse_than_triton_bears_is_refused(
    serving: Serving, body: Any, status: int, error: str
) -> None:
    reply = serving.post(ADD_SUB, body)

    assert (reply.status, reply.error[: len(error)]) == (status, error)
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.promise("HTTP", "Malformed requests and false lengths are …")
@pytest.mark.parametrize(
    ("length", "tensors", "error"),
    [
        ("10x", 32, "failed to parse the request JSON buffer: "),
        ("x", 32, "[request id: <id_unknown>] Raw request must only have 1 input"),
    ],
)  # fmt: skip
def test_lengths_that_lie_are_found_out(serving: Serving, length: str, tensors: int, error: str) -> None:
    headers = {"Inference-Header-Content-Length": length}
    reply = post_binary(serving, ADD_SUB, binary_add_sub(), bytes(tensors), headers)

    assert reply.status in (400, 500)
    assert reply.error.startswith(error)


@pytest.mark.promise("HTTP", "If a client goes, at any …")
def test_a_client_that_goes_cancels_its_request_in_the_model(serving: Serving) -> None:
    kept = {"inputs": [{"name": "X", "datatype": "BOOL", "shape": [1], "data": [True]}]}
    asked = {"inputs": [{"name": "X", "datatype": "BOOL", "shape": [1], "data": [False]}]}
    path = "/v2/models/holds/infer"
    connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=60)
    before = serving.runtime.statistics("holds")["execution_count"]
    connection.request("POST", path, json.dumps(kept))
    wait_until(lambda: serving.runtime.statistics("holds")["execution_count"] == before + 1)
    assert serving.post(path, asked).value["outputs"][0]["data"] == [0]

    connection.close()

    wait_until(lambda: serving.post(path, asked).value["outputs"][0]["data"] == [1])


@pytest.mark.promise("HTTP", "Heads, bodies, decompressed bodies and the …")
@pytest.mark.parametrize("made", [gzip.compress, zlib.compress])
def test_a_bomb_is_refused_before_it_takes_the_memory(made: Any) -> None:
    from moonpool.runtime.server.http.body import inflate
    from moonpool.runtime.server.http.head import BadHttpMessage

    bomb = made(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(BadHttpMessage) as refused:
            inflate(bomb, 1 << 20)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert refused.value.status == 413
    assert most_bytes < 8 << 20


@pytest.mark.parametrize("body", [b"", b"{}", gzip.compress(b"{}", mtime=0)[:-9], gzip.compress(b"{}", mtime=0) + b"x"])
def test_a_body_with_a_false_encoding_is_refused(serving: Serving, body: bytes) -> None:
    reply = serving.post(ADD_SUB, body, {"Content-Encoding": "gzip"})

    assert reply.status == 400
    assert "decompressed" in reply.error
