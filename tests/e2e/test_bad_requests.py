"""Tests of requests that callers may not send, and their errors."""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.e2e.hosting import ECHO, MODELS, Config, hosted, same, tensor
from tests.waiting import wait_until

import moonpool
from moonpool import InvalidRequest, LoadFailed, ModelNotFound, ModelUnavailable, RepositoryError, RuntimeClosed

ECHO_FILE = MODELS / "echo.py"
PAIR: Config = {
    "max_batch_size": 4,
    "input": [tensor("A", "FP32", 3), tensor("B", "INT32", -1), tensor("C", "STRING", 1) | {"optional": True}],
    "output": [tensor("OUT_A", "FP32", 3), tensor("OUT_B", "INT32", -1), tensor("OUT_C", "STRING", 1)],
}
A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.arange(8, dtype=np.int32).reshape(2, 4)


@pytest.fixture(scope="module")
def models(runtime: moonpool.Runtime) -> Iterator[None]:
    with hosted(runtime, "echo", ECHO_FILE, ECHO), hosted(runtime, "pair", ECHO_FILE, PAIR):
        yield


pytestmark = pytest.mark.usefixtures("models")
X = np.arange(24, dtype=np.float32)


REFUSED: dict[str, tuple[Mapping[Any, Any], str]] = {
    "a name that is not a text": ({"A": A, "B": B, 7: A}, "unexpected inference input '7'"),
    "None": ({"A": A, "B": None}, "input 'B' for model 'pair' is None"),
    "None for an optional input": ({"A": A, "B": B, "C": None}, "input 'C' for model 'pair' is None"),
    "text that is no Unicode": ({"A": A, "B": B, "C": np.array([["\ud800"], ["x"]], object)}, "(model 'pair')"),
    "a dtype that no datatype has": (
        {"A": A.astype(np.complex64), "B": B},
        "tensor 'A' has dtype complex64, which no datatype has; pass the real and imaginary parts",
    ),
    "another byte order": (
        {"A": A.astype(">f4"), "B": B},
        "tensor 'A' has dtype >f4, which no datatype has; convert it first: array.astype('float32')",
    ),
    "fields": ({"A": np.zeros((2, 3), [("x", "f4"), ("y", "f4")]), "B": B}, "pass one array for each field"),
    "no rows": (
        {"A": np.zeros((0, 3), np.float32), "B": np.zeros((0, 1), np.int32)},
        "inference request batch-size must be > 0 for 'pair'",
    ),
    "inputs of different numbers of rows": (
        {"A": A, "B": B[:1]},
        "input 'B' batch size does not match other inputs for 'pair': 1 and 2",
    ),
    "something that is not an array": (
        {"A": object(), "B": B},
        "input 'A' for model 'pair' must be a numpy array, not object",
    ),
    "a dictionary": ({"A": {}, "B": B}, "must be a numpy array, not dict"),
    "a ragged list": ({"A": [[1, 2, 3], [4]], "B": B}, "cannot be made an array"),
    "a list of numbers that are too large": ({"A": A, "B": [[2**40] * 4] * 2}, "cannot be made an array"),
}


@pytest.mark.promise("Requests", "A request that does not fit the model is refused before it is sent.")
@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_does_not_fit_is_refused_before_it_is_sent(runtime: moonpool.Runtime, name: str) -> None:
    inputs, words = REFUSED[name]
    before = runtime.statistics("pair")["execution_count"]

    with pytest.raises(InvalidRequest) as caught:
        runtime.infer("pair", inputs, timeout_s=60.0)

    assert words in str(caught.value)
    assert caught.value.code == "INVALID_ARG"
    assert runtime.statistics("pair")["execution_count"] == before


def test_inputs_that_are_no_mapping_are_refused(runtime: moonpool.Runtime) -> None:
    wrong: Any
    for wrong in ([A, B], A, None, "A"):
        with pytest.raises(InvalidRequest, match="must be a mapping of names to arrays"):
            runtime.infer("pair", wrong, timeout_s=60.0)


def test_any_mapping_and_whatever_is_like_an_array_will_do(runtime: moonpool.Runtime) -> None:
    class Like:
        def __array__(self, dtype: object = None, copy: object = None) -> NDArray[Any]:
            return A

    inputs = UserDict({"A": Like(), "B": B.tolist(), "C": [["x"], [b"y"]]})
    outputs = runtime.infer("pair", inputs, timeout_s=60.0)

    assert same(outputs["OUT_A"], A)
    assert same(outputs["OUT_B"], B)
    assert outputs["OUT_C"].tolist() == [[b"x"], [b"y"]]


def test_an_output_that_the_model_has_not_is_refused(runtime: moonpool.Runtime) -> None:
    with pytest.raises(InvalidRequest, match="unexpected inference output 'Z' for model 'pair'"):
        runtime.infer("pair", {"A": A, "B": B}, outputs=["Z"], timeout_s=60.0)


def test_an_output_that_is_asked_for_twice_comes_once(runtime: moonpool.Runtime) -> None:
    inputs = {"A": A, "B": B}

    outputs = runtime.infer("pair", inputs, outputs=["OUT_A", "OUT_A"], timeout_s=60.0)

    assert list(outputs) == ["OUT_A"]


@pytest.mark.parametrize("parameters", [{"x": None}, {"x": [1]}, {1: "x"}, {"x": b"bytes"}, {"x": np.float32(1)}])
def test_parameters_that_are_no_scalars_are_refused(runtime: moonpool.Runtime, parameters: dict[Any, Any]) -> None:
    with pytest.raises(InvalidRequest, match="must be a string with a bool, int, float or str"):
        runtime.infer("pair", {"A": A, "B": B}, parameters=parameters, timeout_s=60.0)


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
        runtime.infer("pair", {"A": A, "B": B}, **details, timeout_s=60.0)

    assert same(runtime.infer("pair", {"A": A, "B": B}, timeout_s=60.0)["OUT_A"], A)
    assert runtime.instances("pair") == before


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


def test_a_model_that_is_loaded_is_not_started_again(runtime: moonpool.Runtime) -> None:
    before = runtime.instances("echo")
    runtime.load("echo", ECHO_FILE, config=ECHO)

    assert runtime.instances("echo") == before
    assert same(runtime.infer("echo", {"X": X}, timeout_s=60.0)["OUT_X"], X)


def test_two_loads_of_one_name_at_the_same_time_give_one_model(runtime: moonpool.Runtime) -> None:
    processes: list[object] = []

    def load() -> None:
        runtime.load("twin", ECHO_FILE, config=ECHO)
        processes.append(runtime.instances("twin")[0]["pid"])

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runtime.unload("twin")

    assert len(processes) == 3
    assert len(set(processes)) == 1


def test_a_model_is_unloaded_when_its_requests_are_answered(runtime: moonpool.Runtime) -> None:
    """Check that earlier requests are finished, and later ones get an error."""
    runtime.load("leaving", ECHO_FILE, config=ECHO, instances=2)
    stop, errors, answers = threading.Event(), [], []

    def ask() -> None:
        while not stop.is_set():
            try:
                answers.append(runtime.infer("leaving", {"X": X}, timeout_s=60.0)["OUT_X"].sum())
            except (ModelUnavailable, ModelNotFound) as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(answers) > 20)
    runtime.unload("leaving")
    for thread in threads:
        thread.join(60.0)
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
