"""Requests of clients for one model version: planned, checked, and refused with Triton's error texts.

A protocol reads what a client sent into a `RequestPlan`, which holds everything but the bytes of tensors. Clients send the same
JSON, or the same message, again and again, so the readers remember plans by those bytes. The first request of a plan is checked
against the model's signature. If nothing but bytes of tensors can differ between requests of the plan, the plan keeps a
`PreparedRequest`, which makes the next ones without any check but that of sizes.

Theory of operation. A plan may serve requests on several threads at once, and nothing holds a lock. Readers never change a plan
after they made it, except for `prepared`, which one assignment replaces as a whole: a thread sees the old one or the new one, and
both are right as long as `signature` is the model's. After a reload the model has another signature, so the next request of the
plan is checked again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.memory import ALIGNMENT, Lease
from moonpool.ipc.port import compiled
from moonpool.ipc.tensors import DTYPES
from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.request import Details, InferenceRequest
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.schedule.scheduler import Scheduler
from moonpool.runtime.server.inference.tensors import Input, WrongSize
from moonpool.runtime.server.service import Service, numbered
from moonpool.runtime.stubs.regions import CallerMemory

_UINT8 = np.dtype(np.uint8)
_NO_DETAILS = Details()
# Bodies between these sizes are received into memory that the model's stubs see.
_LONG_BODY_BYTES, _HUGE_BODY_BYTES = 64 << 10, 64 << 20
START, END = 1, 2
"""The flags of a request that begins or ends a sequence."""
MAX_SEQUENCE_ID_BYTES = 128
# Triton finds these before it has a request whose id it could name.
_EARLY = ("unexpected inference input", "unexpected inference output")


class Hosted(Protocol):
    """A model version that takes requests."""

    model: Model
    signature: Signature
    scheduler: Scheduler


class LongSequenceId(MoonpoolError):
    """The text that names a sequence is longer than Triton takes."""

    code = "UNSUPPORTED"

    def __init__(self) -> None:
        super().__init__(
            f"string correlation ID cannot be longer than {MAX_SEQUENCE_ID_BYTES} characters"
        )


class RegionPlace(NamedTuple):
    """The place of a tensor in memory that a client shares."""

    region: str
    offset: int
    size_bytes: int


class InputPlan(NamedTuple):
    """One input of a request, without the bytes that come with the message."""

    name: str
    code: int
    """The code of its datatype; 0 if there is no such datatype."""
    shape: Sequence[int]
    place: RegionPlace | None
    """None if the tensor comes with the message."""
    size_bytes: int = 0
    """The size that the message names for binary values, if its protocol names sizes there."""
    values: Input | None = None
    """The tensor, if its values stand in the plan itself."""


class RequestPlan:
    """Everything that requests with the same JSON, or the same message but for tensors and id, have in common."""

    __slots__ = (
        "details",
        "has_classes",
        "inputs",
        "is_repeatable",
        "outputs",
        "places",
        "prepared",
    )

    def __init__(self) -> None:
        self.details: Details | None = None
        self.inputs: list[InputPlan] = []
        # None for all outputs of the model.
        self.outputs: list[str] | None = None
        # Outputs that go into memory that the client shares.
        self.places: dict[str, RegionPlace] = {}
        # If an output is wanted as its best classes, for which all of it is sorted.
        self.has_classes = False
        # If nothing but bytes of tensors may differ between requests of this plan.
        self.is_repeatable = True
        self.prepared: PreparedRequest | None = None

    def repeated(
        self,
        service: Service,
        hosted: Hosted,
        data: Any,
        offset: int,
        sent: Sequence[tuple[int, int]] | None = None,
        request_id: str | None = None,
        *,
        has_views: bool,
    ) -> InferenceRequest | None:
        """Return a request that differs from a checked one only in the bytes of its tensors, and in its id; None for any other.

        `sent` has the places of the tensors in `data`, from `offset` on; None if they fill it one behind another. `request_id` is None
        if it is the same for all requests of the plan. `has_views` says that stubs see `data`. Raises `InvalidRequest`, `SharedMemoryError`.
        """
        prepared = self.prepared
        if prepared is None or prepared.signature is not hosted.signature:
            return None
        if sent is None:
            if len(data) - offset != prepared.size_bytes:
                return None
            sent = prepared.sent
        elif [size for _, size in sent] != prepared.sizes:
            return None
        details = prepared.details
        if request_id is not None and request_id != (details.request_id if details else ""):
            details = (details or _NO_DETAILS)._replace(request_id=request_id)
        return prepared.request(service, hosted.model, data, offset, sent, details, has_views)

    def make(
        self,
        service: Service,
        hosted: Hosted,
        inputs: Mapping[str, Input],
        details: Details | None,
        *,
        is_typical: bool,
    ) -> InferenceRequest:
        """Check a request of this plan, and have its outputs written where the client wants them.

        `is_typical` says that the next requests of the plan have the same `details`, but for the id. Raises `InvalidRequest` and
        `SharedMemoryError`.
        """
        request = make_request(hosted, inputs, self.outputs, details)
        if self.places:
            service.lend_targets(hosted.model, request, self.places)
        shapes = request.shapes
        if (
            is_typical
            and self.is_repeatable
            and shapes.is_shared
            and all(tensor.size_bytes for tensor in shapes.tensors)
        ):
            self.prepared = PreparedRequest(self, hosted, request)
        return request


class PreparedRequest:
    """Makes requests that are like one that was checked before, except for the bytes of their tensors."""

    __slots__ = (
        "_has_places",
        "_is_plain",
        "_shapes",
        "_targets",
        "_tensors",
        "details",
        "sent",
        "signature",
        "size_bytes",
        "sizes",
    )

    def __init__(self, plan: RequestPlan, hosted: Hosted, request: InferenceRequest) -> None:
        # Tensors either lie in the client's memory or come with the message, in the order of the plan.
        places = {each.name: each.place for each in plan.inputs}
        sent = [each.name for each in plan.inputs if each.place is None]
        numbers = {name: number for number, name in enumerate(sent)}
        names = [tensor.name for tensor in hosted.model.config.inputs]
        # What was checked holds as long as the model has this very signature.
        self.signature = hosted.signature
        self._shapes, self._targets = request.shapes, numbered(hosted.model, plan.places)
        # In the model's order.
        self._tensors = [
            (tuple(tensor.shape), DTYPES[tensor.datatype], numbers.get(name, 0), places[name])
            for tensor in request.shapes.tensors
            for name in [names[tensor.number]]
        ]
        self.details = request.details
        """The details of the first request, which say which outputs are wanted."""
        self._has_places = len(sent) < len(plan.inputs)
        self._is_plain = not self._has_places and not plan.places
        sizes = {names[each.number]: each.size_bytes for each in request.shapes.tensors}
        self.sizes = [sizes[name] for name in sent]
        """Bytes of each tensor that comes with the message."""
        self.size_bytes = sum(self.sizes)
        self.sent = [(sum(self.sizes[:number]), size) for number, size in enumerate(self.sizes)]
        """These tensors as (offset, size in bytes) if they lie one behind another."""

    def request(
        self,
        service: Service,
        model: Model,
        data: Any,
        offset: int,
        sent: Sequence[tuple[int, int]],
        details: Details | None,
        has_views: bool,
    ) -> InferenceRequest | None:
        """Return the request whose tensors lie in `data` from `offset` on, or in memory that clients lend.

        `sent` has (offset, size in bytes) of each tensor in `data`. The caller has compared the sizes with `sizes`. `details` are those of the first request, with the id of this one. `has_views` says that stubs see the
        memory of `data`. Returns None if a client's memory is not lent. Raises `InvalidRequest`, `SharedMemoryError`.
        """
        if compiled is not None and details is None and self._is_plain and type(sent) is list:
            usual: InferenceRequest = compiled.prepared(
                InferenceRequest, self._tensors, self._shapes, data, offset, sent, has_views
            )
            return usual
        arrays: list[NDArray[Any]] = []
        leases: list[Lease] = []
        may_lend = not self._is_plain and service.may_lend(model)
        for shape, dtype, number, place in self._tensors:
            if place is None:
                arrays.append(np.ndarray(shape, dtype, data, offset + sent[number][0]))
                continue
            lease = service.shared_memory.lease(*place) if may_lend else None
            if lease is None:
                return None
            leases.append(lease)
            arrays.append(np.ndarray(shape, dtype, lease))
        request = InferenceRequest(
            arrays, self._shapes, details, has_views=has_views or self._has_places
        )
        request.wants_wire = True
        if may_lend:
            service.aim(request, self._targets, leases)
        return request


def room_for_body(
    memory: CallerMemory | None, size_bytes: int, tensors_at: int
) -> NDArray[np.uint8] | None:
    """Return room for a body in the memory of the model's callers, so that nobody copies its tensors; None for any memory.

    The first tensor, which begins at `tensors_at`, is aligned.
    """
    if memory is None or not _LONG_BODY_BYTES < size_bytes < _HUGE_BODY_BYTES:
        return None
    gap = -tensors_at % ALIGNMENT
    try:
        room = memory.empty((gap + size_bytes,), _UINT8, gap + size_bytes)
    except MoonpoolError:
        # There is no such memory left. The body is copied, then.
        return None
    return room[gap:]  # type: ignore[return-value]


def make_request(
    hosted: Hosted,
    inputs: Mapping[str, Input],
    outputs: Sequence[str] | None = None,
    details: Details | None = None,
) -> InferenceRequest:
    """Return a request whose outputs come as `WireTensor`. `outputs` names those that are wanted, all by default.

    Raises `InvalidRequest`.
    """
    try:
        request = hosted.signature.request(inputs, outputs, details)
    except InvalidRequest as error:
        raise refused(error, hosted, "" if details is None else details.request_id) from None
    request.wants_wire = True
    return request


def refused(error: InvalidRequest, hosted: Hosted, request_id: str) -> InvalidRequest:
    """Return the same error in Triton's form, with the id of the request."""
    if isinstance(error, WrongSize):
        text = error.for_model(hosted.model.name)
    else:
        text = str(error)
        if text.startswith(_EARLY):
            return error
    return InvalidRequest(f"[request id: {request_id or '<id_unknown>'}] {text}")


def check_has_one_response(hosted: Hosted, way: str) -> None:
    """Raise `ModelError` for a decoupled model, which cannot be asked in this way."""
    if hosted.model.config.decoupled:
        raise ModelError(
            f"{way} doesn't support models with decoupled transaction policy", "UNSUPPORTED"
        )
