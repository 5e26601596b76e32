"""What goes wrong before a model takes requests, and what `finalize` leaves."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from tests.triton.answers import Failure
from tests.triton.both import Both
from tests.triton.broken import BROKEN

pytestmark = pytest.mark.triton


def in_short(failure: Failure) -> tuple[str, str, list[str]]:
    """The code, the first paragraph, and the frames that are the model's own."""
    text, _, rest = failure.text.partition("\n\n")
    return failure.code, text, re.findall(r"/repository/.*\(\d+\): .*", rest)


@pytest.mark.parametrize("model", BROKEN)
def test_a_model_that_cannot_be_loaded_says_the_same(both: Both, model: str) -> None:
    theirs, ours = both.loads[model]

    assert ours is not None
    assert theirs is not None
    assert in_short(ours) == in_short(theirs)


def test_a_model_without_a_configuration_completes_the_same(both: Both) -> None:
    inputs = {"Z": np.zeros((1, 1, 2), np.int32)}
    configs: list[Any] = []
    for side in (both.triton, both.moonpool):
        data: Any = side.infer("completes", inputs)
        configs.append(json.loads(data.outputs["CONFIG"].data[0]))
    theirs, ours = configs

    assert ours == theirs


def test_a_model_logs_in_every_stage(both: Both) -> None:
    both.forget_log()

    with both.hosted("finalizes"):
        both.infer("finalizes", {"X": np.zeros(1, np.float32)})

    before = [line.text for line in both.log_until("finalized")]
    assert before == ["made", "initialized", "executes"]


def test_a_model_whose_finalize_fails_is_unloaded(both: Both) -> None:
    with both.hosted("finalize_raises"):
        assert both.triton.ready("finalize_raises")
        assert both.moonpool.ready("finalize_raises")

    assert not both.triton.ready("finalize_raises")
    assert not both.moonpool.ready("finalize_raises")
