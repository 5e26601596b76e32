"""Chats and completions over OpenAI's API, as their bytes go over the wire."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.http.serving import Serving
from tests.waiting import wait_until

import moonpool

WRITER = Path(__file__).parents[2] / "models" / "writer.py"
ADD_SUB = Path(__file__).parents[3] / "examples" / "models" / "add_sub"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@contextlib.contextmanager
def started() -> Iterator[Serving]:
    with moonpool.Runtime() as runtime:
        runtime.load("writer", str(WRITER))
        runtime.load("add_sub", str(ADD_SUB))
        with Serving(runtime) as made:
            yield made


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with started() as made:
        yield made


def chat(said: str, **fields: Any) -> dict[str, Any]:
    return {"model": "writer", "messages": [{"role": "user", "content": said}], **fields}


def chunks(body: bytes) -> list[Any]:
    """Return the events of a stream that has ended as it should."""
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def deltas(found: list[Any]) -> list[Any]:
    return [chunk["choices"][0]["delta"] for chunk in found if chunk["choices"]]


@pytest.mark.promise("OpenAI", "A class with `chat` answers `/v1/chat/completions`, whole and as a stream.")
def test_a_whole_answer(serving: Serving) -> None:
    reply = serving.post(CHAT, chat("one two"))

    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    answer = reply.value
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer == {
        "object": "chat.completion",
        "model": "writer",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "one two ", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
    }


@pytest.mark.promise("OpenAI", "A class with `chat` answers `/v1/chat/completions`, whole …")
def test_a_stream_begins_with_the_role_and_ends_with_the_reason(serving: Serving) -> None:
    reply = serving.post(CHAT, chat("one two", stream=True))

    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    found = chunks(reply.body)
    assert {(each["id"], each["object"], each["created"], each["model"]) for each in found} == {
        (found[0]["id"], "chat.completion.chunk", found[0]["created"], "writer")
    }
    assert deltas(found) == [{"role": "assistant", "content": ""}, {"content": "one "}, {"content": "two "}, {}]
    assert [each["choices"][0]["finish_reason"] for each in found] == [None, None, None, "stop"]
    assert all("usage" not in each for each in found)


@pytest.mark.promise("OpenAI", "Usage is what the model tells, and nothing if it tells nothing.")
def test_usage_is_in_one_more_chunk_if_it_is_wanted(serving: Serving) -> None:
    wanted = {"stream": True, "stream_options": {"include_usage": True}}
    told = chunks(serving.post(CHAT, chat("counts", **wanted)).body)
    untold = chunks(serving.post(CHAT, chat("one", **wanted)).body)

    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert (told[-1]["choices"], told[-1]["usage"]) == ([], usage)
    assert {each["usage"] for each in told[:-1]} == {None}
    assert untold[-1]["choices"][0]["finish_reason"] == "stop"
    assert serving.post(CHAT, chat("counts")).value["usage"] == usage
    limited = serving.post(CHAT, chat("counts", max_tokens=2)).value
    assert limited["choices"][0]["finish_reason"] == "length"


@pytest.mark.promise("OpenAI", "Tools, choices, reasoning and logprobs travel to the client.")
def test_calls_of_tools_come_in_parts_and_whole(serving: Serving) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("weather", "time")]
    streamed = chunks(serving.post(CHAT, chat("calls", tools=tools, stream=True)).body)
    choice = serving.post(CHAT, chat("calls", tools=tools)).value["choices"][0]

    parts = [part for delta in deltas(streamed) for part in delta.get("tool_calls", ())]
    assert [part["index"] for part in parts] == [0, 0, 1]
    assert parts[0]["id"] == "call_123456789"
    assert parts[0]["function"] == {"name": "weather", "arguments": '{"city":'}
    assert parts[1] == {"index": 0, "function": {"arguments": '"Bern"}'}}
    assert len(parts[2]["id"]) >= 9
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city":"Bern"}'},
        {"name": "time", "arguments": '{"zone":1}'},
    ]


@pytest.mark.promise("OpenAI", "Tools, choices, reasoning and logprobs travel …")
def test_several_choices_each_end_once(serving: Serving) -> None:
    whole = serving.post(CHAT, chat("chooses", n=3)).value["choices"]
    streamed = chunks(serving.post(CHAT, chat("chooses", n=3, stream=True)).body)

    assert [each["message"]["content"] for each in whole] == [f"choice {n}" for n in range(3)]
    assert [each["finish_reason"] for each in whole] == ["length", "stop", "stop"]
    ended = [each["choices"][0] for each in streamed if each["choices"][0]["finish_reason"]]
    assert sorted((each["index"], each["finish_reason"]) for each in ended) == [(0, "length"), (1, "stop"), (2, "stop")]


@pytest.mark.promise("OpenAI", "Tools, choices, reasoning and logprobs travel …")
def test_reasoning_and_logprobs(serving: Serving) -> None:
    choice = serving.post(CHAT, chat("thinks", logprobs=True)).value["choices"][0]

    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["content"] == "so it is"
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["so", " it is"]


def test_a_model_sees_fields_and_the_id_of_the_request(serving: Serving) -> None:
    fields = {"temperature": 0.5, "stop": "x", "max_tokens": 3, "max_completion_tokens": 4, "odd": [1]}
    reply = serving.post(CHAT, chat("tells", **fields), {"x-request-id": "my-id"})

    assert reply.headers["x-request-id"] == "my-id"
    told = reply.value["choices"][0]["message"]["content"]
    assert told.startswith("('my-id', 0.5, ['x'], 4, ")
    assert "'odd'" in told


def test_an_answer_of_nothing_is_an_empty_one(serving: Serving) -> None:
    assert serving.post(CHAT, chat("nothing")).value["choices"][0]["message"]["content"] == ""
    streamed = chunks(serving.post(CHAT, chat("nothing", stream=True)).body)
    assert deltas(streamed) == [{"role": "assistant", "content": ""}, {}]


@pytest.mark.promise("OpenAI", "A class with `complete` answers `/v1/completions`.")
@pytest.mark.parametrize(
    ("prompt", "texts"), [("a", ["a!"]), (["a", "b"], ["a!", "b!"]), ([1, 2], ["[1, 2]"]), ([[1], [2]], ["[1]", "[2]"])]
)
def test_each_prompt_has_its_choice(serving: Serving, prompt: object, texts: list[str]) -> None:
    fields = {"model": "writer", "prompt": prompt}
    whole = serving.post(COMPLETIONS, fields).value
    streamed = chunks(serving.post(COMPLETIONS, {**fields, "stream": True}).body)

    assert (whole["object"], whole["id"][:5]) == ("text_completion", "cmpl-")
    assert [each["text"] for each in whole["choices"]] == texts
    joined: dict[int, str] = {}
    for each in streamed:
        choice = each["choices"][0]
        joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    assert joined == dict(enumerate(texts))


# What is wrong

WRONG = [
    ({"model": "writer"}, 422, "messages", "missing"),
    ({"messages": []}, 422, "model", "missing"),
    (chat("x", messages=[]), 422, "messages", "too_short"),
    (chat("x", messages=["x"]), 422, "messages.0", "dict_type"),
    (chat("x", messages=None), 422, "messages", "list_type"),
    (chat("x", model=None), 422, "model", "string_type"),
    (chat("x", temperature=2.1), 422, "temperature", "less_than_equal"),
    (chat("x", temperature="1"), 422, "temperature", "float_type"),
    (chat("x", top_p=-0.1), 422, "top_p", "greater_than_equal"),
    (chat("x", n=0), 422, "n", "greater_than_equal"),
    (chat("x", n=True), 422, "n", "int_type"),
    (chat("x", seed=1 << 63), 422, "seed", "less_than_equal"),
    (chat("x", stop=[1]), 422, "stop", "string_type"),
    (chat("x", stream=1), 422, "stream", "bool_type"),
    (chat("x", top_logprobs=0), 400, "top_logprobs", "invalid_value"),
    (chat("x", stream_options={"include_usage": True}), 400, "stream_options", "invalid_value"),
    (chat("x", stream=True, stream_options={"include_usage": 1}), 422, "stream_options.include_usage", "bool_type"),
    (chat("x", tool_choice="required"), 400, "tool_choice", "invalid_value"),
    (chat("x", tool_choice={"function": "x"}, tools=[{}]), 400, "tool_choice", "invalid_value"),
    (chat("x", model="nobody"), 400, "model", "model_not_found"),
    *((chat("x", model=f"writer:{version}"), 400, "model", "model_not_found") for version in ("9" * 30, "٣", "2", "")),
    (chat("x", model="add_sub"), 400, "model", "model_not_found"),
]


@pytest.mark.promise("OpenAI", "A wrong field gets OpenAI's error object, which names the field.")
@pytest.mark.parametrize(("fields", "status", "param", "code"), WRONG)
def test_a_wrong_field_is_named(serving: Serving, fields: object, status: int, param: str, code: str) -> None:
    reply = serving.post(CHAT, fields)

    error = reply.value["error"]
    assert (reply.status, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error"
    assert reply.value["detail"]


def test_an_empty_prompt_is_refused(serving: Serving) -> None:
    reply = serving.post(COMPLETIONS, {"model": "writer", "prompt": ""})

    assert (reply.status, reply.value["detail"]) == (400, "prompt must be non-empty")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"model": NaN}', b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused(serving: Serving, body: bytes) -> None:
    reply = serving.ask("POST", CHAT, body)

    assert reply.status in (400, 422)
    assert reply.value["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_body_may_be_compressed(serving: Serving, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    headers = {"Content-Encoding": encoding}
    body = json.dumps(chat("one")).encode()

    assert serving.post(CHAT, pack(body), headers).status == 200
    assert serving.post(CHAT, pack(body + b" " * (64 << 20)), headers).status == 413
    assert serving.post(CHAT, body, headers).status == 400
    unknown = serving.post(CHAT, body, {"Content-Encoding": "br"})
    assert (unknown.status, "'br' is not supported" in unknown.value["error"]["message"]) == (400, True)


def test_a_body_that_is_nested_too_deeply_is_the_clients_mistake(serving: Serving) -> None:
    body = json.dumps(chat("x"))[:-1] + ',"odd":' + "[" * 1000 + "]" * 1000 + "}"
    reply = serving.ask("POST", CHAT, body.encode())

    assert (reply.status, reply.value["error"]["type"]) == (400, "invalid_request_error")
    assert "nested too deeply" in reply.value["error"]["message"]


def test_a_text_that_cannot_be_written_is_the_clients_mistake(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    # NaN makes the reader lenient.
    for prompt in ('["a", "\\ud800"]', '["a", "b"], "odd": "\\ud800"'):
        body = '{"model": "writer", "n": null, "x": NaN, "prompt": ' + prompt + "}"
        reply = serving.ask("POST", COMPLETIONS, body.encode())
        assert (reply.status, reply.value["error"]["type"]) == (400, "invalid_request_error")
    unknown = serving.ask("POST", COMPLETIONS, b'{"model": "\\ud800", "x": NaN, "prompt": "a"}')
    assert unknown.value["error"]["code"] == "model_not_found"
    assert "answering" not in caplog.text


def test_prompts_do_not_multiply_other_fields(serving: Serving) -> None:
    fields = {"model": "writer", "prompt": ["a"] * 128, "odd": "x" * (1 << 20)}

    reply = serving.post(COMPLETIONS, fields)

    assert (reply.status, reply.value["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", CHAT, 405), ("GET", "/v1/x", 404), ("POST", "/v1/models", 405)]
)
def test_wrong_paths_and_methods_have_this_form_too(serving: Serving, method: str, path: str, status: int) -> None:
    reply = serving.ask(method, path, b"", {"x-request-id": "mine"})

    assert (reply.status, reply.value["error"]["type"]) == (status, "invalid_request_error")
    assert reply.headers["x-request-id"] == "mine"


@pytest.mark.promise("OpenAI", "What a model raises before its first piece has a status of its own.")
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("said", "status", "code", "text"),
    [
        ("refuses", 400, "invalid_value", "I will not"),
        ("raises", 500, "model_error", "no idea"),
        ("odd", 500, "model_error", "'content' must be a text"),
    ],
)
def test_an_error_before_the_first_piece(
    serving: Serving, said: str, status: int, code: str, text: str, streams: bool
) -> None:
    reply = serving.post(CHAT, chat(said, stream=streams))

    assert (reply.status, reply.value["error"]["code"]) == (status, code)
    assert text in reply.value["error"]["message"]
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.promise("OpenAI", "A model that raises in the middle of a stream ends it with an error.")
def test_an_error_in_a_stream_is_its_last_event(serving: Serving) -> None:
    reply = serving.post(CHAT, chat("breaks", stream=True))

    events = reply.body.decode().split("\n\n")
    assert reply.status == 200
    assert events[-1] == ""
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "model_error"
    assert "[DONE]" not in reply.body.decode()
    assert "half" in events[1]


PROMPTS = """
import asyncio

class Prompts:
    async def complete(self, request):
        if request.prompt == "waits":
            await asyncio.Event().wait()
        raise ValueError("no idea")
        yield
"""


def test_an_error_for_one_prompt_does_not_wait_for_the_others(tmp_path: Path) -> None:
    (tmp_path / "prompts.py").write_text(PROMPTS)
    with moonpool.Runtime() as runtime:
        runtime.load("prompts", str(tmp_path / "prompts.py"))
        with Serving(runtime) as serving:
            reply = serving.post(COMPLETIONS, {"model": "prompts", "prompt": ["waits", "raises"]})

    assert (reply.status, reply.value["error"]["code"]) == (500, "model_error")


def test_a_number_that_cannot_be_written_is_the_models_mistake(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    whole = serving.post(CHAT, chat("huge"))
    streamed = serving.post(CHAT, chat("huge", stream=True))

    for reply in (whole, streamed):
        assert (reply.status, reply.value["error"]["code"]) == (500, "model_error")
    assert "answering" not in caplog.text


@pytest.mark.promise("OpenAI", "No text of a model forges an event.")
def test_a_text_with_the_form_of_events_is_a_text(serving: Serving) -> None:
    found = chunks(serving.post(CHAT, chat("forges", stream=True)).body)

    assert len(found) == 3
    assert found[1]["choices"][0]["delta"]["content"].count("[DONE]") == 1


@pytest.mark.promise("OpenAI", "A client that leaves ends the model's iterator.")
@pytest.mark.parametrize("what", ["waits", "floods"])
def test_a_client_that_leaves_ends_the_iterator(what: str) -> None:
    body = json.dumps(chat(f"{what} {what}", stream=True)).encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body))

    # A server of its own: the flood makes its regions grow.
    with started() as serving:
        with socket.create_connection(("127.0.0.1", serving.port)) as client:
            client.sendall(head + body)
            assert b"200" in client.recv(65536)

        def left() -> bool:
            told = serving.post(CHAT, chat("left")).value["choices"][0]["message"]["content"]
            return what in told.split(",")

        wait_until(left, 30.0, f"the end of {what}")


def test_a_death_in_a_stream_is_its_last_event() -> None:
    with started() as serving:
        reply = serving.post(CHAT, chat("dies", stream=True))

        event = reply.body.decode().split("\n\n")[-2].removeprefix("data: ")
        assert json.loads(event)["error"]["code"] == "model_error"
        wait_until(lambda: serving.post(CHAT, chat("x")).status == 200, 30.0, "the next process")


def test_models_are_listed(serving: Serving) -> None:
    listed = serving.get("/v1/models").value

    assert listed["object"] == "list"
    assert [each["id"] for each in listed["data"]] == ["add_sub", "writer"]
    assert serving.get("/v1/models/writer").value["id"] == "writer"
    assert serving.get("/v1/models/x").status == 404
    assert serving.get("/v1/models/x").value["error"]["code"] == "model_not_found"


@pytest.mark.promise("OpenAI", "Metrics have the time to the first piece, the gaps and the tokens.")
def test_metrics_count_pieces_and_tokens() -> None:
    with started() as serving:
        serving.post(CHAT, chat("one two three"))
        serving.post(CHAT, chat("counts", stream=True))
        text = serving.service.metrics.text()

        found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("moonpool_openai"))
        of = '{model="writer"}'
        assert float(found["moonpool_openai_first_piece_seconds_count" + of]) == 2
        assert float(found["moonpool_openai_piece_gap_seconds_count" + of]) == 2
        tokens = {
            kind: found[f'moonpool_openai_tokens_total{{kind="{kind}",model="writer"}}']
            for kind in ("prompt", "completion")
        }
        assert {kind: float(count) for kind, count in tokens.items()} == {"prompt": 3, "completion": 2}

        serving.runtime.unload("writer")
        assert "moonpool_openai_tokens_total{" not in serving.service.metrics.text()
