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
    "`triton_python_backend_utils` has the names, types, exceptions and texts of Triton's "
    "module in its default mode.",
)

# All public names of Triton's two modules.
NAMES = [
    "TRITON_STRING_TO_NUMPY",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "deserialize_bytes_tensor",
    "get_input_tensor_by_name",
    "get_output_tensor_by_name",
    "get_input_config_by_name",
    "get_output_config_by_name",
    "using_decoupled_model_transaction_policy",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "ModelConfig",
    "TritonError",
    "TritonModelException",
    "Tensor",
    "InferenceRequest",
    "InferenceResponse",
    "Logger",
    "PreferredMemory",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_MEMORY_CPU",
    "MetricFamily",
    "load_model",
    "unload_model",
    "is_model_ready",
    "get_model_dir",
    "InferenceResponseSender",
    "ResponseIterator",
    "InferenceTrace",
    "Metric",
    "MetricKind",
    "MemoryType",
]


def test_every_name_of_tritons_is_there_and_exported() -> None:
    assert set(NAMES) <= set(pb_utils.__all__)
    for name in pb_utils.__all__:
        getattr(pb_utils, name)


def test_types_map_as_in_triton() -> None:
    assert pb_utils.triton_string_to_numpy("TYPE_BOOL") is bool
    assert pb_utils.triton_to_numpy_type(1) is np.bool_
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    for number in range(1, 14):
        numpy_type = pb_utils.triton_to_numpy_type(number)
        assert numpy_type is not None
        assert pb_utils.numpy_to_triton_type(numpy_type) == number
        assert pb_utils.numpy_to_triton_type(np.dtype(numpy_type)) == number
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.triton_to_numpy_type(14) is None
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("TYPE_BF16")


def test_strings_are_serialized_and_back() -> None:
    array = np.array([["a", b"\0"], ["ä", 3]], np.object_)
    wire = pb_utils.serialize_byte_tensor(array)

    assert isinstance(wire, bytes)
    assert pb_utils.deserialize_bytes_tensor(wire).tolist() == [b"a", b"\0", b"\xc3\xa4", b"3"]
    assert pb_utils.serialize_byte_tensor(np.empty(0, np.object_)) == ()
    assert pb_utils.serialize_byte_tensor(np.zeros(1)) is None
    assert pb_utils.deserialize_bytes_tensor(b"").shape == (0,)


@pytest.mark.parametrize(
    ("wire", "text"),
    [(b"\1\0", "incomplete length field"), (b"\2\0\0\0a", "string extends beyond buffer")],
)
def test_broken_strings_are_refused(wire: bytes, text: str) -> None:
    with pytest.raises(pb_utils.TritonModelException, match=text):
        pb_utils.deserialize_bytes_tensor(wire)


def test_tensors_are_found_by_name() -> None:
    tensor = pb_utils.Tensor("X", np.zeros(1))
    request = pb_utils.InferenceRequest(inputs=[tensor], requested_output_names=[], model_name="m")
    response = pb_utils.InferenceResponse([tensor])

    assert pb_utils.get_input_tensor_by_name(request, "X") is tensor
    assert pb_utils.get_input_tensor_by_name(request, "Y") is None
    assert pb_utils.get_output_tensor_by_name(response, "X") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "Y") is None


def test_configurations_are_found_by_name() -> None:
    config = {"input": [{"name": "X"}], "model_transaction_policy": {"decoupled": True}}

    assert pb_utils.get_input_config_by_name(config, "X") == {"name": "X"}
    assert pb_utils.get_input_config_by_name(config, "Y") is None
    assert pb_utils.get_output_config_by_name(config, "X") is None
    assert pb_utils.using_decoupled_model_transaction_policy(config)
    assert not pb_utils.using_decoupled_model_transaction_policy({})


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


def test_outside_a_stub_an_empty_array_is_an_ordinary_one() -> None:
    assert pb_utils.empty((2, 3), np.int8).shape == (2, 3)
