"""Tests that every tensor comes back from a model as it was sent, and that lack of memory is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.e2e.hosting import ECHO, MODELS, Config, hosted, options, same, tensor

import moonpool
from moonpool import ConfigError, InvalidRequest, OutOfMemory

ECHO_FILE = MODELS / "echo.py"
ARRAYS: dict[str, NDArray[Any]] = {
    "BOOL": np.array([[True, False], [False, True]]),
    "UINT8": np.array([[0, 255], [1, 2]], np.uint8),
    "UINT16": np.array([[0, 65535], [1, 2]], np.uint16),
    "UINT32": np.array([[0, 2**32 - 1], [1, 2]], np.uint32),
    "UINT64": np.array([[0, 2**64 - 1], [1, 2]], np.uint64),
    "INT8": np.array([[-128, 127], [1, 2]], np.int8),
    "INT16": np.array([[-32768, 32767], [1, 2]], np.int16),
    "INT32": np.array([[-(2**31), 2**31 - 1], [1, 2]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1], [1, 2]], np.int64),
    "FP16": np.array([[-65504, 65504], [np.nan, 6e-8]], np.float16),
    "FP32": np.array([[np.inf, -np.inf], [np.nan, -0.0]], np.float32),
    "FP64": np.array([[np.inf, 5e-324], [np.nan, -0.0]], np.float64),
    "STRING": np.array([[b"", b"\x00\xff"], ["\u00fcber".encode(), b"x" * 10_000]], object),
}


@pytest.fixture(scope="module")
def models(runtime: moonpool.Runtime) -> Iterator[None]:
    types: Config = {
        "input": [tensor(name, name, -1, -1) | {"optional": True} for name in ARRAYS],
        "output": [tensor("OUT_" + name, name, -1, -1) for name in ARRAYS],
    }
    with (
        hosted(runtime, "echo", ECHO_FILE, ECHO),
        hosted(runtime, "types", ECHO_FILE, types),
        hosted(runtime, "deep", ECHO_FILE, shaped(*[-1] * 32)),
        hosted(runtime, "small", ECHO_FILE, ECHO | options(REGION_LIMIT_BYTES="1M")),
    ):
        yield


pytestmark = pytest.mark.usefixtures("models")


def shaped(*dims: int) -> Config:
    return {"input": [tensor("X", "UINT8", *dims)], "output": [tensor("OUT_X", "UINT8", *dims)]}


@pytest.mark.promise(
    "Requests",
    "Every datatype comes back as it was sent, at any shape of up to 32 dimensions and from any layout in memory.",
)
@pytest.mark.parametrize("name", ARRAYS)
def test_every_datatype_comes_back_as_it_was(runtime: moonpool.Runtime, name: str) -> None:
    outputs = runtime.infer("types", {name: ARRAYS[name]}, timeout_s=60.0)

    assert same(outputs["OUT_" + name], ARRAYS[name])


def test_all_datatypes_travel_together(runtime: moonpool.Runtime) -> None:
    outputs = runtime.infer("types", ARRAYS, timeout_s=60.0)

    assert [name for name in ARRAYS if not same(outputs["OUT_" + name], ARRAYS[name])] == []


@pytest.mark.promise("Requests", "Every datatype comes back as it …")
@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)], ids=str)
def test_tensors_of_nothing_keep_their_shape(runtime: moonpool.Runtime, name: str, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, ARRAYS[name].dtype)

    assert same(runtime.infer("types", {name: array}, timeout_s=60.0)["OUT_" + name], array)


def test_bf16_comes_back_as_it_was(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    """Check BF16, for which Triton's Python backend has no numpy dtype: the model passes it on by DLPack or whole."""
    file = tmp_path / "bf16.py"
    file.write_text(
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack(\n"
        "            'OUT_X', request.inputs()[0].to_dlpack())]) for request in requests]\n"
    )
    config: Config = {"input": [tensor("X", "BF16", -1)], "output": [tensor("OUT_X", "BF16", -1)]}
    x = np.array([1, -2.5, np.nan, np.inf], ml_dtypes.bfloat16)

    with hosted(runtime, "bf16", file, config):
        assert same(runtime.infer("bf16", {"X": x}, timeout_s=60.0)["OUT_X"], x)
        raw = runtime.infer("bf16", {"X": x.view(np.uint16)}, timeout_s=60.0)["OUT_X"]
        assert same(raw, x)


X = np.arange(24, dtype=np.float32)
LAYOUTS: dict[str, Callable[[], NDArray[np.float32]]] = {
    "every other one": lambda: X[::2],
    "backwards": lambda: X[::-1],
    "a column": lambda: X.reshape(6, 4)[:, 1],
    "one repeated": lambda: np.broadcast_to(X[:1], (10,)),
    "unaligned": lambda: np.frombuffer(b"\0" + X.tobytes(), np.uint8)[1:].view(np.float32),
    "of a subclass": lambda: np.matrix(X).A1.view(np.memmap),
}


@pytest.mark.promise("Requests", "Every datatype comes back as it …")
@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_array_may_lie_in_memory_as_it_likes(runtime: moonpool.Runtime, name: str) -> None:
    array = LAYOUTS[name]()
    want = array.copy()

    assert same(runtime.infer("echo", {"X": array}, timeout_s=60.0)["OUT_X"], np.asarray(want))


def test_fortran_order_and_transposes_keep_their_meaning(runtime: moonpool.Runtime) -> None:
    ordinary = np.arange(12, dtype=np.int32).reshape(3, 4)
    for array in (np.asfortranarray(ordinary), ordinary.T, ordinary[::-1, ::-1], ordinary[1:, 1:]):
        got = runtime.infer("types", {"INT32": array}, timeout_s=60.0)["OUT_INT32"]
        assert same(got, np.ascontiguousarray(array))


def test_an_array_that_may_not_be_written_is_only_read(runtime: moonpool.Runtime) -> None:
    x = np.arange(4, dtype=np.float32)
    x.flags.writeable = False

    assert same(runtime.infer("echo", {"X": x}, timeout_s=60.0)["OUT_X"], x)


def test_there_may_be_32_dimensions(runtime: moonpool.Runtime) -> None:
    x = np.arange(4, dtype=np.uint8).reshape((1,) * 30 + (2, 2))

    assert same(runtime.infer("deep", {"X": x}, timeout_s=60.0)["OUT_X"], x)


def test_there_may_not_be_33_dimensions(runtime: moonpool.Runtime) -> None:
    x = np.zeros((1,) * 33, np.uint8)

    with pytest.raises(InvalidRequest, match="unexpected shape for input 'X' for model 'deep'"):
        runtime.infer("deep", {"X": x}, timeout_s=60.0)
    with pytest.raises(ConfigError, match=r"input\[0\].dims"):
        runtime.load("deeper", ECHO_FILE, config=shaped(*[1] * 33))


def test_a_scalar_is_a_row_where_the_model_batches_and_dims_are_1(runtime: moonpool.Runtime) -> None:
    with pytest.raises(InvalidRequest, match=r"Expected \[-1\], got \[\]"):
        runtime.infer("echo", {"X": np.float32(1)}, timeout_s=60.0)
    assert runtime.infer("echo", {"X": [1]}, timeout_s=60.0)["OUT_X"].tolist() == [1]


# Memory


def test_a_tensor_over_the_limit_of_the_regions_is_refused_and_the_model_serves_on(runtime: moonpool.Runtime) -> None:
    before = runtime.instances("small")
    for _ in range(3):
        with pytest.raises(OutOfMemory, match="1048576 are allowed; raise MOONPOOL_REGION_LIMIT"):
            runtime.infer("small", {"X": np.zeros(1 << 20, np.float32)}, timeout_s=60.0)

    x = np.arange(1 << 16, dtype=np.float32)
    assert same(runtime.infer("small", {"X": x}, timeout_s=60.0)["OUT_X"], x)
    assert runtime.instances("small") == before


def test_responses_that_nobody_drops_end_in_an_error_and_dropping_them_ends_that(runtime: moonpool.Runtime) -> None:
    x = np.zeros(1 << 16, np.float32)
    kept: list[NDArray[Any]] = []

    def fill() -> None:
        while len(kept) < 100:
            kept.append(runtime.infer("small", {"X": x + 1}, timeout_s=60.0)["OUT_X"])

    with pytest.raises(OutOfMemory, match="MOONPOOL_REGION_LIMIT_BYTES"):
        fill()
    assert all((one == 1).all() for one in kept)
    kept.clear()
    fill_again = runtime.infer("small", {"X": x}, timeout_s=60.0)["OUT_X"]

    assert same(fill_again, x)


def test_more_than_the_machine_has_is_refused(runtime: moonpool.Runtime) -> None:
    huge = np.broadcast_to(np.float32(1), (1 << 38,))

    with pytest.raises(OutOfMemory, match=r"cannot set aside|are allowed"):
        runtime.infer("echo", {"X": huge}, timeout_s=60.0)
    with pytest.raises(OutOfMemory, match=r"cannot set aside|are allowed"):
        runtime.empty("echo", "X", 1 << 37)
    with pytest.raises(InvalidRequest, match="too large"):
        runtime.empty("echo", "X", 1 << 60)
    assert same(runtime.infer("echo", {"X": X}, timeout_s=60.0)["OUT_X"], X)
