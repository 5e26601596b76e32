"""Outputs in the caller's memory: the order of the calls, what they are given, and what goes wrong."""

from __future__ import annotations

import gc
import mmap
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.recorder import Planned, tensor

import moonpool
from moonpool import ResponseAllocator, Runtime

PATIENCE_S = 60.0
MODEL = """
import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        if x[0] < 0:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative"))
        wanted = request.requested_output_names()
        outputs = {"Y": x * 2, "S": numpy.array([str(v).encode() for v in x], object)}
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, outputs[name]) for name in ("Y", "S") if name in wanted]
        )
"""
CONFIG = {
    "input": [tensor("X", "FP32", -1)],
    "output": [tensor("Y", "FP32", -1), tensor("S", "STRING", -1)],
    "instance_group": [{"kind": "KIND_CPU", "count": 1}],
}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    file = tmp_path_factory.mktemp("models") / "double.py"
    file.write_text(MODEL)
    with Runtime() as runtime:
        runtime.load("m", file, config=CONFIG)
        yield runtime


@pytest.fixture(autouse=True)
def _one_stub_served_all(runtime: Runtime) -> Iterator[None]:
    """The stub never sees an allocator."""
    yield
    assert runtime.instances("m")[0]["restarts"] == 0
    answer = runtime.infer("m", x(21), outputs=["Y"], timeout_s=PATIENCE_S)
    assert answer["Y"].tolist() == [42]


def x(*values: float) -> dict[str, Any]:
    return {"X": np.array(values, np.float32)}


class Noting(ResponseAllocator):
    """Writes down the calls, and gives out what `make` makes."""

    def __init__(self, make: Callable[[int], Any] = bytearray) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.buffers: list[Any] = []
        self._make = make

    def start(self, userp: object) -> None:
        self.calls.append(("start", userp))

    def alloc(self, name: str, datatype: str, shape: tuple[int, ...], size_bytes: int, userp: object) -> Any:
        self.calls.append(("alloc", name, datatype, shape, size_bytes, userp))
        self.buffers.append(self._make(size_bytes))
        return self.buffers[-1]

    def release(self, buffer: Any, userp: object) -> None:
        number = next(i for i, mine in enumerate(self.buffers) if mine is buffer)
        self.calls.append(("release", number, userp))


@pytest.mark.promise("Requests", "An allocator's `start`, `alloc` and `release` come in Triton's order.")
def test_start_comes_before_alloc_for_each_output_and_release_when_it_is_dropped(runtime: Runtime) -> None:
    allocator, userp = Noting(), object()
    outputs = runtime.infer("m", x(1, 2), allocator=allocator, userp=userp)
    assert outputs["Y"].tolist() == [2, 4]
    assert allocator.calls == [
        ("start", userp),
        ("alloc", "Y", "FP32", (2,), 8, userp),
        ("alloc", "S", "BYTES", (2,), 4 + 3 + 4 + 3, userp),
    ]
    del outputs["S"]
    assert allocator.calls[3:] == [("release", 1, userp)]
    kept = outputs["Y"][1:]
    del outputs
    gc.collect()
    assert len(allocator.calls) == 4
    assert kept.tolist() == [4]
    del kept
    assert allocator.calls[4:] == [("release", 0, userp)]


def test_the_outputs_lie_in_the_buffers(runtime: Runtime) -> None:
    allocator = Noting()
    outputs = runtime.infer("m", x(1, 2), allocator=allocator)
    assert np.frombuffer(allocator.buffers[0], np.float32).tolist() == [2, 4]
    outputs["Y"][0] = 9
    assert np.frombuffer(allocator.buffers[0], np.float32).tolist() == [9, 4]


def test_strings_come_in_their_wire_form(runtime: Runtime) -> None:
    allocator = Noting()
    outputs = runtime.infer("m", x(1), allocator=allocator, outputs=["S"])
    assert outputs["S"].dtype == np.uint8
    assert bytes(allocator.buffers[0]) == outputs["S"].tobytes() == b"\x03\0\0\x001.0"


def test_only_outputs_that_are_wanted_are_allocated(runtime: Runtime) -> None:
    allocator = Noting()
    runtime.infer("m", x(1), allocator=allocator, outputs=["Y"])
    assert [call[:2] for call in allocator.calls if call[0] == "alloc"] == [("alloc", "Y")]


def test_a_response_that_is_an_error_allocates_nothing(runtime: Runtime) -> None:
    allocator = Noting()
    with pytest.raises(moonpool.ModelError, match="negative"):
        runtime.infer("m", x(-1), allocator=allocator)
    assert [call for call in allocator.calls if call[0] != "start"] == []


MAKERS: dict[str, Callable[[int], Any]] = {
    "a bytearray": bytearray,
    "a larger one": lambda size: bytearray(size + 100),
    "an array": lambda size: array("B", bytes(size)),
    "a numpy array": lambda size: np.empty(size, np.uint8),
    "a numpy array of another kind": lambda size: np.empty((size + 7) // 8, np.float64),
    "a memoryview": lambda size: memoryview(bytearray(size)),
    "a mapping": lambda size: mmap.mmap(-1, size),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_any_writable_buffer_that_is_large_enough_will_do(runtime: Runtime, make: Callable[[int], Any]) -> None:
    allocator = Noting(make)
    outputs = runtime.infer("m", x(3, 4), allocator=allocator, outputs=["Y"])
    assert outputs["Y"].tolist() == [6, 8]


BAD_MAKERS: dict[str, Callable[[int], Any]] = {
    "short": lambda size: bytearray(size - 1),
    "none of it": lambda size: bytearray(0),  # noqa: ARG005
    "read-only": bytes,
    "a read-only view": lambda size: memoryview(bytes(size)),
    "not contiguous": lambda size: memoryview(bytearray(2 * size))[::2],
    "no buffer": lambda size: [0] * size,
    "nothing": lambda size: None,  # noqa: ARG005
}


@pytest.mark.parametrize("make", BAD_MAKERS.values(), ids=BAD_MAKERS)
def test_a_buffer_that_will_not_do_is_the_outcome_of_the_request(runtime: Runtime, make: Callable[[int], Any]) -> None:
    with pytest.raises(ValueError, match=r"buffer for output 'Y' must be writable and hold 4 byt"):
        runtime.infer("m", x(1), allocator=Noting(make), outputs=["Y"])


@pytest.mark.parametrize("function", ["start", "alloc"])
def test_an_error_of_the_allocator_is_the_outcome_of_the_request(runtime: Runtime, function: str) -> None:
    def fail(*_: object) -> None:
        raise Planned("no memory today")

    allocator = Noting()
    setattr(allocator, function, fail)
    with pytest.raises(Planned, match="no memory today"):
        runtime.infer("m", x(1), allocator=allocator)


def test_buffers_allocated_before_a_failure_are_released(runtime: Runtime) -> None:
    def make(size: int) -> bytearray:
        if len(allocator.buffers) == 1:
            raise Planned("only one")
        return bytearray(size)

    allocator = Noting(make)
    with pytest.raises(Planned, match="only one") as caught:
        runtime.infer("m", x(1), allocator=allocator)
    # The error's traceback may refer to the memory that the failing call held.
    del caught
    gc.collect()
    assert [call[0] for call in allocator.calls] == ["start", "alloc", "alloc", "release"]


def test_an_allocator_without_alloc_says_so(runtime: Runtime) -> None:
    with pytest.raises(NotImplementedError):
        runtime.infer("m", x(1), allocator=ResponseAllocator())


def test_only_alloc_must_be_written(runtime: Runtime) -> None:
    class Least(ResponseAllocator):
        def alloc(self, *args: Any) -> Any:
            return bytearray(args[3])

    assert runtime.infer("m", x(1), allocator=Least(), outputs=["Y"])["Y"].tolist() == [2]


def test_one_allocator_serves_many_threads_and_each_has_its_userp(runtime: Runtime) -> None:
    allocator = Noting()
    answers: dict[int, list[float]] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            outputs = runtime.infer("m", x(number), allocator=allocator, userp=number, outputs=["Y"])
            answers[number] = outputs["Y"].tolist()
            del outputs

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert answers == {i: [2.0 * i] for i in range(4)}
    for number in range(4):
        mine = [call[0] for call in allocator.calls if call[-1] == number]
        assert mine == ["start", "alloc", "release"] * 20


def test_buffers_are_valid_after_the_model_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "double.py"
    file.write_text(MODEL)
    allocator = Noting()
    with Runtime() as runtime:
        runtime.load("m", file, config=CONFIG)
        outputs = runtime.infer("m", x(5), allocator=allocator, outputs=["Y"])
    assert outputs["Y"].tolist() == [10]
    del outputs
    assert allocator.calls[-1][0] == "release"
