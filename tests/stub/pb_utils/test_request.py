"""Tests requests, those that models get and those that they make."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from moonpool.ipc.messages import NO_DETAILS, Details
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.tensor import MemoryType, PreferredMemory, Tensor

pytestmark = pytest.mark.promise(
    "Models", "`triton_python_backend_utils` has the names, types, exceptions …"
)


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


def test_parameters_are_a_json_text_also_where_there_are_none() -> None:
    assert InferenceRequest.from_wire(NO_DETAILS, (), []).parameters() == "{}"


def test_the_loop_can_mark_a_request_as_cancelled() -> None:
    one = InferenceRequest.from_wire(NO_DETAILS, (), [])
    one._cancelled = True

    assert one.is_cancelled()


def test_the_constructor_has_tritons_defaults() -> None:
    one = request(timeout=11_000_000_000)

    assert (one.request_id(), one.correlation_id(), one.flags()) == ("", 0, 0)
    assert one.timeout() == 11_000_000_000
    one.set_flags(2)
    assert one.flags() == 2


@pytest.mark.parametrize("missing", ["inputs", "requested_output_names", "model_name"])
def test_the_required_arguments_are_required(missing: str) -> None:
    given: dict[str, Any] = {"inputs": [], "requested_output_names": [], "model_name": "m"}
    del given[missing]

    with pytest.raises(TypeError, match=missing):
        InferenceRequest(**given)


@pytest.mark.parametrize(
    "name",
    [
        "request_id",
        "correlation_id",
        "inputs",
        "requested_output_names",
        "model_name",
        "model_version",
        "flags",
        "timeout",
        "preferred_memory",
        "trace",
    ],
)
def test_none_is_a_type_error_for_all_but_the_parameters(name: str) -> None:
    request(parameters=None)

    with pytest.raises(TypeError):
        request(**{name: None})


def test_other_wrong_types_are_type_errors() -> None:
    with pytest.raises(TypeError):
        request(requested_output_names=[None])
    with pytest.raises(TypeError):
        request(inputs=[np.zeros(1)])
    with pytest.raises(TypeError):
        request(flags="1")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"inputs": [None]},
            "Input tensor for request with id '' and model name 'm' should not be empty.",
        ),
        (
            {"requested_output_names": [""]},
            "Requested output name for request with id '' and model name 'm' should not be empty.",
        ),
        ({"correlation_id": 1.5}, "Correlation ID must be integer or string"),
        ({"parameters": []}, "Expect N8pybind114dictE, got <class 'list'>"),
        (
            {"parameters": {1: "a"}},
            "Expect parameters keys to have type str, found type <class 'int'>",
        ),
        (
            {"parameters": {"a": None}},
            "Expect parameters values to have type bool/int/str, found type <class 'NoneType'>",
        ),
        (
            {"parameters": {"a": float("nan")}},
            "Expect parameters values to be finite, found 'a': nan",
        ),
    ],
)
def test_wrong_values_are_refused_in_tritons_words(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TritonModelException) as caught:
        request(**changes)

    assert str(caught.value) == text


def test_a_wish_for_memory_is_taken() -> None:
    memory = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_GPU, 1)

    request(preferred_memory=memory)
    wrong: Any = 2
    with pytest.raises(TypeError):
        PreferredMemory(wrong)


def test_the_sender_of_a_request_of_a_model_s_making_sends_nothing() -> None:
    with pytest.raises(TritonModelException, match="no reference to the decoupled state"):
        request().get_response_sender().send(flags=1)


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
def test_numbers_and_texts_are_those_that_can_be_sent(
    name: str, good: list[Any], bad: list[Any]
) -> None:
    def make(value: Any) -> InferenceRequest:
        arguments: Any = {name: value}
        return InferenceRequest(inputs=[], requested_output_names=[], model_name="m", **arguments)

    for value in good:
        assert make(value) is not None
    for value in bad:
        with pytest.raises(TypeError):
            make(value)
