"""Asks any server of OpenAI's API, and holds its answers against that API's reference.

No server is the measure here, since texts are a model's own: what is compared are status, form and framing, and what a
field asks for, such as one piece of text for `max_tokens: 1`. A form is written as JSON with types in place of values:

    str, int, float     a value of this type            ("a", "b")     one of these forms
    "text", 3           this value                      [form]         a list of at least one such element
    {"a": form}         an object with this member at least; with "a?", the member may be missing
"""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.conformance.asking import AskedServer
from moonpool.runtime.conformance.cases import Case
from moonpool.runtime.conformance.report import Outcome
from moonpool.runtime.conformance.wire import Http, WireReply, get, post
from moonpool.runtime.process.files import parsed_json

ERROR = {"error": {"message": str, "type": str, "param": (str, None), "code": (str, int, None)}}
_ENDS = ("stop", "length", "tool_calls", "content_filter")
_USAGE = {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int}
_MODEL = {"id": str, "object": "model", "created": int, "owned_by": str}
_CHAT = {
    "id": str,
    "object": "chat.completion",
    "created": int,
    "model": str,
    "choices": [{"index": int, "message": {"role": "assistant", "content": (str, None)}, "finish_reason": _ENDS}],
    "usage": _USAGE,
}
_PIECE = {
    "id": str,
    "object": "chat.completion.chunk",
    "created": int,
    "model": str,
    "choices": ([{"index": int, "delta": {"content?": (str, None)}, "finish_reason?": (*_ENDS, None)}], []),
}
_TEXT = {
    "id": str,
    "object": "text_completion",
    "created": int,
    "model": str,
    "choices": [{"index": int, "text": str, "finish_reason": _ENDS}],
    "usage": _USAGE,
}
_TEXT_PIECE = {
    "id": str,
    "object": "text_completion",
    "choices": ([{"index": int, "text": str, "finish_reason?": (*_ENDS, None)}], []),
}
_VECTORS = {
    "object": "list",
    "model": str,
    "data": [{"object": "embedding", "index": int, "embedding": [float]}],
    "usage": {"prompt_tokens": int, "total_tokens": int},
}
_SAYS = [{"role": "user", "content": "Say something."}]


class _Question(NamedTuple):
    extension: str
    name: str
    request: Http
    status: tuple[int, ...] = (200,)
    form: Any = ERROR
    pieces: bool = False
    """The answer is a stream of events, each with this form."""
    also: Callable[[Any], bool] = bool
    """Returns whether the body, or the list of pieces, is what the request asked for."""


def wrong(value: Any, form: Any, place: str = "") -> Iterator[str]:
    """Give what differs from a form, with its place."""
    if isinstance(form, tuple):
        if all(any(wrong(value, each)) for each in form):
            yield f"{place or 'the body'} is {_short(value)}"
    elif isinstance(form, dict):
        if not isinstance(value, dict):
            yield f"{place or 'the body'} is {_short(value)}, no object"
            return
        for key, each in form.items():
            name = key.removesuffix("?")
            if name in value:
                yield from wrong(value[name], each, f"{place}.{name}".lstrip("."))
            elif not key.endswith("?"):
                yield f"{place}.{name} is missing".lstrip(".")
    elif isinstance(form, list):
        if not isinstance(value, list) or (form and not value) or (value and not form):
            yield f"{place} is {_short(value)}"
            return
        for index, each in enumerate(value):
            yield from wrong(each, form[0], f"{place}[{index}]")
    elif isinstance(form, type):
        kinds = (int, float) if form is float else (form,)
        if isinstance(value, bool) or not isinstance(value, kinds):
            yield f"{place} is {_short(value)}, no {form.__name__}"
    elif value != form or isinstance(value, bool):
        yield f"{place} is {_short(value)}, not {form!r}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]} …"


def _joined(pieces: list[Any]) -> bool:
    """Return True if one stream of pieces has one id, a reason at its end, and nothing after it."""
    choices = [choice for piece in pieces for choice in piece["choices"]]
    reasons = [choice.get("finish_reason") for choice in choices]
    return len({piece["id"] for piece in pieces}) == 1 and reasons[-1] in _ENDS and not any(reasons[:-1])


def _indices(body: Any) -> list[int]:
    return sorted(choice["index"] for choice in body["choices"])


def _cut(body: Any) -> bool:
    return (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == ("length", 1)


def _is_base64(body: Any) -> bool:
    return len(base64.b64decode(body["data"][0]["embedding"], validate=True)) % 4 == 0


def _listed(model: str, body: Any) -> bool:
    return model in [each["id"] for each in body["data"]]


def _has_usage(pieces: list[Any]) -> bool:
    return pieces[-1]["choices"] == [] and not any(wrong(pieces[-1]["usage"], _USAGE))


def _asked(path: str, model: str, base: dict[str, Any], changes: dict[str, Any]) -> Http:
    """Make a request. A change to ... leaves a field out."""
    fields = {"model": model, **base, **changes}
    return post(
        path, {key: value for key, value in fields.items() if value is not ...}, Content_Type="application/json"
    )


def _models(model: str) -> Iterator[_Question]:
    about = partial(_Question, "models")
    yield about("list", get("/v1/models"), form={"object": "list", "data": [_MODEL]}, also=partial(_listed, model))
    yield about("one", get(f"/v1/models/{model}"), form={**_MODEL, "id": model})
    yield about("an unknown one", get("/v1/models/there-is-none"), (404,))
    yield about("an unknown path", get("/v1/there-is-none"), (404,), object)


def _wrong(extension: str, ask: Callable[..., Http], needed: str) -> Iterator[_Question]:
    """Give what every endpoint refuses."""
    for name, changes, status in (
        ("no model", {"model": ...}, (400, 422)),
        ("an unknown model", {"model": "there-is-none"}, (404,)),
        ("a model that is not a text", {"model": 3}, (400, 422)),
        (f"no {needed}", {needed: ...}, (400, 422)),
        (f"{needed} is an object", {needed: {}}, (400, 422)),
    ):
        yield _Question(extension, name, ask(**changes), status)
    path = ask().path
    yield _Question(extension, "no JSON", post(path, b'{"model": ', Content_Type="application/json"), (400, 422))
    yield _Question(extension, "a list", post(path, [], Content_Type="application/json"), (400, 422))
    yield _Question(extension, "GET", get(path), (404, 405), object)


def _ranges(extension: str, ask: Callable[..., Http]) -> Iterator[_Question]:
    """Give values that texts of either kind cannot have."""
    for changes in (
        {"temperature": "hot"},
        {"temperature": 3},
        {"top_p": 2},
        {"n": 0},
        {"n": "two"},
        {"max_tokens": "many"},
        {"frequency_penalty": 5},
        {"stop": ["a", "b", "c", "d", "e"]},
        {"stream": "yes"},
        {"logit_bias": [1]},
    ):
        yield _Question(extension, json.dumps(changes), ask(**changes), (400, 422))


def _chats(model: str) -> Iterator[_Question]:
    def ask(**changes: Any) -> Http:
        return _asked("/v1/chat/completions", model, {"messages": _SAYS, "max_tokens": 4}, changes)

    about = partial(_Question, "chat")
    one = partial(about, form=_CHAT)
    several = [{"role": "system", "content": "Be brief."}, *_SAYS, {"role": "assistant", "content": "Yes."}, *_SAYS]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say something."}]}]
    yield one("one message", ask())
    yield one("several messages", ask(messages=several))
    yield one("a message in parts", ask(messages=parts))
    yield one("max_tokens", ask(max_tokens=1), also=_cut)
    yield one("max_completion_tokens", ask(max_tokens=..., max_completion_tokens=1), also=_cut)
    yield one("n", ask(n=2), also=lambda body: _indices(body) == [0, 1])
    yield one("fields that change nothing", ask(user="u", seed=1, temperature=0, top_p=1, stop=["zzz"], stream=False))
    yield one("null", ask(temperature=None, stop=None, n=None, stream=None))
    stream = partial(about, form=_PIECE, pieces=True)
    yield stream("a stream", ask(stream=True), also=_joined)
    usage = {"include_usage": True}
    yield stream("a stream with its usage", ask(stream=True, stream_options=usage), also=_has_usage)
    yield about("no message", ask(messages=[]), (400, 422))
    yield about("a message without a role", ask(messages=[{"content": "Yes."}]), (400, 422))
    yield about("an unknown role", ask(messages=[{"role": "king", "content": "Yes."}]), (400, 422))
    yield about("a stream of an unknown model", ask(stream=True, model="there-is-none"), (404,))
    yield from _wrong("chat", ask, "messages")
    yield from _ranges("chat", ask)


def _texts(model: str) -> Iterator[_Question]:
    def ask(**changes: Any) -> Http:
        return _asked("/v1/completions", model, {"prompt": "Once", "max_tokens": 4}, changes)

    one = partial(_Question, "completions", form=_TEXT)
    yield one("one prompt", ask())
    yield one("two prompts", ask(prompt=["Once", "Twice"]), also=lambda body: _indices(body) == [0, 1])
    yield one("max_tokens", ask(max_tokens=1), also=_cut)
    yield one("n", ask(n=2), also=lambda body: _indices(body) == [0, 1])
    yield one("echo", ask(echo=True), also=lambda body: body["choices"][0]["text"].startswith("Once"))
    yield _Question("completions", "a stream", ask(stream=True), (200,), _TEXT_PIECE, pieces=True, also=_joined)
    yield from _wrong("completions", ask, "prompt")
    yield from _ranges("completions", ask)


def _embeddings(model: str) -> Iterator[_Question]:
    def ask(**changes: Any) -> Http:
        return _asked("/v1/embeddings", model, {"input": "Once"}, changes)

    one = partial(_Question, "embeddings", form=_VECTORS)
    yield one("one text", ask())
    yield one("two texts", ask(input=["Once", "Twice"]), also=lambda body: [v["index"] for v in body["data"]] == [0, 1])
    coded = {**_VECTORS, "data": [{"object": "embedding", "index": int, "embedding": str}]}
    yield _Question("embeddings", "base64", ask(encoding_format="base64"), form=coded, also=_is_base64)
    yield _Question("embeddings", "an unknown encoding", ask(encoding_format="words"), (400, 422))
    yield _Question("embeddings", "no text", ask(input=[]), (400, 422))
    yield _Question("embeddings", "dimensions", ask(dimensions="many"), (400, 422))
    yield from _wrong("embeddings", ask, "input")


def outcomes(
    server: AskedServer, chat: str | None, completions: str | None, embeddings: str | None, only: str | None = None
) -> Iterator[Outcome]:
    """Ask the models of these names, by endpoint; those without a name are left out. `only` is one extension. Raises
    `MoonpoolError` if nobody answers.
    """
    some = chat or completions or embeddings
    questions = [
        *(_models(some) if some else ()),
        *(_chats(chat) if chat else ()),
        *(_texts(completions) if completions else ()),
        *(_embeddings(embeddings) if embeddings else ()),
    ]
    known = sorted({each.extension for each in questions})
    if only is not None and only not in known:
        raise MoonpoolError(f"there are no requests for {only!r}, but for {', '.join(known)}")
    try:
        server.send(get("/v1/models"))
    except OSError as error:
        raise MoonpoolError(f"nobody answers over HTTP at {server.host}:{server.http_port}: {error}") from error
    for question in questions:
        if only in (None, question.extension):
            yield _outcome(server, question)


def _outcome(server: AskedServer, question: _Question) -> Outcome:
    case = Case(question.name, "HTTP", question.extension, lambda asked: asked.send(question.request))
    expected = " or ".join(map(str, question.status))
    try:
        reply: WireReply = case.ask(server)
    except (OSError, http.client.HTTPException) as error:
        return Outcome(case, "fails", expected, f"{type(error).__name__}: {error}")
    found = [*_faults(question, reply)]
    if not found:
        return Outcome(case, "same", expected, "")
    is_other = (reply.status < 400) != (question.status[0] < 400)
    return Outcome(case, "fails" if is_other else "differs", expected, "; ".join(found))


def _faults(question: _Question, reply: WireReply) -> Iterator[str]:
    """Give what is wrong with an answer."""
    if reply.status not in question.status:
        yield f"status {reply.status}: {_short(reply.body)}"
        return
    if question.form is object:
        return
    kind = "text/event-stream" if question.pieces else "application/json"
    if not reply.headers.get("content-type", "").startswith(kind):
        yield f"content-type {reply.headers.get('content-type')}"
    try:
        body = _events(reply.body) if question.pieces else parsed_json(reply.body)
    except (ValueError, IndexError) as error:
        yield f"{error}: {_short(reply.body)}"
        return
    faults = [fault for each in (body if question.pieces else [body]) for fault in wrong(each, question.form)]
    yield from faults or _others(question, body)


def _others(question: _Question, body: Any) -> Iterator[str]:
    try:
        if question.also(body):
            return
    except (KeyError, IndexError, TypeError, ValueError) as error:
        yield f"{type(error).__name__}: {error}"
        return
    yield f"not as asked: {_short(body)}"


def _events(body: bytes) -> list[Any]:
    """Return the pieces of a stream. Raises ValueError."""
    *events, last, rest = body.decode().replace("\r\n", "\n").split("\n\n")
    if last != "data: [DONE]" or rest:
        raise ValueError("the stream does not end with [DONE]")
    # Lines that begin with a colon are comments.
    lines = [line for event in events for line in event.splitlines() if not line.startswith(":")]
    if any(not line.startswith("data: ") for line in lines):
        raise ValueError("a line that is not data")
    return [parsed_json(line.removeprefix("data: ").encode()) for line in lines]
