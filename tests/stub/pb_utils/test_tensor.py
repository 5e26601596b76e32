"""Tests which arrays tensors take, what they keep, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from moonpool.ipc.tensors import encode_bytes
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.tensor import Tensor

pytestmark = pytest.mark.promise("Models", "`triton_python_backend_utils` has the names, types, exceptions …")


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
    ("wire", "text"), [(b"\1\0", "incomplete length field"), (b"\5\0\0\0a", "string extends beyond buffer")]
)
def test_broken_strings_from_the_wire_are_an_error_of_tritons(wire: bytes, text: str) -> None:
    tensor = Tensor.from_wire("X", 13, [1], np.frombuffer(wire, np.uint8))

    with pytest.raises(TritonModelException, match=f"Invalid bytes tensor data: {text}"):
        tensor.as_numpy()


def test_bf16_has_no_numpy_form() -> None:
    tensor = Tensor.from_wire("X", 14, [2], np.zeros(4, np.uint8))

    with pytest.raises(TritonModelException, match="Tensor dtype is BF16 and cannot be converted"):
        tensor.as_numpy()
