"""A model that is loaded for a test, with one interface for models in this process and in a stub."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import Response as Outputs
from moonpool.runtime.model.request import WireTensor
from moonpool.runtime.openai.answers import CHAT, COMPLETION
from moonpool.runtime.openai.calls import AnswerStream, ModelCalls
from moonpool.runtime.openai.conventions import endpoints_in
from moonpool.testing.request import Request
from moonpool.testing.response import Response


class NotOneResponse(MoonpoolError):
    """A model did not answer `infer` with one response; `responses` returns any number."""


class LoadedModel(ABC):
    """A loaded model. Use it as a context manager, or call `close`, which runs the model's `finalize`.

    A request is a `Request`, or inputs by name: `model.infer(X=[[1, 2]])`, `model.infer({"X": array})`.
    A request that does not fit the configuration raises `InvalidRequest`, as in a runtime.
    """

    def __init__(self, config: ModelConfig, version: int) -> None:
        # The configuration after the model has completed it.
        self.config = config
        self.version = version

    @property
    def name(self) -> str:
        return self.config.name

    def infer(self, request: Request | Mapping[str, Any] | None = None, /, **inputs: Any) -> Response:
        """Return the response to a request. Raises `ModelError` if it is an error, and `NotOneResponse`."""
        return self._only(self.responses(request, **inputs)).check()

    def responses(self, request: Request | Mapping[str, Any] | None = None, /, **inputs: Any) -> list[Response]:
        """Return all responses to a request, errors among them, in the order in which the model sent them."""
        return self._batch([_as_request(request, inputs)])[0]

    def stream(
        self, request: Request | Mapping[str, Any] | None = None, /, **inputs: Any
    ) -> Generator[Response, None, bool]:
        """Yield the responses to a request as they come. The first `next` sends it; closing the iterator cancels it."""
        return self._stream(_as_request(request, inputs))

    def _stream(self, request: Request) -> Generator[Response, None, bool]:
        return (yield from self._send(request))

    def infer_batch(self, requests: Sequence[Request | Mapping[str, Any]]) -> list[Response]:
        """Return one response to each request of a batch, errors among them. Raises `NotOneResponse`."""
        return [self._only(responses) for responses in self.responses_batch(requests)]

    def responses_batch(self, requests: Sequence[Request | Mapping[str, Any]]) -> list[list[Response]]:
        """Return all responses to each request of a batch."""
        return self._batch([_as_request(request, {}) for request in requests])

    # OpenAI's API

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[False] = ..., **fields: Any
    ) -> dict[str, Any]: ...

    @overload
    def chat(self, messages: Sequence[Mapping[str, Any]], *, stream: Literal[True], **fields: Any) -> AnswerStream: ...

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, stream: bool = False, **fields: Any
    ) -> dict[str, Any] | AnswerStream:
        """Ask a model with a method `chat` for the next message, with OpenAI's `fields`, such as `temperature=0`.

        Returns the answer that a server's client gets, or with `stream` an iterator over its chunks; closing it cancels
        the request. Raises `InvalidRequest` for wrong fields, and `ModelError`.
        """
        asked = {**fields, "model": self.name, "messages": list(messages), "stream": stream}
        return self._calls().begin(CHAT, asked) if stream else self._calls().whole(CHAT, asked)

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> dict[str, Any]:
        """Ask a model with a method `complete` to go on with a text, or with the ids of tokens. Raises as `chat`."""
        given = prompt if isinstance(prompt, str) else list(prompt)
        return self._calls().whole(COMPLETION, {**fields, "model": self.name, "prompt": given})

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return a row of numbers for each text, from a model with a method `embed`. Raises as `chat`."""
        return self._calls().embed(texts)

    def _calls(self) -> ModelCalls:
        def ask(inputs: Mapping[str, Any], outputs: Sequence[str], request_id: str) -> Iterator[Outputs]:
            return self._wired(Request(inputs, outputs=outputs, request_id=request_id))

        return ModelCalls(self.name, endpoints_in(self.config), ask)

    def _wired(self, request: Request) -> Iterator[Outputs]:
        """Yield the responses in the form in which a server reads them. Raises `ModelError`."""
        with closing(self.stream(request)) as responses:
            for response in responses:
                outputs = response.check().outputs
                yield Outputs({name: WireTensor.of(array) for name, array in outputs.items()})  # type: ignore[misc]

    def _only(self, responses: list[Response]) -> Response:
        if len(responses) != 1:
            raise NotOneResponse(
                f"model '{self.name}' sent {len(responses)} responses to one request; `responses` returns them all"
            )
        return responses[0]

    @abstractmethod
    def _batch(self, requests: Sequence[Request]) -> list[list[Response]]:
        """Send a batch, and return all responses to each request."""

    @abstractmethod
    def _send(self, request: Request) -> Generator[Response, None, bool]:
        """Send a request now. Yields its responses as they come; returns True if the end came apart from the last
        one.
        """

    @abstractmethod
    def _tell_cancelled(self, request: Request) -> None:
        """Set the flag that lets the model stop. Its responses go on."""

    @abstractmethod
    def why_not_ready(self) -> str | None:
        """Ask the model's `is_ready`, if it has one. Return None if the model is ready, else the reason."""

    def sleep(self) -> None:
        """Call the model's `sleep`, as a runtime does that needs its memory. The next request wakes the model, as
        there.

        Does nothing if it sleeps already. Raises what `sleep` raises, in a stub as a `MoonpoolError`; `InvalidRequest`
        if the model has not both `sleep` and `wake`, or has something to do.
        """
        raise InvalidRequest(f"model '{self.name}' cannot sleep: it has not both `sleep` and `wake`")

    def wake(self) -> None:  # noqa: B027 - most models never sleep
        """Call the model's `wake`, if it sleeps. Raises what `wake` raises, in a stub as a `MoonpoolError`; there it
        starts anew then.
        """

    @abstractmethod
    def close(self) -> None:
        """Finalize the model. Raises what its `finalize` raises; the second time nothing happens."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} '{self.name}'>"


def _as_request(request: Request | Mapping[str, Any] | None, inputs: Mapping[str, Any]) -> Request:
    if request is None:
        return Request(inputs)
    if inputs:
        raise TypeError("give either a request or inputs by name, not both")
    return request if isinstance(request, Request) else Request(request)
