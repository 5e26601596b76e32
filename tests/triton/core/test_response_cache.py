"""The response cache: which requests execute, and what the statistics and the metrics say."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tests.triton.answers import Answer
from tests.triton.core.conftest import Core

from moonpool import ConfigError

pytestmark = [
    pytest.mark.triton,
    pytest.mark.timeout(300),
    pytest.mark.promise(
        "Fidelity", "The response cache answers the same requests as in a real Triton, and counts them in the same way."
    ),
]

COUNTS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.number = 0

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            self.number += 1
            outputs = [pb_utils.Tensor("Y", x), pb_utils.Tensor("N", np.full((len(x), 1), self.number, np.int32))]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
CONFIG = """
backend: "python" max_batch_size: 4 instance_group [{ kind: KIND_CPU }]
input [{ name: "X" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [-1] }, { name: "N" data_type: TYPE_INT32 dims: [1] }]
response_cache { enable: true }
"""


def x(*rows: list[float]) -> dict[str, Any]:
    return {"X": np.array(rows, np.float32)}


# The requests that are sent one after the other. None fails, and no model preserves the order: after an error, Triton
# 2.51 answers with an empty response, and with the order it never answers.
REQUESTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (x([1, 2]), {}),
    (x([1, 2]), {}),
    (x([1, 2]), {"request_id": "a"}),
    (x([1], [3]), {}),
    (x([1, 4]), {}),
    (x([1, 2]), {"priority": 1}),
    (x([0]), {}),
    (x([-0.0]), {}),
    (x([1, 4]), {}),
]


@pytest.mark.parametrize("more", ["", "dynamic_batching { }"])
def test_the_same_requests_execute(core: Core, more: str) -> None:
    name = f"cached_{re.sub('[^a-z]+', '_', more)}"
    core.write(name, CONFIG + more, COUNTS)
    assert (core.triton.load(name), core.moonpool.load(name)) == (None, None)
    try:
        for inputs, options in REQUESTS:
            theirs = core.triton.infer(name, inputs, **options)
            assert core.moonpool.infer(name, inputs, **options) == theirs
        theirs_counts, ours_counts = core.triton.counts(name), core.moonpool.counts(name)
        ours_metrics, theirs_metrics = (_cache_lines(each, name) for each in (core.moonpool, core.triton))
    finally:
        core.triton.unload(name)
        core.moonpool.unload(name)
    assert _counts(ours_counts) == _counts(theirs_counts)
    assert ours_metrics == theirs_metrics


def _counts(statistics: dict[str, Any]) -> dict[str, int]:
    counts = {kind: each["count"] for kind, each in statistics["inference_stats"].items()}
    return {**counts, "inferences": statistics["inference_count"], "executions": statistics["execution_count"]}


def _cache_lines(side: Any, model: str) -> dict[str, float]:
    """The numbers of hits and misses; durations are measured anew each time."""
    found = side.metrics(rf'^(nv_cache_num_\w+_per_model){{model="{model}",version="1"}} (\S+)$')
    assert len(found) == 2
    return {name: float(value) for name, value in found}


def test_parameters_and_shapes_are_part_of_the_key_here(core: Core) -> None:
    """In Triton they are not, so a client may get what another one asked for, even in another shape."""
    core.write("keys", CONFIG, COUNTS)
    assert (core.triton.load("keys"), core.moonpool.load("keys")) == (None, None)
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (x([1, 2]), {}),
        (x([1, 2]), {"parameters": {"a": 1}}),
        (x([1, 2]), {"parameters": {"a": 2}}),
        (x([1], [2]), {}),
    ]
    try:
        for side, executed in ((core.triton, 1), (core.moonpool, 4)):
            for inputs, options in asked:
                side.infer("keys", inputs, **options)
            assert side.counts("keys")["execution_count"] == executed
    finally:
        core.triton.unload("keys")
        core.moonpool.unload("keys")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("model_transaction_policy { decoupled: true }", "'decoupled' transaction policy"),
        ("sequence_batching { }", "sequence batching scheduler"),
    ],
)
def test_models_that_cannot_have_one_are_refused(core: Core, more: str, why: str) -> None:
    core.write("refused", CONFIG + more, COUNTS)
    assert core.triton.load("refused") is not None
    ours = core.moonpool.load("refused")
    text = f"Response Cache does not currently support model refused with {why}. Please disable the response cache."
    assert ours is not None
    assert ours.text.endswith(text)
    assert ours.code == ConfigError.code
    # The client of a real Triton gets no reason, which is in the log.
    assert core.triton.has_logged(text)


ENSEMBLE = """
platform: "ensemble" max_batch_size: 4
input [{ name: "A" data_type: TYPE_FP32 dims: [-1] }]
output [{ name: "B" data_type: TYPE_FP32 dims: [-1] }, { name: "N" data_type: TYPE_INT32 dims: [1] }]
response_cache { enable: true }
ensemble_scheduling { step [{
  model_name: "MEMBER" model_version: -1 input_map { key: "X" value: "A" }
  output_map { key: "Y" value: "B" } output_map { key: "N" value: "N" }
}] }
"""


@pytest.mark.parametrize("member", ["plain", "cached"])
def test_an_ensemble_is_cached_as_a_whole(core: Core, member: str) -> None:
    name, whole = f"member_{member}", f"whole_{member}"
    config = CONFIG if member == "cached" else CONFIG.replace("enable: true", "enable: false")
    core.write(name, config, COUNTS)
    core.write(whole, ENSEMBLE.replace("MEMBER", name), "")
    sides = core.triton, core.moonpool
    assert [side.load(whole) for side in sides] == [None, None]
    try:
        for inputs, options in REQUESTS:
            theirs = core.triton.infer(whole, {"A": inputs["X"]}, **options)
            ours = core.moonpool.infer(whole, {"A": inputs["X"]}, **options)
            assert isinstance(ours, Answer)
            assert isinstance(theirs, Answer)
            # A hit of Triton's has lost the parameters that say which sequence an ensemble's response is part of.
            assert (ours.outputs, ours.request_id) == (theirs.outputs, theirs.request_id)
            assert theirs.parameters in ({}, ours.parameters)
        # What the model answered for itself is found for the ensemble only if the model has a cache, too.
        for side in sides:
            side.infer(name, x([7]))
        found = [side.infer(whole, {"A": x([7])["X"]}) for side in sides]
        assert found[0] == found[1]
        for model in (whole, name):
            assert _counts(core.moonpool.counts(model)) == _counts(core.triton.counts(model))
        lines = [_cache_lines(side, whole) for side in sides]
        assert lines[0] == lines[1]
    finally:
        for side in sides:
            side.unload(whole)
            side.unload(name)


def test_a_decoupled_ensemble_is_refused(core: Core) -> None:
    decoupled = "model_transaction_policy { decoupled: true }"
    core.write("streams", CONFIG.replace("enable: true", "enable: false") + decoupled, COUNTS)
    core.write("whole_streams", ENSEMBLE.replace("MEMBER", "streams"), "")
    try:
        theirs, ours = (side.load("whole_streams") for side in (core.triton, core.moonpool))
        assert theirs is not None
        assert ours is not None
        assert (ours.text, ours.code) == (theirs.text, theirs.code)
    finally:
        for side in (core.triton, core.moonpool):
            side.unload("streams")
