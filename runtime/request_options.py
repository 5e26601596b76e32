"""What may be said of a request beside model and inputs, in one place for all ways of sending one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from moonpool.runtime.details import details_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moonpool.runtime.allocator import ResponseAllocator
    from moonpool.runtime.request import InferenceRequest, Parameter
    from moonpool.runtime.signature import Signature


class RequestOptions(TypedDict, total=False):
    """All of them have defaults."""

    outputs: Sequence[str] | None
    """The names of the outputs that are wanted; all by default."""
    request_id: str
    correlation_id: int | str
    """Of the sequence that the request is part of; 0 or empty for none."""
    flags: int
    """1 for the start of a sequence, 2 for its end, 3 for both."""
    priority: int
    """For the model's queue policy, as `queue_timeout_us`."""
    queue_timeout_us: int
    parameters: Mapping[str, Parameter] | None
    trace_context: str | None
    """What the model finds in `request.trace().get_context()`: the trace that the request is part of."""
    allocator: ResponseAllocator | None
    """Says where the outputs go; it gets `userp`."""
    userp: object
    outputs_in: str | None
    """`cpu` for ordinary memory, `gpu` or `gpu:1` for a GPU where the model can; where the model leaves them by default.
    On a GPU they are `DeviceArray`s."""


def make_request(
    signature: Signature,
    inputs: Mapping[str, Any],
    *,
    outputs: Sequence[str] | None = None,
    request_id: str = "",
    correlation_id: int | str = 0,
    flags: int = 0,
    priority: int = 0,
    queue_timeout_us: int = 0,
    parameters: Mapping[str, Parameter] | None = None,
    trace_context: str | None = None,
    allocator: ResponseAllocator | None = None,
    userp: object = None,
    outputs_in: str | None = None,
) -> InferenceRequest:
    """A request with the options of `RequestOptions`. Raises `InvalidRequest`."""
    details = details_of(
        request_id,
        correlation_id,
        flags,
        queue_timeout_us,
        priority,
        parameters,
        trace_context,
        outputs_in,
    )
    request = signature.request(inputs, outputs, details)
    if allocator is not None:
        request.allocator = allocator
        request.userp = userp
    return request
