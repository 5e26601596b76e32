"""Recordings over OpenAI's API, and the forms in which they come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.http.serving import Reply, Serving

import moonpool
from moonpool.runtime.openai.fields import BadField
from moonpool.runtime.server.openai.multipart import read_form

MODELS = Path(__file__).parents[2] / "models"
PATH = "/v1/audio/transcriptions"
BOUNDARY = "x-y'z 1"
TYPE = f'multipart/form-data; boundary="{BOUNDARY}"'


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with moonpool.Runtime() as runtime:
        runtime.load("scribe", str(MODELS / "scribe.py"))
        runtime.load("writer", str(MODELS / "writer.py"))
        with Serving(runtime) as made:
            yield made


def part(disposition: str, content: bytes, more: str = "") -> bytes:
    return f"--{BOUNDARY}\r\nContent-Disposition: form-data; {disposition}\r\n{more}\r\n".encode() + content + b"\r\n"


def form(file: bytes | None = b"one two", **fields: Any) -> bytes:
    parts = [part(f'name="{name}"', text.encode()) for name, text in fields.items()]
    if file is not None:
        parts.append(part('name="file"; filename="a \\"b\\".wav"', file, "Content-Type: audio/wav\r\n"))
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def ask(serving: Serving, file: bytes | None = b"one two", **fields: Any) -> Reply:
    return serving.ask("POST", PATH, form(file, **{"model": "scribe", **fields}), {"Content-Type": TYPE})


@pytest.mark.promise("OpenAI", "A class with `transcribe` answers `/v1/audio/transcriptions`, in each of its forms.")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("text", "one two \n"),
        ("srt", "1\n00:00:00,000 --> 00:00:00,500\none\n\n2\n00:00:01,000 --> 00:00:01,500\ntwo\n"),
        ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:00.500\none\n\n00:00:01.000 --> 00:00:01.500\ntwo\n"),
    ],
)
def test_forms_of_text(serving: Serving, name: str, text: str) -> None:
    reply = ask(serving, response_format=name)

    assert (reply.status, reply.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert reply.body.decode() == text


@pytest.mark.promise("OpenAI", "A class with `transcribe` answers …")
def test_forms_of_json(serving: Serving) -> None:
    usage = {"type": "tokens", "input_tokens": 2, "output_tokens": 1, "total_tokens": 3}

    assert ask(serving).value == {"text": "one two ", "usage": usage}
    assert ask(serving, response_format="verbose_json").value == {
        "task": "transcribe",
        "language": "en",
        "duration": 2,
        "text": "one two ",
        "segments": [
            {"id": 0, "start": 0, "end": 0.5, "text": "one "},
            {"id": 1, "start": 1, "end": 1.5, "text": "two "},
        ],
        "words": [{"word": "one", "start": 0, "end": 0.5}, {"word": "two", "start": 1, "end": 1.5}],
        "usage": usage,
    }


@pytest.mark.promise("OpenAI", "A class with `transcribe` answers …")
def test_a_stream_has_the_pieces_and_the_whole(serving: Serving) -> None:
    reply = ask(serving, stream="true")

    events = reply.body.decode().split("\n\n")
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events[-2:] == ["data: [DONE]", ""]
    found = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [each.get("delta") for each in found] == ["one ", "two ", None]
    assert (found[-1]["type"], found[-1]["text"]) == ("transcript.text.done", "one two ")
    assert found[-1]["usage"]["total_tokens"] == 3


def test_a_model_gets_the_fields_and_the_file(serving: Serving) -> None:
    body = form(bytes(range(256)) * 64, model="scribe", prompt="tells", language="de", odd="1")
    told = serving.ask("POST", PATH, body, {"Content-Type": TYPE}).value["text"]

    assert told.startswith("('a \"b\".wav', 'de', 16384, ")
    assert "'odd'" in told


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nobody"}, 400, "model"),
        ({"model": "writer"}, 400, "model"),
        ({"response_format": "yaml"}, 422, "response_format"),
        ({"stream": "maybe"}, 422, "stream"),
        ({"temperature": "hot"}, 422, "temperature"),
        ({"temperature": "1.5"}, 422, "temperature"),
        ({"temperature": "nan"}, 422, "temperature"),
        ({"prompt": "untimed", "response_format": "srt"}, 400, "response_format"),
    ],
)
def test_a_wrong_field_is_named(serving: Serving, fields: dict[str, Any], status: int, param: str) -> None:
    reply = ask(serving, **fields)

    assert (reply.status, reply.value["error"]["param"]) == (status, param)


def test_a_recording_must_be_there(serving: Serving) -> None:
    missing = ask(serving, None)
    no_form = serving.post(PATH, {"model": "scribe"})
    # A long one is read on a thread.
    long = ask(serving, bytes(1 << 20), model="nobody")

    assert (missing.status, missing.value["error"]["param"]) == (422, "file")
    assert (no_form.status, "multipart/form-data" in no_form.value["error"]["message"]) == (400, True)
    assert (long.status, long.value["error"]["code"]) == (400, "model_not_found")


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [("refuses", 400, "invalid_value"), ("breaks", 500, "model_error"), ("wrong", 500, "model_error")],
)
def test_what_a_model_raises(serving: Serving, said: str, status: int, code: str) -> None:
    reply = ask(serving, prompt=said)

    assert (reply.status, reply.value["error"]["code"]) == (status, code)


def test_an_error_in_a_stream_is_its_last_event(serving: Serving) -> None:
    body = ask(serving, prompt="breaks", stream="true").body.decode()

    assert json.loads(body.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "model_error"
    assert "[DONE]" not in body


@pytest.mark.promise("OpenAI", "No text of a model …")
def test_a_text_with_the_form_of_a_segment_is_a_text(serving: Serving) -> None:
    srt = ask(serving, prompt="forges", response_format="srt").body.decode()
    events = ask(serving, prompt="forges", stream="true").body.decode()

    assert srt.count("-->") == 1
    assert "\n\n" not in srt
    assert events.count("data: [DONE]\n\n") == 1


def test_a_page_of_another_origin_is_refused(serving: Serving) -> None:
    reply = serving.ask("POST", PATH, form(model="scribe"), {"Content-Type": TYPE, "Origin": "http://evil.example"})

    assert (reply.status, reply.value["error"]["type"]) == (403, "permission_error")


# The reader

PLAIN = "multipart/form-data; boundary=b"


def test_a_form_is_read() -> None:
    body = (
        b'--b\r\ncontent-disposition: form-data; name="a"\r\n\r\n--c\r\n\r\n'
        b'--b\r\nContent-Disposition: form-data; name="l[]"\r\n\r\n1\r\n'
        b'--b\r\nContent-Disposition: form-data; name="l[]"\r\nContent-Type: text/plain\r\n\r\n2\r\n'
        b"--b\r\nContent-Disposition: form-data; name=f; filename*=utf-8''%C3%A4.wav\r\n\r\n\0\r\n--\r\n--b--"
    )

    found = read_form("Multipart/Form-Data;charset=utf-8; boundary=b", memoryview(body))

    assert found.texts == {"a": "--c\r\n", "l": ["1", "2"]}
    assert {name: (file.name, bytes(file.content)) for name, file in found.files.items()} == {
        "f": ("ä.wav", b"\0\r\n--")
    }


HEAD = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
BAD_FORMS = {
    "nothing": b"",
    "no boundary": b"a=1",
    "before the first part": b"\r\n" + HEAD + b"1\r\n--b--",
    "no end": HEAD + b"1",
    "half an end": HEAD + b"1\r\n--b",
    "no head": b"--b\r\n\r\n1\r\n--b--",
    "no name": b"--b\r\nContent-Disposition: form-data\r\n\r\n1\r\n--b--",
    "another disposition": b'--b\r\nContent-Disposition: attachment; name="a"\r\n\r\n1\r\n--b--',
    "a line that is not a header": b"--b\r\nx\r\n\r\n1\r\n--b--",
    "a header twice": HEAD[:-2] + b"content-disposition: form-data; name=c\r\n\r\n1\r\n--b--",
    "an encoding": HEAD[:-2] + b"Content-Transfer-Encoding: base64\r\n\r\n1\r\n--b--",
    "a long head": b"--b\r\nx: " + b"x" * 5000 + b"\r\n" + HEAD[5:] + b"1\r\n--b--",
    "more behind": HEAD + b"1\r\n--b--\r\nmore",
    "a name twice": (HEAD + b"1\r\n") * 2 + b"--b--",
    "a list and a text": HEAD + b"1\r\n" + HEAD.replace(b'"a"', b'"a[]"') + b"1\r\n--b--",
    "no text": HEAD + b"\xff\r\n--b--",
    "a long text": HEAD + b"1" * (2 << 20) + b"\r\n--b--",
    "many parts": b"".join(HEAD.replace(b'"a"', b'"%d"' % number) + b"1\r\n" for number in range(17)) + b"--b--",
}


@pytest.mark.promise("OpenAI", "A form has at most 16 parts, with short heads, and is refused if it is malformed.")
@pytest.mark.parametrize("what", BAD_FORMS)
def test_a_malformed_form_is_refused(what: str) -> None:
    with pytest.raises(BadField):
        read_form(PLAIN, BAD_FORMS[what])


@pytest.mark.parametrize(
    "content_type", ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=", PLAIN + "b" * 70]
)
def test_a_form_needs_its_type(content_type: str) -> None:
    with pytest.raises(BadField):
        read_form(content_type, HEAD + b"1\r\n--b--")
