"""Tests of sequences in the scheduler: which instance gets which request, and the order of outcomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.inside import hosted_in
from tests.runtime.held_batches import Caller, HoldingBackend, holding, queued
from tests.runtime.interrupting import Interrupted, interrupted_once
from tests.runtime.recorder import PATIENCE_S, counted, row
from tests.waiting import wait_until

from moonpool import SequenceLost, StubDied
from moonpool.ipc.errors import PeerGone
from moonpool.runtime.schedule.lane import IS_COMPILED, Execution
from moonpool.runtime.schedule.scheduler import Scheduler

START, END = 1, 2
HOUR_US = 3_600_000_000


def sequences(**batching: Any) -> dict[str, Any]:
    # By default, a sequence for which nothing comes for a second is over.
    return {"max_batch_size": 4, "sequence_batching": {"max_sequence_idle_microseconds": HOUR_US, **batching}}


def ask(runtime: Any, sequence: int, value: float, flags: int = 0) -> Caller:
    return Caller(runtime, row(value), correlation_id=sequence, flags=flags)


def test_a_sequence_stays_with_its_instance_though_another_one_is_idle(folder: Path) -> None:
    with holding(folder, **sequences(), **counted(2)) as (backend, runtime):
        callers = [ask(runtime, 1, 10, START)]
        held = backend.wait_for(1)
        callers.append(ask(runtime, 1, 11))
        queued(runtime, 1)
        assert backend.sent == [[10]]
        held.answer()
        assert backend.wait_for(2) is held
        held.answer()
        assert [caller.result() for caller in callers] == [10, 11]


def test_responses_keep_the_order_of_batches_where_that_is_asked_for(folder: Path) -> None:
    batching = sequences(oldest={"preserve_ordering": True})
    with holding(folder, **batching, **counted(2)) as (backend, runtime):
        first = ask(runtime, 1, 10, START)
        backend.wait_for(1)
        second = ask(runtime, 2, 20, START)
        backend.wait_for(2).answer()
        scheduler = hosted_in(runtime, "m").scheduler
        wait_until(lambda: scheduler.executing == 1)
        assert second.is_alive()
        backend.wait_for(1).answer()
        assert [first.result(), second.result()] == [10, 20]


def test_an_empty_place_is_sent_and_its_answer_goes_nowhere(folder: Path) -> None:
    with holding(folder, **sequences()) as (backend, runtime):
        backend.is_quick = True
        for sequence in (1, 2):
            assert ask(runtime, sequence, sequence, START).result() == sequence
        assert ask(runtime, 2, 22).result() == 22
        assert backend.sent == [[1], [0, 2], [0, 22]]
        assert runtime.statistics("m")["inference_stats"]["success"]["count"] == 3


def test_requests_behind_one_that_broke_the_instance_get_an_error(folder: Path) -> None:
    with holding(folder, **sequences()) as (backend, runtime):
        first = ask(runtime, 1, 10, START)
        held = backend.wait_for(1)
        second, other = ask(runtime, 1, 11), ask(runtime, 2, 20, START)
        queued(runtime, 2)
        held.break_down(PeerGone("broken"))
        assert isinstance(first.result(), (PeerGone, StubDied))
        assert isinstance(second.result(), SequenceLost)
        # A sequence that had not begun begins in the restarted instance.
        backend.is_quick = True
        backend.wait_for(2).answer()
        assert other.result() == 20


@pytest.mark.promise(
    "Sequences",
    "A request that continues a sequence whose instance is gone gets an error that says so, "
    "even if it is the last one of the sequence. It joins no other sequence of that id and is "
    "not tried again. A request that starts a sequence starts it on another instance.",
)
@pytest.mark.parametrize("flags", [0, END], ids=["in the middle", "at the end"])
@pytest.mark.parametrize("is_started_again", [False, True])
def test_a_request_whose_instance_is_gone_learns_that_its_sequence_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flags: int, is_started_again: bool
) -> None:
    with holding(folder, **sequences()) as (backend, runtime):
        begun = ask(runtime, 1, 10, START)
        backend.wait_for(1)
        next_ones = [ask(runtime, 1, 11, flags)]
        queued(runtime, 1)
        if is_started_again:
            next_ones.append(ask(runtime, 1, 12, START))
            queued(runtime, 2)
        breaking_once(backend, monkeypatch)
        backend.is_quick = True
        backend.held_batches[next(iter(backend.held_batches))].answer()
        assert begun.result() == 10
        lost, *again = [each.result() for each in next_ones]
        assert isinstance(lost, SequenceLost)
        # The request goes into no other sequence with the same id.
        assert again == [12] * is_started_again
        assert backend.sent == [[10], *([value] for value in again)]


@pytest.mark.promise("Sequences", "A request that continues a …")
def test_a_request_that_continues_a_sequence_is_not_retried(folder: Path) -> None:
    parameters = {"MOONPOOL_RETRY": {"string_value": "yes"}}
    with holding(folder, **sequences(), parameters=parameters) as (backend, runtime):
        begun = ask(runtime, 1, 10, START)
        backend.wait_for(1).answer()
        assert begun.result() == 10
        last = ask(runtime, 1, 11, END)
        backend.wait_for(2).break_down(PeerGone("broken"))
        assert isinstance(last.result(), SequenceLost)


@pytest.mark.promise("Sequences", "A request that continues a …")
def test_a_first_request_whose_instance_is_gone_starts_its_sequence_elsewhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holding(folder, **sequences()) as (backend, runtime):
        backend.is_quick = True
        breaking_once(backend, monkeypatch)
        assert ask(runtime, 1, 10, START).result() == 10
        assert ask(runtime, 1, 11, END).result() == 11


def breaking_once(backend: HoldingBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next batch find the instance gone, so that it is not delivered."""
    execute = backend.model_instance_execute

    def breaks(*_: object) -> object:
        monkeypatch.setattr(backend, "model_instance_execute", execute)
        raise PeerGone("gone")

    monkeypatch.setattr(backend, "model_instance_execute", breaks)


def test_a_caller_that_left_leaves_its_sequence_as_it_was(folder: Path) -> None:
    with holding(folder, **sequences()) as (backend, runtime):
        first = ask(runtime, 1, 10, START)
        held = backend.wait_for(1)
        gone = Caller(runtime, row(11), correlation_id=1, timeout_s=0.01)
        assert isinstance(gone.result(), TimeoutError)
        last = ask(runtime, 1, 12, END)
        queued(runtime, 1)
        held.answer()
        backend.wait_for(2).answer()
        assert [first.result(), last.result()] == [10, 12]
        assert backend.sent == [[10], [12]]


def test_requests_for_empty_slots_are_no_failures_in_the_statistics(folder: Path) -> None:
    with holding(folder, **sequences()) as (backend, runtime):
        backend.is_quick = True
        for sequence in (1, 2):
            ask(runtime, sequence, sequence, START).result()
        backend.is_quick = False
        lost = ask(runtime, 2, 22)
        backend.wait_for(3).break_down(PeerGone("broken"))
        assert isinstance(lost.result(), (PeerGone, StubDied))
        assert runtime.statistics("m")["inference_stats"]["fail"]["count"] == 1


# Methods in which the main thread is interrupted by a signal handler.
PLACES = [
    (owner, name, after)
    for owner, name in [
        (Scheduler, "enter"),
        # Of what is compiled, nothing can be replaced. What is not has the reactor finish in place of such a thread.
        (Scheduler, "finish") if IS_COMPILED else (Execution, "drive"),
    ]
    for after in (False, True)
]


@pytest.mark.parametrize(("owner", "name", "after"), PLACES)
def test_an_interrupted_call_leaves_no_slot_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool
) -> None:
    batching = sequences(max_sequence_idle_microseconds=1000) | {"max_batch_size": 1}
    with holding(folder, **batching) as (backend, runtime):
        backend.is_quick = True
        with monkeypatch.context() as patch:
            interrupted_once(patch, owner, name, after=after)
            with pytest.raises(Interrupted):
                runtime.infer("m", row(1), correlation_id=1, flags=START)
        for i in (2, 3):
            found = runtime.infer("m", row(i), correlation_id=i, flags=START, timeout_s=PATIENCE_S)
            assert found["Y"].item() == i
        assert not hosted_in(runtime, "m").scheduler.executing
