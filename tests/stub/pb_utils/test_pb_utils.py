"""Tests the module that models import, outside of a stub."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.heap_region import HeapRegion

import moonpool.stub.pb_utils as pb_utils
from moonpool.ipc.memory import lease_of
from moonpool.stub.pb_utils.memory import use_memory

pytestmark = pytest.mark.promise(
    "Models",
    "`triton_python_backend_utils` has the names, types, exceptions and texts of Triton's module in its default mode.",
)


@pytest.mark.parametrize(
    ("wire", "text"), [(b"\1\0", "incomplete length field"), (b"\2\0\0\0a", "string extends beyond buffer")]
)
def test_broken_strings_are_refused(wire: bytes, text: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=text):
        pb_utils.deserialize_bytes_tensor(wire)


@pytest.fixture
def region() -> Iterator[HeapRegion]:
    region = HeapRegion(1, 4096)
    memory = SimpleNamespace(empty=lambda size: region.lease(64, size, lambda _: None, None))
    use_memory(cast(Any, memory))
    yield region
    use_memory(None)


@pytest.mark.usefixtures("region")
def test_an_empty_array_lies_in_the_stubs_memory() -> None:
    array = pb_utils.empty((2, 3), np.float32)
    array[:] = 1

    assert array.shape == (2, 3)
    assert array.dtype == np.float32
    assert lease_of(array) is not None
    assert lease_of(pb_utils.empty(4, "i8")) is not None


@pytest.mark.usefixtures("region")
@pytest.mark.parametrize(("shape", "dtype"), [((0, 3), "f4"), (2, "O")])
def test_an_array_without_bytes_is_an_ordinary_one(shape: int, dtype: str) -> None:
    array = pb_utils.empty(shape, dtype)

    assert array.dtype == dtype
    assert lease_of(array) is None
