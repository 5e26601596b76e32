"""Tests moonpool's own kind of model: its configuration from hints, its batches and its errors."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.heap_region import HeapRegion

from moonpool.ipc.messages import NO_DETAILS
from moonpool.stub.native.hints import Batch, Bytes, Float32, Int64, Outputs
from moonpool.stub.native.model import NativeAdapter, complete_config, native_config
from moonpool.stub.native.signature import BadHint
from moonpool.stub.pb_utils.config import ModelConfig
from moonpool.stub.pb_utils.errors import InvalidReturn
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor

# ruff: noqa: N803
# mypy: disable-error-code="valid-type, name-defined, type-arg, misc, syntax, operator, index, attr-defined, redundant-expr"


class AddSub:
    """Counts its calls."""

    calls: ClassVar[list[int]] = []

    def __call__(self, A: Float32[Batch, 2], B: Float32[Batch, 2]) -> Outputs(
        SUM=Float32[Batch, 2], FIRST=Float32[Batch]
    ):
        self.calls.append(len(A))
        return {"SUM": A + B, "FIRST": A[:, 0]}


def request(**arrays: Any) -> InferenceRequest:
    tensors = [Tensor(name, array) for name, array in arrays.items()]
    return InferenceRequest.from_wire(NO_DETAILS, (), tensors)


def rows(count: int, value: float = 1) -> NDArray[np.float32]:
    return np.full((count, 2), value, np.float32)


def adapter(model: Any, **fields: Any) -> NativeAdapter:
    adapter = NativeAdapter(model, {"name": "m", **native_config(model), **fields})
    adapter.initialize({"model_name": "m", "model_version": "1", "model_config": "{}"})
    return adapter


def arrays(response: InferenceResponse) -> dict[str, list[Any]]:
    return {t.name(): t.as_numpy().tolist() for t in response.output_tensors()}


def test_the_configuration_is_read_from_the_hints() -> None:
    assert native_config(AddSub) == {
        "max_batch_size": 64,
        "input": [
            {"name": "A", "data_type": "TYPE_FP32", "dims": [2], "optional": False},
            {"name": "B", "data_type": "TYPE_FP32", "dims": [2], "optional": False},
        ],
        "output": [
            {"name": "SUM", "data_type": "TYPE_FP32", "dims": [2]},
            {"name": "FIRST", "data_type": "TYPE_FP32", "dims": [1]},
        ],
        "dynamic_batching": {},
    }


def test_a_model_without_batches_keeps_all_its_dimensions() -> None:
    def model(X: Float32[:, 3], Y: NDArray[np.int64], Z) -> Bytes[()]:  # type: ignore[no-untyped-def]
        raise NotImplementedError

    assert native_config(model) == {
        "max_batch_size": 0,
        "input": [
            {"name": "X", "data_type": "TYPE_FP32", "dims": [-1, 3], "optional": False},
            {"name": "Y", "data_type": "TYPE_INT64", "dims": [-1], "optional": False},
        ],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_STRING", "dims": [1]}],
    }


def test_the_model_says_how_large_its_batches_are() -> None:
    class Eight(AddSub):
        max_batch_size = 8

    class One(AddSub):
        max_batch_size = 0

    assert native_config(Eight)["max_batch_size"] == 8
    assert native_config(One)["max_batch_size"] == 0
    assert native_config(One)["input"][0]["dims"] == [-1, 2]


def test_the_configuration_may_ask_for_smaller_batches_but_not_for_larger_ones() -> None:
    class Eight(AddSub):
        max_batch_size = 8

    smaller = ModelConfig('{"name": "m", "max_batch_size": 4}')
    assert complete_config(Eight, smaller).as_dict()["max_batch_size"] == 4
    with pytest.raises(ValueError, match="configuration specified max_batch_size 9, but"):
        complete_config(Eight, ModelConfig('{"name": "m", "max_batch_size": 9}'))


def test_a_wrong_size_and_a_missing_batch_are_refused() -> None:
    class Wrong(AddSub):
        max_batch_size = -1

    class Missing:
        max_batch_size = 4

        def __call__(self, X: Float32[4]) -> Float32[Batch, 4]:
            raise NotImplementedError

    with pytest.raises(BadHint, match="max_batch_size must be an integer of at least 0, not -1"):
        native_config(Wrong)
    with pytest.raises(BadHint, match=r"the first dimension of Float32\[4\], the hint of 'X'"):
        native_config(Missing)


def test_hints_complete_a_configuration() -> None:
    config = ModelConfig('{"name": "m", "max_batch_size": 8, "output": [{"name": "SUM"}]}')
    complete_config(AddSub, config)

    assert config.as_dict() == {"name": "m", **native_config(AddSub), "max_batch_size": 8}


def test_hints_that_contradict_the_configuration_are_refused() -> None:
    config = ModelConfig('{"name": "m", "input": [{"name": "A", "data_type": "TYPE_INT8"}]}')

    with pytest.raises(ValueError, match="expects datatype TYPE_INT8 for input 'A', model provid"):
        complete_config(AddSub, config)


def test_a_batch_is_one_call_and_each_request_gets_its_rows() -> None:
    AddSub.calls.clear()
    one = adapter(AddSub)
    responses = one.execute([request(A=rows(1), B=rows(1, 2)), request(A=rows(2, 5), B=rows(2, 6))])

    assert [arrays(response) for response in responses] == [
        {"SUM": [[3, 3]], "FIRST": [[1]]},
        {"SUM": [[11, 11], [11, 11]], "FIRST": [[5], [5]]},
    ]
    assert AddSub.calls == [3]


def test_rows_that_lie_together_reach_the_model_without_a_copy() -> None:
    seen: list[NDArray[np.float32]] = []

    class Look:
        def __call__(self, X: Float32[Batch, 2]) -> Float32[Batch, 2]:
            seen.append(X)
            return X

    lease = HeapRegion(1, 4096).lease(0, 512, lambda _: None, None)
    lease[:] = 0
    views = [np.ndarray((2, 2), np.float32, lease, offset) for offset in (0, 16)]
    responses = adapter(Look).execute([request(X=view) for view in views])

    assert np.shares_memory(seen[0], views[1])
    assert np.shares_memory(responses[1].output_tensors()[0].as_numpy(), views[1])


def test_requests_that_cannot_be_joined_are_called_for_apart() -> None:
    class Sums:
        def __call__(self, X: Float32[Batch, :], Y: Float32[Batch, :] | None = None) -> Outputs(SUM=Float32[Batch]):
            return {"SUM": X.sum(1) + (0 if Y is None else Y.sum(1))}

    wide = np.ones((1, 3), np.float32)
    responses = adapter(Sums).execute(
        [request(X=rows(1)), request(X=wide), request(X=rows(1), Y=rows(1)), request(X=wide)]
    )

    assert [arrays(r)["SUM"] for r in responses] == [[[2]], [[3]], [[4]], [[3]]]


def test_strings_are_joined_and_cut_too() -> None:
    class Upper:
        def __call__(self, X: Bytes[Batch]) -> Bytes[Batch]:
            assert X.ndim == 1
            return np.array([text.decode().upper() for text in X])

    texts = [np.array([[b"a"]], np.object_), np.array([[b"b"], [b"c"]], np.object_)]
    responses = adapter(Upper).execute([request(X=text) for text in texts])

    assert [arrays(r) for r in responses] == [{"OUTPUT0": [["A"]]}, {"OUTPUT0": [["B"], ["C"]]}]


def test_a_model_without_batches_gets_each_request_as_it_is() -> None:
    def total(X: Float32[:]) -> Outputs(TOTAL=Float32[()], SIZE=Int64[()]):
        return {"TOTAL": X.sum(), "SIZE": len(X)}

    responses = adapter(total).execute([request(X=np.ones(n, np.float32)) for n in (2, 3)])

    assert [arrays(r) for r in responses] == [{"TOTAL": [2], "SIZE": [2]}, {"TOTAL": [3], "SIZE": [3]}]


def test_the_model_gets_its_configuration_if_it_wants_it() -> None:
    configs = []

    class Wants(AddSub):
        def __init__(self, config: dict[str, Any]) -> None:
            configs.append(config)

    adapter(Wants)

    (config,) = configs
    assert config["max_batch_size"] == 64
    assert config["instance"] == {"model_name": "m", "model_version": "1"}


def test_close_is_called_once_the_model_is_done_with() -> None:
    class Closes(AddSub):
        closed = 0

        def close(self) -> None:
            Closes.closed += 1

    adapter(Closes).finalize()

    assert Closes.closed == 1
    adapter(AddSub).finalize()


def returns(value: object) -> Any:
    def model(X: Float32[Batch, 2]) -> Outputs(A=Float32[Batch, :], B=Int64[Batch]):  # noqa: ARG001
        return value

    return model


GOOD = {"A": rows(2), "B": np.array([1, 2])}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "returned nothing, and must return a dict with the arrays 'A', 'B'"),
        (rows(2), "returned an object of type ndarray, and must return a dict"),
        ({"A": rows(2)}, "returned the outputs 'A', and its configuration has 'A', 'B'"),
        ({**GOOD, "C": rows(2)}, "returned the outputs 'A', 'B', 'C', and its configuration has"),
        (
            {**GOOD, "A": rows(3)},
            "returned output 'A' of shape [3, 2], and its configuration asks for [2, -1] for this "
            "batch of 2 rows (-1 is any size)",
        ),
        ({**GOOD, "A": np.float32(1)}, "returned output 'A' of shape [], and its configuration"),
        (
            {**GOOD, "A": np.zeros((2, 2))},
            "returned output 'A' as float64, and its configuration says TYPE_FP32; convert it: "
            "array.astype(numpy.float32)",
        ),
        ({**GOOD, "B": [1, [2]]}, "returned an object of type list as output 'B', and it cannot"),
        ({**GOOD, "B": "ab"}, "returned an object of type str as output 'B', and it cannot be"),
        (
            {**GOOD, "B": object()},
            "returned an object of type object as output 'B', and it cannot be made an array of TYPE_INT64: it is "
            "neither an array",
        ),
    ],
    # The address of an object is no part of the test's name.
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", str(value)),
)
def test_a_wrong_return_is_told_with_what_is_wrong(value: object, text: str) -> None:
    with pytest.raises(InvalidReturn) as caught:
        adapter(returns(value)).execute([request(X=rows(2))])

    assert str(caught.value).startswith(f"model 'm' {text}")


def test_lists_and_numbers_become_arrays_of_the_right_datatype() -> None:
    responses = adapter(returns({"A": [[1, 2]], "B": [7]})).execute([request(X=rows(1))])

    assert arrays(responses[0]) == {"A": [[1, 2]], "B": [[7]]}
    assert [t.triton_dtype() for t in responses[0].output_tensors()] == [11, 9]


def test_hints_and_configuration_must_name_the_same_inputs() -> None:
    def unhinted(X, **_):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    with pytest.raises(BadHint, match="has no input 'X'; give the parameter a type hint"):
        NativeAdapter(unhinted, {"name": "m"})
    with pytest.raises(BadHint, match="has no parameter 'Z', which the configuration of model 'm'"):
        NativeAdapter(AddSub, {"name": "m", "input": [{"name": n} for n in ("A", "B", "Z")]})
    NativeAdapter(unhinted, {"name": "m", "input": [{"name": "X"}, {"name": "Z"}]})


def test_what_neither_a_hint_nor_the_configuration_says_is_named() -> None:
    def unhinted(X, Y=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    def silent(X: Float32[Batch, 2]):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    inputs, outputs = [{"name": "X", **tensor}], [{"name": "OUTPUT0", **tensor}]

    def complete(model: Any, **given: Any) -> ModelConfig:
        return complete_config(model, ModelConfig(json.dumps({"name": "m", **given})))

    with pytest.raises(BadHint, match=r"'X' has no hint; give it one, such as X: Float32\[Batch, 3\]"):
        complete(unhinted, output=outputs)
    with pytest.raises(BadHint, match=r"what it returns; give it a hint, such as -> Float32\[Batch"):
        complete(silent)
    complete(unhinted, input=inputs, output=outputs)
    complete(silent, output=outputs)
