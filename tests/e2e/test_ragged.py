"""Requests of different shapes in one batch: whose models get them, and in which order the bytes lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moonpool

RAGGED = Path(__file__).parents[1] / "triton" / "models" / "ragged"
NATIVE = """
import numpy as np


class Native:
    def __call__(self, X):
        return {"ROWS": np.full((len(X), 1), len(X), np.int32)}
"""


def requests(count: int) -> list[dict[str, Any]]:
    """Make requests of one row each, in which X is longer by one each time."""
    return [
        {"X": np.full((1, number), number, np.int32), "S": np.array([[b"s" * number] * number])}
        for number in range(1, count + 1)
    ]


@pytest.mark.promise(
    "Batching",
    "Requests share a batch though the shapes of inputs with `allow_ragged_batch` differ; each keeps its own.",
)
def test_requests_of_other_shapes_share_a_batch_and_keep_their_own_tensors() -> None:
    with moonpool.Runtime() as runtime:
        runtime.load("ragged", RAGGED)
        for _ in range(2):  # the second batch has a layout that is known
            futures = [runtime.submit("ragged", each) for each in requests(4)]
            responses = [future.result(60) for future in futures]

            assert [each.outputs["Y"].tolist() for each in responses] == [
                [[2 * number] * number] for number in range(1, 5)
            ]
            for each in responses:
                assert each.outputs["SHAPES"].tolist() == [[1, 1, 1, 2, 1, 3, 1, 4]]


PADDED = """
from moonpool import Batch, Float32, Int64, Outputs, Ragged


class Padded:
    def __call__(
        self, X: Float32[Batch, Ragged], X_lengths
    ) -> Outputs(Y=Float32[Batch, Ragged], ROWS=Int64[Batch]):
        return {"Y": X * 2, "ROWS": X_lengths * 0 + len(X)}
"""


@pytest.mark.promise("Batching", "A native model with a `Ragged` input …")
def test_a_native_model_gets_requests_of_other_sizes_in_one_call(tmp_path: Path) -> None:
    (tmp_path / "padded.py").write_text(PADDED)
    batching = {"preferred_batch_size": [4], "max_queue_delay_microseconds": 10_000_000}
    config = {"max_batch_size": 4, "dynamic_batching": batching}
    with moonpool.Runtime() as runtime:
        runtime.load("padded", tmp_path / "padded.py", config=config)
        given = [np.full((1, size), size, np.float32) for size in (1, 3, 2, 5)]
        futures = [runtime.submit("padded", {"X": array}) for array in given]
        for array, future in zip(given, futures, strict=True):
            outputs = future.result(60).outputs
            assert outputs["Y"].tolist() == (array * 2).tolist()
            assert outputs["ROWS"].tolist() == [[4]]


def tensor(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "data_type": "TYPE_INT32", "dims": [-1], **more}


def test_a_model_that_gets_its_rows_stacked_gets_one_shape_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "native.py").write_text(NATIVE)
    config = {
        "max_batch_size": 4,
        "input": [tensor("X", allow_ragged_batch=True)],
        "output": [tensor("ROWS")],
        "dynamic_batching": {"preferred_batch_size": [2], "max_queue_delay_microseconds": 10_000_000},
    }
    with moonpool.Runtime() as runtime:
        runtime.load("native", tmp_path / "native.py", config=config)
        sizes = (2, 2, 3, 3)
        futures = [runtime.submit("native", {"X": np.zeros((1, size), np.int32)}) for size in sizes]

        assert [future.result(60).outputs["ROWS"].tolist() for future in futures] == [[[2]]] * 4
