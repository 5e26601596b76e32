"""Tests DLPack on CPU tensors, in both directions."""

from __future__ import annotations

import ctypes
import gc
import re
import struct
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.stub.pb_utils.capsules import address_of, overwrite

from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.tensor import Tensor


class Device:
    """An object that claims to be on a device."""

    def __init__(self, device_type: int) -> None:
        self._device_type = device_type

    def __dlpack__(self) -> object:
        raise AssertionError("must not be asked for")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self._device_type, 0)


class Owner(np.ndarray):
    """An array that can be watched."""


class Giver:
    """Is a foreign tensor that returns what the test says."""

    def __init__(self, give: Callable[..., object], device: object = (1, 0)) -> None:
        self._give = give
        self._device = device

    def __dlpack__(self, **asked: object) -> object:
        return self._give(**asked)

    def __dlpack_device__(self) -> object:
        return self._device


Capsule = Callable[[NDArray[Any]], Any]
CAPSULES: dict[str, Capsule] = {"first form": lambda array: array.__dlpack__()}
if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
    CAPSULES["later form"] = lambda array: array.__dlpack__(max_version=(1, 0))


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", ["?", "u1", "u8", "i4", "f2", "f4", "f8"])
def test_a_tensor_made_of_an_array_shares_its_memory(dtype: str) -> None:
    array = np.ones((2, 3), dtype)
    tensor = Tensor.from_dlpack("X", array)
    tensor.as_numpy()[0, 0] = 0

    assert array[0, 0] == 0
    assert tensor.as_numpy().dtype == array.dtype
    assert type(tensor.as_numpy()) is np.ndarray
    assert tensor.shape() == [2, 3]


def test_the_memory_lives_as_long_as_the_last_view() -> None:
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


@pytest.mark.promise("DLPack", "A capsule keeps its memory, that …")
@pytest.mark.parametrize("make", CAPSULES)
@pytest.mark.parametrize("shape", [(3,), (0, 3), ()])
def test_a_capsule_can_be_used_once(make: str, shape: tuple[int, ...]) -> None:
    capsule = CAPSULES[make](np.zeros(shape))
    Tensor.from_dlpack("Y", capsule)

    assert "used_dltensor" in repr(capsule)
    with pytest.raises(TritonModelException, match="Provided tensor is not supported"):
        Tensor.from_dlpack("Y", capsule)


def test_a_capsule_that_nobody_uses_gives_its_memory_back() -> None:
    array = np.arange(6.0).view(Owner)
    watch = weakref.ref(array)
    capsule = Tensor("X", array).to_dlpack()
    del array
    gc.collect()
    assert watch() is not None

    del capsule
    gc.collect()
    assert watch() is None


def test_a_capsule_outlives_the_tensor_and_the_request() -> None:
    tensor = Tensor("X", np.arange(6.0))
    request = InferenceRequest(inputs=[tensor], requested_output_names=[], model_name="m")
    capsule = request.inputs()[0].to_dlpack()
    del tensor, request
    gc.collect()
    more = [np.full(6, -1.0) for _ in range(100)]

    assert Tensor.from_dlpack("Y", capsule).as_numpy().tolist() == [0, 1, 2, 3, 4, 5]
    del more


def test_bf16_travels_by_dlpack() -> None:
    raw = np.arange(8, dtype=np.uint8)
    tensor = Tensor.from_dlpack("Y", Tensor.from_wire("X", 14, [2, 2], raw))

    assert (tensor.triton_dtype(), tensor.shape()) == (14, [2, 2])
    capsule = tensor.__dlpack__(max_version=(1, 0))
    (data,) = struct.unpack("Q", ctypes.string_at(address_of(capsule, "later form") + 32, 8))
    assert data == address(raw)
    again = Tensor.from_dlpack("Z", capsule)
    assert (again.triton_dtype(), again.shape()) == (14, [2, 2])


@pytest.mark.promise("DLPack", "Arrays and PyTorch's tensors, BF16 among them, go in and out at the same address.")
@pytest.mark.parametrize("make", CAPSULES)
@pytest.mark.parametrize(
    "array",
    [np.zeros((0, 3)), np.array(7.5), np.array([True, False]), np.arange(24.0).reshape(2, 1, 3, 4)],
    ids=["empty", "0-d", "bool", "4-d"],
)
def test_any_shape_goes_in_and_out_at_the_same_address(make: str, array: NDArray[Any]) -> None:
    tensor = Tensor.from_dlpack("X", CAPSULES[make](array))
    back = np.from_dlpack(tensor)

    assert tensor.shape() == list(array.shape)
    assert np.array_equal(back, array)
    assert back.dtype == tensor.as_numpy().dtype == array.dtype
    if array.size:
        assert address(back) == address(tensor.as_numpy()) == address(array)


def test_a_strided_array_goes_out_in_its_order() -> None:
    array = np.arange(12.0).reshape(3, 4)

    assert np.array_equal(np.from_dlpack(Tensor("X", array.T)), array.T)
    assert np.array_equal(np.from_dlpack(Tensor("X", array[::-1, ::2])), array[::-1, ::2])


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 1)).T, np.zeros((4, 4))[:1], np.zeros((4, 4))[:0, ::2]],
    ids=["transposed row", "first row", "no rows"],
)
def test_strides_that_nothing_is_reached_by_do_not_matter(array: NDArray[Any]) -> None:
    assert Tensor.from_dlpack("X", array).shape() == list(array.shape)


def read_only() -> NDArray[Any]:
    array = np.arange(3.0)
    array.flags.writeable = False
    return array


def test_read_only_memory_is_copied_for_the_first_form_which_has_no_word_for_it() -> None:
    array = read_only()
    view = Tensor.from_dlpack("Y", Tensor("X", array).to_dlpack()).as_numpy()

    assert view.flags.writeable
    assert not np.shares_memory(view, array)
    assert view.tolist() == array.tolist()
    with pytest.raises(BufferError, match="read-only"):
        Tensor("X", array).__dlpack__(copy=False)


@pytest.mark.promise("DLPack", "Copies, devices and read-only memory follow …")
@pytest.mark.skipif("later form" not in CAPSULES, reason="this numpy has only DLPack's first form")
def test_read_only_memory_stays_so_in_the_later_form() -> None:
    array = read_only()
    tensor = Tensor.from_dlpack("Y", array)
    again = np.from_dlpack(tensor)

    assert address(again) == address(tensor.as_numpy()) == address(array)
    assert not again.flags.writeable
    assert not tensor.as_numpy().flags.writeable


@pytest.mark.promise("DLPack", "Copies, devices and read-only memory follow the array API's standard.")
def test_a_copy_is_made_where_it_is_asked_for() -> None:
    array = np.arange(3.0)
    tensor = Tensor("X", array)

    def shares(capsule: object) -> bool:
        return np.shares_memory(Tensor.from_dlpack("Y", capsule).as_numpy(), array)

    assert not shares(tensor.__dlpack__(copy=True))
    assert not shares(tensor.__dlpack__(max_version=(1, 0), copy=True))
    assert shares(tensor.__dlpack__(copy=False))
    assert shares(tensor.__dlpack__(None, dl_device=(1, 0), max_version=(9, 9)))
    with pytest.raises(BufferError, match=r"not on device \(2, 0\)"):
        tensor.__dlpack__(dl_device=(2, 0))


def test_exceptions_of_the_foreign_object_are_passed_on() -> None:
    def fail(**_: object) -> object:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        Tensor.from_dlpack("X", Giver(fail))
    with pytest.raises(TypeError, match="Object of type 'int' is not an instance of 'capsule'"):
        Tensor.from_dlpack("X", Giver(lambda **_: 3))
    with pytest.raises(TypeError):
        Tensor.from_dlpack("X", Giver(lambda **_: 3, device=7))


def test_an_object_that_knows_the_first_form_only_is_asked_for_that() -> None:
    array = np.arange(3.0)

    class Old(Giver):
        def __dlpack__(self) -> object:  # type: ignore[override]
            return array.__dlpack__()

    assert address(Tensor.from_dlpack("X", Old(dict)).as_numpy()) == address(array)


@pytest.mark.promise("DLPack", "An object that cannot be a …")
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"data": 0}, "DLPack tensor has elements but no memory."),
        ({"code": 4, "bits": 32}, "Expected BF16 tensor to have 16 bits, but had: 32"),
        ({"code": 9}, 'DType code "9" is not supported.'),
        ({"bits": 4}, 'DType code "2" is not supported.'),
        ({"lanes": 4}, 'DType code "2" is not supported.'),
        ({"device_type": 16}, "DLDevice type 16 is not support by Python backend."),
    ],
)
@pytest.mark.parametrize("form", CAPSULES)
def test_a_capsule_is_looked_at_before_it_is_believed(form: str, fields: dict[str, int], text: str) -> None:
    capsule = CAPSULES[form](np.zeros((2, 2)))
    overwrite(capsule, form, **fields)

    with pytest.raises(TritonModelException, match=re.escape(text)):
        Tensor.from_dlpack("X", capsule)
    assert "used" not in repr(capsule)


@pytest.mark.skipif("later form" not in CAPSULES, reason="this numpy has only DLPack's first form")
def test_a_form_from_the_future_is_refused() -> None:
    capsule = CAPSULES["later form"](np.zeros((2, 2)))
    ctypes.memmove(address_of(capsule, "later form"), struct.pack("I", 2), 4)
    # A capsule of this version may hold something else in this place, which is not an address.
    overwrite(capsule, "later form", shape=8)

    with pytest.raises(TritonModelException, match=r"DLPack version 2 is not supported\."):
        Tensor.from_dlpack("X", capsule)


@pytest.mark.promise("DLPack", "An object that cannot be a tensor is refused with Triton's text, before it is used.")
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (3, "Provided tensor is not supported. Tensor must be a DLPack capsule         or have"),
        (np.zeros((4, 4))[:, ::2], "DLPack tensor is not contiguous. Only contiguous DLPack"),
        (np.zeros(3, np.complex64), 'DType code "5" is not supported.'),
        (Device(10), "DLDevice type 10 is not support by Python backend."),
    ],
)
def test_an_impossible_tensor_is_refused_in_tritons_words(source: object, text: str) -> None:
    with pytest.raises(TritonModelException) as caught:
        Tensor.from_dlpack("X", source)

    assert str(caught.value).startswith(text)
