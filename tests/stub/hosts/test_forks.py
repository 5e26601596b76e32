"""Tests the answers that a fork of a stub gets, also after the end of the stub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.waiting import wait_until

from moonpool.stub.hosts.forks import ForkBroker, ForkedHost
from moonpool.stub.pb_utils import host
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.host import Host
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor

pytestmark = pytest.mark.promise(
    "At the limits",
    "A process that a model forked learns why its request failed, and when the stub ends, even while other forks live.",
)

Y = InferenceResponse([Tensor("Y", np.arange(3, dtype=np.float32))])


class Stub(Host):
    """Answers as the test says."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer
        self.asked: list[InferenceRequest] = []

    def infer(self, request: InferenceRequest, decoupled: bool) -> Any:  # noqa: ARG002
        self.asked.append(request)
        return self.answer()

    def is_model_ready(self, name: str, version: str) -> bool:  # noqa: ARG002
        return bool(self.answer())


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkedHost]:
    """Make the host of a fork in the process of the stub, as both have the same code."""
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    broker = ForkBroker(lambda: None)
    listener = threading.Thread(target=broker._listen)
    listener.start()
    yield ForkedHost(broker._outside)
    host.use(None)
    broker._outside.close()
    listener.join()
    broker._inside.close()


def request() -> InferenceRequest:
    return InferenceRequest(model_name="m", inputs=[], requested_output_names=["Y"])


def refuse(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def raiser(error: BaseException) -> Callable[[], Any]:
    def answer() -> Any:
        raise error

    return answer


@pytest.mark.parametrize("error", [TritonModelException("as planned"), KeyError("as planned")])
def test_every_failure_reaches_the_fork(forked: ForkedHost, error: Exception) -> None:
    host.use(Stub(raiser(error)))
    with pytest.raises(TritonModelException, match="as planned"):
        forked.infer(request(), False)
    with pytest.raises(TritonModelException, match="as planned"):
        forked.is_model_ready("m", "")


def test_a_stream_is_refused_in_a_fork_and_the_error_says_where_it_works(forked: ForkedHost) -> None:
    with pytest.raises(TritonModelException, match="in the model's own process only"):
        forked.infer(request(), True)


def test_outputs_are_asked_for_in_memory_that_a_fork_has(forked: ForkedHost) -> None:
    stub = Stub(lambda: Y)
    host.use(stub)
    forked.infer(request(), False)
    wish = stub.asked[0]._preferred_memory
    assert wish is not None
    assert wish.is_ordinary


def test_a_fork_for_which_there_is_no_thread_is_told_and_the_next_is_served(
    forked: ForkedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.use(Stub(lambda: Y))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TritonModelException, match="is full: can't start new thread"):
            forked.infer(request(), False)
    answer: Any = forked.infer(request(), False)
    assert (answer.output_tensors()[0].as_numpy() == [0, 1, 2]).all()


def test_a_door_that_could_not_be_opened_is_opened_at_the_next_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    host.use(Stub(lambda: Y))
    broker = ForkBroker(lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            broker._open()
    broker._open()
    try:
        forked = ForkedHost(broker._outside)
        assert isinstance(forked.infer(request(), False), InferenceResponse)
    finally:
        host.use(None)
        broker._outside.close()
    wait_until(lambda: not any(each.name == "moonpool-forks" for each in threading.enumerate()))
    broker._inside.close()


def test_a_request_that_cannot_be_sent_is_an_error(forked: ForkedHost) -> None:
    asked = InferenceRequest(model_name="m", inputs=[], requested_output_names=["Y"], parameters={"n": 1 << 70})
    with pytest.raises(TritonModelException):
        forked.infer(asked, False)


DYING = """
import os, signal, sys, threading
from moonpool.stub.pb_utils import host
from moonpool.stub.hosts.forks import ForkBroker
from moonpool.stub.pb_utils.request import InferenceRequest


class Stub(host.Host):
    def infer(self, request, decoupled):
        other = os.fork()
        if not other:
            signal.pause()
        print(other, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


host.use(Stub())
ForkBroker(lambda: None)
if os.fork():
    signal.pause()
try:
    host.current().infer(InferenceRequest(model_name="m", inputs=[], requested_output_names=[]), False)
except Exception as error:
    print(error, flush=True)
os._exit(0)
"""


def test_a_fork_that_asks_hears_of_the_end_of_the_stub_while_another_fork_lives() -> None:
    with subprocess.Popen([sys.executable, "-c", DYING], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        try:
            assert process.stdout.readline() == b"The process that hosts the model has ended.\n"
        finally:
            os.kill(other, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
