"""Tests that PyTorch's tensors on the CPU go in and out of ours at the same address."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from moonpool.stub.pb_utils.tensor import Tensor

torch: Any = pytest.importorskip("torch")

NAMES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "uint16",
    "uint32",
    "uint64",
]


@pytest.mark.promise("DLPack", "Arrays and PyTorch's tensors, BF16 among …")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)], ids=["2-d", "0-d", "empty"])
def test_every_datatype_goes_in_and_comes_out_without_a_copy(name: str, shape: tuple[int, ...]) -> None:
    source = torch.ones(shape).to(getattr(torch, name))
    tensor = Tensor.from_dlpack("X", source)

    back = torch.from_dlpack(tensor)
    by_capsule = torch.utils.dlpack.from_dlpack(tensor.to_dlpack())

    assert tensor.shape() == list(shape)
    for one in (back, by_capsule):
        assert one.dtype == source.dtype
        assert one.shape == source.shape
        assert one.data_ptr() == source.data_ptr()
    if name != "bfloat16":
        assert np.array_equal(tensor.as_numpy(), source.numpy())


def test_torch_writes_into_the_array() -> None:
    array = np.zeros(4, np.float32)

    torch.from_dlpack(Tensor("X", array)).add_(3)

    assert array.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_capsules_of_both_forms_are_taken(version: tuple[int, int] | None) -> None:
    source = torch.arange(4)
    capsule = source.__dlpack__(max_version=version) if version else source.__dlpack__()

    assert Tensor.from_dlpack("X", capsule).as_numpy().tolist() == [0, 1, 2, 3]


def test_memory_lives_while_only_we_look_at_it() -> None:
    source = torch.arange(1000)
    tensor = Tensor.from_dlpack("X", source[100:200])
    del source
    gc.collect()
    others = [torch.zeros(1000) for _ in range(20)]

    assert tensor.as_numpy().tolist() == list(range(100, 200))
    del others


def test_memory_lives_while_only_torch_looks_at_it() -> None:
    tensor = Tensor("X", np.arange(1000))
    view = torch.from_dlpack(tensor)[100:200]
    del tensor
    gc.collect()
    others = [np.zeros(1000) for _ in range(20)]

    assert view.tolist() == list(range(100, 200))
    del others


def test_a_tensor_with_a_gradient_is_refused_in_torchs_words() -> None:
    with pytest.raises(BufferError, match="require gradient"):
        Tensor.from_dlpack("X", torch.ones(3, requires_grad=True))


def test_bf16_keeps_its_values() -> None:
    values = torch.tensor([1.5, -2.0, 3.25e10, float("inf")], dtype=torch.bfloat16)

    back = torch.from_dlpack(Tensor.from_dlpack("X", values.clone()))

    assert torch.equal(back, values)
