"""A request on its way through the runtime, and the response to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from numpy.typing import NDArray

    from moonpool.runtime.allocator import ResponseAllocator
    from moonpool.runtime.waiter import Waiter

Parameter = bool | int | float | str


class Placement(NamedTuple):
    """One input as it is going to be placed; `number` is its index in the configuration."""

    number: int
    datatype: int
    shape: list[int]
    # Typed array; for BYTES and raw BF16 the bytes of the wire as uint8.
    data: NDArray[Any]
    size_bytes: int


class Details(NamedTuple):
    """What most requests leave at its default; in the order of the wire."""

    request_id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    priority: int = 0
    parameters: Mapping[str, Parameter] | None = None
    outputs: list[int] | None = None


NO_DETAILS = Details()


class Response:
    """What the model answered.

    `outputs` maps names to arrays, which are views on shared memory and give it back when they are
    collected; copy what is to be kept for long. BYTES outputs are object arrays of `bytes`.
    """

    __slots__ = ("outputs", "parameters", "request_id")

    def __init__(
        self,
        outputs: dict[str, NDArray[Any]],
        parameters: Mapping[str, Parameter] | None = None,
        request_id: str = "",
    ) -> None:
        self.outputs = outputs
        self.parameters = parameters or {}
        self.request_id = request_id

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in self.outputs.items())
        return f"<Response {shown}>"


Outcome = Response | BaseException


class InferenceRequest:
    """One request. The scheduler's queue, the backend and the caller's waiter share it."""

    __slots__ = (
        "allocator",
        "attempts",
        "batch_size",
        "details",
        "inputs",
        "left",
        "priority",
        "queued_ns",
        "signature",
        "started_ns",
        "timeout_us",
        "userp",
        "waiter",
    )

    def __init__(
        self,
        inputs: list[Placement],
        batch_size: int,
        signature: Hashable,
        details: Details = NO_DETAILS,
    ) -> None:
        self.inputs = inputs
        self.batch_size = batch_size
        self.signature = signature
        self.details = details
        self.priority = details.priority
        self.timeout_us = details.timeout_us
        self.allocator: ResponseAllocator | None = None
        self.userp: object = None
        self.waiter: Waiter
        self.queued_ns = 0
        self.attempts = 0
        # The caller went away: nobody wants the outcome.
        self.left = False
