"""DLPack on CPU tensors, in both directions."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from moonpool.stub.errors import TritonModelException
from moonpool.stub.tensor import Tensor


class Device:
    """An object that claims to be on a device."""

    def __init__(self, device_type: int) -> None:
        self._device_type = device_type

    def __dlpack__(self) -> object:
        raise AssertionError("must not be asked for")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self._device_type, 0)


@pytest.mark.parametrize("dtype", ["?", "u1", "u8", "i4", "f2", "f4", "f8"])
def test_a_tensor_made_of_an_array_shares_its_memory(dtype: str) -> None:
    array = np.ones((2, 3), dtype)
    tensor = Tensor.from_dlpack("X", array)
    tensor.as_numpy()[0, 0] = 0

    assert array[0, 0] == 0
    assert tensor.as_numpy().dtype == array.dtype
    assert type(tensor.as_numpy()) is np.ndarray
    assert tensor.shape() == [2, 3]


def test_numpy_reads_a_tensor_without_a_copy() -> None:
    array = np.arange(6.0)
    view = np.from_dlpack(Tensor("X", array))

    assert np.shares_memory(view, array)


def test_the_memory_lives_as_long_as_the_last_view() -> None:
    class Owner(np.ndarray):
        pass

    array = np.arange(6.0).view(Owner)
    watch = weakref.ref(array)
    tensor = Tensor.from_dlpack("X", array)
    piece = tensor.as_numpy()[2:4]
    del array, tensor
    gc.collect()
    assert watch() is not None
    assert piece.tolist() == [2.0, 3.0]

    del piece
    gc.collect()
    assert watch() is None


def test_a_capsule_can_be_used_once() -> None:
    capsule = Tensor("X", np.zeros(3)).to_dlpack()
    Tensor.from_dlpack("Y", capsule)

    assert "used_dltensor" in repr(capsule)
    with pytest.raises(TritonModelException, match="Provided tensor is not supported"):
        Tensor.from_dlpack("Y", capsule)


def test_bf16_travels_by_dlpack() -> None:
    raw = np.arange(8, dtype=np.uint8)
    tensor = Tensor.from_dlpack("Y", Tensor.from_wire("X", 14, [2, 2], raw))

    assert (tensor.triton_dtype(), tensor.shape()) == (14, [2, 2])
    assert tensor._wire is not None
    assert tensor._wire.tolist() == raw.tolist()
    assert np.shares_memory(tensor._wire, raw)


def test_an_empty_array_makes_an_empty_tensor() -> None:
    tensor = Tensor.from_dlpack("X", np.zeros((0, 3)))

    assert tensor.shape() == [0, 3]
    assert tensor.as_numpy().shape == (0, 3)


def test_strings_have_no_dlpack_form() -> None:
    tensor = Tensor("X", np.array([b"a"], np.object_))

    with pytest.raises(
        TritonModelException, match=r"^DLPack does not have support for string tensors\.$"
    ):
        tensor.to_dlpack()


def test_a_read_only_array_is_copied() -> None:
    array = np.zeros(3)
    array.flags.writeable = False

    assert not np.shares_memory(np.from_dlpack(Tensor("X", array)), array)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (3, "Provided tensor is not supported. Tensor must be a DLPack capsule         or have"),
        (np.zeros((4, 4))[:, ::2], "DLPack tensor is not contiguous. Only contiguous DLPack"),
        (np.zeros(3, np.complex64), 'DType code "5" is not supported.'),
        (Device(10), "DLDevice type 10 is not support by Python backend."),
        (Device(2), "moonpool does not offer tensors in GPU memory (Tensor.from_dlpack) yet."),
    ],
)
def test_what_cannot_be_a_tensor_is_refused_in_tritons_words(source: object, text: str) -> None:
    with pytest.raises(TritonModelException) as caught:
        Tensor.from_dlpack("X", source)

    assert str(caught.value).startswith(text)


def test_the_name_is_looked_at_first() -> None:
    with pytest.raises(TritonModelException, match="Tensor name cannot be an empty string"):
        Tensor.from_dlpack("", 3)
    name: Any = None
    with pytest.raises(TypeError):
        Tensor.from_dlpack(name, np.zeros(1))


def test_a_tensor_is_on_the_cpu() -> None:
    assert Tensor("X", np.zeros(1)).__dlpack_device__() == (1, 0)
