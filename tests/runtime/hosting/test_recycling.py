"""Tests of recycling: instances that have served long enough are started anew, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.inside import hosted_in
from tests.runtime.held_batches import Caller, holding, queued
from tests.runtime.recorder import PATIENCE_S, Recorder, config, counted, row, x
from tests.waiting import wait_until

from moonpool import ModelInstance, Response, Runtime
from moonpool.ipc.errors import PeerGone
from moonpool.ipc.messages import FINAL
from moonpool.runtime.hosting import recycling, supervisor
from moonpool.runtime.model.request import LATER, InferenceRequest

ENDED = ("model_instance_finalize", "m:1 m_0_0")
BEGUN = ("model_instance_initialize", "m:1 m_0_0")
START, END = 1, 2


def after(requests: int) -> dict[str, Any]:
    return {"parameters": {"MOONPOOL_RECYCLE_REQUESTS": {"string_value": str(requests)}}}


def supervisor_of(runtime: Runtime) -> supervisor.Supervisor:
    return hosted_in(runtime, "m").supervisor


def recycled(runtime: Runtime, count: int) -> None:
    """Wait until so many instances were recycled and all are ready."""
    watched = supervisor_of(runtime)
    wait_until(
        lambda: (
            sum(watched.recycling.counts.values()) == count
            and {record.machine.state for record in watched.records} == {"READY"}
        ),
        what=f"{count} recycled instances",
    )


def states(runtime: Runtime) -> list[str]:
    return sorted(shown["state"] for shown in runtime.instances("m"))


@pytest.mark.promise(
    "Limits",
    "An instance is started anew after the number of requests that its option sets. Requests "
    "that wait meanwhile are answered.",
)
def test_an_instance_is_started_anew_after_so_many_requests_and_what_waits_is_answered(folder: Path) -> None:
    executed: list[int] = []
    with holding(folder, **after(3)) as (backend, runtime):
        finalize = backend.model_instance_finalize

        def note(instance: ModelInstance) -> None:
            executed.append(len(backend.batches))
            finalize(instance)

        backend.model_instance_finalize = note  # type: ignore[method-assign]
        callers = [Caller(runtime, x(float(i))) for i in range(8)]
        backend.is_quick = True
        backend.wait_for(1).answer()
        assert sorted(caller.result() for caller in callers) == list(range(8))
        recycled(runtime, 2)
        assert backend.calls.count(ENDED) == 2
        assert backend.calls.count(BEGUN) == 3
        assert runtime.instances("m")[0]["restarts"] == 0
        assert executed == [3, 6]
    backend.check_pairs()


def test_why_an_instance_is_started_anew_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "moonpool")
    with holding(folder, **after(1)) as (backend, runtime):
        backend.is_quick = True
        runtime.infer("m", x(1), timeout_s=PATIENCE_S)
        recycled(runtime, 1)
        why = "it has executed 1 requests; MOONPOOL_RECYCLE_REQUESTS is 1"
        assert f"[m_0_0] is started anew: {why}" in caplog.text
        assert runtime.instances("m")[0]["because"] == f"recycled: {why}"
        assert 'reason="requests",version="1"} 1' in _counter(runtime)


def _counter(runtime: Runtime) -> str:
    lines = runtime.metrics().splitlines()
    (line,) = [
        each for each in lines if each.startswith("moonpool_instance_recycles_total") and 'reason="requests"' in each
    ]
    return line


@pytest.mark.promise("Limits", "If several instances have served long enough, they are recycled one at a time.")
def test_instances_are_recycled_one_at_a_time(folder: Path) -> None:
    with holding(folder, **after(1), **counted(2)) as (backend, runtime):
        held = threading.Event()
        finalize = backend.model_instance_finalize

        def slowly(instance: ModelInstance) -> None:
            assert held.wait(PATIENCE_S)
            finalize(instance)

        backend.model_instance_finalize = slowly  # type: ignore[method-assign]
        backend.is_quick = True
        for i in range(5):
            assert runtime.infer("m", x(float(i)), timeout_s=PATIENCE_S)["Y"].flat[0] == i
        wait_until(lambda: states(runtime) == ["READY", "RECYCLING"])
        assert runtime.infer("m", x(5), timeout_s=PATIENCE_S)["Y"].flat[0] == 5
        assert states(runtime) == ["READY", "RECYCLING"]
        assert runtime.is_ready("m")
        held.set()
        wait_until(lambda: sum(supervisor_of(runtime).recycling.counts.values()) == 1)
    backend.check_pairs()


@pytest.mark.promise("Limits", "A recycled instance finishes its sequences and open requests first.")
def test_a_sequence_ends_where_it_began(folder: Path) -> None:
    batching = {"max_batch_size": 4, "sequence_batching": {"max_sequence_idle_microseconds": 3_600_000_000}}
    with holding(folder, **batching, **after(2)) as (backend, runtime):
        backend.is_quick = True

        def ask(sequence: int, value: float, flags: int = 0) -> Caller:
            return Caller(runtime, row(value), correlation_id=sequence, flags=flags)

        assert [ask(1, 1, START).result(), ask(1, 2).result(), ask(1, 3).result()] == [1, 2, 3]
        # The instance is due, so this request waits for the next process.
        other = ask(2, 9, START | END)
        queued(runtime, 1)
        assert ENDED not in backend.calls
        assert ask(1, 4, END).result() == 4
        assert other.result() == 9
        recycled(runtime, 1)
        assert backend.calls.count(ENDED) == 1
    backend.check_pairs()


class Later(Recorder):
    """A backend that leaves all requests open; `asked` has them."""

    def __init__(self) -> None:
        super().__init__("later", execute=self._take)
        self.asked: list[tuple[ModelInstance, InferenceRequest]] = []

    def _take(self, instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
        self.asked += [(instance, request) for request in requests]
        return [LATER] * len(requests)

    def answer(self) -> None:
        instance, request = self.asked.pop(0)
        reactor = instance.model.state
        reply = Response({"Y": request.inputs[0].data.copy()})
        reactor.call_soon(lambda: instance.respond(request, reply, FINAL))


def later(folder: Path) -> tuple[Later, Runtime]:
    backend = Later()
    runtime = Runtime(backends=[backend])
    runtime.load("m", folder, config=config(backend="later", **after(1)))
    hosted = hosted_in(runtime, "m")
    hosted.model.state = hosted.scheduler.reactor
    return backend, runtime


@pytest.mark.promise("Limits", "A recycled instance finishes its sequences …")
def test_a_request_that_is_answered_later_is_waited_for(folder: Path) -> None:
    backend, runtime = later(folder)
    with runtime, ThreadPoolExecutor() as pool:
        first = pool.submit(runtime.infer, "m", x(1), timeout_s=PATIENCE_S)
        wait_until(lambda: backend.asked)
        second = pool.submit(runtime.infer, "m", x(2), timeout_s=PATIENCE_S)
        queued(runtime, 1)
        assert ENDED not in backend.calls
        backend.answer()
        assert first.result(PATIENCE_S)["Y"].flat[0] == 1
        wait_until(lambda: backend.asked)
        assert backend.calls.count(ENDED) == 1
        backend.answer()
        assert second.result(PATIENCE_S)["Y"].flat[0] == 2
    backend.check_pairs()


def test_an_instance_whose_requests_stay_open_serves_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recycling, "_OPEN_S", 0.01)
    backend, runtime = later(folder)
    with runtime, ThreadPoolExecutor() as pool:
        first = pool.submit(runtime.infer, "m", x(1), timeout_s=PATIENCE_S)
        second = pool.submit(runtime.infer, "m", x(2), timeout_s=PATIENCE_S)
        wait_until(lambda: len(backend.asked) == 2)
        assert ENDED not in backend.calls
        backend.answer()
        backend.answer()
        assert {each.result(PATIENCE_S)["Y"].flat[0] for each in (first, second)} == {1, 2}
    assert "[m_0_0] is not recycled yet: requests are open" in caplog.text
    backend.check_pairs()


def test_an_instance_that_breaks_while_it_waits_to_leave_is_mended(folder: Path) -> None:
    backend, runtime = later(folder)
    with runtime, ThreadPoolExecutor() as pool:
        first = pool.submit(runtime.infer, "m", x(1), timeout_s=PATIENCE_S)
        wait_until(lambda: backend.asked)
        (record,) = supervisor_of(runtime).records
        wait_until(lambda: not record.instance.accepts or record.recovery)
        record.instance.report_broken(PeerGone("gone"))
        with pytest.raises(PeerGone, match="gone"):
            first.result(PATIENCE_S)
        wait_until(lambda: record.restarts == 1)
        backend.asked.clear()
        second = pool.submit(runtime.infer, "m", x(2), timeout_s=PATIENCE_S)
        wait_until(lambda: backend.asked)
        backend.answer()
        assert second.result(PATIENCE_S)["Y"].flat[0] == 2
    backend.check_pairs()


@pytest.mark.parametrize("moment", ["finalize", "initialize"])
def test_an_unload_meets_an_instance_that_is_being_recycled(folder: Path, moment: str) -> None:
    inside, proceed = threading.Event(), threading.Event()
    with holding(folder, **after(1)) as (backend, runtime):
        backend.is_quick = True
        function = getattr(backend, f"model_instance_{moment}")

        def slowly(instance: ModelInstance) -> None:
            inside.set()
            assert proceed.wait(PATIENCE_S)
            function(instance)

        setattr(backend, f"model_instance_{moment}", slowly)
        runtime.infer("m", x(1), timeout_s=PATIENCE_S)
        assert inside.wait(PATIENCE_S)
        (record,) = supervisor_of(runtime).records
        watched = supervisor_of(runtime)
        unloading = threading.Thread(target=runtime.unload, args=("m",))
        unloading.start()
        wait_until(lambda: watched.is_stopping)
        proceed.set()
        unloading.join(PATIENCE_S)
        assert not unloading.is_alive()
        assert record.machine.state == "STOPPED"
    backend.check_pairs()


def test_an_instance_that_does_not_come_back_is_restarted_as_the_policy_says(folder: Path) -> None:
    with holding(folder, **after(1)) as (backend, runtime):
        backend.is_quick = True
        failure = RuntimeError("not now")
        backend.failures[BEGUN] = failure
        runtime.infer("m", x(1), timeout_s=PATIENCE_S)
        (record,) = supervisor_of(runtime).records
        wait_until(lambda: len(record.deaths_s) >= 2)
        waiting = runtime.submit("m", x(2))
        del backend.failures[BEGUN]
        assert waiting.result(PATIENCE_S).outputs["Y"].flat[0] == 2
        assert record.restarts == 1
    backend.check_pairs()


def test_an_instance_that_has_grown_is_started_anew_when_it_is_idle(folder: Path) -> None:
    parameters = {"MOONPOOL_RECYCLE_RSS_BYTES": {"string_value": "1M"}}
    with holding(folder, parameters=parameters) as (backend, runtime):
        (record,) = supervisor_of(runtime).records
        asked = runtime.submit("m", x(1))
        held = backend.wait_for(1)
        record.instance.report_grown(5 << 20)
        assert ENDED not in backend.calls
        held.answer()
        assert asked.result(PATIENCE_S).outputs["Y"].flat[0] == 1
        recycled(runtime, 1)
        assert supervisor_of(runtime).recycling.counts == {("m_0_0", "rss"): 1}
        why = "its process has grown to 5242880 bytes; MOONPOOL_RECYCLE_RSS_BYTES is 1048576"
        assert record.machine.because == f"recycled: {why}"
        record.instance.report_grown(6 << 20)
        recycled(runtime, 2)
    backend.check_pairs()
