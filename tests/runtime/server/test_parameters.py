"""The parameters of a request, and those that the model sees."""

from __future__ import annotations

import pytest

from moonpool.runtime.server.http.infer_request import request_details

pytestmark = pytest.mark.promise(
    "Tensors and requests of clients",
    "Parameters that the protocols know become the request's id, sequence, priority and time; "
    "the others reach the model.",
)


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
    )

    assert details is not None
    assert (details.request_id, details.correlation_id, details.flags) == ("one", 42, 3)
    assert (details.priority, details.timeout_us) == (2, 1000)
    assert details.parameters == {"own": "text", "number": 1.5}
