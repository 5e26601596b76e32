"""A model that is loaded for a test: one interface, whether it runs in this process or in a stub."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from moonpool.ipc.errors import MoonpoolError
from moonpool.testing.request import Request

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from moonpool.runtime.config import ModelConfig
    from moonpool.testing.response import Response


class NotOneResponse(MoonpoolError):
    """`infer` is for models that answer with one response; `responses` has them all."""


class LoadedModel(ABC):
    """Use it as a context manager, or call `close`: the model's `finalize` runs then.

    A request is a `Request`, or inputs by name: `model.infer(X=[[1, 2]])`, `model.infer({"X": array})`.
    What does not fit the configuration raises `InvalidRequest`, as the runtime would.
    """

    def __init__(self, config: ModelConfig, version: int) -> None:
        # As the model has completed it.
        self.config = config
        self.version = version

    @property
    def name(self) -> str:
        return self.config.name

    def infer(
        self, request: Request | Mapping[str, Any] | None = None, /, **inputs: Any
    ) -> Response:
        """The response to a request. Raises `ModelError` where it is an error, and `NotOneResponse`."""
        return self._only(self.responses(request, **inputs)).check()

    def responses(
        self, request: Request | Mapping[str, Any] | None = None, /, **inputs: Any
    ) -> list[Response]:
        """All responses to a request, in the order in which they were sent; errors are among them."""
        return self._batch([_as_request(request, inputs)])[0]

    def stream(
        self, request: Request | Mapping[str, Any] | None = None, /, **inputs: Any
    ) -> Generator[Response, None, bool]:
        """As `responses`, each when it is there. The first `next` sends the request, closing the iterator cancels it."""
        return self._stream(_as_request(request, inputs))

    def _stream(self, request: Request) -> Generator[Response, None, bool]:
        return (yield from self._send(request))

    def infer_batch(self, requests: Sequence[Request | Mapping[str, Any]]) -> list[Response]:
        """One response to each request of a batch; errors are among them. Raises `NotOneResponse`."""
        return [self._only(responses) for responses in self.responses_batch(requests)]

    def responses_batch(
        self, requests: Sequence[Request | Mapping[str, Any]]
    ) -> list[list[Response]]:
        """All responses to each request of a batch."""
        return self._batch([_as_request(request, {}) for request in requests])

    def _only(self, responses: list[Response]) -> Response:
        if len(responses) != 1:
            raise NotOneResponse(
                f"model '{self.name}' sent {len(responses)} responses to one request; "
                "`responses` returns them all"
            )
        return responses[0]

    @abstractmethod
    def _batch(self, requests: Sequence[Request]) -> list[list[Response]]:
        """All responses to each request of a batch."""

    @abstractmethod
    def _send(self, request: Request) -> Generator[Response, None, bool]:
        """Send a request now. Yields its responses as they come; returns True if the end came apart from the last one."""

    @abstractmethod
    def _tell_cancelled(self, request: Request) -> None:
        """Set the flag that lets the model stop. Its responses go on."""

    @abstractmethod
    def why_not_ready(self) -> str | None:
        """Asks the model's `is_ready`, if it has one: None where it is ready, else the reason."""

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
