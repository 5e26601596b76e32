"""Tests of the inputs that describe a batch of requests of different shapes, and of the parts of its outputs. Needs no
library.
"""

from __future__ import annotations

import importlib.util
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moonpool

pytestmark = pytest.mark.promise("Backends", "Requests of different shapes are joined …")

BACKENDS = Path(moonpool.__file__).parent / "stub" / "backends"
# Models find the file on their path. It is no module of moonpool.
_SPEC = importlib.util.spec_from_file_location("batch_tensors", BACKENDS / "onnxruntime" / "batch_tensors.py")
assert _SPEC is not None
assert _SPEC.loader is not None
batch_tensors: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(batch_tensors)

_SIZES = st.integers(0, 5)
SHAPES = st.integers(0, 3).flatmap(
    lambda rank: st.lists(st.tuples(st.integers(1, 4), *[_SIZES] * rank).map(list), min_size=1, max_size=6)
)


class FakeTensor:
    def __init__(self, name: str, shape: list[int]) -> None:
        self._name, self._shape = name, shape

    def name(self) -> str:
        return self._name

    def shape(self) -> list[int]:
        return self._shape


class FakeRequest:
    def __init__(self, **shapes: list[int]) -> None:
        self._shapes = shapes

    def inputs(self) -> list[FakeTensor]:
        return [FakeTensor(name, shape) for name, shape in self._shapes.items()]


def test_both_backends_have_the_same_file() -> None:
    texts = [(BACKENDS / name / "batch_tensors.py").read_text() for name in ("onnxruntime", "pytorch")]

    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("BATCH_ELEMENT_COUNT", [6, 16]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [6, 22]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 6, 22]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0] * 16),
        ("BATCH_ITEM_SHAPE", [[3, 2], [4, 2], [4, 2]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [3, 2, 4, 2, 4, 2]),
    ],
)
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_a_batch_is_described_as_in_triton(kind: str, values: list[Any], dtype: type) -> None:
    array = batch_tensors.described(kind, dtype, [[1, 3, 2], [2, 4, 2]])

    assert (array.dtype, array.tolist()) == (np.dtype(dtype), values)


@given(SHAPES)
def test_counts_say_where_each_request_lies(shapes: list[list[int]]) -> None:
    def described(kind: str) -> Any:
        return batch_tensors.described(kind, np.int32, shapes)

    joined = np.concatenate([np.full(prod(shape), i) for i, shape in enumerate(shapes)])
    counts, starts = (described("BATCH_ELEMENT_COUNT"), described("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"))

    assert starts[1:].tolist() == described("BATCH_ACCUMULATED_ELEMENT_COUNT").tolist()
    for index, count in enumerate(counts):
        part = joined[starts[index] : starts[index + 1]]
        assert len(part) == count
        assert (part == index).all()
    assert described("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE").shape == (counts.max(),)
    items = described("BATCH_ITEM_SHAPE")
    assert items.shape == (sum(shape[0] for shape in shapes), len(shapes[0]) - 1)
    assert described("BATCH_ITEM_SHAPE_FLATTEN").tolist() == items.reshape(-1).tolist()


@given(SHAPES)
def test_an_output_that_is_the_input_comes_back_as_it_was(shapes: list[list[int]]) -> None:
    arrays = [np.random.default_rng(i).random(shape) for i, shape in enumerate(shapes)]
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    dims = [-1] * len(shapes[0])
    config = {
        "max_batch_size": 8,
        "output": [{"name": "Y", "dims": dims[1:]}],
        "batch_output": [{"target_name": ["Y"], "source_input": ["X"]}],
    }
    requests = [FakeRequest(X=shape) for shape in shapes]
    cut = batch_tensors.BatchTensors(config).output_shapes("Y", requests)

    bounds = batch_tensors.bounds("Y", flat.size, cut)
    parts = [flat[start:end].reshape(shape) for (start, end), shape in zip(bounds, cut, strict=True)]

    assert [part.tolist() for part in parts] == [array.tolist() for array in arrays]


def test_fixed_dimensions_of_an_output_stay_and_variable_ones_are_those_of_the_input() -> None:
    config = {
        "max_batch_size": 0,
        "output": [{"name": "Y", "dims": [9], "reshape": {"shape": [-1, 3]}}],
        "batch_output": [{"target_name": ["Y"], "source_input": ["X"]}],
    }
    tensors = batch_tensors.BatchTensors(config)

    assert tensors.output_shapes("Y", [FakeRequest(X=[2, 7]), FakeRequest(X=[5, 1])]) == [[2, 3], [5, 3]]


def test_an_output_of_another_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="output 'Y' has 7 elements for a batch whose requests get 6"):
        batch_tensors.bounds("Y", 7, [[1, 2], [2, 2]])


def test_a_count_that_does_not_fit_the_datatype_is_an_error() -> None:
    with pytest.raises(ValueError, match="too large for TYPE_INT32"):
        batch_tensors.described("BATCH_ELEMENT_COUNT", np.int32, [[1, 2**31]])


def test_a_request_without_the_input_that_describes_the_batch_is_an_error() -> None:
    config = {
        "max_batch_size": 4,
        "batch_input": [
            {"kind": "BATCH_ELEMENT_COUNT", "target_name": ["N", "M"], "data_type": "TYPE_INT32", "source_input": ["X"]}
        ],
    }
    tensors = batch_tensors.BatchTensors(config)

    assert tensors.input_datatypes() == {"N": "TYPE_INT32", "M": "TYPE_INT32"}
    assert {k: v.tolist() for k, v in tensors.input_values([FakeRequest(X=[1, 3])]).items()} == {"N": [3], "M": [3]}
    with pytest.raises(ValueError, match="no input 'X'"):
        tensors.input_values([FakeRequest(X=[1, 3]), FakeRequest(Z=[1, 3])])
