"""Defines what a model yields, and how it travels: each piece is one JSON object, the only element of an output.

The server reads these objects, puts ids, names and times around their fields, and sends nothing else of them to the
client. So a model of another kind, or in another language, has the endpoint, too, if it writes the same objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Union

_encoded = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
_encoded_text = json.encoder.encode_basestring


class BadRequest(Exception):
    """Refuses a request, whose client gets the text with the status 400. `param` names the field."""

    def __init__(self, text: str, param: str | None = None) -> None:
        super().__init__(text)
        self.param = param


class Delta:
    """Is a piece of an answer that is more than text.

    `content`, `reasoning_content` and `refusal` are texts, which the client appends to those before. `tool_calls` are
    from `tool_call`, or dicts in OpenAI's form. `logprobs` are in OpenAI's form. A `finish_reason`, such as "stop",
    "length" or "tool_calls", ends the choice. `index` is the choice, from 0 on.
    """

    __slots__ = ("content", "finish_reason", "index", "logprobs", "reasoning_content", "refusal", "tool_calls")

    def __init__(
        self,
        content: str | None = None,
        *,
        tool_calls: list[dict[str, Any]] | None = None,
        reasoning_content: str | None = None,
        refusal: str | None = None,
        logprobs: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
        index: int = 0,
    ) -> None:
        self.content = content
        self.tool_calls = tool_calls
        self.reasoning_content = reasoning_content
        self.refusal = refusal
        self.logprobs = logprobs
        self.finish_reason = finish_reason
        self.index = index


class Segment:
    """Is a piece of a transcription: a text, with the seconds at which it begins and ends in the recording.

    `words` are dicts with `word`, `start` and `end`.
    """

    __slots__ = ("content", "end", "start", "words")

    def __init__(self, text: str, start: float, end: float, words: list[dict[str, Any]] | None = None) -> None:
        self.content = text
        self.start = start
        self.end = end
        self.words = words


class Usage:
    """Tells how many tokens the prompt and the answer have. A model yields it once, last."""

    __slots__ = ("completion_tokens", "prompt_tokens")

    def __init__(self, prompt_tokens: int, completion_tokens: int = 0) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens


Piece = Union[str, Delta, Segment, Usage]


def tool_call(
    name: str | None = None, arguments: str | Mapping[str, Any] = "", *, call_id: str | None = None, index: int = 0
) -> dict[str, Any]:
    """Return a call of a tool, or a part of one: the first part has `name` and `call_id`, others more `arguments`.

    `arguments` are JSON, or an object to be written as JSON. A call without an id gets one from the server.
    """
    text = arguments if isinstance(arguments, str) else _encoded(arguments)
    function: dict[str, Any] = {"arguments": text}
    call: dict[str, Any] = {"index": index, "function": function}
    if name is not None:
        function["name"], call["type"] = name, "function"
    if call_id is not None:
        call["id"] = call_id
    return call


def encoded(piece: object) -> bytes:
    """Return a piece as it travels.

    Raises TypeError for what no model may yield, and ValueError for a number that JSON has no form for.
    """
    if isinstance(piece, str):
        return f'{{"content":{_encoded_text(piece)}}}'.encode("utf-8", "replace")
    if isinstance(piece, Delta):
        fields: Mapping[str, Any] = {
            name: value
            for name in Delta.__slots__
            if (value := getattr(piece, name)) is not None and (name != "index" or value)
        }
    elif isinstance(piece, Segment):
        fields = {name: value for name in Segment.__slots__ if (value := getattr(piece, name)) is not None}
    elif isinstance(piece, Usage):
        fields = {"usage": {name: getattr(piece, name) for name in Usage.__slots__}}
    elif isinstance(piece, Mapping):
        fields = piece
    else:
        raise TypeError(
            f"yielded an object of type {type(piece).__name__}, and a piece is a str, a moonpool.openai.Delta, a "
            "Segment, a Usage or a dict with the fields of one of them"
        )
    # A text may hold half of a character, which has no form in UTF-8.
    return _encoded(fields).encode("utf-8", "replace")
