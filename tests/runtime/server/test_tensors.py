"""Tensors of clients from bytes and JSON values, and back."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.ipc.tensors import BF16, BYTES, CODES, DTYPES, NAMES, encode_bytes
from moonpool.runtime.errors import InvalidRequest, ModelError
from moonpool.runtime.model.request import WireTensor
from moonpool.runtime.server.inference import tensors
from moonpool.runtime.server.inference.tensors import BadJson, BadStrings, WrongSize

pytestmark = pytest.mark.promise(
    "Tensors and requests of clients",
    "A client's bytes become inputs without a copy, and JSON values become values of the "
    "datatype. Anything else is refused with Triton's texts.",
)

FIXED = [code for code in DTYPES if code != BF16]


def array_of(value: tensors.Input) -> np.ndarray:
    assert isinstance(value, np.ndarray)
    return value


@pytest.mark.parametrize("code", FIXED, ids=lambda code: NAMES[code])
def test_bytes_become_an_array_without_a_copy(code: int) -> None:
    array = np.arange(6).astype(DTYPES[code])
    data = b"..." + array.tobytes()

    made = array_of(tensors.of_bytes("X", code, [2, 3], data, 3, array.nbytes))

    assert made.dtype == array.dtype
    assert made.tolist() == array.reshape(2, 3).tolist()
    assert not made.flags.owndata


@pytest.mark.parametrize("code", [BYTES, BF16], ids=lambda code: NAMES[code])
def test_a_datatype_that_numpy_lacks_stays_bytes(code: int) -> None:
    made = tensors.of_bytes("X", code, [2], b"\1\2\3\4", 0, 4)

    assert isinstance(made, WireTensor)
    assert (made.datatype, made.shape, made.raw.tolist()) == (code, (2,), [1, 2, 3, 4])


@pytest.mark.parametrize("shape", [[0], [3, 0], [0, 2]])
def test_an_empty_tensor_has_its_shape(shape: list[int]) -> None:
    assert array_of(tensors.of_bytes("X", CODES["FP32"], shape, b"", 0, 0)).shape == tuple(shape)


def test_a_size_that_the_shape_does_not_have_is_refused() -> None:
    with pytest.raises(WrongSize) as caught:
        tensors.of_bytes("X", CODES["FP32"], [4], b"0" * 15, 0, 15)

    assert caught.value.for_model("m") == (
        "input byte size mismatch for input 'X' for model 'm'. Expected 16, got 15"
    )


@pytest.mark.parametrize("shape", [[-1], [True], [1.0], ["1"], [2**62, 4], [1] * 40])
def test_a_malformed_shape_is_refused(shape: list[Any]) -> None:
    with pytest.raises(InvalidRequest):
        tensors.of_bytes("X", CODES["FP32"], shape, b"1234", 0, 4)


@pytest.mark.parametrize(
    ("datatype", "values", "expected"),
    [
        ("FP32", [1, 2.5, -0.0], [1.0, 2.5, 0.0]),
        ("FP64", [0.1, 1e300, 3], [0.1, 1e300, 3.0]),
        ("BOOL", [True, False, True], [True, False, True]),
        ("UINT8", [0, 255, 7], [0, 255, 7]),
        ("INT8", [-128, 127, 0], [-128, 127, 0]),
        ("UINT64", [2**64 - 1, 0, 1], [2**64 - 1, 0, 1]),
        ("INT64", [-(2**63), 2**63 - 1, 0], [-(2**63), 2**63 - 1, 0]),
    ],
)
def test_values_become_an_array(datatype: str, values: list[Any], expected: list[Any]) -> None:
    made = array_of(tensors.of_values("X", CODES[datatype], [3], values))

    assert made.dtype == DTYPES[CODES[datatype]]
    assert made.tolist() == expected


@pytest.mark.parametrize(
    "values", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[[1], [2]], [[3], [4]]], [[1, 2], 3, 4]]
)
def test_values_may_be_nested_or_flat(values: list[Any]) -> None:
    assert array_of(tensors.of_values("X", CODES["INT32"], [2, 2], values)).tolist() == [
        [1, 2],
        [3, 4],
    ]


def test_a_number_too_large_for_a_float_is_infinite() -> None:
    assert array_of(tensors.of_values("X", CODES["FP32"], [1], [1e300])).tolist() == [np.inf]


NON = "attempt to access JSON non-"


@pytest.mark.promise(
    "Tensors and requests of clients",
    "Whole numbers that do not fit their datatype are refused, not wrapped.",
)
@pytest.mark.parametrize(
    ("datatype", "values", "error", "text"),
    [
        ("FP32", [True], BadJson, f"Unable to parse 'data': {NON}number as double"),
        ("FP32", ["1"], BadJson, f"Unable to parse 'data': {NON}number as double"),
        ("FP32", [None], BadJson, f"Unable to parse 'data': {NON}number as double"),
        ("FP32", "x", BadJson, f"Unable to parse 'data': {NON}array as array"),
        ("FP32", None, BadJson, f"Unable to parse 'data': {NON}array as array"),
        ("FP32", [1, 2], BadJson, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
        ("UINT8", [1.0], BadJson, f"Unable to parse 'data': {NON}unsigned-integer as unsigned-integer"),
        ("INT8", [1.5], BadJson, f"Unable to parse 'data': {NON}signed-integer as signed-integer"),
        ("BOOL", [1], BadJson, f"Unable to parse 'data': {NON}boolean as boolean"),
        ("BYTES", [1], BadStrings, f"Unable to parse JSON bytes array: {NON}string as string"),
        ("UINT8", [256], InvalidRequest, "input 'X' has values that do not fit its datatype UINT8"),
        ("UINT8", [-1], InvalidRequest, "input 'X' has values that do not fit its datatype UINT8"),
        ("FP16", [1.0], InvalidRequest, "receiving FP16 data via JSON is not supported. "
         "Please use the binary data format for input X"),
        ("BF16", [1.0], InvalidRequest, "receiving BF16 data via JSON is not supported. "
         "Please use the binary data format for input X"),
        ("BYTES", ["\ud800"], InvalidRequest, None),
    ],
)  # fmt: skip
def test_other_values_are_refused_in_triton_s_words(
    datatype: str, values: Any, error: type[Exception], text: str | None
) -> None:
    with pytest.raises(error) as caught:
        tensors.of_values("X", CODES[datatype], [1], values)

    if text is not None:
        assert str(caught.value) == text


def test_arrays_without_end_are_refused() -> None:
    deep: list[Any] = [1]
    for _ in range(100):
        deep = [deep]

    with pytest.raises(BadJson):
        tensors.of_values("X", CODES["INT32"], [1], deep)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_strings_come_back_as_they_went(texts: list[str]) -> None:
    made = tensors.of_values("X", BYTES, [len(texts)], texts)

    assert isinstance(made, WireTensor)
    assert tensors.to_values("X", made) == texts
    assert bytes(tensors.to_bytes(made)) == b"".join(
        struct.pack("<I", len(text.encode())) + text.encode() for text in texts
    )


@pytest.mark.parametrize("code", FIXED, ids=lambda code: NAMES[code])
def test_an_output_comes_as_its_bytes(code: int) -> None:
    array = np.arange(4).astype(DTYPES[code]).reshape(2, 2)

    output = WireTensor.of(array)

    assert bytes(tensors.to_bytes(output)) == array.tobytes()
    if NAMES[code] != "FP16":
        assert tensors.to_values("Y", output) == array.ravel().tolist()


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_an_output_may_be_empty_or_have_no_dimension(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.float32)

    assert bytes(tensors.to_bytes(WireTensor.of(array))) == array.tobytes()
    assert tensors.to_values("Y", WireTensor.of(array)) == array.ravel().tolist()


def test_an_output_that_json_cannot_carry_is_an_error() -> None:
    with pytest.raises(ModelError, match="sending FP16 data via JSON is not supported"):
        tensors.to_values("Y", WireTensor.of(np.zeros(1, np.float16)))
    no_utf8 = np.array([b"\xff"], object)
    with pytest.raises(ModelError, match="no UTF-8"):
        tensors.to_values("Y", WireTensor.of(no_utf8))


def test_bytes_of_a_stub_that_are_no_strings_are_an_error() -> None:
    with pytest.raises(ModelError):
        tensors.to_values(
            "Y",
            WireTensor(
                BYTES, (3,), np.frombuffer(encode_bytes(np.array([b"a"], object)), np.uint8)
            ),
        )


def test_no_other_name_is_a_datatype() -> None:
    names: list[object] = ["fp32", "TYPE_FP32", "", None, 3, []]
    for name in names:
        with pytest.raises(InvalidRequest, match="invalid datatype for input X"):
            tensors.code_of(name, "X")
