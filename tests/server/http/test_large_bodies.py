"""Large bodies: tensors are received where stubs read them, JSON apart from them, and both without holding others
up.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.server.http.listening import Client
from tests.server.http.served import serving
from tests.server.http.serving import TIMEOUT_S, Serving
from tests.waiting import wait_until

from moonpool.ipc.memory import lease_of
from moonpool.runtime.server.http import inference
from moonpool.runtime.server.http.body import Fixed
from moonpool.runtime.server.http.connection import HttpExchange
from moonpool.runtime.server.http.handler import HttpHandler
from moonpool.runtime.server.http.infer_request import HttpRequestPlan, read_plan
from moonpool.runtime.server.inference import call
from moonpool.runtime.server.inference.request import RequestPlan

__all__ = ["serving"]
LARGE = 300_000
VALUES = [7] * (1 << 20)
PATH = "/v2/models/plain/infer"


def described(count: int, **more: Any) -> dict[str, Any]:
    return {"name": "X", "datatype": "UINT8", "shape": [count], **more}


def asking(count: int) -> bytes:
    return json.dumps({"inputs": [described(count, data=VALUES[:count])]}).encode()


def binary(request_id: str, given: bytes) -> tuple[bytes, dict[str, str]]:
    tensor = described(len(given), parameters={"binary_data_size": len(given)})
    asked = {"id": request_id, "inputs": [tensor], "parameters": {"binary_data_output": True}}
    text = json.dumps(asked).encode()
    return text + given, {"Inference-Header-Content-Length": str(len(text))}


@pytest.fixture(scope="module")
def warm(serving: Serving) -> Serving:
    """Every region has its size before the first test counts descriptors."""
    for _ in range(2):
        assert serving.post(PATH, asking(len(VALUES))).status == 200
        assert serving.post(PATH, *binary("", bytes(LARGE))).status == 200
    return serving


def test_a_body_is_received_apart_from_what_describes_it() -> None:
    for steps in ([10], [1] * 10, [3, 7], [4, 6], [5, 5]):
        memory = memoryview(bytearray(6))
        body, sent = Fixed(memory, 10), b"textTENSOR"
        for number, step in enumerate(steps):
            part, sent = sent[:step], sent[step:]
            if number % 2:
                room = body.room()[: len(part)]
                room[:] = part[: len(room)]
                body.received(len(room))
                part = part[len(room) :]
            rest = body.take(part + b"next" if not sent else part)
        assert rest == b"next"
        assert (bytes(body.text or b""), bytes(memory)) == (b"text", b"TENSOR")
    whole = Fixed(memoryview(bytearray(3)), 3)
    assert whole.text is None
    assert whole.take(b"abcd") == b"d"


@pytest.mark.promise(
    "HTTP",
    "Large binary tensors are received into memory that the model reads, and the JSON that describes them is not.",
)
def test_the_json_of_a_large_body_lies_where_no_stub_can_change_it(
    warm: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any]] = []
    handle = HttpHandler.handle

    def spy(handler: HttpHandler, exchange: HttpExchange) -> None:
        seen.append((exchange.text, exchange.body.obj))  # type: ignore[union-attr]
        handle(handler, exchange)

    monkeypatch.setattr(HttpHandler, "handle", spy)
    given = np.random.default_rng(1).integers(0, 255, LARGE, np.uint8)
    for request_id in ("", "x" * 5000):
        body, headers = binary(request_id, given.tobytes())
        reply = warm.post(PATH, body, headers)
        assert reply.status == 200
        assert reply.body.endswith(given.tobytes())
        [(json_text, data)] = seen
        assert bytes(json_text) == body[:-LARGE]
        assert lease_of(data) is not None
        assert not np.shares_memory(np.frombuffer(json_text, np.uint8), data)
        seen.clear()
        # The memory is for the next one.
        del json_text, data


@pytest.mark.promise(
    "What the server bears, and whom it answers like", "While a large body of JSON is read, other clients are answered."
)
def test_others_are_answered_while_large_json_is_read(warm: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(text: Any) -> HttpRequestPlan:
        if len(text) > LARGE:
            begun.set()
            assert goes_on.wait(TIMEOUT_S)
        return read_plan(text)

    monkeypatch.setattr(inference, "read_plan", slow)
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(warm.post, PATH, asking(len(VALUES)))
        try:
            assert begun.wait(TIMEOUT_S)
            assert warm.post(PATH, asking(3)).value["outputs"][0]["data"] == [7, 7, 7]
        finally:
            goes_on.set()
        assert large.result(TIMEOUT_S).value["outputs"][0]["data"] == VALUES
    broken = warm.post(PATH, b"[" + b" " * (2 << 20))
    assert (broken.status, "parse" in broken.error) == (500, True)
    wrong = warm.post(PATH, asking(len(VALUES)).replace(b"UINT8", b"BYTES"))
    assert (wrong.status, "Unable to parse" in wrong.error) == (500, True)


@pytest.mark.promise("HTTP", "If a client goes while its large request is made, no model gets the request.")
def test_a_request_whose_client_goes_while_it_is_made_is_not_sent(
    warm: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges: list[HttpExchange] = []
    sent: list[Any] = []
    begun, released, done = threading.Event(), threading.Event(), threading.Event()
    handle, make, finish = HttpHandler.handle, RequestPlan.make, call._done

    def seen(handler: HttpHandler, exchange: HttpExchange) -> None:
        exchanges.append(exchange)
        handle(handler, exchange)

    def held(*arguments: Any) -> Any:
        begun.set()
        assert released.wait(TIMEOUT_S)
        return make(*arguments)

    def noted(*arguments: Any) -> None:
        finish(*arguments)
        done.set()

    # Whatever is made is made by a thread.
    monkeypatch.setattr(call, "LONG_COPY_BYTES", -1)
    monkeypatch.setattr(HttpHandler, "handle", seen)
    monkeypatch.setattr(RequestPlan, "make", held)
    monkeypatch.setattr(call, "_done", noted)
    capture = SimpleNamespace(take=lambda _, request: sent.append(request))
    monkeypatch.setattr(warm.service, "capture", capture)
    body = json.dumps({"inputs": [described(3, data=[1, 2, 3])]}).encode()
    with Client(warm.port) as client:
        client.send(f"POST {PATH} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode(), body)
        assert begun.wait(TIMEOUT_S)
    try:
        wait_until(lambda: exchanges[0].is_gone)
    finally:
        released.set()
    assert done.wait(TIMEOUT_S)
    assert sent == []
