"""Asks models for chats, completions and embeddings in this process, with OpenAI's fields and answers.

What the server does for clients, without HTTP: the same checks, the same endpoints, the same form of answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.model.details import details_of
from moonpool.runtime.openai.answers import CHAT, AnswerKind, Json, TextAnswer
from moonpool.runtime.openai.conventions import endpoints_of
from moonpool.runtime.openai.endpoints import Inputs, ModelEndpoints, PieceReader
from moonpool.runtime.openai.fields import check_chat, check_completion
from moonpool.runtime.schedule.stream import ResponseStream

# Submits a request with these inputs, for these outputs, with an id. Returns its `ResponseStream`, or in a test what
# yields as one does and can be closed.
Ask = Callable[[Inputs, Sequence[str], str], Any]


class AnswerStream:
    """Iterates over the chunks of an answer, as dicts, with `for` or `async for`. For one thread or task at a time.

    Ending it early, by `close`, by leaving a `with` or by dropping it, ends the model's iterator.
    """

    def __init__(self, stream: Any, reader: PieceReader, answer: TextAnswer) -> None:
        self._stream = stream
        self._reader = reader
        self._answer = answer
        # Chunks that are made and not taken yet, the last one first.
        self._made: list[Json] = []
        self._is_over = False

    def _take(self, choices: Sequence[Json]) -> None:
        head, usage = self._answer.chunk_head, {"usage": None} if self._answer.tells_usage else {}
        self._made = [{**head, "choices": [each], **usage} for each in reversed(choices)]

    def _end(self) -> None:
        self._take(self._answer.end_chunks(0))
        self._is_over = True
        usage = self._answer.usage
        if self._answer.tells_usage and usage is not None:
            self._made.insert(0, {**self._answer.chunk_head, "choices": [], "usage": usage})

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> Json:
        """Return the next chunk. Raises what the model has raised."""
        while not self._made and not self._is_over:
            try:
                response = next(self._stream)
            except StopIteration:
                self._end()
            else:
                self._take(self._answer.chunks(self._reader.piece(response), 0))
        if not self._made:
            raise StopIteration
        return self._made.pop()

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> Json:
        """Return the next chunk, as `__next__` does, for a task."""
        while not self._made and not self._is_over:
            try:
                response = await anext(self._stream)
            except StopAsyncIteration:
                self._end()
            else:
                self._take(self._answer.chunks(self._reader.piece(response), 0))
        if not self._made:
            raise StopAsyncIteration
        return self._made.pop()

    def close(self) -> None:
        """Take no more chunks, and end the model's iterator."""
        self._stream.close()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> AnswerStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class ModelCalls:
    """Calls of the endpoints of one model."""

    def __init__(self, name: str, endpoints: ModelEndpoints, ask: Ask) -> None:
        """`ask` submits a request, whose responses have `WireTensor`s; `close` of its stream cancels the request."""
        self._name = name
        self._endpoints = endpoints
        self._ask = ask

    @classmethod
    def of(cls, hosted: HostedModel, timeout_s: float | None) -> ModelCalls:
        """Return the calls of a model of a runtime."""

        def ask(inputs: Inputs, outputs: Sequence[str], request_id: str) -> ResponseStream:
            request = hosted.signature.request(inputs, outputs, details_of(request_id, 0, 0, 0, 0, {}))
            request.wants_wire = True
            return ResponseStream(hosted.scheduler, request, timeout_s)

        return cls(hosted.model.name, endpoints_of(hosted.model), ask)

    def begin(self, kind: AnswerKind, fields: Mapping[str, Any]) -> AnswerStream:
        """Ask for a chat or a completion. Raises `InvalidRequest` for wrong fields, and what a request raises."""
        check: Callable[[Mapping[str, Any]], None] = check_chat if kind is CHAT else check_completion
        check(fields)
        endpoint = self._endpoints.text(self._name, kind.endpoint)
        if endpoint is None:
            raise InvalidRequest(f"model '{self._name}' has no method '{kind.endpoint}'")
        number = uuid4().hex
        body = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")
        stream = self._ask(endpoint.inputs(fields, body), endpoint.outputs, number)
        return AnswerStream(stream, endpoint.reader(fields), TextAnswer(kind, number, fields))

    def whole(self, kind: AnswerKind, fields: Mapping[str, Any]) -> Json:
        """Ask as `begin` does, and wait for the whole answer. Raises also what the model raises."""
        with self.begin(kind, fields) as begun:
            for response in begun._stream:
                begun._answer.add(begun._reader.piece(response), 0)
        begun._answer.end(0)
        return begun._answer.whole()

    async def awhole(self, kind: AnswerKind, fields: Mapping[str, Any]) -> Json:
        """Do the same as `whole`, for a task."""
        with self.begin(kind, fields) as begun:
            async for response in begun._stream:
                begun._answer.add(begun._reader.piece(response), 0)
        begun._answer.end(0)
        return begun._answer.whole()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return a row for each text. Raises `InvalidRequest`, and what a request raises."""
        endpoint = self._endpoints.embedding
        if endpoint is None:
            raise InvalidRequest(f"model '{self._name}' has no method 'embed'")
        if isinstance(texts, str) or not texts or not all(isinstance(each, str) for each in texts):
            raise InvalidRequest("texts to embed are a list of at least one text")
        made = endpoint.requests(texts, {})
        with ExitStack() as closing_all:
            streams = [
                closing_all.enter_context(closing(self._ask(inputs, endpoint.outputs, ""))) for inputs, _ in made
            ]
            rows = []
            for stream, (_, count) in zip(streams, made, strict=True):
                response = next(iter(stream), None)
                if response is None:
                    raise ModelError(f"model '{self._name}' gave no answer")
                rows.append(endpoint.rows(response, count)[0])
        return np.concatenate(rows)
