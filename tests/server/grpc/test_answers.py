"""Answers of stubs: the polling thread waits for quick models, another one for the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.held_batches import holding
from tests.runtime.recorder import PATIENCE_S, model_directory, x

from moonpool import Runtime
from moonpool.ipc.errors import PeerGone
from moonpool.runtime.model.request import Outcome, Waiter
from moonpool.runtime.schedule.scheduler import Execution
from moonpool.runtime.server.grpc.answers import Answers


class Client(Waiter):
    """Keeps its outcome, and the thread that it came on."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.thread: int | None = None
        self.outcome: Outcome | None = None
        self.is_answered = threading.Event()

    def appoint(self, execution: Execution) -> bool:
        return self._answers.drive(execution)

    def resolve(self, outcome: Outcome | None) -> None:
        self.outcome, self.thread = outcome, threading.get_ident()
        self.is_answered.set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_directory(tmp_path / "m", 1)


@pytest.fixture
def answers() -> Iterator[Answers]:
    made = Answers(threading.Lock())
    made.poller = threading.get_ident()
    yield made
    made.close()


def sent(runtime: Runtime, answers: Answers) -> Client:
    hosted = runtime.registry.find("m")
    request = hosted.signature.request(x(1))
    client = request.waiter = Client(answers)
    execution = hosted.scheduler.submit(request)
    if execution is not None:
        execution.offer()
        assert answers.drive(execution)
    return client


def test_a_quick_answer_is_read_where_the_request_was_sent(folder: Path, answers: Answers) -> None:
    with holding(folder) as (backend, runtime):
        backend.is_quick = True
        client = sent(runtime, answers)
        assert answers.has_fresh

        answers.attend()

        assert client.thread == threading.get_ident()
        assert not answers.has_fresh


def test_slow_models_are_left_to_the_other_thread(folder: Path, answers: Answers) -> None:
    with holding(folder) as (backend, runtime):
        client = sent(runtime, answers)
        answers.attend()
        assert not answers.has_fresh
        assert client.outcome is None

        backend.wait_for(1).answer()

        assert client.is_answered.wait(PATIENCE_S)
        assert client.thread != threading.get_ident()


def test_a_slow_model_is_not_waited_for_again_at_once(folder: Path, answers: Answers) -> None:
    with holding(folder) as (backend, runtime):
        slow = sent(runtime, answers)
        answers.attend()
        backend.wait_for(1).answer()
        assert slow.is_answered.wait(PATIENCE_S)

        next_one = sent(runtime, answers)
        assert not answers.has_fresh
        backend.wait_for(2).answer()
        assert next_one.is_answered.wait(PATIENCE_S)


def test_a_model_that_dies_meanwhile_is_an_error_of_its_request(
    folder: Path, answers: Answers
) -> None:
    with holding(folder) as (backend, runtime):
        client = sent(runtime, answers)
        backend.wait_for(1).break_down(PeerGone("the instance is gone"))

        answers.attend()

        assert client.is_answered.wait(PATIENCE_S)
        assert isinstance(client.outcome, BaseException)


def test_at_the_end_nothing_is_waited_for_and_nothing_lost(folder: Path, answers: Answers) -> None:
    with holding(folder) as (backend, runtime):
        client = sent(runtime, answers)
        answers.attend(0)
        assert not answers.has_fresh
        backend.wait_for(1).answer()

        assert client.is_answered.wait(PATIENCE_S)
