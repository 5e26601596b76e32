"""Tests of executions of a backend: never two in one instance, all answers and errors, and the threads they run on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.recorder import PATIENCE_S, Planned, Recorder, config, counted, echo, x

import moonpool
from moonpool import ModelInstance, Response, Runtime
from moonpool.ipc.errors import PeerGone
from moonpool.runtime.errors import BackendError
from moonpool.runtime.model.request import InferenceRequest


@pytest.mark.promise("Lifecycle", "One instance never executes two batches at once; different instances do.")
def test_one_instance_never_executes_twice_at_once_and_different_ones_do(folder: Path) -> None:
    inside: set[str] = set()
    seen: set[str] = set()
    # The first execution of each of the three instances waits for the other two.
    together = threading.Barrier(3)
    overlaps: list[str] = []
    lock = threading.Lock()

    def execute(instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
        with lock:
            if instance.name in inside:
                overlaps.append(instance.name)
            inside.add(instance.name)
            is_first = instance.name not in seen
            seen.add(instance.name)
        if is_first:
            together.wait(PATIENCE_S)
        os.sched_yield()
        with lock:
            inside.discard(instance.name)
        return echo(instance, requests)

    answers: list[float] = []

    def ask(number: int) -> None:
        asked = range(number * 100, number * 100 + 10)
        answers.extend(runtime.infer("m", x(i))["Y"][0] for i in asked)

    with Runtime(backends=[Recorder(execute=execute)]) as runtime:
        runtime.load("m", folder, config=config(**counted(3)))
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert overlaps == []
    assert len(seen) == 3
    assert sorted(answers) == [float(n * 100 + i) for n in range(9) for i in range(10)]


def test_an_exception_in_execute_is_the_outcome_of_its_batch_alone(folder: Path) -> None:
    def execute(instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
        if requests[0].inputs[0].data[0] < 0:
            raise Planned("negative")
        return echo(instance, requests)

    recorder = Recorder(execute=execute)
    with Runtime(backends=[recorder]) as runtime:
        runtime.load("m", folder, config=config())
        for _ in range(3):
            with pytest.raises(BackendError, match=r"m_0_0.*Planned\('negative'\)") as caught:
                runtime.infer("m", x(-1))
            assert isinstance(caught.value.__cause__, Planned)
            assert runtime.infer("m", x(1))["Y"].tolist() == [1]
        shown = runtime.instances("m")[0]
        assert (shown["state"], shown["restarts"]) == ("READY", 0)
    recorder.check_pairs()


def test_a_moonpool_error_of_execute_reaches_the_caller_as_it_is(folder: Path) -> None:
    error = moonpool.ModelError("out of range", "INVALID_ARG")

    def execute(_: ModelInstance, __: Sequence[InferenceRequest]) -> Any:
        raise error

    with Runtime(backends=[Recorder(execute=execute)]) as runtime:
        runtime.load("m", folder, config=config())
        with pytest.raises(moonpool.ModelError, match="out of range") as caught:
            runtime.infer("m", x(1))
    assert caught.value.code == "INVALID_ARG"


def test_an_exception_among_the_outcomes_is_for_its_request(folder: Path) -> None:
    def execute(_: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
        return [moonpool.ModelError("not you") for _ in requests]

    with Runtime(backends=[Recorder(execute=execute)]) as runtime:
        runtime.load("m", folder, config=config())
        with pytest.raises(moonpool.ModelError, match="not you"):
            runtime.infer("m", x(1))


WRONG_ANSWERS: list[tuple[Any, str]] = [
    ([], "0 responses to 1 requests"),
    ([Response({}), Response({})], "2 responses to 1 requests"),
    ([None], "NoneType"),
    (["text"], "str"),
    (None, "NoneType"),
    ("text", "str"),
    (7, "int"),
]


@pytest.mark.parametrize(("answer", "words"), WRONG_ANSWERS, ids=repr)
def test_a_wrong_answer_of_a_backend_is_an_error_and_the_instance_goes_on(
    folder: Path, answer: object, words: str
) -> None:
    answers = [answer]

    def execute(instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
        return answers.pop() if answers else echo(instance, requests)

    with Runtime(backends=[Recorder(execute=execute)]) as runtime:
        runtime.load("m", folder, config=config())
        with pytest.raises(BackendError, match=words):
            runtime.infer("m", x(1), timeout_s=PATIENCE_S)
        assert runtime.infer("m", x(1), timeout_s=PATIENCE_S)["Y"].tolist() == [1]


@pytest.mark.promise("Lifecycle", "If an instance breaks, requests that had not reached it yet are not lost.")
def test_an_instance_that_says_it_is_broken_is_started_anew_and_the_request_is_not_lost(folder: Path) -> None:
    breaks = [PeerGone("gone")]

    def execute(instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
        if breaks:
            raise breaks.pop()
        return echo(instance, requests)

    recorder = Recorder(execute=execute)
    with Runtime(backends=[recorder]) as runtime:
        runtime.load("m", folder, config=config())
        assert runtime.infer("m", x(4), timeout_s=PATIENCE_S)["Y"].tolist() == [4]
        assert runtime.instances("m")[0]["restarts"] == 1
    assert [f for f, s in recorder.calls if s.startswith("m:1 ")] == [
        "model_instance_initialize",
        "model_instance_execute",
        "model_instance_finalize",
        "model_instance_initialize",
        "model_instance_execute",
        "model_instance_finalize",
    ]


# Callers that must not block


def test_executions_for_callers_that_must_not_block_run_elsewhere(folder: Path) -> None:
    release = threading.Event()

    def execute(instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
        if not release.wait(PATIENCE_S):
            raise Planned("nobody came")
        return echo(instance, requests)

    with Runtime(backends=[Recorder(execute=execute)]) as runtime:
        runtime.load("m", folder, config=config())
        future = runtime.submit("m", x(1))
        assert not future.done()
        release.set()
        assert future.result(PATIENCE_S).outputs["Y"].tolist() == [1]


async def _both(runtime: Runtime) -> list[float]:
    answers = await asyncio.gather(runtime.ainfer("m", x(1)), runtime.ainfer("m", x(2)))
    return [float(answer["Y"][0]) for answer in answers]


def test_a_backend_that_blocks_does_not_block_an_event_loop(folder: Path) -> None:
    # Both executions run at the same time, though one thread asked for both.
    together = threading.Barrier(2)

    def execute(instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
        together.wait(PATIENCE_S)
        return echo(instance, requests)

    with Runtime(backends=[Recorder(execute=execute)]) as runtime:
        runtime.load("m", folder, config=config(**counted(2)))
        assert asyncio.run(_both(runtime)) == [1, 2]


def test_a_caller_with_a_time_limit_does_not_wait_longer_for_a_backend_that_blocks(folder: Path) -> None:
    proceed = threading.Event()

    def execute(instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
        proceed.wait(PATIENCE_S)
        return echo(instance, requests)

    with Runtime(backends=[Recorder(execute=execute)]) as runtime:
        runtime.load("m", folder, config=config())
        with pytest.raises(moonpool.RequestTimedOut):
            runtime.infer("m", x(1), timeout_s=0.01)
        proceed.set()
        assert runtime.infer("m", x(2), timeout_s=PATIENCE_S)["Y"].tolist() == [2]


def test_a_backend_that_answers_at_once_may_answer_a_long_queue(folder: Path) -> None:
    class Quick(Recorder):
        blocks = False

    inside, proceed = threading.Event(), threading.Event()

    def execute(instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
        if not inside.is_set():
            inside.set()
            proceed.wait(PATIENCE_S)
        return echo(instance, requests)

    with Runtime(backends=[Quick(execute=execute)]) as runtime:
        runtime.load("m", folder, config=config())
        first = threading.Thread(target=runtime.infer, args=("m", x(0)))
        first.start()
        assert inside.wait(PATIENCE_S)
        futures = [runtime.submit("m", x(i)) for i in range(2000)]
        proceed.set()
        assert [f.result(PATIENCE_S).outputs["Y"][0] for f in futures] == list(range(2000))
        first.join(PATIENCE_S)
