"""Answers on a device that no caller asked for there arrive in ordinary memory."""

from __future__ import annotations

import queue
import threading
from typing import Any

import numpy as np
import pytest
from tests.gpu.cards import Fake
from tests.refused_threads import refuse_threads

from moonpool.ipc.codec import encode
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.ipc.errors import MoonpoolError, OutOfMemory, RemoteProtocolError
from moonpool.ipc.port import Shapes
from moonpool.ipc.tensors import CODES
from moonpool.runtime.errors import BackendError, ModelUnavailable, OutOfThreads
from moonpool.runtime.model.request import InferenceRequest, Response, WireTensor
from moonpool.runtime.stubs.answers import AnswerReader
from moonpool.runtime.stubs.calls.requests import _MOST_FETCHED, Fetching

pytestmark = pytest.mark.promise(
    "GPUs in the runtime",
    "A contained stub that answers on a device is ended if ordinary memory was asked for, and a "
    "model can make only a limited number of the runtime's threads wait for its GPU.",
)


def read(*, is_confined: bool, datatype: str = "FP32") -> Any:
    """Read an answer with one output on a device, for a caller that only passes it on."""
    reader = AnswerReader(is_confined=is_confined)
    reader.output_names, reader.has_devices = ["Y"], True
    region = DeviceRegion.create(1, 1, device(0))
    region.device.write(region.address, np.arange(4, dtype=np.float32))
    request = InferenceRequest([], Shapes([], 1, None, is_shared=True))
    request.wants_wire = True
    layout = reader.layout(encode([[0, CODES[datatype], [4], 0, 0, 16]]), 1)
    lease: Any = region.lease(0, 16, lambda _: None, None)
    region.close()
    return reader.outcome(request, layout.responses[0], None, [lease])


def test_they_are_copied_where_the_stub_is_trusted(fake: Fake) -> None:  # noqa: ARG001
    response = read(is_confined=False)

    assert isinstance(response, Response)
    output: Any = response.outputs["Y"]
    assert isinstance(output, WireTensor)
    assert (output.raw.view(np.float32) == [0, 1, 2, 3]).all()


def test_a_contained_stub_is_not_waited_for(fake: Fake) -> None:  # noqa: ARG001
    with pytest.raises(RemoteProtocolError, match="where ordinary memory was asked for"):
        read(is_confined=True)


class Slow:
    """A signature whose inputs take until they are let go."""

    def __init__(self) -> None:
        self.may_go = threading.Event()

    def fetched(self, value: object) -> object:
        self.may_go.wait(60)
        if isinstance(value, BaseException):
            raise value
        return value


def test_a_model_cannot_have_any_number_of_inputs_copied_at_a_time() -> None:
    slow: Any = Slow()
    fetching = Fetching()
    came: list[Any] = []
    done = threading.Semaphore(0)

    def go_on(inputs: dict[str, Any] | MoonpoolError) -> None:
        came.append(inputs)
        done.release()

    for _ in range(_MOST_FETCHED):
        fetching.start(slow, {"X": OutOfMemory("none left")}, go_on)
    fetching.start(slow, {"X": 1}, go_on)

    assert [type(each) for each in came] == [ModelUnavailable]
    slow.may_go.set()
    for _ in range(_MOST_FETCHED + 1):
        assert done.acquire(timeout=60)
    assert {type(each) for each in came[1:]} == {OutOfMemory}
    fetching.start(slow, {"X": 1}, go_on)
    assert done.acquire(timeout=60)
    assert came[-1] == {"X": 1}


@pytest.mark.promise("At the limits", "If no thread can be started …")
def test_inputs_that_cannot_be_copied_are_told_and_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    slow: Any = Slow()
    slow.may_go.set()
    fetching = Fetching()
    came: queue.SimpleQueue[Any] = queue.SimpleQueue()

    fetching.start(slow, {"X": MemoryError("none left")}, came.put)
    error = came.get(timeout=60)
    assert isinstance(error, BackendError)
    assert "none left" in str(error)

    with monkeypatch.context() as patch:
        refuse_threads(patch)
        for _ in range(_MOST_FETCHED + 1):
            fetching.start(slow, {"X": 1}, came.put)
            error = came.get(timeout=60)
            assert isinstance(error, OutOfThreads)
            assert "can't start new thread" in str(error)

    fetching.start(slow, {"X": 1}, came.put)
    assert came.get(timeout=60) == {"X": 1}
