"""A request as a test makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moonpool.runtime.request import Parameter


class Execution(Protocol):
    """A request that was sent, and is not done yet."""

    def cancel(self) -> None:
        """Its client goes away."""


class Request:
    """Inputs by name, and what else a client may say. It can be sent any number of times.

    `inputs` are arrays of the datatypes and shapes of the model's configuration, or lists and numbers that become such.
    `outputs` names those that are wanted, all by default. `timeout_us` is what the model reads as `timeout()`; it may
    shorten the timeout of the model's queue policy. `trace_context` is what the model reads as `trace().get_context()`.
    `cancel_after` lets the client go away after that many responses, 0 before the first.
    """

    def __init__(
        self,
        inputs: Mapping[str, Any],
        *,
        outputs: Sequence[str] | None = None,
        request_id: str = "",
        correlation_id: int | str = 0,
        flags: int = 0,
        priority: int = 0,
        timeout_us: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
        trace_context: str | None = None,
        cancel_after: int | None = None,
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.request_id = request_id
        self.correlation_id = correlation_id
        self.flags = flags
        self.priority = priority
        self.timeout_us = timeout_us
        self.parameters = parameters
        self.trace_context = trace_context
        self.cancel_after = cancel_after
        # Whoever executes it now, and can be told.
        self.executions: set[Execution] = set()

    def cancel(self) -> None:
        """The client goes away: for a model that has the request now, `is_cancelled()` is True. Any thread."""
        for execution in list(self.executions):
            execution.cancel()

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r}, inputs {list(self.inputs)}>"


def request(inputs: Mapping[str, Any] | None = None, /, **details: Any) -> Request:
    """A request with these inputs; `details` are those of `Request`."""
    return Request({} if inputs is None else inputs, **details)
