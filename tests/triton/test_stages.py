"""Errors before a model takes requests, and the effects of `finalize`, are the same on both sides."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from tests.triton.answers import Failure
from tests.triton.both import Both
from tests.triton.broken import BROKEN

pytestmark = [
    pytest.mark.triton,
    pytest.mark.promise(
        "Fidelity",
        "Loads fail for the same reasons as in a real Triton, and the completed configurations are the same.",
    ),
]


# moonpool appends this to Triton's text.
ADVICE = r"; install \w+ for \S+, under which the model runs, or name an environment that has it in EXECUTION_ENV_PATH$"


def in_short(failure: Failure) -> tuple[str, str, list[str]]:
    """The code, the first paragraph without moonpool's advice, and the frames that are the model's own."""
    text, _, rest = failure.text.partition("\n\n")
    text = re.sub(ADVICE, "", text)
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
