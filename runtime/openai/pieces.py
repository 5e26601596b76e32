"""Reads the pieces of an answer: one JSON object each, which a stub or another process has written.

They are hostile until they are checked. No byte of a piece travels on. The known fields are checked, and written anew.
So no text of a model can forge an event or another field.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from moonpool.runtime.errors import ModelError
from moonpool.runtime.process.files import parsed_json

# A piece says little. A longer one is a model's mistake, or its malice.
MOST_PIECE_BYTES = 8 << 20
# Each array and object becomes one of Python's, which is many times as large as its text.
_MOST_CONTAINERS, _CONTAINER_BYTES = 1 << 17, 128
_MOST_CALLS = 1024
_MOST_TOKENS = 1 << 53
_TEXTS = ("content", "reasoning_content", "refusal")
_SPEECH = frozenset(("start", "end", "words", "language", "duration"))
_SECONDS, _MOST_SECONDS = ("start", "end", "duration"), 1e6
# The most usual piece, a text in which nothing is escaped. One of this length may be read without a parser.
_plain = re.compile(rb'\{"content":"([^"\\\x00-\x1f]*)"\}').fullmatch
_MOST_PLAIN_BYTES = 4096
_COUNTS = ("prompt_tokens", "completion_tokens")


class Piece(NamedTuple):
    """A part of an answer, checked."""

    delta: dict[str, Any]
    """The texts and calls of tools, as they stand in a chunk."""
    choice: int = 0
    """The choice that it belongs to."""
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None
    usage: dict[str, int] | None = None
    """The tokens of `prompt_tokens` and `completion_tokens`."""
    extra_bytes: int = 0
    """About the memory that it takes beyond its text."""
    speech: dict[str, Any] | None = None
    """Facts of a transcription beside its text: `start`, `end` and `duration` in seconds, `words`, `language`."""


class PieceCounts(NamedTuple):
    """Counts of the pieces of a model until now."""

    answers: int = 0
    """The answers that have begun."""
    first_ns: int = 0
    """The time from the request to the first piece, of all answers together."""
    pieces: int = 0

    def minus(self, other: PieceCounts) -> PieceCounts:
        """Return what came since; nothing if the model was loaded anew meanwhile."""
        came = PieceCounts(*map(operator.sub, self, other))
        return came if min(came) >= 0 else PieceCounts()


NO_PIECES = PieceCounts()


def piece_of(raw: memoryview, model: str) -> Piece:
    """Return the piece that a model of this name has written. Raises `ModelError`, which says what is wrong with it."""
    if len(raw) <= _MOST_PLAIN_BYTES:
        # A copy: the stub may write to its memory.
        found = _plain(bytes(raw))
        if found is not None:
            try:
                return Piece({"content": found[1].decode()})
            except UnicodeDecodeError:  # which is told below
                pass
    fields = object_of(raw, model)
    delta = {name: fields[name] for name in _TEXTS if fields.get(name) is not None}
    for name, text in delta.items():
        if type(text) is not str:
            raise _bad(model, f"'{name}' must be a text")
    if fields.get("tool_calls") is not None:
        delta["tool_calls"] = _tool_calls(fields["tool_calls"], model)
    index, reason, logprobs = (fields.get("index", 0), fields.get("finish_reason"), fields.get("logprobs"))
    if type(index) is not int or index < 0:
        raise _bad(model, "'index' must be the number of a choice")
    if reason is not None and type(reason) is not str:
        raise _bad(model, "'finish_reason' must be a text")
    if logprobs is not None and type(logprobs) is not dict:
        raise _bad(model, "'logprobs' must be an object")
    usage = usage_in(fields.get("usage"), model)
    speech = None if _SPEECH.isdisjoint(fields) else _speech(fields, model)
    extra_bytes = 0 if logprobs is None and speech is None else held_bytes_of(raw)
    return Piece(delta, index, reason, logprobs, usage, extra_bytes, speech)


def object_of(raw: memoryview, model: str) -> dict[str, Any]:
    """Return the fields of a piece. Raises `ModelError`."""
    fields = value_of(raw, model)
    if type(fields) is not dict:
        raise _bad(model, "it is not an object")
    return fields


def value_of(raw: bytes | memoryview, model: str) -> Any:
    """Return the value of a JSON that a model has written. Raises `ModelError`."""
    # A copy: the stub may write to its memory.
    data = bytes(raw)
    if len(data) > _MOST_CONTAINERS and _containers(data) > _MOST_CONTAINERS:
        raise _bad(model, f"it has more than {_MOST_CONTAINERS} arrays and objects")
    try:
        return parsed_json(data)
    except ValueError as error:
        raise _bad(model, f"it is not JSON: {error}") from None


def check_size(size_bytes: int, model: str) -> None:
    """Raise `ModelError` if a piece is too large to be read."""
    if size_bytes > MOST_PIECE_BYTES:
        raise _bad(model, f"it has {size_bytes} bytes, and {MOST_PIECE_BYTES} are the most")


def held_bytes_of(raw: bytes | memoryview) -> int:
    """Return about the memory that the value of a JSON takes beyond its text."""
    return _containers(raw) * _CONTAINER_BYTES


def _containers(raw: bytes | memoryview) -> int:
    data = bytes(raw)
    return data.count(b"[") + data.count(b"{")


def _tool_calls(calls: object, model: str) -> list[dict[str, Any]]:
    if type(calls) is not list:
        raise _bad(model, "'tool_calls' must be a list")
    return [_tool_call(each, at, model) for at, each in enumerate(calls)]


def _tool_call(call: object, at: int, model: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _bad(model, "a call of a tool must be an object")
    function, index, call_id = call.get("function", {}), call.get("index", at), call.get("id")
    if not isinstance(function, Mapping) or type(index) is not int or not 0 <= index < _MOST_CALLS:
        raise _bad(model, "a call of a tool has an 'index' and a 'function'")
    made: dict[str, Any] = {}
    for name in ("name", "arguments"):
        if (text := function.get(name)) is not None:
            if type(text) is not str:
                raise _bad(model, f"the '{name}' of a call of a tool must be a text")
            made[name] = text
    found: dict[str, Any] = {"index": index}
    if call_id is not None:
        if type(call_id) is not str:
            raise _bad(model, "the 'id' of a call of a tool must be a text")
        found["id"] = call_id
    if "name" in made:
        found["type"] = "function"
    return {**found, "function": made}


def _speech(fields: Mapping[str, Any], model: str) -> dict[str, Any]:
    given = {name: fields[name] for name in _SPEECH if fields.get(name) is not None}
    if ("start" in given) != ("end" in given):
        raise _bad(model, "a segment has both 'start' and 'end'")
    for name in _SECONDS:
        if name in given and not _is_time(given[name]):
            raise _bad(model, f"'{name}' must be a number of seconds")
    if type(given.get("language", "")) is not str:
        raise _bad(model, "'language' must be a text")
    words = given.get("words", [])
    if type(words) is not list:
        raise _bad(model, "'words' must be a list")
    if words:
        given["words"] = [_word(each, model) for each in words]
    return given


def _word(word: object, model: str) -> dict[str, Any]:
    made = {name: word.get(name) for name in ("word", "start", "end")} if isinstance(word, Mapping) else {}
    if type(made.get("word")) is not str or not (_is_time(made["start"]) and _is_time(made["end"])):
        raise _bad(model, "each of 'words' has a text 'word', 'start' and 'end'")
    return made


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and 0 <= value <= _MOST_SECONDS


def usage_in(usage: object, model: str) -> dict[str, int] | None:
    """Return the counts of tokens that a model tells. Raises `ModelError`."""
    if usage is None:
        return None
    if not isinstance(usage, Mapping):
        raise _bad(model, "'usage' must be an object")
    counts = {name: usage.get(name, 0) for name in _COUNTS}
    if any(type(count) is not int or not 0 <= count < _MOST_TOKENS for count in counts.values()):
        raise _bad(model, f"'usage' has the counts {' and '.join(_COUNTS)}")
    return counts


def _bad(model: str, text: str) -> ModelError:
    return ModelError(f"model '{model}' answered with a wrong piece: {text}")
