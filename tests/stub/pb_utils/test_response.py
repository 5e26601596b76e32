"""Tests responses: outputs or an error, and parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moonpool.stub.pb_utils.errors import TritonError, TritonModelException
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor

pytestmark = pytest.mark.promise(
    "Models", "`triton_python_backend_utils` has the names, types, exceptions …"
)

TENSOR = Tensor("Y", np.zeros(1))


def test_a_response_carries_tensors() -> None:
    given = [TENSOR]
    response = InferenceResponse(output_tensors=given, parameters={"a": True})
    given.clear()

    assert response.output_tensors() == [TENSOR]
    assert not response.has_error()
    assert response.error() is None
    assert response.parameters() == '{"a": true}'


def test_a_response_may_be_empty() -> None:
    assert InferenceResponse().output_tensors() == []
    assert InferenceResponse([]).parameters() == "{}"


def test_a_response_carries_an_error() -> None:
    error = TritonError("no", TritonError.CANCELLED)
    response = InferenceResponse(error=error)

    assert response.has_error()
    assert response.error() is error


@pytest.mark.parametrize(
    "arguments",
    [
        {"output_tensors": None},
        {"output_tensors": TENSOR},
        {"output_tensors": [np.zeros(1)]},
        {"error": "no"},
        {"output_tensors": [], "error": "no"},
    ],
    ids=str,
)
def test_wrong_types_are_type_errors(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        InferenceResponse(**arguments)


def test_an_empty_output_is_an_error_of_tritons() -> None:
    outputs: Any = [TENSOR, None]
    with pytest.raises(
        TritonModelException, match=r"^Output tensor for inference response should not be empty\.$"
    ):
        InferenceResponse(outputs)


@pytest.mark.promise("HTTP", "A parameter of a request or …")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_parameters_are_numbers_that_json_has(value: float) -> None:
    with pytest.raises(TritonModelException, match=r"to be finite, found 'a': -?(nan|inf)$"):
        InferenceResponse([], parameters={"a": value})


def test_parameters_are_checked() -> None:
    parameters: Any = ["a"]
    with pytest.raises(TritonModelException, match=", got <class 'list'>"):
        InferenceResponse([], parameters=parameters)
