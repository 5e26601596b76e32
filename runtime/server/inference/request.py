"""Requests of clients for one model version: planned, checked, and refused with Triton's error texts.

A protocol reads what a client sent into a `RequestPlan`, which holds everything but the bytes of tensors.

Most requests have all their tensors in the message or in memory that the client shares, exactly as the model wants
them. Compiled code makes such a request in one step (`RequestPlan.usual`). All others go through `make`, which says
what is wrong with them, if anything is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.memory import ALIGNMENT
from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.request import Details, InferenceRequest
from moonpool.runtime.model.signature import Signature
from moonpool.runtime.schedule.scheduler import Scheduler
from moonpool.runtime.server.inference.tensors import Input, WrongSize
from moonpool.runtime.server.service import Service
from moonpool.runtime.stubs.regions import CallerMemory

_UINT8 = np.dtype(np.uint8)
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
        super().__init__(f"string correlation ID cannot be longer than {MAX_SEQUENCE_ID_BYTES} characters")


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
    """Everything of a request but the bytes of its tensors."""

    __slots__ = ("details", "has_classes", "has_shared", "inputs", "outputs", "places")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Set all attributes."""
        self.details: Details | None = None
        self.inputs: list[InputPlan] = []
        # If any of them lies in memory that the client shares.
        self.has_shared = False
        # None for all outputs of the model.
        self.outputs: list[str] | None = None
        # Outputs that go into memory that the client shares.
        self.places: dict[str, RegionPlace] = {}
        # If an output is wanted as its best classes, for which all of it is sorted.
        self.has_classes = False

    def usual(
        self,
        service: Service,
        hosted: Hosted,
        data: Any,
        offset: int,
        sent: list[tuple[int, int]] | None,
        details: Details | None,
        *,
        has_views: bool,
    ) -> InferenceRequest | None:
        """Return a request whose tensors are in the message or lent by the client, and fit the model; None for any
        other.

        `sent` has the places of the tensors in `data`, from `offset` on; None if they fill it one behind another.
        `has_views` says that stubs see `data`. Raises `InvalidRequest`, `SharedMemoryError`.
        """
        lend = service.lender(hosted.model) if self.has_shared else None
        try:
            request = hosted.signature.request_in(
                self.inputs, data, offset, sent, self.outputs, details, has_views=has_views, lend=lend
            )
        except InvalidRequest as error:
            raise refused(error, hosted, "" if details is None else details.request_id) from None
        if request is not None and self.places:
            service.lend_targets(hosted.model, request, self.places)
        return request

    def make(
        self, service: Service, hosted: Hosted, inputs: Mapping[str, Input], details: Details | None
    ) -> InferenceRequest:
        """Check a request of this plan, and have its outputs written where the client wants them.

        Raises `InvalidRequest`, `SharedMemoryError`.
        """
        request = make_request(hosted, inputs, self.outputs, details)
        if self.places:
            service.lend_targets(hosted.model, request, self.places)
        return request


def room_for_body(memory: CallerMemory | None, size_bytes: int, tensors_at: int) -> NDArray[np.uint8] | None:
    """Return room for a body in the memory of the model's callers, so that nobody copies its tensors; None for any
    memory.

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
    hosted: Hosted, inputs: Mapping[str, Input], outputs: Sequence[str] | None = None, details: Details | None = None
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
        raise ModelError(f"{way} doesn't support models with decoupled transaction policy", "UNSUPPORTED")
