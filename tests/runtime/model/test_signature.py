"""Requests are checked against a model, with Triton's error texts."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.heap_region import HeapRegion
from tests.runtime.recorder import tensor

from moonpool import InvalidRequest
from moonpool.ipc.tensors import NAMES
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.signature import Signature

F32 = np.float32


def signature(max_batch_size: int = 0, *, is_native: bool = False, **more: Any) -> Signature:
    """Inputs A (FP32, 4) and B (INT32, any size), outputs Y and Z, for the model `m`."""
    raw = {
        "name": "m",
        "backend": "any",
        "max_batch_size": max_batch_size,
        "input": [tensor("A", "FP32", 4), tensor("B", "INT32", -1)],
        "output": [tensor("Y", "FP32", 4), tensor("Z", "FP32", 4)],
        **more,
    }
    return Signature(ModelConfig.from_dict(raw), is_native=is_native)


def inputs(rows: int | None = None) -> dict[str, Any]:
    lead = () if rows is None else (rows,)
    return {"A": np.zeros((*lead, 4), F32), "B": np.zeros((*lead, 3), np.int32)}


def one_of(name: str, datatype: str, *dims: int, max_batch_size: int = 0) -> Signature:
    return signature(max_batch_size, input=[tensor(name, datatype, *dims)])


# What fits


def test_a_request_has_its_arrays_in_the_order_of_the_configuration() -> None:
    given = inputs()
    request = signature().request(dict(reversed(given.items())))
    assert [array is given[name] for array, name in zip(request.arrays, "AB", strict=True)] == [True, True]
    assert [(t.number, NAMES[t.datatype], t.shape, t.size_bytes) for t in request.shapes.tensors] == [
        (0, "FP32", [4], 16),
        (1, "INT32", [3], 12),
    ]
    assert request.batch_size == 1
    assert request.details is None


def test_rows_are_counted_where_the_model_batches() -> None:
    request = signature(8).request(inputs(5))
    assert request.batch_size == 5
    assert [t.shape for t in request.shapes.tensors] == [[5, 4], [5, 3]]


def test_requests_may_be_batched_whose_shapes_agree_beyond_the_rows() -> None:
    model = signature(8)
    one, other = model.request(inputs(1)), model.request(inputs(3))
    assert one.signature == other.signature
    longer = {**inputs(1), "B": np.zeros((1, 7), np.int32)}
    assert model.request(longer).signature != one.signature


def test_requests_with_other_optional_inputs_are_not_batched() -> None:
    model = signature(8, input=[tensor("A", "FP32", 4), {**tensor("B", "INT32", -1), "optional": True}])
    with_b, without_b = model.request(inputs(1)), model.request({"A": inputs(1)["A"]})
    assert with_b.signature != without_b.signature
    assert [t.number for t in without_b.shapes.tensors] == [0]


@pytest.mark.parametrize(
    ("datatype", "value", "expected"),
    [
        ("FP32", [1, 2.5], [1.0, 2.5]),
        ("FP32", (1, 2), [1.0, 2.0]),
        ("INT64", [1, 2], [1, 2]),
        ("BOOL", [True, False], [True, False]),
        ("FP64", [np.float32(0.5), 1], [0.5, 1.0]),
    ],
)
def test_python_s_own_numbers_become_arrays(datatype: str, value: Any, expected: Any) -> None:
    request = one_of("X", datatype, -1).request({"X": value})
    assert request.arrays[0].tolist() == expected
    assert NAMES[request.shapes.tensors[0].datatype] == datatype


def test_any_array_interface_is_accepted() -> None:
    class Like:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.array([1, 2], dtype or F32)

    assert one_of("X", "FP32", -1).request({"X": Like()}).arrays[0].tolist() == [1, 2]
    view = memoryview(bytearray(8))
    with pytest.raises(InvalidRequest, match="must be a numpy array, not memoryview"):
        one_of("X", "FP32", -1).request({"X": view})


def test_strings_are_put_into_their_wire_form() -> None:
    request = one_of("X", "STRING", -1).request({"X": [b"ab", "é"]})
    wire = b"\x02\0\0\0ab" + b"\x02\0\0\0" + "é".encode()
    assert request.arrays[0].tobytes() == wire
    assert request.shapes.tensors[0].size_bytes == len(wire)
    assert request.shapes.tensors[0].shape == [2]


def test_wanted_outputs_travel_as_numbers() -> None:
    request = signature().request(inputs(), ["Z", "Y"])
    assert request.details is not None
    assert request.details.outputs == [1, 0]


def test_a_view_is_noticed_as_it_may_lie_in_shared_memory() -> None:
    model = one_of("X", "FP32", -1)
    region = HeapRegion(1, 4096)
    # Callers write here; the token of an output is its place.
    callers = region.lease(0, 32, lambda _: None, "")
    output = region.lease(0, 32, lambda _: None, (1, 0))
    assert not model.request({"X": np.zeros(4, F32)}).has_views
    assert not model.request({"X": np.zeros(8, F32)[:4]}).has_views
    assert not model.request({"X": np.ndarray(8, F32, output)[:4]}).has_views
    assert model.request({"X": np.ndarray(8, F32, callers)[:4]}).has_views


def test_threads_may_ask_at_the_same_time() -> None:
    model = signature(8)
    failures: list[BaseException] = []

    def ask(number: int) -> None:
        try:
            for rows in range(1, 9):
                for width in range(50):
                    given = {**inputs(rows), "B": np.zeros((rows, width + number), np.int32)}
                    request = model.request(given)
                    assert request.shapes.tensors[1].shape == [rows, width + number]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# What does not fit


def refused(model: Signature, given: Any, **options: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        model.request(given, **options)
    assert caught.value.code == "INVALID_ARG"
    return str(caught.value)


def test_an_input_that_is_none_is_named() -> None:
    assert refused(signature(), {**inputs(), "B": None}) == "input 'B' for model 'm' is None"


def test_the_author_of_a_native_model_reads_no_note_on_a_configuration() -> None:
    given = {**inputs(2), "A": np.zeros((2, 3), F32)}
    assert refused(signature(8, is_native=True), given) == (
        "unexpected shape for input 'A' for model 'm'. Expected [-1,4], got [2,3]. "
    )


@pytest.mark.parametrize("given", [None, 3, "A", [("A", 1)]])
def test_inputs_that_are_no_mapping_are_refused(given: object) -> None:
    assert "must be a mapping of names to arrays" in refused(signature(), given)


@pytest.mark.parametrize("value", [[1, "a"], [[1], [1, 2]], [2**70], "text"])
def test_values_that_cannot_become_an_array_are_refused(value: object) -> None:
    text = refused(one_of("X", "INT64", -1), {"X": value})
    assert text.startswith("input 'X' for model 'm' cannot be made an array")


@pytest.mark.parametrize("value", [object(), {"a": 1}, {1}])
def test_objects_unlike_an_array_are_refused(value: object) -> None:
    text = refused(one_of("X", "INT64", -1), {"X": value})
    assert text.startswith("input 'X' for model 'm' must be a numpy array, not ")


def test_strings_that_have_no_bytes_are_refused() -> None:
    text = refused(one_of("X", "STRING", -1), {"X": np.array([b"a", "\ud800"], object)})
    assert "'X'" in text
    assert "(model 'm')" in text


def test_a_refused_request_leaves_nothing_behind() -> None:
    model = signature(8)
    for _ in range(3):
        refused(model, inputs(9))
        assert model.request(inputs(8)).batch_size == 8


# Memory for inputs


def test_memory_for_an_input_has_its_datatype_and_size() -> None:
    assert signature().empty_dtype("B", (2, 3)) == (np.dtype(np.int32), 24)
    assert signature().empty_dtype("A", ()) == (np.dtype(F32), 4)
    assert signature().empty_dtype("A", (0, 5)) == (np.dtype(F32), 0)


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("W", (1,), "unexpected inference input 'W' for model 'm'"),
        ("A", (-1,), "input 'A' cannot have the shape [-1]"),
        ("A", (1,) * 33, "cannot have the shape"),
        ("A", (2**50,), "is too large"),
        ("A", (2**40, 2**40), "is too large"),
    ],
)
def test_memory_that_no_input_can_have_is_refused(name: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        signature().empty_dtype(name, shape)
    assert words in str(caught.value)


def test_strings_are_not_written_in_place() -> None:
    with pytest.raises(InvalidRequest, match="strings have no fixed size"):
        one_of("X", "STRING", -1).empty_dtype("X", (1,))


# Which requests share a batch


def signature_of(given: dict[str, Any], *, is_ragged: bool) -> object:
    raw = {
        "name": "m",
        "backend": "any",
        "max_batch_size": 4,
        "input": [
            {**tensor("A", "FP32", -1), "allow_ragged_batch": is_ragged, "optional": True},
            tensor("B", "INT32", -1),
        ],
        "output": [tensor("Y", "FP32", 4)],
    }
    return Signature(ModelConfig.from_dict(raw)).request(given).signature


@pytest.mark.parametrize(
    ("a", "b", "shares", "shares_ragged"),
    [
        ((1, 2), (1, 3), True, True),
        ((3, 2), (3, 3), True, True),  # another number of rows
        ((1, 7), (1, 3), False, True),
        ((2, 7), (2, 3), False, True),
        ((1, 2), (1, 4), False, False),
        (None, (1, 3), False, False),
    ],
)
def test_shapes_of_ragged_inputs_part_no_batch(
    a: tuple[int, ...] | None, b: tuple[int, ...], shares: bool, shares_ragged: bool
) -> None:
    first = {"A": np.zeros((1, 2), F32), "B": np.zeros((1, 3), np.int32)}
    other: dict[str, Any] = {"B": np.zeros(b, np.int32)}
    if a is not None:
        other["A"] = np.zeros(a, F32)
    for is_ragged, expected in ((False, shares), (True, shares_ragged)):
        same = signature_of(first, is_ragged=is_ragged) == signature_of(other, is_ragged=is_ragged)
        assert same == expected
