"""A model that is loaded for a test, with one interface for models in this process and in a stub."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Self

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.model.config.model import ModelConfig
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
