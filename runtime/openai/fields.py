"""Checks the fields of requests by tables. What no table names is never refused, and goes to the model as it came.

A field that is null counts as absent, as clients send all that they have. Texts and kinds are those of pydantic, which
clients of Triton's front end know. The content of messages is the model's alone: nothing in it is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from moonpool.runtime.errors import InvalidRequest

Json = Mapping[str, Any]
# Returns nothing, or raises `BadField` for the value of a field that is there.
Check = Callable[[str, Any], None]
_INT64 = 1 << 63


class BadField(InvalidRequest):
    """A field of a request is wrong. `where` leads to it."""

    def __init__(self, text: str, where: tuple[str | int, ...] = (), kind: str = "", *, given: Any = None) -> None:
        """Without a `kind`, one of pydantic's, the request as a whole is wrong, and the text says all."""
        self.param = ".".join(map(str, where))
        super().__init__(f"{self.param}: {text}" if kind else text)
        self.text = text
        self.where = where
        self.kind = kind
        self.given = given


def check(fields: Json, table: Mapping[str, Check], required: tuple[str, ...]) -> None:
    """Check the fields of a request. Raises `BadField` for the first one that is wrong."""
    for name in required:
        if name not in fields:
            raise BadField("Field required", (name,), "missing", given=None)
    for name, look in table.items():
        value = fields.get(name)
        if value is not None or name in required:
            look(name, value)


def _text(name: str, value: Any) -> None:
    if type(value) is not str:
        raise BadField("Input should be a valid string", (name,), "string_type", given=_shown(value))


def _flag(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise BadField("Input should be a valid boolean", (name,), "bool_type", given=_shown(value))


def _object(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise BadField("Input should be a valid dictionary", (name,), "dict_type", given=_shown(value))


def _number(least: float, most: float) -> Check:
    def look(name: str, value: Any) -> None:
        if type(value) not in (int, float) or not isfinite(value):
            raise BadField("Input should be a valid number", (name,), "float_type", given=_shown(value))
        _in_range(name, value, least, most)

    return look


def _integer(least: int, most: int = _INT64 - 1) -> Check:
    def look(name: str, value: Any) -> None:
        if type(value) is not int:
            raise BadField("Input should be a valid integer", (name,), "int_type", given=_shown(value))
        _in_range(name, value, least, most)

    return look


def _in_range(name: str, value: float, least: float, most: float) -> None:
    if value < least:
        text, kind = f"greater than or equal to {least}", "greater_than_equal"
    elif value > most:
        text, kind = f"less than or equal to {most}", "less_than_equal"
    else:
        return
    raise BadField(f"Input should be {text}", (name,), kind, given=value)


def _stop(name: str, value: Any) -> None:
    values = value if type(value) is list else [value]
    for each in values:
        _text(name, each)


def _stream_options(name: str, value: Any) -> None:
    _object(name, value)
    wanted = value.get("include_usage")
    if wanted is not None and type(wanted) is not bool:
        raise BadField("Input should be a valid boolean", (name, "include_usage"), "bool_type", given=_shown(wanted))


def _messages(name: str, value: Any) -> None:
    if type(value) is not list:
        raise BadField("Input should be a valid list", (name,), "list_type", given=_shown(value))
    if not value:
        raise BadField("List should have at least 1 item after validation, not 0", (name,), "too_short", given=[])
    for at, message in enumerate(value):
        if type(message) is not dict:
            raise BadField("Input should be a valid dictionary", (name, at), "dict_type", given=_shown(message))
        if type(message.get("role")) is not str:
            raise BadField("Field required", (name, at, "role"), "missing")


def _prompt(name: str, value: Any) -> None:
    """Take a text, texts, tokens or lists of tokens."""
    if value in ("", []):
        raise BadField("Value should have at least 1 item after validation, not 0", (name,), "too_short", given=value)
    if type(value) is str or _are(value, str) or _are(value, int):
        return
    if type(value) is list and all(_are(each, int) for each in value):
        return
    raise BadField("Input should be a valid string", (name,), "string_type", given=_shown(value))


def _prompts(name: str, value: Any) -> None:
    """Take the same for a completion. Triton's front end finds an empty one when all fields are checked."""
    if value == "":
        raise BadField("prompt must be non-empty", (name,))
    _prompt(name, value)


def _documents(name: str, value: Any) -> None:
    is_right = type(value) is list and all(
        type(each) is str or (type(each) is dict and type(each.get("text")) is str) for each in value
    )
    if not is_right or not value:
        raise BadField("Input should be a list of texts", (name,), "list_type", given=_shown(value))


def _are(value: Any, kind: type) -> bool:
    return type(value) is list and bool(value) and all(type(each) is kind for each in value)


def _format(*names: str) -> Check:
    def look(name: str, value: Any) -> None:
        if value not in names:
            raise BadField(
                f"Input should be {' or '.join(map(repr, names))}", (name,), "literal_error", given=_shown(value)
            )

    return look


def _shown(value: Any) -> Any:
    """Return a value for an error, but not a long one."""
    return value if isinstance(value, bool | int | float) or value is None else f"{value!r:.100}"


_GENERATION: dict[str, Check] = {
    "model": _text,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    "max_tokens": _integer(0),
    "max_completion_tokens": _integer(0),
    "min_tokens": _integer(0),
    "n": _integer(1, 128),
    "best_of": _integer(0, 20),
    "seed": _integer(-_INT64),
    "stop": _stop,
    "stream": _flag,
    "stream_options": _stream_options,
    "ignore_eos": _flag,
    "logit_bias": _object,
    "user": _text,
}
_CHAT: dict[str, Check] = {
    **_GENERATION,
    "messages": _messages,
    "logprobs": _flag,
    "top_logprobs": _integer(0, 20),
    "response_format": _object,
}
_COMPLETION: dict[str, Check] = {
    **_GENERATION,
    "prompt": _prompts,
    "logprobs": _integer(0, 5),
    "echo": _flag,
    "suffix": _text,
}
_EMBEDDINGS: dict[str, Check] = {
    "model": _text,
    "input": _prompt,
    "encoding_format": _format("float", "base64"),
    "dimensions": _integer(1),
    "user": _text,
}
_RERANK: dict[str, Check] = {
    "model": _text,
    "query": _text,
    "documents": _documents,
    "top_n": _integer(1),
    "return_documents": _flag,
}


_TRANSCRIPTION: dict[str, Check] = {
    "model": _text,
    "language": _text,
    "prompt": _text,
    "response_format": _format("json", "text", "srt", "verbose_json", "vtt"),
    "temperature": _number(0, 1),
    "stream": _flag,
}


def check_chat(fields: Json) -> None:
    """Check a request for a chat. Raises `BadField`."""
    check(fields, _CHAT, ("model", "messages"))
    _check_generation(fields)
    if fields.get("top_logprobs") is not None and not fields.get("logprobs"):
        raise BadField("`top_logprobs` can only be used when `logprobs` is True", ("top_logprobs",))
    _check_tools(fields)


def check_completion(fields: Json) -> None:
    """Check a request for a completion. Raises `BadField`."""
    check(fields, _COMPLETION, ("model", "prompt"))
    _check_generation(fields)


def check_embeddings(fields: Json) -> None:
    """Check a request for embeddings. Raises `BadField`."""
    check(fields, _EMBEDDINGS, ("model", "input"))


def check_rerank(fields: Json) -> None:
    """Check a request for a ranking. Raises `BadField`."""
    check(fields, _RERANK, ("model", "query", "documents"))


def check_transcription(fields: Json) -> None:
    """Check a request for a transcription. Raises `BadField`."""
    check(fields, _TRANSCRIPTION, ("model",))


def _check_generation(fields: Json) -> None:
    if fields.get("stream_options") and not fields.get("stream"):
        raise BadField("`stream_options` can only be used when `stream` is True", ("stream_options",))


def _check_tools(fields: Json) -> None:
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    if tools is not None and (type(tools) is not list or any(type(each) is not dict for each in tools)):
        raise BadField("Input should be a list of tools", ("tools",), "list_type")
    if choice is None or choice in ("none", "auto"):
        return
    names = [_name_of(tool) for tool in tools or ()]
    if choice == "required":
        if not names:
            raise BadField("`tool_choice` 'required' needs `tools`", ("tool_choice",))
    elif type(choice) is not dict:
        raise BadField("`tool_choice` must be 'none', 'auto', 'required' or an object", ("tool_choice",))
    elif type(_name_of(choice)) is not str or _name_of(choice) not in names:
        raise BadField("`tool_choice` names a function that is not in `tools`", ("tool_choice",))


def _name_of(tool: Json) -> object:
    function = tool.get("function")
    return function.get("name") if type(function) is dict else None
