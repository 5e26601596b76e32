"""Tests of models whose tensors have other shapes than their clients': alone, in batches, called by models, and in a
test's process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moonpool
from moonpool import testing

pytestmark = pytest.mark.promise("Requests", "If a configuration has a `reshape`, …")

FOLDER = Path(__file__).parents[1] / "triton" / "models" / "reshaped"
ASKS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            asked = pb_utils.InferenceRequest(
                model_name="reshaped", requested_output_names=["OUT_GRID"], inputs=request.inputs()
            )
            tensor = pb_utils.get_output_tensor_by_name(asked.exec(), "OUT_GRID")
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
"""
SEEN = {"GRID": "2, 3", "SCALAR": "", "ROWS": "5, 2, 2", "TEXTS": "2"}


def inputs_of(rows: int, first: int = 0) -> dict[str, Any]:
    return {
        "GRID": np.arange(first, first + rows * 6, dtype=np.int32).reshape(rows, 6),
        "SCALAR": np.arange(rows, dtype=np.int32).reshape(rows, 1),
        "ROWS": np.arange(rows * 20, dtype=np.int32).reshape(rows, 5, 4),
        "TEXTS": np.array([[[b"a"], [b"bc"]]] * rows, object),
    }


def check(outputs: Any, rows: int, first: int = 0) -> None:
    """Return the outputs that clients get for these inputs."""
    given = inputs_of(rows, first)
    assert np.array_equal(outputs["OUT_GRID"], given["GRID"].reshape(rows, 3, 2))
    assert np.array_equal(outputs["OUT_SCALAR"], given["SCALAR"])
    assert outputs["OUT_ROWS"].shape == (rows, 4, 5)
    assert outputs["OUT_TEXTS"].tolist() == [[[b"a", b"bc"]]] * rows
    shapes = [f"({rows}, {rest})" if rest else f"({rows},)" for rest in SEEN.values()]
    assert outputs["SEEN"].tolist() == [[shape.encode() for shape in shapes]] * rows


def test_requests_that_are_batched_keep_their_shapes(runtime: moonpool.Runtime) -> None:
    batching = {"preferred_batch_size": [3], "max_queue_delay_microseconds": 30_000_000}
    runtime.load("reshaped", FOLDER, config={"dynamic_batching": batching})
    try:
        futures = [runtime.submit("reshaped", inputs_of(rows, 100 * rows)) for rows in (1, 2)]
        for rows, future in zip((1, 2), futures, strict=True):
            check(future.result(60).outputs, rows, 100 * rows)
        assert runtime.statistics("reshaped")["execution_count"] == 1
    finally:
        runtime.unload("reshaped")


def test_a_model_that_asks_is_a_client(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    (tmp_path / "asks" / "1").mkdir(parents=True)
    (tmp_path / "asks" / "1" / "model.py").write_text(ASKS)
    text = (FOLDER / "config.pbtxt").read_text()
    plain = re.sub(r" reshape \{.*?\]? \}", "", text)
    (tmp_path / "asks" / "config.pbtxt").write_text(plain)
    runtime.load("reshaped", FOLDER)
    runtime.load("asks", tmp_path / "asks")
    try:
        got = runtime.infer("asks", inputs_of(2), outputs=["OUT_GRID"], timeout_s=60)["OUT_GRID"]
        assert np.array_equal(got, inputs_of(2)["GRID"].reshape(2, 3, 2))
    finally:
        runtime.unload("asks")
        runtime.unload("reshaped")


@pytest.mark.parametrize("load", [testing.load, testing.load_in_stub])
def test_tests_of_a_model_are_clients(load: Callable[..., Any]) -> None:
    with load(FOLDER) as model:
        check(model.infer(**inputs_of(2)), 2)
