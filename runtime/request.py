"""A request on its way through the runtime, and the response to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from moonpool.ipc.bytes_tensor import encode_bytes
from moonpool.ipc.details import Details as Details
from moonpool.ipc.messages import ORDINARY_MEMORY
from moonpool.ipc.tensors import BF16, BYTES, NAMES, code_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from numpy.typing import NDArray

    from moonpool.ipc.memory import Lease
    from moonpool.runtime.allocator import ResponseAllocator
    from moonpool.runtime.backend import Model
    from moonpool.runtime.waiter import Waiter

Parameter = bool | int | float | str


class Tensor(NamedTuple):
    """One input as it is described to the stub; `number` is its place in the configuration."""

    number: int
    datatype: int
    shape: list[int]
    size_bytes: int


class Wire(NamedTuple):
    """A tensor as the bytes that it travels as; `datatype` is a code of `ipc.tensors`.

    `raw` is an array without gaps: of any dtype whose bytes are these.
    """

    datatype: int
    shape: tuple[int, ...]
    raw: NDArray[Any]

    @classmethod
    def of(cls, output: Wire | NDArray[Any]) -> Wire:
        """The same for an array; strings are encoded, the rest is not copied."""
        if isinstance(output, Wire):
            return output
        datatype = code_of(output.dtype)
        raw = output
        if datatype == BYTES:
            raw = np.frombuffer(encode_bytes(raw), np.uint8)
        elif datatype == BF16:
            raw = raw.view(np.uint16)
        return cls(datatype, output.shape, raw)

    @property
    def base(self) -> object:
        """As of an array."""
        return self.raw.base

    @property
    def dtype(self) -> str:
        """The name of the datatype."""
        return NAMES[self.datatype]


class Placement(NamedTuple):
    """One input as a backend finds it; `number` is its place in the configuration."""

    number: int
    datatype: int
    # Typed array; for BYTES the bytes of the wire as uint8.
    data: NDArray[Any]


class Shapes:
    """What all requests have in common whose inputs have the same shapes.

    There is one object for all such requests, which whoever works something out from them can
    remember it by; only BYTES, whose size differs from request to request, make a new one each time.
    """

    __slots__ = ("batch_size", "is_shared", "signature", "tensors")

    def __init__(
        self, tensors: list[Tensor], batch_size: int, signature: Hashable, *, is_shared: bool
    ) -> None:
        self.tensors = tensors
        self.batch_size = batch_size
        self.signature = signature
        self.is_shared = is_shared


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


class Deferral:
    """What a backend may answer with in place of an outcome."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


LATER = Deferral("LATER")
"""The responses come through `ModelInstance.respond`, before this or after it."""
AGAIN = Deferral("AGAIN")
"""The request is to be scheduled once more."""

Answer = Outcome | Deferral


class RequestTrace(Protocol):
    """Who is told what happens to a request on its way. Times are of `time.monotonic_ns`; from any thread."""

    context: str
    """What its model may hand on with requests of its own."""

    def executed(
        self,
        answer: Answer,
        queued_ns: int,
        started_ns: int,
        sent_ns: int,
        answered_ns: int,
        ended_ns: int,
    ) -> None:
        """It was in a batch that is answered now."""

    def responded(self, answer: object) -> None:
        """Here is a response apart from the answer to its batch."""

    def child(self, model: Model, request_id: str) -> RequestTrace:
        """Of a request that its model makes for it."""

    def follow(self, request: InferenceRequest) -> None:
        """This is the request."""

    def end(self) -> None:
        """Its caller has all that he will get."""


_NOWHERE: Mapping[int, Lease] = {}


class InferenceRequest:
    """One request. The scheduler's queue, the backend and the caller's waiter share it."""

    __slots__ = (
        "allocator",
        "arrays",
        "attempts",
        "batch_size",
        "details",
        "fills_place",
        "has_views",
        "is_cancelled",
        "left",
        "priority",
        "queued_ns",
        "responded_ns",
        "response",
        "responses",
        "shapes",
        "signature",
        "takes_devices",
        "targets",
        "timeout_us",
        "trace",
        "userp",
        "waiter",
        "wants_wire",
    )

    def __init__(
        self,
        arrays: list[NDArray[Any]],
        shapes: Shapes,
        details: Details | None = None,
        *,
        has_views: bool = True,
    ) -> None:
        # In the order of `shapes.tensors`: typed arrays, and for BYTES the bytes of the wire.
        self.arrays = arrays
        self.shapes = shapes
        self.batch_size = shapes.batch_size
        self.signature = shapes.signature
        self.details = details
        self.priority = self.timeout_us = 0
        if details is not None:
            self.priority = details.priority
            self.timeout_us = details.timeout_us
        # Whether any array is a view of something, which may be shared memory.
        self.has_views = has_views
        # Where the stub is to write outputs to, by their numbers; only looked at where `has_views`.
        self.targets: Mapping[int, Lease] = _NOWHERE
        self.allocator: ResponseAllocator | None = None
        self.userp: object = None
        # Whether outputs are wanted as `Wire`, by those who only pass them on.
        self.wants_wire = False
        # And whether they may be arrays on devices then.
        self.takes_devices = False
        # Who watches it; for most nobody does.
        self.trace: RequestTrace | None = None
        self.waiter: Waiter
        self.queued_ns = 0
        self.attempts = 0
        # The caller went away: nobody wants the outcome.
        self.left = False
        # The model may stop, but what it sends is still wanted.
        self.is_cancelled = False
        # It stands for an empty place in the batch of a sequence batcher: nobody sent it.
        self.fills_place = False
        # How many responses came so far apart from the outcome, and the only one of a model that gives one.
        self.responses = 0
        # When the last of them came, or the request was given to an instance, where its model is decoupled.
        self.responded_ns = 0
        self.response: Outcome | None = None

    @property
    def request_id(self) -> str:
        """The name that its caller gave it, "" where it has none."""
        return "" if self.details is None else self.details.request_id

    @property
    def is_for_host(self) -> bool:
        """Whether outputs are wanted in ordinary memory, wherever the model leaves them."""
        if self.details is not None and self.details.memory == ORDINARY_MEMORY:
            return True
        return self.allocator is not None or (self.wants_wire and not self.takes_devices)

    @property
    def correlation_id(self) -> int | str:
        """Which sequence it belongs to; 0 and "" are none."""
        return 0 if self.details is None else self.details.correlation_id

    @property
    def flags(self) -> int:
        """1 starts a sequence, 2 ends one."""
        return 0 if self.details is None else self.details.flags

    def identify(self, correlation_id: int | str, flags: int) -> None:
        """From now on these are its correlation id and its flags."""
        details = self.details or Details()
        self.details = details._replace(correlation_id=correlation_id, flags=flags)

    @property
    def inputs(self) -> list[Placement]:
        """The inputs with what describes them, for backends."""
        return [
            Placement(tensor.number, tensor.datatype, array)
            for tensor, array in zip(self.shapes.tensors, self.arrays, strict=True)
        ]
