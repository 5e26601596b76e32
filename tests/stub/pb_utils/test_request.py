"""Tests requests, those that models get and those that they make."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from moonpool.ipc.messages import Details
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor

pytestmark = pytest.mark.promise("Models", "`triton_python_backend_utils` has the names, types, exceptions …")


def request(**changes: Any) -> InferenceRequest:
    required: dict[str, Any] = {"inputs": [], "requested_output_names": [], "model_name": "m"}
    return InferenceRequest(**{**required, **changes})


def test_a_request_from_the_runtime_says_what_it_was_given() -> None:
    tensor = Tensor("X", np.zeros(1))
    details = Details("id", "seq", 3, 1_000, 2, {"a": 1})
    one = InferenceRequest.from_wire(details, ("Y", "Z"), [tensor])

    assert (one.request_id(), one.correlation_id(), one.flags()) == ("id", "seq", 3)
    assert one.timeout() == 1_000
    assert one.requested_output_names() == {"Y", "Z"}
    assert json.loads(one.parameters()) == {"a": 1}
    assert one.inputs() == [tensor]
    assert one.inputs() is not one.inputs()
    assert one.trace().get_context() is None
    assert not one.is_cancelled()


@pytest.mark.promise("HTTP", "A parameter of a request or …")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_parameters_are_numbers_that_json_has(value: float) -> None:
    for make in (request, InferenceResponse):
        with pytest.raises(TritonModelException, match=r"to be finite, found 'a': -?(nan|inf)$"):
            make(parameters={"a": value})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("flags", [0, 2**32 - 1], [-1, 2**32]),
        ("timeout", [0, 2**64 - 1], [-1, 2**64]),
        ("model_version", [-(2**63), 2**63 - 1], [-(2**63) - 1, 2**63]),
        ("correlation_id", [0, 2**64 - 1, "seq"], [-1, 2**64, "\ud800"]),
        ("request_id", ["", "\u6708", b"\xff"], ["\ud800"]),
    ],
)
def test_numbers_and_texts_are_those_that_can_be_sent(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        request(**{name: value})
    for value in bad:
        with pytest.raises(TypeError):
            request(**{name: value})
