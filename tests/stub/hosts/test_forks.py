"""Tests the answers that a fork of a stub gets, also after the end of the stub."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.runtime.interrupting import OF_A_STUB, interrupted_everywhere
from tests.waiting import wait_until

from moonpool.stub.hosts.forks import ForkBroker, ForkedHost
from moonpool.stub.pb_utils import host
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.host import Host
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse, ResponseIterator
from moonpool.stub.pb_utils.tensor import Tensor

pytestmark = pytest.mark.promise(
    "At the limits",
    "A process that a model forked learns why its request failed, and when the stub ends, even "
    "while other forks live; its responses end only when the model ends them.",
)

Y = InferenceResponse([Tensor("Y", np.arange(3, dtype=np.float32))])


class Stub(Host):
    """Answers as the test says."""

    def __init__(self, answer: Callable[[], Any]) -> None:
        self.answer = answer
        self.asked: list[InferenceRequest] = []

        self.is_cancelled = threading.Event()

    def infer(self, request: InferenceRequest, decoupled: bool) -> Any:
        self.asked.append(request)
        if decoupled:
            return ResponseIterator.over(self._receive, self.is_cancelled.set)
        return self.answer()

    def _receive(self, seen: list[InferenceResponse]) -> None:
        response = self.answer()
        if response is not None:
            seen.append(response)

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


def responses(*outcomes: Any) -> Callable[[], Any]:
    left = iter(outcomes)

    def answer() -> Any:
        outcome = next(left)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return answer


def test_responses_end_where_the_stub_says_so(forked: ForkedHost) -> None:
    host.use(Stub(responses(Y, Y, None)))
    answers: Any = forked.infer(request(), True)
    assert [len(each.output_tensors()) for each in answers] == [1, 1]
    # A second loop sees all of them again.
    assert len(list(answers)) == 2


def test_responses_that_break_off_are_no_end(forked: ForkedHost) -> None:
    host.use(Stub(responses(Y, ValueError("as planned"))))
    stream: Any = forked.infer(request(), True)
    answers = iter(stream)
    next(answers)
    with pytest.raises(TritonModelException, match="ValueError: as planned"):
        next(answers)


@pytest.mark.parametrize("error", [TritonModelException("as planned"), KeyError("as planned")])
def test_every_failure_reaches_the_fork(forked: ForkedHost, error: Exception) -> None:
    host.use(Stub(raiser(error)))
    with pytest.raises(TritonModelException, match="as planned"):
        forked.infer(request(), False)
    with pytest.raises(TritonModelException, match="as planned"):
        forked.is_model_ready("m", "")


@pytest.mark.promise("Requests between models", "`cancel` of an iterator only sets …")
def test_a_loop_that_a_signal_handler_interrupted_goes_on_to_its_end(forked: ForkedHost) -> None:
    def ask() -> Any:
        answers = iter([Y, Y, None])
        host.use(Stub(lambda: next(answers)))
        return forked.infer(request(), True)

    responses = [ask()]
    taken: list[InferenceResponse] = []

    def go_on() -> None:
        with contextlib.suppress(StopIteration):
            while True:
                taken.append(next(responses[0]))

    def check() -> None:
        go_on()
        assert len(taken) == 2
        taken.clear()
        responses[0] = ask()

    assert interrupted_everywhere(go_on, check, within=OF_A_STUB, at_lines=False) > 50
    go_on()


def test_a_loop_that_is_cancelled_goes_on_to_the_model_s_own_end(forked: ForkedHost) -> None:
    def all_answers() -> Iterator[Any]:
        yield Y
        assert stub.is_cancelled.wait(60)
        yield Y
        yield Y

    answers = all_answers()
    stub = Stub(lambda: next(answers, None))
    host.use(stub)
    stream: Any = forked.infer(request(), True)
    next(stream)
    stream.cancel()
    assert len(list(stream)) == 2


def test_a_model_is_told_when_a_fork_forgets_its_loop(forked: ForkedHost) -> None:
    may_end = threading.Event()
    answers = iter([Y])

    def answer() -> Any:
        response = next(answers, None)
        return response or (may_end.wait(60) and None)

    stub = Stub(answer)
    host.use(stub)
    stream: Any = forked.infer(request(), True)
    next(stream)
    del stream
    gc.collect()
    assert stub.is_cancelled.wait(60)
    may_end.set()


@pytest.mark.promise("Requests between models", "A coroutine that calls a …")
def test_a_coroutine_of_a_fork_gets_its_loop_with_the_first_response(forked: ForkedHost) -> None:
    may_answer = threading.Event()
    answers = iter([Y])

    def answer() -> Any:
        assert may_answer.wait(60)
        return next(answers, None)

    async def ask() -> int:
        asyncio.get_running_loop().call_later(0.05, may_answer.set)
        responses: Any = await forked.ainfer(request(), True)
        return sum(1 for _ in responses)

    host.use(Stub(answer))
    assert asyncio.run(ask()) == 1


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


def test_a_door_that_could_not_be_opened_is_opened_at_the_next_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    asked = InferenceRequest(
        model_name="m", inputs=[], requested_output_names=["Y"], parameters={"n": 1 << 70}
    )
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
