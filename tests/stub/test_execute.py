"""Tests which return values of `execute` are valid, and the errors for others."""

from __future__ import annotations

import pytest

from moonpool.ipc.messages import NO_DETAILS
from moonpool.stub.model import validate_execute_return
from moonpool.stub.pb_utils.errors import InvalidReturn
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse

pytestmark = pytest.mark.promise("Models", "`triton_python_backend_utils` has the names, types, exceptions …")


def requests(count: int) -> list[InferenceRequest]:
    return [InferenceRequest.from_wire(NO_DETAILS, (), []) for _ in range(count)]


def validate(returned: object, given: list[InferenceRequest], *, decoupled: bool = False) -> None:
    validate_execute_return(returned, given, "M_0_0", decoupled=decoupled, reschedules=False)


def refusal(returned: object, given: list[InferenceRequest], *, decoupled: bool = False) -> str:
    with pytest.raises(InvalidReturn) as caught:
        validate(returned, given, decoupled=decoupled)
    return str(caught.value)


def test_a_subclass_of_a_response_is_a_response() -> None:
    class Mine(InferenceResponse):
        pass

    validate([Mine()], requests(1))


def test_a_response_for_a_rescheduled_request_is_refused() -> None:
    given = requests(1)
    given[0].set_release_flags(2)

    assert refusal([InferenceResponse()], given) == (
        "Expected a None object in the execute function return list for reschduled request, "
        "found type '<class 'c_python_backend_utils.InferenceResponse'>'."
    )


def test_rescheduling_needs_a_model_that_is_configured_for_it() -> None:
    given = requests(1)
    given[0].set_release_flags(2)

    assert refusal([None], given).startswith(
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not"
    )


def test_a_released_request_is_answered_as_any_other() -> None:
    given = requests(1)
    given[0].set_release_flags(1)

    validate([InferenceResponse()], given)
