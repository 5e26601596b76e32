"""Requests of clients for one model version: checked, and refused in Triton's words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.frontend.tensors import WrongSize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from moonpool.runtime.frontend.submission import Hosted
    from moonpool.runtime.frontend.tensors import Input
    from moonpool.runtime.request import Details, InferenceRequest

# What Triton finds before it has a request whose id it could tell.
_EARLY = ("unexpected inference input", "unexpected inference output")


def make_request(
    hosted: Hosted,
    inputs: Mapping[str, Input],
    outputs: Sequence[str] | None = None,
    details: Details | None = None,
) -> InferenceRequest:
    """A request whose outputs come as `Wire`. `outputs` names those that are wanted, all by default.

    Raises `InvalidRequest`.
    """
    try:
        request = hosted.signature.request(inputs, outputs, details)
    except InvalidRequest as error:
        raise refused(error, hosted, "" if details is None else details.request_id) from None
    request.wants_wire = True
    return request


def refused(error: InvalidRequest, hosted: Hosted, request_id: str) -> InvalidRequest:
    """The same error as Triton tells it, with the id of the request."""
    if isinstance(error, WrongSize):
        text = error.for_model(hosted.model.name)
    else:
        text = str(error)
        if text.startswith(_EARLY):
            return error
    return InvalidRequest(f"[request id: {request_id or '<id_unknown>'}] {text}")
