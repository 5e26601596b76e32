"""Tests which arrays tensors take, what they keep, and what they refuse."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from moonpool.ipc.tensors import encode_bytes
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.tensor import Tensor

pytestmark = pytest.mark.promise(
    "Models", "`triton_python_backend_utils` has the names, types, exceptions …"
)

DTYPES = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"]


@pytest.mark.parametrize(("dtype", "code"), list(zip(DTYPES, range(1, 13), strict=True)))
def test_an_array_is_kept_and_not_copied(dtype: str, code: int) -> None:
    array = np.ones((2, 3), dtype)
    tensor = Tensor("X", array)

    assert tensor.as_numpy() is array
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype()) == ("X", [2, 3], code)
    assert tensor.is_cpu()


def test_an_array_that_is_not_contiguous_is_copied_at_once() -> None:
    array = np.arange(6.0).reshape(2, 3).T
    tensor = Tensor("X", array)

    assert tensor.as_numpy().flags.c_contiguous
    np.testing.assert_array_equal(tensor.as_numpy(), array)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,) * 32])
def test_unusual_shapes_are_kept(shape: tuple[int, ...]) -> None:
    tensor = Tensor("X", np.zeros(shape))

    assert tensor.shape() == list(shape)
    assert tensor.as_numpy().shape == shape


@pytest.mark.parametrize("array", [None, [1, 2], 3, 1.5, np.float32(1)])
def test_a_value_that_is_not_an_array_is_a_type_error(array: Any) -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        Tensor("X", array)


@pytest.mark.parametrize("name", [None, 3, ["X"]])
def test_a_name_that_is_no_text_is_a_type_error(name: Any) -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        Tensor(name, np.zeros(1))


def test_the_types_are_looked_at_before_the_empty_name() -> None:
    nothing: Any = None
    with pytest.raises(TypeError):
        Tensor("", nothing)
    with pytest.raises(TritonModelException, match=r"^Tensor name cannot be an empty string\.$"):
        Tensor("", np.zeros(1))


def test_a_name_may_be_bytes_as_it_may_in_triton() -> None:
    name: Any = b"X"
    assert Tensor(name, np.zeros(1)).name() == "X"


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(1, np.complex64),
        np.zeros(1, "M8[s]"),
        np.array(["text"]),
        np.zeros(1, ">f4"),
        np.zeros(1, ml_dtypes.bfloat16),
        np.zeros(1, [("a", "f4")]),
    ],
    ids=lambda array: str(array.dtype),
)
def test_other_dtypes_are_refused(array: Any) -> None:
    with pytest.raises(TritonModelException, match=r"^NumPy dtype is not supported\.$"):
        Tensor("X", array)


def test_strings_are_encoded_when_the_tensor_is_made() -> None:
    array = np.array([b"a", "ä", 7], np.object_)
    tensor = Tensor("X", array)
    array[0] = b"changed later"

    assert tensor._array is None
    assert tensor._wire is not None
    assert tensor._wire.tobytes() == b"\1\0\0\0a\2\0\0\0\xc3\xa4\1\0\0\0007"
    assert tensor.as_numpy() is array
    assert tensor.triton_dtype() == 13


def test_fixed_width_strings_are_strings_too() -> None:
    tensor = Tensor("X", np.array([b"ab", b"c"]))

    assert tensor._wire is not None
    assert tensor._wire.tobytes() == b"\2\0\0\0ab\1\0\0\0c"


def test_a_string_without_utf_8_form_is_refused() -> None:
    with pytest.raises(TritonModelException, match="element 0 of tensor 'X'"):
        Tensor("X", np.array(["\ud800"], np.object_))


def test_an_input_is_a_view_that_can_be_written_to() -> None:
    memory = np.zeros(4, np.float32)
    tensor = Tensor.from_wire("X", 11, [2, 2], memory.reshape(2, 2))
    tensor.as_numpy()[1, 1] = 5

    assert memory[3] == 5
    assert tensor.as_numpy() is tensor.as_numpy()


def test_strings_from_the_wire_are_decoded_once() -> None:
    wire = np.frombuffer(encode_bytes(np.array([b"a", b""], np.object_)), np.uint8)
    tensor = Tensor.from_wire("X", 13, [1, 2], wire)

    assert tensor.as_numpy().tolist() == [[b"a", b""]]
    assert tensor.as_numpy() is tensor.as_numpy()


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (b"\1\0", "incomplete length field"),
        (b"\5\0\0\0a", "string extends beyond buffer"),
    ],
)
def test_broken_strings_from_the_wire_are_an_error_of_tritons(wire: bytes, text: str) -> None:
    tensor = Tensor.from_wire("X", 13, [1], np.frombuffer(wire, np.uint8))

    with pytest.raises(TritonModelException, match=f"Invalid bytes tensor data: {text}"):
        tensor.as_numpy()


def test_bf16_has_no_numpy_form() -> None:
    tensor = Tensor.from_wire("X", 14, [2], np.zeros(4, np.uint8))

    with pytest.raises(TritonModelException, match="Tensor dtype is BF16 and cannot be converted"):
        tensor.as_numpy()


def test_classes_go_by_the_name_that_tritons_texts_give_them() -> None:
    assert str(Tensor) == "<class 'c_python_backend_utils.Tensor'>"
