"""Tests the answers that a fork of a stub gets, also after the end of the stub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.promise(
    "At the limits",
    "A process that a model forked learns why its request failed, and when the stub ends, even while other forks live.",
)

# A stub whose host answers each question as `answer` does.
STUB = """
import os, signal, threading
import numpy as np
from moonpool.stub.hosts.forks import ForkBroker
from moonpool.stub.pb_utils import host
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.pb_utils.response import InferenceResponse
from moonpool.stub.pb_utils.tensor import Tensor


class Stub(host.Host):
    def infer(self, request, decoupled):
        return answer(request)

    def is_model_ready(self, name, version):
        return bool(answer(None))


def request(**fields):
    return InferenceRequest(model_name="m", inputs=[], requested_output_names=["Y"], **fields)


def infer(asked=None, decoupled=False):
    return host.current().infer(asked or request(), decoupled).output_tensors()[0].as_numpy().tolist()


def told(ask, *arguments):
    try:
        answer = ask(*arguments)
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}".splitlines()[0]
    print(answer, flush=True)


start = threading.Thread.start


def refuse(_):
    threading.Thread.start = start
    raise RuntimeError("can't start new thread")


def answer(request):
    return InferenceResponse([Tensor("Y", np.arange(3, dtype=np.float32))])


host.use(Stub())
ForkBroker(lambda: None)
"""


def told(fork: str, stub: str = "") -> list[str]:
    """Run `stub` in a stub, and `fork` in one that it forks. Returns the lines that they print."""
    parts = STUB, textwrap.dedent(stub), "if os.fork(): os._exit(os.wait()[1])", textwrap.dedent(fork), "os._exit(0)"
    program = [sys.executable, "-c", "\n".join(parts)]
    return subprocess.run(program, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout.splitlines()


@pytest.mark.parametrize("error", ["TritonModelException", "KeyError"])
def test_every_failure_reaches_the_fork(error: str) -> None:
    lines = told(
        "told(infer); told(host.current().is_model_ready, 'm', '')", f"def answer(_): raise {error}('as planned')"
    )
    assert [line.startswith("TritonModelException: ") and "as planned" in line for line in lines] == [True, True]


def test_a_stream_is_refused_in_a_fork_and_the_error_says_where_it_works() -> None:
    (line,) = told("told(infer, None, True)")
    assert "in the model's own process only" in line


def test_outputs_are_asked_for_in_memory_that_a_fork_has() -> None:
    asked = "def answer(request): raise TritonModelException(f'ordinary: {request._preferred_memory.is_ordinary}')"
    assert told("told(infer)", asked) == ["TritonModelException: ordinary: True"]


def test_a_fork_for_which_there_is_no_thread_is_told_and_the_next_is_served() -> None:
    lines = told(
        "for _ in range(3): told(infer)",
        """
        usual = answer
        def answer(request):
            threading.Thread.start = refuse
            return usual(request)
        """,
    )
    assert lines[::2] == ["[0.0, 1.0, 2.0]"] * 2
    assert lines[1].endswith("is full: can't start new thread")


def test_a_door_that_could_not_be_opened_is_opened_at_the_next_fork() -> None:
    first = "threading.Thread.start = refuse\nif not os.fork(): os._exit(0)\nos.wait()"
    assert told("told(infer)", first) == ["[0.0, 1.0, 2.0]"]


def test_a_request_that_cannot_be_sent_is_an_error() -> None:
    (line,) = told("told(infer, request(parameters={'n': 1 << 70}))")
    assert line.startswith("TritonModelException: ")


DYING = """
def answer(request):
    other = os.fork()
    if not other:
        signal.pause()
    print(other, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if os.fork():
    signal.pause()
told(infer)
os._exit(0)
"""


def test_a_fork_that_asks_hears_of_the_end_of_the_stub_while_another_fork_lives() -> None:
    with subprocess.Popen([sys.executable, "-c", STUB + DYING], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        try:
            line = process.stdout.readline()
            assert line == b"TritonModelException: The process that hosts the model has ended.\n"
        finally:
            os.kill(other, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
