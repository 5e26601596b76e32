"""Tensors of all kinds, batches, parameters and what a request says of itself."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.triton.answers import Answer, Failure, Inputs, Outcome, output_of
from tests.triton.both import Both

pytestmark = [
    pytest.mark.triton,
    pytest.mark.promise(
        "Fidelity",
        "Tensors, batches, parameters, facts of a request and refusals of wrong requests are those of a real Triton.",
    ),
]

NUMBERS = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "u2", "UINT32": "u4", "UINT64": "u8", "INT8": "i1",
    "INT16": "i2", "INT32": "i4", "INT64": "i8", "FP16": "f2", "FP32": "f4", "FP64": "f8",
    "BF16": ml_dtypes.bfloat16,
}  # fmt: skip
SHAPES = [(1, 1), (2, 3), (0, 0), (0, 4), (4, 0), (1, 100_000)]


@pytest.mark.parametrize("datatype", NUMBERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_numbers_come_back(both: Both, datatype: str, shape: tuple[int, int]) -> None:
    dtype = np.dtype(NUMBERS[datatype])
    bits = np.random.default_rng(0).integers(0, 2, (*shape, dtype.itemsize), np.uint8)
    if datatype != "BOOL":
        bits *= 171
    array = np.frombuffer(bits.tobytes(), dtype).reshape(shape)

    answer = both.answer("echo", {f"IN_{datatype}": array})

    assert answer.outputs == {f"OUT_{datatype}": output_of(array)}


STRINGS = [[b""], [b"a", b"", b"ccc"], [b"\0\xff\n"], ["ä\U0001f600".encode()], [b"x" * 100_000], []]


@pytest.mark.parametrize("strings", STRINGS, ids=lambda strings: repr(strings)[:20])
def test_strings_come_back(both: Both, strings: list[bytes]) -> None:
    array = np.array(strings, object).reshape(1, -1)

    answer = both.answer("echo", {"IN_STRING": array})

    assert answer.outputs == {"OUT_STRING": output_of(array)}


def test_all_inputs_together_come_back(both: Both) -> None:
    inputs = {f"IN_{each}": np.ones((2, 2), dtype) for each, dtype in NUMBERS.items()}

    assert len(both.answer("echo", inputs).outputs) == len(inputs)


ONE = np.ones((1, 1), np.float32)
X = np.arange(3, dtype=np.float32)
WRONG: dict[str, tuple[str, Inputs]] = {
    "no input": ("facts", {}),
    "an input twice over": ("facts", {"X": X, "Z": X}),
    "another input": ("facts", {"Z": X}),
    "another datatype": ("facts", {"X": X.astype(np.float64)}),
    "another datatype of an optional one": ("facts", {"X": X, "Y": np.zeros(2, np.int32)}),
    "strings for numbers": ("facts", {"X": np.array([b"a"], object)}),
    "a dimension too many": ("facts", {"X": np.ones((1, 1), np.float32)}),
    "a dimension too few": ("facts", {"X": np.array(1, np.float32)}),
    "another dimension": ("facts", {"X": X, "Y": X}),
    "a dimension too few of a batch": ("batch", {"X": np.zeros(2, np.int32)}),
    "another dimension of a batch": ("batch", {"X": np.zeros((1, 3), np.int32)}),
    "a shape that only the model has": (
        "reshaped",
        {
            "GRID": np.zeros((1, 2, 3), np.int32),
            "SCALAR": np.zeros((1, 1), np.int32),
            "ROWS": np.zeros((1, 1, 4), np.int32),
            "TEXTS": np.array([[["a"], ["b"]]], object),
        },
    ),
    "a batch too large": ("batch", {"X": np.zeros((5, 2), np.int32)}),
    "no model": ("none of that name", {"X": X}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_refused_in_the_same_words(both: Both, name: str) -> None:
    model, inputs = WRONG[name]

    both.failure(model, inputs)


def test_requests_that_triton_lets_through_or_misreports_are_refused(both: Both) -> None:
    theirs = both.triton.infer("facts", {"Y": X[:2]})
    ours = both.moonpool.infer("facts", {"Y": X[:2]})

    assert isinstance(theirs, Failure)
    assert "object has no attribute 'as_numpy'" in theirs.text
    assert isinstance(ours, Failure)
    assert "missing required input(s) ['X']" in ours.text

    empty = {"X": np.zeros((0, 2), np.int32)}
    theirs = both.triton.infer("batch", empty)
    ours = both.moonpool.infer("batch", empty)

    assert isinstance(theirs, Failure)
    assert "input byte size mismatch for input 'X'" in theirs.text
    assert ours == Failure("INVALID_ARG", "inference request batch-size must be > 0 for 'batch'")


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_batch_is_answered_by_rows(both: Both, rows: int) -> None:
    array = np.arange(rows * 2, dtype=np.int32).reshape(rows, 2)

    assert both.answer("batch", {"X": array}).outputs == {"Y": output_of(array * 2)}


@pytest.mark.promise("Requests", "If a configuration has a `reshape`, …")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_tensors_have_the_shapes_that_a_reshape_gives_them(both: Both, rows: int, length: int) -> None:
    texts = [[[b"a"], [b"bc"]]] * rows
    inputs = {
        "GRID": np.arange(rows * 6, dtype=np.int32).reshape(rows, 6),
        "SCALAR": np.arange(rows, dtype=np.int32).reshape(rows, 1),
        "ROWS": np.arange(rows * length * 4, dtype=np.int32).reshape(rows, length, 4),
        "TEXTS": np.array(texts, object),
    }

    both.answer("reshaped", inputs)


@pytest.mark.parametrize("code", range(1, 9))
def test_an_error_of_one_request_keeps_its_code(both: Both, code: int) -> None:
    assert both.failure("batch", {"X": np.full((1, 2), -code, np.int32)}).text == f"refused -{code}"


def facts(outcome: Outcome) -> Any:
    assert isinstance(outcome, Answer), outcome
    text: Any = outcome.outputs["FACTS"].data[0]
    return json.loads(text)


REQUESTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "an id": {"request_id": "ä-17"},
    "a correlation id": {"correlation_id": 17},
    "a large correlation id": {"correlation_id": 2**63 - 1},
    "a text as correlation id": {"correlation_id": "some"},
    "the start of a sequence": {"correlation_id": 17, "flags": 1},
    "the end of a sequence": {"correlation_id": 17, "flags": 2},
    "a sequence of one": {"correlation_id": 17, "flags": 3},
    "a timeout": {"queue_timeout_us": 123_456},
    "parameters": {"parameters": {"a": 1, "b": "text", "c": True, "d": -(2**62), "e": ""}},
    "all outputs": {"outputs": ["FACTS", "X_AGAIN"]},
    "outputs in another order": {"outputs": ["X_AGAIN", "FACTS"]},
    "one output": {"outputs": ["FACTS"]},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_model_learns_the_same_of_a_request(both: Both, name: str) -> None:
    theirs = both.triton.infer("facts", {"X": X}, **REQUESTS[name])
    ours = both.moonpool.infer("facts", {"X": X}, **REQUESTS[name])

    assert facts(ours) == facts(theirs)
    assert isinstance(theirs, Answer)
    assert isinstance(ours, Answer)
    assert list(ours.outputs) == list(theirs.outputs)
    assert ours.parameters == theirs.parameters


def test_an_output_that_there_is_not_is_refused_in_the_same_words(both: Both) -> None:
    both.failure("facts", {"X": X}, outputs=["Z"])


def test_an_optional_input_is_seen_where_it_is_given(both: Both) -> None:
    inputs = {"X": X, "Y": X[:2]}
    theirs = facts(both.triton.infer("facts", inputs))
    ours = facts(both.moonpool.infer("facts", inputs))

    assert sorted(ours["inputs"]) == sorted(theirs["inputs"])


GROUPS = {
    "four": [[[1]], [[2]], [[3]], [[4]]],
    "two, of different sizes": [[[1]], [[2], [3], [4]]],
    "one that is refused": [[[1]], [[-2]], [[3]], [[4]]],
    "all refused": [[[-1], [-2]], [[-3], [-4]]],
    "one that fails all": [[[1]], [[0]], [[3]], [[4]]],
}


@pytest.mark.parametrize("name", GROUPS)
def test_requests_of_a_batch_have_an_outcome_each(both: Both, name: str) -> None:
    both.together("grouped", [{"X": np.array(rows, np.int32)} for rows in GROUPS[name]])
