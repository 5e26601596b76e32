"""Makes the answers of chats and completions in OpenAI's form: chunks of a stream, or the whole.

Clients rely on the order of chunks. A chat begins with the role of each choice. Then come the pieces. Each choice ends
with one chunk that has a `finish_reason` and nothing else. If the client asked for it and the model has told it, one
more chunk without choices has the usage. `[DONE]` is last.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import uuid4

from moonpool.runtime.errors import ModelError
from moonpool.runtime.openai.pieces import Piece

Json = dict[str, Any]


class AnswerKind(NamedTuple):
    """Tells a chat from a completion on the wire."""

    endpoint: str
    id_prefix: str
    whole: str
    """The type of the object that is a whole answer."""
    chunk: str
    """The type of the object that is a part of one."""
    operation: str
    """Its name in OpenTelemetry's spans."""


CHAT = AnswerKind("chat", "chatcmpl-", "chat.completion", "chat.completion.chunk", "chat")
COMPLETION = AnswerKind("complete", "cmpl-", "text_completion", "text_completion", "text_completion")


class _Choice:
    """One of the answers that a client has asked for."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.texts: dict[str, list[str]] = {}
        # By the index of the call. Parts of their arguments are joined at the end.
        self.calls: dict[int, dict[str, Any]] = {}
        self.arguments: dict[int, list[str]] = {}
        self.logprobs: dict[str, Any] | None = None


class TextAnswer:
    """An answer on its way. For the loop's thread."""

    def __init__(self, kind: AnswerKind, request_id: str, fields: Mapping[str, Any]) -> None:
        """Begin the answer to a request with these fields, which were checked."""
        self._is_chat = kind is CHAT
        self._model = fields["model"]
        self._most_choices: int = fields.get("n") or 1
        limit = fields.get("max_completion_tokens")
        self._most_tokens = fields.get("max_tokens") if limit is None else limit
        self.tells_usage = bool((fields.get("stream_options") or {}).get("include_usage"))
        """True if the client wants the usage in a chunk of its own. Then all chunks have the field."""
        self._head = {
            "id": kind.id_prefix + request_id,
            "object": kind.whole,
            "created": int(time.time()),
            "model": self._model,
            "system_fingerprint": None,
        }
        self.chunk_head = {**self._head, "object": kind.chunk}
        """The fields that all chunks have, before the choices."""
        self._choices: dict[int, _Choice] = {}
        # By the place of the prompt.
        self._usage: dict[int, dict[str, int]] = {}

    # A stream

    def chunks(self, piece: Piece, place: int) -> list[Json]:
        """Return the choice of each chunk for a piece of the answer to the prompt at `place`. Raises `ModelError`."""
        index = place * self._most_choices + piece.choice
        if piece.usage is not None and self._is_usage_alone(piece, place):
            return []
        begins = index not in self._choices
        choice = self._choice(piece, place)
        made = self._first(index) if begins else []
        if piece.delta or piece.logprobs:
            if "tool_calls" in piece.delta:
                self._name_calls(choice, piece)
            made.append(self._chunk(index, piece.delta, piece.logprobs))
        if choice.finish_reason is not None:
            made.append(self._chunk(index, {}, None, choice.finish_reason))
        return made

    def end_chunks(self, place: int) -> list[Json]:
        """Return the choice of each chunk that ends those of the prompt at `place`."""
        made = []
        for index, begins in self._unfinished(place):
            if begins:
                made += self._first(index)
            choice = self._choices[index]
            choice.finish_reason = self._reason(choice, place)
            made.append(self._chunk(index, {}, None, choice.finish_reason))
        return made

    def _first(self, index: int) -> list[Json]:
        return [self._chunk(index, {"role": "assistant", "content": ""})] if self._is_chat else []

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
        said: Json = {"delta": delta} if self._is_chat else {"text": delta.get("content", "")}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}

    # The whole

    def add(self, piece: Piece, place: int) -> None:
        """Keep a piece of the answer to the prompt at `place`. Raises `ModelError`."""
        if self._is_usage_alone(piece, place):
            return
        choice = self._choice(piece, place)
        self._name_calls(choice, piece)
        for name, value in piece.delta.items():
            if name != "tool_calls":
                choice.texts.setdefault(name, []).append(value)
        for call in piece.delta.get("tool_calls", ()):
            choice.arguments[call["index"]].append(call["function"].get("arguments", ""))
        if piece.logprobs is not None:
            choice.logprobs = _joined(choice.logprobs, piece.logprobs)

    def end(self, place: int) -> None:
        """End the answer to the prompt at `place`."""
        for index, _ in self._unfinished(place):
            choice = self._choices[index]
            choice.finish_reason = self._reason(choice, place)

    def whole(self) -> Json:
        """Return the whole answer."""
        choices = []
        for index, choice in sorted(self._choices.items()):
            said = (
                {"message": self._message(choice)}
                if self._is_chat
                else {"text": "".join(choice.texts.get("content", ()))}
            )
            choices.append({"index": index, **said, "logprobs": choice.logprobs, "finish_reason": choice.finish_reason})
        usage = self.usage
        return {**self._head, "choices": choices, **({} if usage is None else {"usage": usage})}

    def _message(self, choice: _Choice) -> dict[str, Any]:
        texts = {name: "".join(parts) for name, parts in choice.texts.items()}
        content = texts.pop("content", None if choice.calls or "refusal" in texts else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, **texts}
        if choice.calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(choice.arguments[index])},
                }
                for index, call in sorted(choice.calls.items())
            ]
        return message

    # Both

    @property
    def usage(self) -> dict[str, int] | None:
        """The tokens of all prompts and answers, None if the model has not told them."""
        if not self._usage:
            return None
        prompt, completion = (
            sum(each[name] for each in self._usage.values()) for name in ("prompt_tokens", "completion_tokens")
        )
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _is_usage_alone(self, piece: Piece, place: int) -> bool:
        """Keep the usage that a piece tells. Returns True if it says nothing else."""
        if piece.usage is None:
            return False
        self._usage[place] = piece.usage
        return not piece.delta and piece.logprobs is None and piece.finish_reason is None

    def _choice(self, piece: Piece, place: int) -> _Choice:
        if piece.choice >= self._most_choices:
            raise ModelError(
                f"model '{self._model}' answered with a piece of choice {piece.choice}, and the client wants "
                f"{self._most_choices}"
            )
        index = place * self._most_choices + piece.choice
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice()
        if choice.finish_reason is not None:
            raise ModelError(f"model '{self._model}' answered with a piece of choice {piece.choice} after the last one")
        choice.finish_reason = piece.finish_reason
        return choice

    def _name_calls(self, choice: _Choice, piece: Piece) -> None:
        """Give each call of a tool an id in its first part, if the model has not. Raises `ModelError`."""
        for call in piece.delta.get("tool_calls", ()):
            known = choice.calls.get(call["index"])
            if known is not None:
                continue
            name = call["function"].get("name")
            if name is None:
                raise ModelError(f"model '{self._model}' began a call of a tool without a name")
            call["id"] = call.get("id") or f"call_{uuid4().hex[:24]}"
            call["function"].setdefault("arguments", "")
            choice.calls[call["index"]] = {"id": call["id"], "name": name}
            choice.arguments[call["index"]] = []

    def _unfinished(self, place: int) -> list[tuple[int, bool]]:
        """Return the choices of a prompt without an end, and which of them have not begun: the first, if none has."""
        first = place * self._most_choices
        indices = [index for index in range(first, first + self._most_choices) if index in self._choices]
        if not indices:
            self._choices[first] = _Choice()
            return [(first, True)]
        return [(index, False) for index in indices if self._choices[index].finish_reason is None]

    def _reason(self, choice: _Choice, place: int) -> str:
        if choice.calls:
            return "tool_calls"
        usage = self._usage.get(place)
        is_full = (
            usage is not None and self._most_tokens is not None and usage["completion_tokens"] >= self._most_tokens
        )
        return "length" if is_full else "stop"


def _joined(before: dict[str, Any] | None, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logprobs of two pieces: lists are joined."""
    joined = dict(before or {})
    for name, value in more.items():
        old = joined.get(name)
        joined[name] = [*old, *value] if isinstance(old, list) and isinstance(value, list) else value
    return joined
