"""Tests which return values of `execute` are valid, and the errors for others."""

from __future__ import annotations

import pytest

from moonpool.ipc.messages import NO_DETAILS
from moonpool.stub.model import validate_execute_return
from moonpool.stub.pb_utils.errors import InvalidReturn
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse

pytestmark = pytest.mark.promise(
    "Models", "`triton_python_backend_utils` has the names, types, exceptions …"
)


def requests(count: int) -> list[InferenceRequest]:
    return [InferenceRequest.from_wire(NO_DETAILS, (), []) for _ in range(count)]


def validate(returned: object, given: list[InferenceRequest], *, decoupled: bool = False) -> None:
    validate_execute_return(returned, given, "M_0_0", decoupled=decoupled, reschedules=False)


def refusal(returned: object, given: list[InferenceRequest], *, decoupled: bool = False) -> str:
    with pytest.raises(InvalidReturn) as caught:
        validate(returned, given, decoupled=decoupled)
    return str(caught.value)


def test_a_list_of_as_many_responses_is_valid() -> None:
    validate([InferenceResponse(), InferenceResponse()], requests(2))


def test_none_is_valid_for_all_and_for_one() -> None:
    validate(None, requests(2))
    validate([None, InferenceResponse()], requests(2))


def test_a_subclass_of_a_response_is_a_response() -> None:
    class Mine(InferenceResponse):
        pass

    validate([Mine()], requests(1))


def test_a_return_value_that_is_not_a_list_is_refused() -> None:
    assert refusal((), requests(0)) == (
        "Expected a list in the execute return, found type '<class 'tuple'>'."
    )


def test_another_length_is_refused() -> None:
    assert refusal([InferenceResponse()], requests(2)) == (
        "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
        "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:1\n"
    )


def test_an_entry_of_another_type_is_refused() -> None:
    assert refusal([InferenceResponse(), "text"], requests(2)) == (
        "Expected an 'InferenceResponse' object in the execute function return list, "
        "found type '<class 'str'>'."
    )


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


def test_a_decoupled_model_returns_nothing() -> None:
    validate(None, requests(1), decoupled=True)

    assert refusal([InferenceResponse()], requests(1), decoupled=True) == (
        "Python model 'M_0_0' is using the decoupled mode and the execute function must return "
        "None."
    )
