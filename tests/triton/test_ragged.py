"""Requests of different shapes in one batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.triton.answers import Answer
from tests.triton.both import Both

pytestmark = [
    pytest.mark.triton,
    pytest.mark.promise(
        "Fidelity",
        "Requests share a batch if they differ in the shapes of inputs with `allow_ragged_batch`, and in no other "
        "shape. A Python model gets no `batch_input`, as in Triton.",
    ),
]


def x(*shape: int) -> dict[str, Any]:
    return {"X": np.arange(np.prod(shape), dtype=np.int32).reshape(shape)}


def s(count: int) -> dict[str, Any]:
    return {"S": np.array([[b"text" * each for each in range(count)]], object)}


def fixed(size: int) -> dict[str, Any]:
    return {"FIXED": np.zeros((1, size), np.int32)}


TOGETHER = {
    "the same shape": [x(1, 3)] * 4,
    "other shapes": [x(1, 1), x(1, 2), x(1, 3), x(1, 4)],
    "another number of rows": [x(1, 5), x(3, 2)],
    "an empty one": [x(1, 0), x(1, 2), x(1, 1), x(1, 3)],
    "strings": [x(1, each) | s(each) for each in range(1, 5)],
    "another input of one shape": [x(1, each) | fixed(2) for each in range(1, 5)],
}


@pytest.mark.parametrize("name", TOGETHER)
def test_requests_of_other_shapes_share_a_batch(both: Both, name: str) -> None:
    requests = TOGETHER[name]

    # Each request was told the shapes of all.
    answer = both.together("ragged", requests)[0]
    assert isinstance(answer, Answer)
    assert answer.outputs["SHAPES"].shape == (len(requests[0]["X"]), 2 * len(requests))
