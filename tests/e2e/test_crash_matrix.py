"""Tests of each way to end badly at each point of a model's life: the effect on callers, the log and other models."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from tests.e2e.conftest import Sibling
from tests.e2e.hosting import MODELS, Config, hosted, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.waiting import wait_until

import moonpool
from moonpool import ExecuteTimedOut, LoadFailed, ModelError, StubDied

DEATHS = {
    "SIGSEGV": "was killed by SIGSEGV",
    "SIGKILL": "was killed by SIGKILL (not sent by moonpool; often by",
    "_exit 0": "exited with 0",
    "_exit 3": "exited with 3",
}
RAISED = {
    "exception": "ValueError: on purpose",
    "SystemExit": "SystemExit: on purpose",
    "memory": "Unable to allocate 16.0 GiB",
    "recursion": "RecursionError: maximum recursion depth exceeded",
}
# One case with each of these is enough.
RARE_DEATHS = {
    "abort": "was killed by SIGABRT",
    "SIGTERM by default": "was killed by SIGTERM",
    "libc exit": "exited with 4",
    "stack": "was killed by SIGSEGV",
}
RARE_RAISED = {
    "KeyboardInterrupt": "KeyboardInterrupt: on purpose",
    "unprintable": "MESSAGE UNAVAILABLE DUE TO EXCEPTION: RuntimeError",
}
HANGS = ("hang", "spin", "hang in C")

# Places in moonpool's own code.
STRUCK = ("reading the next input", "writing the output", "sending the answer")


class Case(NamedTuple):
    place: str
    way: str
    error: type[Exception] | None
    words: str

    def __str__(self) -> str:
        return f"{self.place}: {self.way}"


def load_cases() -> Iterator[Case]:
    for place in ("import", "initialize"):
        for way, words in (DEATHS | RAISED).items():
            yield Case(place, way, LoadFailed, words)
    for place in ("auto_complete_config", "__init__"):
        yield Case(place, "SIGSEGV", LoadFailed, DEATHS["SIGSEGV"])
        yield Case(place, "_exit 0", LoadFailed, DEATHS["_exit 0"])
        yield Case(place, "exception", LoadFailed, RAISED["exception"])
    for place in ("import", "auto_complete_config", "initialize"):
        yield Case(place, "hang", LoadFailed, "was not ready in time and was ended")
    for way, words in (RARE_DEATHS | RARE_RAISED).items():
        yield Case("initialize", way, LoadFailed, words)
    yield Case("import", "KeyboardInterrupt", LoadFailed, "KeyboardInterrupt: on purpose")
    yield Case("initialize", "hang in C", LoadFailed, "was not ready in time and was ended")


def execute_cases() -> Iterator[Case]:
    for way, words in (DEATHS | RARE_DEATHS).items():
        yield Case("execute", way, StubDied, words)
    for way, words in (RAISED | RARE_RAISED).items():
        yield Case("execute", way, ModelError, words)
    for way in HANGS:
        yield Case("execute", way, ExecuteTimedOut, "took longer than 2 s to execute a batch")
    for place in STRUCK:
        for way in ("SIGSEGV", "_exit 0"):
            yield Case(place, way, StubDied, DEATHS[way])
    for place in ("reading the next input", "sending the answer"):
        # An exception there is moonpool's own failure, which the last line reports.
        yield Case(place, "exception", StubDied, "exited with 1; its last words were: ValueError")
    # A failure in writing may come from the model's objects, so it is an error of the request.
    yield Case("writing the output", "exception", ModelError, "ValueError: on purpose")
    yield Case("sending the answer", "hang", ExecuteTimedOut, "took longer than 2 s to execute")
    for way in ("SIGSEGV", "_exit 3"):
        yield Case("a thread", way, StubDied, DEATHS[way])
    for way in ("exception", "SystemExit"):
        yield Case("a thread", way, None, "")
    for way, words in DEATHS.items():
        yield Case("after the answer", way, None, words)


def finalize_cases() -> Iterator[Case]:
    for place in ("finalize", "atexit"):
        for way in ("SIGSEGV", "_exit 0") if place == "atexit" else DEATHS:
            told = f"died in finalize: Stub process 'ending_0' is not healthy. It {DEATHS[way]}"
            yield Case(place, way, None, told)
        yield Case(place, "hang", None, "finalize took longer than 1.0 s; killing it")
    for way, words in RAISED.items():
        yield Case("finalize", way, None, words)
    yield Case("atexit", "exception", None, "ValueError: on purpose")
    yield Case("atexit", "SystemExit", None, "SystemExit: on purpose")


SIGNATURE: Config = {"input": [tensor("COMMAND", "STRING", 1)], "output": [tensor("PID", "INT64", 1)]}
# The model may die once in each case, and restarts at once.
PATIENT = {"ENVIRONMENT": "FAULT_AT", "RESTART_WINDOW_S": 0.001, "MEMORY_LIMIT_BYTES": "8G"}


@pytest.fixture(scope="module")
def completes() -> bool:
    return True


@pytest.fixture(scope="module")
def victims(runtime: moonpool.Runtime) -> Iterator[None]:
    """Load the model that dies on command, and the same one with time limits."""
    file = MODELS / "dies.py"
    with (
        hosted(runtime, "victim", file, SIGNATURE | options(**PATIENT)),
        hosted(runtime, "hanged", file, SIGNATURE | options(**PATIENT, EXECUTE_TIMEOUT_S=2)),
    ):
        yield


def command(runtime: moonpool.Runtime, model: str, words: str) -> int:
    """Give the model a command; returns the id of the process that answered."""
    inputs = {"COMMAND": np.array([words], object)}
    return int(runtime.infer(model, inputs, timeout_s=60.0)["PID"][0])


@pytest.mark.promise("The sandbox: `standard`", "A crash, an …")
@pytest.mark.promise(
    "Containment",
    "If a model's process ends, in whatever way and at whatever moment of its life, only its "
    "own requests fail, with a reason. The other instances go on answering.",
)
@pytest.mark.promise(
    "Lifecycle",
    "A model that hangs in load, execute or finalize is ended at its limit, and the log shows where it hung.",
)
@pytest.mark.usefixtures("victims")
@pytest.mark.parametrize("case", [*load_cases(), *execute_cases(), *finalize_cases()], ids=str)
def test_a_model_that_ends_badly_harms_nobody_else(
    runtime: moonpool.Runtime,
    undisturbed: Sibling,
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "moonpool")
    if case.place in ("finalize", "atexit"):
        ends_in_finalize(runtime, case, monkeypatch, caplog)
    elif case.error is LoadFailed:
        ends_in_load(runtime, case, monkeypatch)
    else:
        ends_in_execute(runtime, case, caplog)
    wait_until(lambda: undisturbed.answers > 0 or undisturbed.errors)


def ends_in_load(runtime: moonpool.Runtime, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT_AT", f"{case.place}:{case.way}")
    timeout_s = 1 if case.way in HANGS else 60
    config = SIGNATURE | options(**PATIENT, LOAD_TIMEOUT_S=timeout_s)

    with pytest.raises(LoadFailed) as caught:
        runtime.load("newcomer", MODELS / "dies.py", config=config)

    assert case.words in str(caught.value)
    assert "newcomer" not in runtime.models()
    if case.way in RAISED:
        assert "dies.py" in caught.value.traceback


def ends_in_execute(runtime: moonpool.Runtime, case: Case, caplog: pytest.LogCaptureFixture) -> None:
    model = "hanged" if case.way in HANGS else "victim"
    before = command(runtime, model, "answer")
    restarts = runtime.instances(model)[0]["restarts"]

    told = f"{case.place}:{case.way}"
    if case.place == "reading the next input":
        assert command(runtime, model, told) == before
        told = "answer"
    if case.error is None:
        assert command(runtime, model, told) == before
    else:
        with pytest.raises(case.error) as caught:
            command(runtime, model, told)
        assert case.words in str(caught.value)

    survives = case.error is ModelError or (case.place == "a thread" and case.error is None)
    if not survives:
        # The runtime notices the death although no request meets it.
        wait_until(lambda: runtime.instances(model)[0]["restarts"] == restarts + 1, 60.0)
        assert case.words in caplog.text
    assert (command(runtime, model, "answer") == before) == survives


def ends_in_finalize(
    runtime: moonpool.Runtime, case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAULT_AT", f"{case.place}:{case.way}")
    config = SIGNATURE | options(**PATIENT, FINALIZE_TIMEOUT_S=1 if case.way in HANGS else 60)
    runtime.load("ending", MODELS / "dies.py", config=config)
    command(runtime, "ending", "answer")

    runtime.unload("ending")

    assert case.words in caplog.text
    assert "ending" not in runtime.models()


def test_every_place_and_way_is_in_the_matrix() -> None:
    cases = [*load_cases(), *execute_cases(), *finalize_cases()]
    pairs = {(case.place, case.way) for case in cases}

    assert len(pairs) == len(cases)
    assert {place for place, _ in pairs} >= {"import", "initialize", "execute", "finalize", *STRUCK}
    assert set(itertools.product(("import", "initialize", "execute", "finalize"), DEATHS)) <= pairs
