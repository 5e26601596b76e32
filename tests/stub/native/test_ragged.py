"""Tests of Ragged dimensions: rows of different sizes are padded for the model, and its results are cut again."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from moonpool.ipc.errors import BadTensor
from moonpool.ipc.messages import NO_DETAILS
from moonpool.stub.native.hints import Batch, Bytes, Float32, Int64, Outputs, Ragged
from moonpool.stub.native.model import NativeAdapter, complete_config
from moonpool.stub.native.signature import BadHint
from moonpool.stub.pb_utils.config import ModelConfig
from moonpool.stub.pb_utils.errors import InvalidReturn
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.tensor import Tensor

# ruff: noqa: N803
# mypy: disable-error-code="valid-type, name-defined, type-arg, misc, syntax, operator, index, attr-defined, redundant-expr"

pytestmark = pytest.mark.promise(
    "Batching",
    "A native model with a `Ragged` input gets rows of different sizes padded, with their lengths; each request gets "
    "its part of the result, without padding.",
)

SEEN: list[Any] = []


class Doubles:
    def __call__(self, X: Float32[Batch, Ragged, 2], X_lengths: Int64[Batch]) -> Outputs(
        Y=Float32[Batch, Ragged, 2], LENGTH=Int64[Batch]
    ):
        SEEN.append((X.copy(), X_lengths.copy()))
        return {"Y": X * 2, "LENGTH": X_lengths}


def adapter(model: Any) -> NativeAdapter:
    config = complete_config(model, ModelConfig('{"name": "m"}')).as_dict()
    adapter = NativeAdapter(model, config)
    adapter.initialize({})
    return adapter


def request(array: NDArray[Any]) -> InferenceRequest:
    return InferenceRequest.from_wire(NO_DETAILS, (), [Tensor("X", array)])


@given(shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=5))
def test_rows_are_padded_and_results_are_cut(shapes: list[tuple[int, int]]) -> None:
    SEEN.clear()
    given_arrays = [np.arange(1, rows * size * 2 + 1, dtype=np.float32).reshape(rows, size, 2) for rows, size in shapes]
    responses = adapter(Doubles).execute([request(array) for array in given_arrays])
    ((seen, lengths),) = SEEN
    longest = max(size for _, size in shapes)
    assert seen.shape == (sum(rows for rows, _ in shapes), longest, 2)
    assert lengths.tolist() == [size for rows, size in shapes for _ in range(rows)]
    for row, length in zip(seen, lengths, strict=True):
        assert not row[length:].any()
    for array, response in zip(given_arrays, responses, strict=True):
        found = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        assert found["Y"].tolist() == (array * 2).tolist()
        assert found["LENGTH"].tolist() == [[array.shape[1]]] * len(array)


def test_the_configuration_lets_such_requests_share_batches() -> None:
    config = complete_config(Doubles, ModelConfig('{"name": "m"}')).as_dict()
    (tensor,) = config["input"]
    assert (tensor["name"], tensor["dims"], tensor["allow_ragged_batch"]) == ("X", [-1, 2], True)


def test_texts_are_padded_with_empty_ones() -> None:
    def longest(X: Bytes[Batch, Ragged]) -> Outputs(Y=Bytes[Batch, Ragged]):
        return {"Y": X}

    first, second = np.array([[b"a"]], object), np.array([[b"b", b"c"]], object)
    responses = adapter(longest).execute([request(first), request(second)])
    found = [each.output_tensors()[0].as_numpy().tolist() for each in responses]
    assert found == [[[b"a"]], [[b"b", b"c"]]]


def test_a_result_without_the_padding_is_refused() -> None:
    def short(X: Float32[Batch, Ragged]) -> Outputs(Y=Float32[Batch, Ragged]):
        return {"Y": X[:, :1]}

    with pytest.raises(InvalidReturn, match="must have the size of the padded input, 3"):
        adapter(short).execute([request(np.ones((1, 3), np.float32))])


@pytest.mark.parametrize(
    ("dims", "shown"), [((Batch, Ragged), "Float32[Batch, Ragged]"), ((Batch, 2, Ragged), "Float32[Batch, 2, Ragged]")]
)
def test_a_hint_says_so(dims: tuple[Any, ...], shown: str) -> None:
    assert repr(Float32[dims]) == shown


@pytest.mark.parametrize("dims", [(Ragged,), (2, Ragged), (Batch, Ragged, Ragged)])
def test_a_dimension_is_ragged_once_and_behind_the_batch(dims: tuple[Any, ...]) -> None:
    with pytest.raises(BadTensor, match="at most one dimension is Ragged, behind Batch"):
        Float32[dims]


def test_an_output_needs_one_ragged_input() -> None:
    def none(X: Float32[Batch, 2]) -> Outputs(Y=Float32[Batch, Ragged]):
        raise NotImplementedError

    text = "output 'Y' is Float32[Batch, Ragged], and is cut as the one input that is Ragged: 0 inputs are"
    with pytest.raises(BadHint, match=re.escape(text)):
        adapter(none)
