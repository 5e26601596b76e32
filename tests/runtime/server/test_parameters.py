"""The parameters of a request, and those that the model sees."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.server.http.infer_request import request_details
from moonpool.runtime.server.inference.request import LongSequenceId
from moonpool.runtime.server.inference.tensors import BadJson

pytestmark = pytest.mark.promise(
    "Tensors and requests of clients",
    "Parameters that the protocols know become the request's id, sequence, priority and time; "
    "the others reach the model.",
)


def test_a_request_that_says_nothing_has_no_details() -> None:
    assert request_details("", {}) is None


def test_parameters_of_the_protocols_do_not_reach_the_model() -> None:
    details = request_details(
        "one",
        {
            "sequence_id": 42,
            "sequence_start": True,
            "sequence_end": True,
            "priority": 2,
            "timeout": 1000,
            "binary_data_output": True,
            "own": "text",
            "number": 1.5,
        },
        "trace",
    )

    assert details is not None
    assert (details.request_id, details.correlation_id, details.flags) == ("one", 42, 3)
    assert (details.priority, details.timeout_us, details.trace) == (2, 1000, "trace")
    assert details.parameters == {"own": "text", "number": 1.5}


def test_a_sequence_may_have_a_text_for_its_id() -> None:
    details = request_details("", {"sequence_id": "s", "sequence_end": True})

    assert details is not None
    assert (details.correlation_id, details.flags) == ("s", 2)


@pytest.mark.parametrize(
    "parameters",
    [
        {"sequence_id": 1.5},
        {"sequence_id": True},
        {"sequence_id": -1},
        {"sequence_start": 1},
        {"sequence_end": "true"},
        {"priority": "1"},
        {"priority": -1},
        {"timeout": 2**64},
        {"timeout": 1.0},
        {"own": []},
        {"own": None},
        {"own": {"a": 1}},
        {"triton_own": 1},
        {"sequence_id": "x" * 129},
    ],
)
def test_an_impossible_parameter_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises((InvalidRequest, BadJson, LongSequenceId)):
        request_details("", parameters)
