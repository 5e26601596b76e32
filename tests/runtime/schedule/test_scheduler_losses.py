"""Tests of losses: callers that leave, instances that break, models that are unloaded."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.inside import hosted_in
from tests.refused_threads import refuse_threads
from tests.runtime.held_batches import Caller, HoldingBackend, holding, queued
from tests.runtime.recorder import PATIENCE_S, Recorder, config, echo, row, x
from tests.waiting import wait_until

import moonpool
from moonpool import RequestTimedOut, Response
from moonpool.ipc.errors import PeerGone
from moonpool.ipc.messages import FINAL
from moonpool.runtime.model.request import InferenceRequest

HOUR_US = 3_600_000_000


def batching(**policy: Any) -> dict[str, Any]:
    return {"max_batch_size": 8, "dynamic_batching": policy}


def value(future: Future[Response]) -> float:
    return float(future.result(PATIENCE_S).outputs["Y"].flat[0])


# Callers that give up


@pytest.mark.promise(
    "Requests",
    "A caller that gives up, is cancelled or is interrupted leaves the instance usable and the "
    "others of its batch answered.",
)
def test_the_instance_is_usable_after_a_caller_gave_up(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        for i in range(3):
            with pytest.raises(RequestTimedOut, match=r"^Request timeout expired$") as caught:
                runtime.infer("m", x(i), timeout_s=0.005)
            assert caught.value.code == "UNAVAILABLE"
            assert isinstance(caught.value, TimeoutError)
            next_one = runtime.submit("m", x(100 + i))
            backend.wait_for(2 * i + 1).answer()
            backend.wait_for(2 * i + 2).answer()
            # The late answer went to no other caller.
            assert value(next_one) == 100 + i
        assert backend.sent == [[0], [100], [1], [101], [2], [102]]


def test_a_caller_that_gave_up_does_not_take_its_batch_with_it(folder: Path) -> None:
    with holding(folder, **batching()) as (backend, runtime):
        first = runtime.submit("m", row(0))
        # In this time the batch forms and is sent, on any machine.
        hasty = Caller(runtime, row(1), timeout_s=5.0)
        patient = Caller(runtime, row(2))
        queued(runtime, 2)
        backend.wait_for(1).answer()
        second = backend.wait_for(2)
        assert isinstance(hasty.result(), RequestTimedOut)
        second.answer()
        assert value(first) == 0
        assert patient.result() == 2


def test_a_caller_that_gave_up_in_the_queue_is_never_executed(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        first = runtime.submit("m", x(0))
        with pytest.raises(RequestTimedOut):
            runtime.infer("m", x(1), timeout_s=0.005)
        last = runtime.submit("m", x(2))
        backend.is_quick = True
        backend.wait_for(1).answer()
        assert [value(first), value(last)] == [0, 2]
        assert backend.sent == [[0], [2]]


def test_a_time_limit_of_zero_is_over_at_once(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        with pytest.raises(RequestTimedOut):
            runtime.infer("m", x(0), timeout_s=0)
        backend.wait_for(1).answer()
        backend.is_quick = True
        assert runtime.infer("m", x(1))["Y"].flat[0] == 1


def test_an_answer_that_was_received_already_is_not_waited_for_on_the_socket(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holding(folder) as (backend, runtime):
        future = runtime.submit("m", x(0))
        held = backend.wait_for(1)
        (execution,) = hosted_in(runtime, "m").scheduler.executing_since(time.monotonic_ns())
        with monkeypatch.context() as patch:
            # This is the state after a signal handler has ended a `wait` that had read the answer.
            patch.setattr(held, "is_received", lambda: True)
            patch.setattr(held, "finish", lambda requests: echo(held.instance, requests))
            execution.drive_in_reactor()
            assert value(future) == 0


# Instances that break


def test_a_batch_that_was_in_a_broken_instance_fails_and_the_queue_waits_for_the_next(folder: Path) -> None:
    with holding(folder, **batching()) as (backend, runtime):
        lost = runtime.submit("m", row(0))
        waiting = [runtime.submit("m", row(i)) for i in (1, 2)]
        backend.wait_for(1).break_down(PeerGone("the instance is gone"))
        with pytest.raises(PeerGone, match="the instance is gone"):
            lost.result(PATIENCE_S)
        backend.wait_for(2).answer()
        assert [value(future) for future in waiting] == [1, 2]
        assert runtime.instances("m")[0]["restarts"] == 1
    backend.check_pairs()


def test_every_caller_of_a_broken_batch_has_an_error_object_of_its_own(folder: Path) -> None:
    with holding(folder, **batching()) as (backend, runtime):
        first = runtime.submit("m", row(0))
        callers = [Caller(runtime, row(i)) for i in (1, 2)]
        queued(runtime, 2)
        backend.wait_for(1).answer()
        error = moonpool.ModelError("out of paper", "INVALID_ARG")
        error.__cause__ = ValueError("no paper")
        backend.wait_for(2).break_down(error)
        one, other = (caller.result() for caller in callers)
        assert value(first) == 0
    for each in (one, other):
        assert isinstance(each, moonpool.ModelError)
        assert (str(each), each.code) == ("out of paper", "INVALID_ARG")
        assert each.__cause__ is error.__cause__
    assert one is not other


def test_requests_in_a_broken_instance_are_retried_once_if_the_model_allows_it(folder: Path) -> None:
    parameters = {"MOONPOOL_RETRY": {"string_value": "yes"}}
    with holding(folder, parameters=parameters) as (backend, runtime):
        lucky = Caller(runtime, x(1))
        backend.wait_for(1).break_down(PeerGone("first"))
        backend.wait_for(2).answer()
        assert lucky.result() == 1
        unlucky = Caller(runtime, x(2))
        backend.wait_for(3).break_down(PeerGone("first"))
        backend.wait_for(4).break_down(PeerGone("second"))
        assert str(unlucky.result()) == "second"
        assert backend.sent == [[1], [1], [2], [2]]


def test_an_execution_over_the_models_limit_is_aborted(folder: Path) -> None:
    parameters = {"MOONPOOL_EXECUTE_TIMEOUT_S": {"string_value": "0.5"}}
    with holding(folder, parameters=parameters) as (backend, runtime):
        with pytest.raises(moonpool.ExecuteTimedOut, match=r"longer than 0\.5 s"):
            runtime.infer("m", x(1), timeout_s=PATIENCE_S)
        assert len(backend.aborted) >= 1
        backend.is_quick = True
        # What is quick may take longer than that on a busy machine.
        runtime.load("m", folder, config=config(backend="holding"))
        assert runtime.infer("m", x(2), timeout_s=PATIENCE_S)["Y"].flat[0] == 2


# Unloading


@pytest.mark.promise(
    "Lifecycle",
    "An unload finishes the present requests and takes no new ones. When its time is over, "
    "the remaining requests get an error that says so.",
)
def test_unload_finishes_what_is_there_and_takes_nothing_new(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        callers = [Caller(runtime, x(0))]
        backend.wait_for(1)
        callers.append(Caller(runtime, x(1)))
        queued(runtime, 1)
        thread = threading.Thread(target=runtime.unload, args=("m",))
        thread.start()
        wait_until(lambda: not runtime.is_ready("m"))
        with pytest.raises(moonpool.ModelUnavailable, match="loading or unloading"):
            runtime.infer("m", x(2))
        backend.is_quick = True
        backend.wait_for(1).answer()
        assert [caller.result() for caller in callers] == [0, 1]
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    backend.check_pairs()


@pytest.mark.promise("Lifecycle", "An unload finishes the present …")
def test_an_unload_whose_time_is_over_gives_everybody_a_reason(folder: Path) -> None:
    with holding(folder, drain_timeout_s=0.05) as (backend, runtime):
        inside = runtime.submit("m", x(0))
        waiting = runtime.submit("m", x(1))
        runtime.unload("m")
        for future in (inside, waiting):
            with pytest.raises(moonpool.ModelUnavailable, match="is being unloaded"):
                future.result(PATIENCE_S)
    backend.check_pairs()


# Messages that cross


@pytest.mark.promise("Responses at any time", "A request ends once, also if its instance dies while it answers.")
def test_a_request_ends_once_though_its_instance_dies_as_it_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holding(folder) as (backend, runtime):
        scheduler = hosted_in(runtime, "m").scheduler
        lost = scheduler._on_lost

        def answer_first(
            instance: moonpool.ModelInstance, requests: list[InferenceRequest], error: BaseException
        ) -> None:
            for request in requests:
                instance.respond(request, Response({}), FINAL)
            lost(instance, requests, error)

        monkeypatch.setattr(scheduler, "_on_lost", answer_first)
        future = runtime.submit("m", x(1))
        backend.wait_for(1).break_down(PeerGone("the instance is gone"))
        with pytest.raises(PeerGone):
            future.result(PATIENCE_S)
        wait_until(lambda: scheduler.statistics.fail_count)
        assert scheduler.statistics.fail_count == 1
        # No table keeps the request.
        assert not scheduler.open_requests._ended


@pytest.mark.promise("Responses at any time", "If many callers leave at …")
def test_an_instance_is_told_of_a_caller_who_left_while_it_was_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holding(folder) as (backend, runtime):
        scheduler = hosted_in(runtime, "m").scheduler
        execute, events = HoldingBackend.model_instance_execute, []

        def leave_first(holding: HoldingBackend, instance: Any, requests: list[InferenceRequest]) -> Any:
            scheduler.leave(requests[0])
            events.append("executes")
            return execute(holding, instance, requests)

        monkeypatch.setattr(HoldingBackend, "model_instance_execute", leave_first)
        monkeypatch.setattr(HoldingBackend, "cancel", lambda *_: events.append("is told"))
        runtime.submit("m", x(1))
        backend.wait_for(1).answer()
        wait_until(lambda: not scheduler.executing)
        assert events == ["is told", "executes", "is told"]


def test_requests_that_fill_empty_places_are_no_failures(folder: Path) -> None:
    changes = {"max_batch_size": 4, "sequence_batching": {"direct": {}, "max_sequence_idle_microseconds": HOUR_US}}
    with holding(folder, **changes) as (backend, runtime):
        scheduler = hosted_in(runtime, "m").scheduler
        first = Caller(runtime, row(1), correlation_id=1, flags=1)
        backend.wait_for(1).answer()
        assert first.result() == 1
        second = Caller(runtime, row(2), correlation_id=2, flags=1)
        # The slot before it is empty, because it belongs to the first sequence.
        assert backend.wait_for(2).values == [0, 2]
        backend.wait_for(2).break_down(PeerGone("the instance is gone"))
        assert isinstance(second.result(), PeerGone)
        assert scheduler.statistics.fail_count == 1


@pytest.mark.promise("At the limits", "If no thread can be started …")
def test_a_batch_that_no_thread_can_give_to_its_instance_fails_and_the_next_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moonpool.Runtime(backends=[Recorder()]) as runtime:
        runtime.load("m", folder, config=config())
        with monkeypatch.context() as patch:
            refuse_threads(patch, "moonpool-execute")
            refused = runtime.submit("m", x(1))
            with pytest.raises(moonpool.OutOfThreads, match="no thread for moonpool-execute_0"):
                refused.result(PATIENCE_S)
        assert value(runtime.submit("m", x(2))) == 2
