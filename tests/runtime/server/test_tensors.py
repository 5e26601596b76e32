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
from moonpool.runtime.server.inference.tensors import BadJson

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


@pytest.mark.promise(
    "Tensors and requests of clients", "Whole numbers that do not fit their datatype are refused, not wrapped."
)
@pytest.mark.parametrize("value", [256, -1])
def test_whole_numbers_that_do_not_fit_are_refused(value: int) -> None:
    with pytest.raises(InvalidRequest, match="input 'X' has values that do not fit its datatype UINT8"):
        tensors.of_values("X", CODES["UINT8"], [1], [value])


def test_texts_without_utf_8_form_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        tensors.of_values("X", BYTES, [1], ["\ud800"])


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


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
def test_an_output_may_be_empty_or_have_no_dimension(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.float32)

    assert bytes(tensors.to_bytes(WireTensor.of(array))) == array.tobytes()
    assert tensors.to_values("Y", WireTensor.of(array)) == array.ravel().tolist()


def test_bytes_of_a_stub_that_are_no_strings_are_an_error() -> None:
    with pytest.raises(ModelError):
        tensors.to_values("Y", WireTensor(BYTES, (3,), np.frombuffer(encode_bytes(np.array([b"a"], object)), np.uint8)))
