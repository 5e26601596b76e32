"""What callers may send, and what they are told when they may not."""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.e2e.hosting import ECHO, MODELS, Config, hosted, options, tensor
from tests.waiting import wait_until

import moonpool
from moonpool import (
    AlreadyLoaded,
    ConfigError,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    ModelUnavailable,
    OutOfMemory,
    RepositoryError,
    RuntimeClosed,
)

ECHO_FILE = MODELS / "echo.py"
PAIR: Config = {
    "max_batch_size": 4,
    "input": [
        tensor("A", "FP32", 3),
        tensor("B", "INT32", -1),
        tensor("C", "STRING", 1) | {"optional": True},
    ],
    "output": [
        tensor("OUT_A", "FP32", 3),
        tensor("OUT_B", "INT32", -1),
        tensor("OUT_C", "STRING", 1),
    ],
}
A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(8, dtype=np.int32).reshape(2, 4)

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
    flat: Config = {"input": [tensor("X", "FP32", 2)], "output": [tensor("OUT_X", "FP32", 2)]}
    with (
        hosted(runtime, "echo", ECHO_FILE, ECHO),
        hosted(runtime, "pair", ECHO_FILE, PAIR),
        hosted(runtime, "types", ECHO_FILE, types),
        hosted(runtime, "flat", ECHO_FILE, flat),
        hosted(runtime, "deep", ECHO_FILE, shaped(*[-1] * 32)),
        hosted(runtime, "small", ECHO_FILE, ECHO | options(REGION_LIMIT_BYTES="1M")),
    ):
        yield


pytestmark = pytest.mark.usefixtures("models")


def shaped(*dims: int) -> Config:
    return {"input": [tensor("X", "UINT8", *dims)], "output": [tensor("OUT_X", "UINT8", *dims)]}


def same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """The same bits, NaN included, in the same shape and dtype."""
    if a.dtype == object or b.dtype == object:
        return a.shape == b.shape and a.tolist() == b.tolist()
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


REFUSED: dict[str, tuple[Mapping[Any, Any], str]] = {
    "a wrong name": (
        {"A": A, "Bb": B},
        "unexpected inference input 'Bb' for model 'pair'",
    ),
    "an input too many": (
        {"A": A, "B": B, "D": A},
        "unexpected inference input 'D' for model 'pair'",
    ),
    "a missing input": (
        {"A": A},
        "expected 2 inputs but got 1 inputs for model 'pair'. Got input(s) ['A'], but missing "
        "required input(s) ['B']. Please provide all required input(s).",
    ),
    "no inputs at all": (
        {},
        "expected 2 inputs but got 0 inputs for model 'pair'. Got input(s) [], but missing "
        "required input(s) ['A','B']. Please provide all required input(s).",
    ),
    "an optional input in the place of a required one": (
        {"A": A, "C": np.array([["x"], ["y"]], object)},
        "missing required input(s) ['B']",
    ),
    "a name that is no text": ({"A": A, "B": B, 7: A}, "unexpected inference input '7'"),
    "None": ({"A": A, "B": None}, "input 'B' for model 'pair' is None"),
    "None for an optional input": (
        {"A": A, "B": B, "C": None},
        "input 'C' for model 'pair' is None",
    ),
    "another datatype": (
        {"A": A.astype(np.float64), "B": B},
        "inference input 'A' data-type is 'FP64', but model 'pair' expects 'FP32'",
    ),
    "strings for numbers": (
        {"A": np.array([["a"] * 3] * 2, object), "B": B},
        "inference input 'A' data-type is 'BYTES', but model 'pair' expects 'FP32'",
    ),
    "numbers for strings": (
        {"A": A, "B": B, "C": np.array([[1], [2]], np.int32)},
        "inference input 'C' data-type is 'INT32', but model 'pair' expects 'BYTES'",
    ),
    "text that is no Unicode": (
        {"A": A, "B": B, "C": np.array([["\ud800"], ["x"]], object)},
        "(model 'pair')",
    ),
    "a dtype that no datatype has": (
        {"A": A.astype(np.complex64), "B": B},
        "tensor 'A' has dtype complex64, which no datatype has; pass the real and imaginary parts",
    ),
    "another byte order": (
        {"A": A.astype(">f4"), "B": B},
        "tensor 'A' has dtype >f4, which no datatype has; convert it first: "
        "array.astype('float32')",
    ),
    "fields": (
        {"A": np.zeros((2, 3), [("x", "f4"), ("y", "f4")]), "B": B},
        "pass one array for each field",
    ),
    "a wrong shape": (
        {"A": np.zeros((2, 4), np.float32), "B": B},
        "unexpected shape for input 'A' for model 'pair'. Expected [-1,3], got [2,4]",
    ),
    "a dimension too few": (
        {"A": np.zeros(3, np.float32), "B": B},
        "unexpected shape for input 'A' for model 'pair'. Expected [-1,3], got [3]",
    ),
    "no dimension": (
        {"A": np.float32(1), "B": B},
        "unexpected shape for input 'A' for model 'pair'. Expected [-1,3], got []",
    ),
    "more rows than the limit": (
        {"A": np.zeros((5, 3), np.float32), "B": np.zeros((5, 1), np.int32)},
        "inference request batch-size must be <= 4 for 'pair'",
    ),
    "no rows": (
        {"A": np.zeros((0, 3), np.float32), "B": np.zeros((0, 1), np.int32)},
        "inference request batch-size must be > 0 for 'pair'",
    ),
    "inputs of different numbers of rows": (
        {"A": A, "B": B[:1]},
        "input 'B' batch size does not match other inputs for 'pair': 1 and 2",
    ),
    "something that is no array": (
        {"A": object(), "B": B},
        "input 'A' for model 'pair' must be a numpy array, not object",
    ),
    "a dictionary": ({"A": {}, "B": B}, "must be a numpy array, not dict"),
    "a ragged list": ({"A": [[1, 2, 3], [4]], "B": B}, "cannot be made an array"),
    "a list of numbers that are too large": (
        {"A": A, "B": [[2**40] * 4] * 2},
        "cannot be made an array",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_does_not_fit_is_refused_before_it_is_sent(
    runtime: moonpool.Runtime, name: str
) -> None:
    inputs, words = REFUSED[name]
    before = runtime.statistics("pair")["execution_count"]

    with pytest.raises(InvalidRequest) as caught:
        runtime.infer("pair", inputs, timeout_s=30.0)

    assert words in str(caught.value)
    assert caught.value.code == "INVALID_ARG"
    assert runtime.statistics("pair")["execution_count"] == before


def test_inputs_that_are_no_mapping_are_refused(runtime: moonpool.Runtime) -> None:
    wrong: Any
    for wrong in ([A, B], A, None, "A"):
        with pytest.raises(InvalidRequest, match="must be a mapping of names to arrays"):
            runtime.infer("pair", wrong, timeout_s=30.0)


def test_any_mapping_and_whatever_is_like_an_array_will_do(runtime: moonpool.Runtime) -> None:
    class Like:
        def __array__(self, dtype: object = None, copy: object = None) -> NDArray[Any]:
            return A

    inputs = UserDict({"A": Like(), "B": B.tolist(), "C": [["x"], [b"y"]]})
    outputs = runtime.infer("pair", inputs, timeout_s=30.0)

    assert same(outputs["OUT_A"], A)
    assert same(outputs["OUT_B"], B)
    assert outputs["OUT_C"].tolist() == [[b"x"], [b"y"]]


def test_an_output_that_the_model_has_not_is_refused(runtime: moonpool.Runtime) -> None:
    with pytest.raises(InvalidRequest, match="unexpected inference output 'Z' for model 'pair'"):
        runtime.infer("pair", {"A": A, "B": B}, outputs=["Z"], timeout_s=30.0)


def test_an_output_that_is_asked_for_twice_comes_once(runtime: moonpool.Runtime) -> None:
    inputs = {"A": A, "B": B}

    outputs = runtime.infer("pair", inputs, outputs=["OUT_A", "OUT_A"], timeout_s=30.0)

    assert list(outputs) == ["OUT_A"]


@pytest.mark.parametrize(
    "parameters", [{"x": None}, {"x": [1]}, {1: "x"}, {"x": b"bytes"}, {"x": np.float32(1)}]
)
def test_parameters_that_are_no_scalars_are_refused(
    runtime: moonpool.Runtime, parameters: dict[Any, Any]
) -> None:
    with pytest.raises(InvalidRequest, match="must be a string with a bool, int, float or str"):
        runtime.infer("pair", {"A": A, "B": B}, parameters=parameters, timeout_s=30.0)


@pytest.mark.parametrize(
    "details",
    [
        {"parameters": {"x": 2**70}},
        {"parameters": {"x": "\ud800"}},
        {"request_id": "\ud800"},
        {"request_id": "x" * (2 << 20)},
        {"correlation_id": -1},
        {"correlation_id": 2**64},
        {"flags": -1},
        {"priority": -1},
        {"priority": 2**64},
        {"queue_timeout_us": -1},
    ],
    ids=lambda details: f"{details}"[:30],
)
def test_details_that_cannot_travel_are_the_caller_s_mistake_and_harm_no_stub(
    runtime: moonpool.Runtime, details: dict[str, Any]
) -> None:
    before = runtime.instances("pair")

    with pytest.raises(InvalidRequest):
        runtime.infer("pair", {"A": A, "B": B}, **details, timeout_s=30.0)

    assert same(runtime.infer("pair", {"A": A, "B": B}, timeout_s=30.0)["OUT_A"], A)
    assert runtime.instances("pair") == before


# Tensors of all kinds


@pytest.mark.parametrize("name", ARRAYS)
def test_every_datatype_comes_back_as_it_was(runtime: moonpool.Runtime, name: str) -> None:
    outputs = runtime.infer("types", {name: ARRAYS[name]}, timeout_s=30.0)

    assert same(outputs["OUT_" + name], ARRAYS[name])


def test_all_datatypes_travel_together(runtime: moonpool.Runtime) -> None:
    outputs = runtime.infer("types", ARRAYS, timeout_s=30.0)

    assert [name for name in ARRAYS if not same(outputs["OUT_" + name], ARRAYS[name])] == []


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)], ids=str)
def test_tensors_of_nothing_keep_their_shape(
    runtime: moonpool.Runtime, name: str, shape: tuple[int, ...]
) -> None:
    array = np.zeros(shape, ARRAYS[name].dtype)

    assert same(runtime.infer("types", {name: array}, timeout_s=30.0)["OUT_" + name], array)


def test_bf16_comes_back_as_it_was(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    """Triton's Python backend has no numpy dtype for it, so the model passes it on by DLPack or whole."""
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
        assert same(runtime.infer("bf16", {"X": x}, timeout_s=30.0)["OUT_X"], x)
        raw = runtime.infer("bf16", {"X": x.view(np.uint16)}, timeout_s=30.0)["OUT_X"]
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


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_array_may_lie_in_memory_as_it_likes(runtime: moonpool.Runtime, name: str) -> None:
    array = LAYOUTS[name]()
    want = array.copy()

    assert same(runtime.infer("echo", {"X": array}, timeout_s=30.0)["OUT_X"], np.asarray(want))


def test_fortran_order_and_transposes_keep_their_meaning(runtime: moonpool.Runtime) -> None:
    ordinary = np.arange(12, dtype=np.int32).reshape(3, 4)
    for array in (np.asfortranarray(ordinary), ordinary.T, ordinary[::-1, ::-1], ordinary[1:, 1:]):
        got = runtime.infer("types", {"INT32": array}, timeout_s=30.0)["OUT_INT32"]
        assert same(got, np.ascontiguousarray(array))


def test_an_array_that_may_not_be_written_is_only_read(runtime: moonpool.Runtime) -> None:
    x = np.arange(4, dtype=np.float32)
    x.flags.writeable = False

    assert same(runtime.infer("echo", {"X": x}, timeout_s=30.0)["OUT_X"], x)


def test_there_may_be_32_dimensions(runtime: moonpool.Runtime) -> None:
    x = np.arange(4, dtype=np.uint8).reshape((1,) * 30 + (2, 2))

    assert same(runtime.infer("deep", {"X": x}, timeout_s=30.0)["OUT_X"], x)


def test_there_may_not_be_33_dimensions(runtime: moonpool.Runtime) -> None:
    x = np.zeros((1,) * 33, np.uint8)

    with pytest.raises(InvalidRequest, match="unexpected shape for input 'X' for model 'deep'"):
        runtime.infer("deep", {"X": x}, timeout_s=30.0)
    with pytest.raises(ConfigError, match=r"input\[0\].dims"):
        runtime.load("deeper", ECHO_FILE, config=shaped(*[1] * 33))


def test_a_scalar_is_a_row_where_the_model_batches_and_dims_are_1(
    runtime: moonpool.Runtime,
) -> None:
    with pytest.raises(InvalidRequest, match=r"Expected \[-1\], got \[\]"):
        runtime.infer("echo", {"X": np.float32(1)}, timeout_s=30.0)
    assert runtime.infer("echo", {"X": [1]}, timeout_s=30.0)["OUT_X"].tolist() == [1]


# Memory


def test_a_tensor_over_the_limit_of_the_regions_is_refused_and_the_model_serves_on(
    runtime: moonpool.Runtime,
) -> None:
    before = runtime.instances("small")
    for _ in range(3):
        with pytest.raises(OutOfMemory, match="1048576 are allowed; raise MOONPOOL_REGION_LIMIT"):
            runtime.infer("small", {"X": np.zeros(1 << 20, np.float32)}, timeout_s=30.0)

    x = np.arange(1 << 16, dtype=np.float32)
    assert same(runtime.infer("small", {"X": x}, timeout_s=30.0)["OUT_X"], x)
    assert runtime.instances("small") == before


def test_responses_that_nobody_drops_end_in_an_error_and_dropping_them_ends_that(
    runtime: moonpool.Runtime,
) -> None:
    x = np.zeros(1 << 16, np.float32)
    kept: list[NDArray[Any]] = []

    def fill() -> None:
        while len(kept) < 100:
            kept.append(runtime.infer("small", {"X": x + 1}, timeout_s=30.0)["OUT_X"])

    with pytest.raises(OutOfMemory, match="MOONPOOL_REGION_LIMIT_BYTES"):
        fill()
    assert all((one == 1).all() for one in kept)
    kept.clear()
    fill_again = runtime.infer("small", {"X": x}, timeout_s=30.0)["OUT_X"]

    assert same(fill_again, x)


def test_more_than_the_machine_has_is_refused(runtime: moonpool.Runtime) -> None:
    huge = np.broadcast_to(np.float32(1), (1 << 38,))

    with pytest.raises(OutOfMemory, match="cannot set aside"):
        runtime.infer("echo", {"X": huge}, timeout_s=30.0)
    with pytest.raises(OutOfMemory, match="cannot set aside"):
        runtime.empty("echo", "X", 1 << 37)
    with pytest.raises(InvalidRequest, match="too large"):
        runtime.empty("echo", "X", 1 << 60)
    assert same(runtime.infer("echo", {"X": X}, timeout_s=30.0)["OUT_X"], X)


# Models and runtimes


def test_a_model_or_version_that_is_not_there_is_not_found(runtime: moonpool.Runtime) -> None:
    with pytest.raises(ModelNotFound, match="unknown model: 'nobody' is not found"):
        runtime.infer("nobody", {"X": X})
    with pytest.raises(ModelNotFound, match="unknown model: 'echo' version 7"):
        runtime.infer("echo", {"X": X}, version=7)
    with pytest.raises(ModelNotFound):
        runtime.unload("nobody")
    with pytest.raises(ModelNotFound, match="has no repository"):
        runtime.load("nobody")
    assert not runtime.is_ready("nobody")
    assert not runtime.is_ready("echo", 7)


def test_a_model_is_not_loaded_twice(runtime: moonpool.Runtime) -> None:
    with pytest.raises(AlreadyLoaded, match="model 'echo' is loaded already; unload it first"):
        runtime.load("echo", ECHO_FILE, config=ECHO)

    assert same(runtime.infer("echo", {"X": X}, timeout_s=30.0)["OUT_X"], X)


def test_two_loads_of_one_name_at_the_same_time_give_one_model(runtime: moonpool.Runtime) -> None:
    outcomes: list[object] = []

    def load() -> None:
        try:
            runtime.load("twin", ECHO_FILE, config=ECHO)
            outcomes.append(None)
        except AlreadyLoaded as error:
            outcomes.append(error)

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runtime.unload("twin")

    assert sorted(type(outcome).__name__ for outcome in outcomes) == [
        "AlreadyLoaded",
        "AlreadyLoaded",
        "NoneType",
    ]


def test_a_model_is_unloaded_when_its_requests_are_answered(runtime: moonpool.Runtime) -> None:
    """Requests that came before are finished; later ones are told; nothing else happens to any."""
    runtime.load("leaving", ECHO_FILE, config=ECHO, instances=2)
    stop, errors, answers = threading.Event(), [], []

    def ask() -> None:
        while not stop.is_set():
            try:
                answers.append(runtime.infer("leaving", {"X": X}, timeout_s=30.0)["OUT_X"].sum())
            except (ModelUnavailable, ModelNotFound) as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(answers) > 20)
    runtime.unload("leaving")
    for thread in threads:
        thread.join(30.0)
    stop.set()

    assert len(errors) == 4
    assert set(answers) == {X.sum()}


def test_a_closed_runtime_says_so() -> None:
    runtime = moonpool.Runtime()
    runtime.close()
    runtime.close()

    refused: list[Callable[[], object]] = [
        lambda: runtime.infer("echo", {"X": X}),
        lambda: runtime.submit("echo", {"X": X}),
        lambda: runtime.load("echo", ECHO_FILE, config=ECHO),
        lambda: runtime.empty("echo", "X", 4),
        lambda: runtime.statistics("echo"),
    ]
    for call in refused:
        with pytest.raises(RuntimeClosed, match="the runtime was closed; make another"):
            call()
    assert not runtime.is_ready("echo")
    assert "closed" in repr(runtime)


def test_a_repository_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=str(tmp_path / "nothing")):
        moonpool.Runtime(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(RepositoryError, match=str(tmp_path / "file")):
        moonpool.Runtime(tmp_path / "file")


def test_a_source_that_is_not_there_is_named(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=str(tmp_path / "nothing.py")):
        runtime.load("nobody", tmp_path / "nothing.py")


def test_a_runtime_that_cannot_load_all_of_its_models_keeps_none(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text(ECHO_FILE.read_text())
        (tmp_path / name / "config.pbtxt").write_text(
            'backend: "python"\n'
            'input { name: "X" data_type: TYPE_FP32 dims: -1 }\n'
            'output { name: "OUT_X" data_type: TYPE_FP32 dims: -1 }\n'
        )
    (tmp_path / "bad" / "1" / "model.py").write_text("import nothing_of_that_name")

    with pytest.raises(LoadFailed, match="No module named 'nothing_of_that_name'"):
        moonpool.Runtime(tmp_path)
