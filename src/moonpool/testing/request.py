"""A request as a test makes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from moonpool.runtime.arguments import OF_REQUEST
from moonpool.runtime.model.request import Parameter


class RequestExecution(Protocol):
    """A request that was sent and has not ended."""

    def cancel(self) -> None:
        """Cancel it, as a client that goes away."""


class Request:
    """Inputs by name, and everything else that a client may send. A request can be sent any number of times.

    `inputs` are arrays of the datatypes and shapes of the model's configuration, or lists and numbers that become such
    arrays. `outputs` names the wanted outputs, all by default. The model reads `timeout_us` as `timeout()`; it may
    shorten the timeout of the model's queue policy. The model reads `trace_context` as `trace().get_context()`.
    `cancel_after` cancels the request after that many responses; 0 cancels it before the first.
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
        OF_REQUEST.whole("timeout_us", timeout_us, 0, 2**64 - 1)
        if cancel_after is not None:
            OF_REQUEST.whole("cancel_after", cancel_after, 0, also=", or None")
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
        # The executions that `cancel` reaches.
        self.executions: set[RequestExecution] = set()

    def cancel(self) -> None:
        """Cancel the request: a model that has it now reads `is_cancelled()` as True. Any thread may call it."""
        for execution in list(self.executions):
            execution.cancel()

    def __repr__(self) -> str:
        return f"<Request {self.request_id!r}, inputs {list(self.inputs)}>"


def request(inputs: Mapping[str, Any] | None = None, /, **details: Any) -> Request:
    """Make a request with these inputs; `details` are the keyword arguments of `Request`."""
    return Request({} if inputs is None else inputs, **details)
