"""Is what `execute` returned an answer to the requests it was given?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.stub.errors import InvalidReturn
from moonpool.stub.response import InferenceResponse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.stub.request import InferenceRequest

RELEASE_RESCHEDULE = 2


def validate_execute_return(
    returned: object,
    requests: Sequence[InferenceRequest],
    instance_name: str,
    *,
    decoupled: bool,
    reschedules: bool,
) -> None:
    """Raises InvalidReturn, in Triton's words, unless `returned` is a valid answer to `requests`.

    None, for all requests or for one of them, is valid: it says that the answer comes otherwise.
    """
    if decoupled:
        if returned is not None:
            raise InvalidReturn(
                f"Python model '{instance_name}' is using the decoupled mode and the execute "
                "function must return None."
            )
    elif returned is not None:
        _validate_list(returned, requests)
    if not reschedules and any(r._release_flags == RELEASE_RESCHEDULE for r in requests):
        raise InvalidReturn(
            "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is "
            "not configured to handle such a flag."
        )


def _validate_list(returned: object, requests: Sequence[InferenceRequest]) -> None:
    if not isinstance(returned, list):
        raise InvalidReturn(
            f"Expected a list in the execute return, found type '{type(returned)}'."
        )
    if len(returned) != len(requests):
        raise InvalidReturn(
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            f"objects. InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) "
            f"size is:{len(returned)}\n"
        )
    for response, request in zip(returned, requests):
        _validate_entry(response, request)


def _validate_entry(response: object, request: InferenceRequest) -> None:
    rescheduled = request._release_flags == RELEASE_RESCHEDULE
    if response is None:
        return
    if rescheduled:
        raise InvalidReturn(
            "Expected a None object in the execute function return list for reschduled request, "
            f"found type '{type(response)}'."
        )
    if not isinstance(response, InferenceResponse):
        raise InvalidReturn(
            "Expected an 'InferenceResponse' object in the execute function return list, found "
            f"type '{type(response)}'."
        )
    reply = request._reply
    if reply is not None and (reply.count or reply.is_closed):
        raise InvalidReturn(
            "Unable to send response. Non-decoupled model cannot send more than one response."
        )
