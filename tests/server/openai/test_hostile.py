"""Hostile models and clients of OpenAI's API: they forge nothing, cost others nothing, and hear what is wrong."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.inside import hosted_in
from tests.server.http.serving import TIMEOUT_S, Reply, Serving
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.errors import ModelError
from moonpool.runtime.openai import fields as tables
from moonpool.runtime.openai.fields import BadField, Check
from moonpool.runtime.openai.pieces import piece_of
from moonpool.runtime.server.http.json_text import MOST_LISTED, loads
from moonpool.runtime.server.openai import routes

MODELS = Path(__file__).parents[2] / "models"
CHAT = "/v1/chat/completions"
RAW: Any = {
    "input": [{"name": "request", "data_type": "TYPE_STRING", "dims": [1]}],
    "output": [{"name": name, "data_type": "TYPE_STRING", "dims": [1]} for name in ("chat", "ranking")],
    "model_transaction_policy": {"decoupled": True},
}


@contextlib.contextmanager
def started() -> Iterator[Serving]:
    with moonpool.Runtime() as runtime:
        runtime.load("writer", str(MODELS / "writer.py"))
        runtime.load("raw", str(MODELS / "raw_pieces.py"), config=RAW)
        with Serving(runtime) as made:
            yield made


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with started() as made:
        yield made


def chat(said: str, model: str = "raw", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": said}], **fields}


def events(reply: Reply) -> list[Any]:
    """Return the events of a stream; all but `[DONE]` as their values."""
    found = reply.body.decode().split("\n\n")
    assert found[-1] == ""
    texts = [event.removeprefix("data: ") for event in found[:-1]]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


# Models

GOOD = b'{"content":"good"}'
PIECES = {
    "no JSON": b"nonsense",
    "an event behind it": GOOD + b"\n\ndata: [DONE]\n\n",
    "half of a character": b'{"content":"\xc3"}',
    "half of a pair": b'{"content":"\\ud800"}',
    "no object": b'["content"]',
    "deep": b'{"content":' + b"[" * 2000,
    "a number for a text": b'{"content":1}',
    "a choice that nobody wants": b'{"content":"x","index":1}',
    "a choice below none": b'{"content":"x","index":-1}',
    "a call without a name": b'{"tool_calls":[{"function":{}}]}',
    "a call of many": b'{"tool_calls":[{"index":1024,"function":{"name":"x"}}]}',
    "calls that are none": b'{"tool_calls":{"0":1}}',
    "a huge count": b'{"usage":{"prompt_tokens":' + b"9" * 30 + b"}}",
    "a count below none": b'{"usage":{"prompt_tokens":-1}}',
    "a number of no number": b'{"content":"x","logprobs":{"content":[NaN]}}',
    "a time of no time": b'{"content":"x","start":NaN,"end":1}',
    "a begin without an end": b'{"content":"x","start":1}',
}
MENDED = ("a number of no number",)


@pytest.mark.promise("OpenAI", "No text of a model …")
@pytest.mark.parametrize("what", PIECES)
def test_a_piece_that_is_wrong_is_the_models_error(serving: Serving, what: str) -> None:
    asked = f"{GOOD.hex()}|{PIECES[what].hex()}"
    if what in MENDED:
        assert serving.post(CHAT, chat(asked)).status == 200
        return
    whole, stream = serving.post(CHAT, chat(asked)), serving.post(CHAT, chat(asked, stream=True))

    assert (whole.status, whole.value["error"]["code"]) == (500, "model_error")
    found = events(stream)
    assert found[1]["choices"][0]["delta"] == {"content": "good"}
    assert found[-1]["error"]["code"] == "model_error"
    assert len(found) == 3


@pytest.mark.parametrize("scores", ["[1]", "[1,NaN]", "[1,-Infinity]", "[1,%s]" % ("9" * 400), '[1,"2"]', "{}"])
def test_a_score_that_is_none_is_the_models_error(serving: Serving, scores: str) -> None:
    query = b'{"scores":%b}' % scores.encode()
    reply = serving.post("/v1/rerank", {"model": "raw", "query": query.hex(), "documents": ["a", "b"]})

    assert (reply.status, reply.value["error"]["code"]) == (500, "model_error")


@pytest.mark.parametrize(
    "piece", [b'{"content":"x","logprobs":{"content":[' + b"[]," * (1 << 18) + b"[]]}}", b"x" * (9 << 20)]
)
def test_a_piece_has_a_size(piece: bytes) -> None:
    with pytest.raises(ModelError):
        piece_of(memoryview(piece), "m")


@pytest.mark.promise("OpenAI", "Pieces, answers and what clients do not read are bounded.")
def test_a_large_piece_is_refused_unread() -> None:
    # A server of its own: its regions grow.
    with started() as serving:
        reply = serving.post(CHAT, chat(f"large {256 << 20}", stream=True))

        assert (reply.status, reply.value["error"]["code"]) == (500, "model_error")
        assert "8388608 are the most" in reply.value["error"]["message"]


@pytest.mark.promise("OpenAI", "Pieces, answers and what …")
def test_a_whole_answer_is_bounded() -> None:
    with started() as serving:
        reply = serving.post(CHAT, chat("floods x", "writer"))

        assert (reply.status, reply.value["error"]["code"]) == (500, "model_error")
        assert "a stream may be longer" in reply.value["error"]["message"]

        def left() -> bool:
            said = serving.post(CHAT, chat("left", "writer")).value["choices"][0]["message"]["content"]
            return "x" in said.split(",")

        wait_until(left, TIMEOUT_S, "the end of the flood")


@pytest.mark.promise("OpenAI", "A flood of pieces leaves other clients their turn.")
@pytest.mark.parametrize("piece", ["{}", '{"content":"x"}'])
def test_a_flood_holds_nobody_up(piece: str) -> None:
    # More pieces than come before the client leaves.
    body = json.dumps(chat(f"many {10**9} {piece}", stream=True)).encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body))
    with started() as serving, ThreadPoolExecutor(1) as pool:
        scheduler = hosted_in(serving.runtime, "raw").scheduler
        with socket.create_connection(("127.0.0.1", serving.port)) as client:
            client.sendall(head + body)
            reading = pool.submit(read_all, client)
            wait_until(lambda: scheduler.executing, TIMEOUT_S, "the flood")
            for _ in range(20):
                assert serving.get("/v1/models").status == 200
            assert scheduler.executing
            client.shutdown(socket.SHUT_RDWR)
            reading.result(TIMEOUT_S)
        wait_until(lambda: not scheduler.executing, TIMEOUT_S, "the end of the flood")


def read_all(client: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while client.recv(1 << 20):
            pass


# Clients


@pytest.mark.promise("OpenAI", "Pieces, answers and what …")
def test_a_client_that_reads_nothing_is_cut_off() -> None:
    body = json.dumps(chat("floods unread", "writer", stream=True)).encode()
    with started() as serving:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", serving.port))
            client.sendall(
                b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
            )

            def left() -> bool:
                said = serving.post(CHAT, chat("left", "writer")).value["choices"][0]["message"]["content"]
                return "unread" in said.split(",")

            wait_until(left, TIMEOUT_S, "the end of the flood")
        assert serving.get("/v1/models").status == 200


BODIES = {
    "brackets": b"[" * (64 << 20),
    "braces": b'{"a":' * (12 << 20),
    "messages": b'{"model":"raw","messages":[' + b'{"role":"user","content":""},' * 1_000_000 + b"1]}",
    "numbers": b'{"model":"raw","messages":[' + b"1," * (30 << 20) + b"1]}",
    "a string": b'{"model":"raw","messages":"' + b"x" * (63 << 20) + b'"}',
}


@pytest.mark.promise("OpenAI", "A body that cannot be a request is refused while other clients are answered.")
@pytest.mark.parametrize("what", BODIES)
def test_a_large_body_of_nonsense_holds_nobody_up(serving: Serving, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(text: Any, **options: Any) -> Any:
        begun.set()
        assert goes_on.wait(TIMEOUT_S)
        return loads(text, **options)

    monkeypatch.setattr(routes, "loads", slow)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(serving.ask, "POST", CHAT, BODIES[what])
        try:
            assert begun.wait(TIMEOUT_S)
            assert serving.get("/v1/models").status == 200
        finally:
            goes_on.set()
        # That the interpreter is free in between is tested where the texts are read.
        while not sent.done():
            assert serving.get("/v1/models").status == 200
        reply = sent.result()

    assert reply.status in (400, 413, 422)
    assert reply.value["error"]["type"] == "invalid_request_error"


def test_long_lists_are_lists() -> None:
    ids = list(range(100_000))
    texts = [[each] * 30 for each in range(100)]
    with started() as serving:
        told = serving.post("/v1/completions", {"model": "writer", "prompt": ids}).value["choices"][0]["text"]
        many = serving.post("/v1/completions", {"model": "writer", "prompt": texts, "odd": [[7] * 10] * 20_000})
        body = b'{"model":"writer","prompt":[' + b"1," * MOST_LISTED + b"1]}"
        beyond = serving.ask("POST", "/v1/completions", body)

    assert told == str(ids)
    assert [each["text"] for each in many.value["choices"]] == list(map(str, texts))
    assert (beyond.status, beyond.value["error"]["code"]) == (413, "content_too_large")


def test_many_documents_are_refused(serving: Serving) -> None:
    reply = serving.post("/v1/rerank", {"model": "writer", "query": "x", "documents": ["x"] * 10_001})

    assert (reply.status, reply.value["error"]["param"]) == (400, "documents")


PATHS = (CHAT, "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/audio/transcriptions")


@pytest.mark.promise("OpenAI", "A page of another origin is refused.")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
def test_a_page_of_another_origin_is_refused(serving: Serving, path: str, headers: dict[str, str]) -> None:
    reply = serving.post(path, chat("x", "writer"), headers)

    assert (reply.status, reply.value["error"]["type"]) == (403, "permission_error")


WRONG_VALUES: tuple[Any, ...] = (5.5, "x", [], {}, True, -(1 << 70), 1 << 70, float("nan"), [None], {"a": 1})
TABLES: dict[str, dict[str, Check]] = {
    name: getattr(tables, name) for name in ("_CHAT", "_COMPLETION", "_EMBEDDINGS", "_RERANK", "_TRANSCRIPTION")
}


@pytest.mark.promise("OpenAI", "A wrong field gets OpenAI's …")
@pytest.mark.parametrize(("table", "field"), [(name, field) for name, table in TABLES.items() for field in table])
def test_every_wrong_field_names_itself(table: str, field: str) -> None:
    refused = [error for value in WRONG_VALUES if (error := _error_of(table, {field: value})) is not None]

    assert len(refused) >= 3
    assert {error.where[0] for error in refused} == {field}
    assert all(error.kind for error in refused)


def _error_of(table: str, given: dict[str, Any]) -> BadField | None:
    try:
        tables.check(given, TABLES[table], ())
    except BadField as error:
        return error
    return None
