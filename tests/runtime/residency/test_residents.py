"""Tests of models that sleep: who wakes them, who may not go, and what happens when both happen at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.inside import hosted_in
from tests.runtime.held_batches import Caller, HoldingBackend, queued
from tests.runtime.recorder import PATIENCE_S, Planned, config, model_directory, x
from tests.waiting import wait_until

from moonpool import LoadFailed, Model, ModelInstance, ModelUnavailable, RequestTimedOut, Resident, Runtime
from moonpool.runtime.model.states import Residence
from moonpool.runtime.residency import policy, residents
from moonpool.runtime.residency.residents import ResidentModel


class Gate:
    """A place where a thread of the runtime waits for the test."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)

    def wait(self) -> None:
        assert self.reached.wait(PATIENCE_S)


class SleepyBackend(HoldingBackend):
    """Starts and ends instances when the test says so, if it has put a gate there."""

    def __init__(self) -> None:
        super().__init__()
        self.is_quick = True
        self.starts: dict[str, Gate] = {}
        self.ends: dict[str, Gate] = {}

    def model_instance_initialize(self, instance: ModelInstance) -> None:
        gate = self.starts.get(instance.model.name)
        if gate is not None:
            gate.pass_through()
        super().model_instance_initialize(instance)

    def model_instance_finalize(self, instance: ModelInstance) -> None:
        gate = self.ends.get(instance.model.name)
        if gate is not None:
            gate.pass_through()
        super().model_instance_finalize(instance)

    def abort(self, instance: ModelInstance, reason: BaseException) -> None:
        if instance.state is None:  # it starts
            self.failures["model_instance_initialize", f"m:1 {instance.name}"] = reason
            gate = self.starts.get(instance.model.name)
            if gate is not None:
                gate.opened.set()
        else:
            super().abort(instance, reason)

    def begun(self, name: str) -> int:
        return sum(
            call == "model_instance_initialize" and subject.startswith(f"{name}:") for call, subject in self.returned
        )


@contextmanager
def sleepy(
    tmp_path: Path, *names: str, options: dict[str, dict[str, Any]] | None = None, **limits: Any
) -> Iterator[tuple[SleepyBackend, Runtime]]:
    """Make a runtime that loads these models on demand."""
    backend = SleepyBackend()
    resident = Resident(**{"least_stay_s": 0.0, **limits})
    with Runtime(backends=[backend], resident=resident, drain_timeout_s=30.0) as runtime:
        for name in names:
            folder = model_directory(tmp_path / name, 1)
            chosen = (options or {}).get(name)
            runtime.load(name, folder, config=config(backend="holding"), options=chosen)
        try:
            yield backend, runtime
        finally:
            for gate in [*backend.starts.values(), *backend.ends.values()]:
                gate.opened.set()
            backend.is_quick = True
            for held in list(backend.held_batches.values()):
                held.answer()
    backend.check_pairs()


def ask(runtime: Runtime, name: str, value: float = 1.0) -> float:
    return float(runtime.infer(name, x(value), timeout_s=PATIENCE_S)["Y"].flat[0])


def entry_of(runtime: Runtime, name: str) -> ResidentModel:
    found = hosted_in(runtime, name).residence
    assert found is not None
    return found


def is_in(runtime: Runtime, name: str, *states: Residence) -> None:
    wait_until(lambda: entry_of(runtime, name).state in states, PATIENCE_S, f"{name} {states}")


def waits(runtime: Runtime, name: str, count: int) -> None:
    queued(runtime, count, name)


@pytest.mark.promise(
    "Lifecycle",
    "With load on demand, a model is known, ready and without processes until the first request. Requests that come "
    "meanwhile wait, and the model is started once for all of them.",
)
def test_concurrent_first_requests_start_a_model_once(tmp_path: Path) -> None:
    with sleepy(tmp_path, "m") as (backend, runtime):
        assert runtime.is_ready("m")
        assert runtime.config("m").inputs[0].name == "X"
        assert runtime.instances("m") == []
        backend.starts["m"] = Gate()
        callers = [Caller(runtime, x(i), timeout_s=PATIENCE_S) for i in range(8)]
        waits(runtime, "m", 8)
        backend.starts["m"].opened.set()
        assert sorted(each.result() for each in callers) == list(range(8))
        assert backend.begun("m") == 1


def test_all_ways_to_ask_wake_a_model(tmp_path: Path) -> None:
    with sleepy(tmp_path, "m", "other", models=1) as (backend, runtime):

        def changed() -> None:
            assert ask(runtime, "other") == 1

        assert runtime.submit("m", x(2)).result(PATIENCE_S).outputs["Y"].flat[0] == 2
        changed()
        with runtime.stream("m", x(3), timeout_s=PATIENCE_S) as stream:
            assert [each.outputs["Y"].flat[0] for each in stream] == [3]
        changed()
        outputs = asyncio.run(runtime.ainfer("m", x(4), timeout_s=PATIENCE_S))
        assert outputs["Y"].flat[0] == 4
        changed()
        placed = runtime.empty("m", "X", (1,))
        placed[:] = 5
        assert runtime.infer("m", {"X": placed}, timeout_s=PATIENCE_S)["Y"].flat[0] == 5
        assert backend.begun("m") == 4


@pytest.mark.promise(
    "Lifecycle",
    "If no more models may be in memory, one that nobody uses is put to sleep for the one that is asked for; never one "
    "with requests inside, and never a pinned one.",
)
def test_the_model_that_nobody_uses_goes(tmp_path: Path) -> None:
    pinned = {"pinned": {"MOONPOOL_PIN": "yes"}}
    names = ("m", "pinned", "used", "free")
    with sleepy(tmp_path, *names, options=pinned, models=3) as (backend, runtime):
        assert entry_of(runtime, "pinned").state is Residence.AWAKE
        ask(runtime, "used")
        ask(runtime, "free")
        backend.is_quick = False
        future = runtime.submit("used", x(7))
        held = backend.wait_for(3)
        backend.is_quick = True
        ask(runtime, "m")
        is_in(runtime, "m", Residence.AWAKE)
        states = {name: entry_of(runtime, name).state for name in names}
        assert states.pop("free") is Residence.ASLEEP
        assert set(states.values()) == {Residence.AWAKE}
        assert entry_of(runtime, "free").sleeps["memory"] == 1
        held.answer()
        assert future.result(PATIENCE_S).outputs["Y"].flat[0] == 7


def test_requests_wait_under_their_own_deadline_while_nothing_may_go(tmp_path: Path) -> None:
    with sleepy(tmp_path, "m", "used", models=1) as (backend, runtime):
        backend.is_quick = False
        future = runtime.submit("used", x(7))
        held = backend.wait_for(1)
        with pytest.raises(RequestTimedOut):
            runtime.infer("m", x(1), timeout_s=0.05)
        is_in(runtime, "m", Residence.ASLEEP)
        caller = Caller(runtime, x(2), timeout_s=PATIENCE_S)
        is_in(runtime, "m", Residence.WAITING)
        backend.is_quick = True
        held.answer()
        assert caller.result() == 2
        assert future.result(PATIENCE_S).outputs["Y"].flat[0] == 7


@pytest.mark.promise(
    "Lifecycle",
    "If nothing may go for too long, the requests that wait get an error that says which limit is short and why the "
    "others stay, and when to come back.",
)
def test_requests_are_refused_with_the_reason_when_nothing_may_go(tmp_path: Path) -> None:
    with sleepy(tmp_path, "m", "used", models=1, patience_s=0.0) as (backend, runtime):
        backend.is_quick = False
        future = runtime.submit("used", x(7))
        held = backend.wait_for(1)
        is_in(runtime, "used", Residence.AWAKE)
        with pytest.raises(ModelUnavailable, match=r"at most 1 model may be .* 1 are in use") as raised:
            ask(runtime, "m")
        assert raised.value.retry_after_s
        backend.is_quick = True
        held.answer()
        future.result(PATIENCE_S)
        assert wait_until(lambda: _answers(runtime), PATIENCE_S)


def _answers(runtime: Runtime) -> bool:
    try:
        return ask(runtime, "m") == 1
    except ModelUnavailable:  # the request of a moment ago is just being settled
        return False


@pytest.mark.promise(
    "Lifecycle",
    "If a model cannot be started on demand, all who wait get the reason, and requests are refused with it for a "
    "while, longer after each failure.",
)
def test_a_start_that_fails_answers_all_who_wait_and_is_tried_again(tmp_path: Path) -> None:
    slow = {"m": {"MOONPOOL_RESTART_BACKOFF_S": "0.2"}}
    with sleepy(tmp_path, "m", options=slow) as (backend, runtime):
        backend.failures["model_instance_initialize", "m:1 m_0_0"] = Planned("no weights")
        gate = backend.starts["m"] = Gate()
        callers = [Caller(runtime, x(i), timeout_s=PATIENCE_S) for i in range(3)]
        waits(runtime, "m", 3)
        gate.opened.set()
        for each in callers:
            error = each.result()
            assert isinstance(error, ModelUnavailable)
            assert "no weights" in str(error)
            assert error.retry_after_s == 0.2
            assert isinstance(error.__cause__, LoadFailed)
        assert entry_of(runtime, "m").failures == 1
        backend.failures.clear()
        assert wait_until(lambda: _answers(runtime), PATIENCE_S)
        assert runtime.is_ready("m")


def test_callers_that_get_the_reason_may_call_the_runtime(tmp_path: Path) -> None:
    """Their callbacks run where the requests are failed, and need the locks of the model and of its residency."""
    with sleepy(tmp_path, "m", "used", models=1, patience_s=0.0) as (backend, runtime):
        seen: list[threading.Event] = []

        def unloads(name: str) -> threading.Event:
            ended = threading.Event()
            seen.append(ended)

            def unload(_: object) -> None:
                runtime.unload(name)
                ended.set()

            runtime.submit(name, x(1)).add_done_callback(unload)
            return ended

        backend.failures["model_instance_initialize", "m:1 m_0_0"] = Planned("no weights")
        assert unloads("m").wait(PATIENCE_S)
        backend.failures.clear()
        runtime.load("m", model_directory(tmp_path / "again", 1), config=config(backend="holding"))
        backend.is_quick = False
        future = runtime.submit("used", x(7))
        held = backend.wait_for(1)
        assert unloads("m").wait(PATIENCE_S)
        held.answer()
        future.result(PATIENCE_S)


@pytest.mark.promise("Lifecycle", "A model whose instances have all been given up keeps no other one out of memory.")
def test_a_model_that_gave_up_takes_no_room(tmp_path: Path) -> None:
    options = {"m": {"MOONPOOL_MAX_RESTARTS": "0"}}
    with sleepy(tmp_path, "m", "other", options=options, models=1) as (backend, runtime):
        backend.is_quick = False
        future = runtime.submit("m", x(7))
        backend.wait_for(1).break_down(ConnectionError("gone"))
        assert future.exception(PATIENCE_S) is not None
        wait_until(lambda: entry_of(runtime, "m").sleeper.has_given_up, PATIENCE_S)
        backend.is_quick = True
        assert ask(runtime, "other") == 1


@pytest.mark.promise(
    "Lifecycle",
    "Where memory is limited, a model whose size nobody knows yet starts when the one before it is measured.",
)
def test_models_of_unknown_size_start_one_after_the_other(tmp_path: Path) -> None:
    with sleepy(tmp_path, "m", "other", memory=1 << 50) as (backend, runtime):
        gate = backend.starts["m"] = Gate()
        first = runtime.submit("m", x(1))
        gate.wait()
        second = runtime.submit("other", x(2))
        is_in(runtime, "other", Residence.WAITING)
        assert backend.begun("other") == 0
        gate.opened.set()
        assert first.result(PATIENCE_S).outputs["Y"].flat[0] == 1
        assert second.result(PATIENCE_S).outputs["Y"].flat[0] == 2
        is_in(runtime, "other", Residence.AWAKE)


@pytest.mark.promise(
    "Lifecycle",
    "A model whose last instance is given up while the model falls asleep sleeps, and the next request wakes it.",
)
def test_a_model_that_is_given_up_while_it_falls_asleep_can_be_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"m": {"MOONPOOL_MAX_RESTARTS": "1", "MOONPOOL_RESTART_BACKOFF_S": "0"}}
    with sleepy(tmp_path, "m", "other", options=options, models=1) as (backend, runtime):
        ask(runtime, "m")
        restart = backend.starts["m"] = Gate()
        name = runtime.instances("m")[0]["name"]
        start = "model_instance_initialize", f"m:1 {name}"
        backend.failures[start] = Planned("no")
        backend.is_quick = False
        future = runtime.submit("m", x(7))
        backend.wait_for(2).break_down(ConnectionError("gone"))
        assert future.exception(PATIENCE_S) is not None
        restart.wait()

        hosted = hosted_in(runtime, "m")
        end_all = hosted.supervisor.end_all

        def give_up_first() -> None:
            restart.opened.set()
            wait_until(lambda: hosted.has_given_up, PATIENCE_S)
            end_all()

        monkeypatch.setattr(hosted.supervisor, "end_all", give_up_first)
        backend.is_quick = True
        assert ask(runtime, "other") == 1
        monkeypatch.undo()
        del backend.failures[start]
        assert entry_of(runtime, "m").state is Residence.ASLEEP
        assert runtime.is_ready("m")
        assert ask(runtime, "m", 5) == 5


@pytest.mark.promise(
    "Lifecycle", "A model that waits for room in memory is woken when a request leaves the one that is in its way."
)
def test_the_end_of_a_request_wakes_a_model_that_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing looks again by itself for as long as this test may take.
    monkeypatch.setattr(residents, "_RARELY_S", 1000.0)
    looks = []

    def decide(*arguments: Any, **more: Any) -> Any:
        looks.append(arguments)
        return policy.decide(*arguments, **more)

    with sleepy(tmp_path, "m", "used", models=1, patience_s=1000.0) as (backend, runtime):
        backend.is_quick = False
        future = runtime.submit("used", x(7))
        held = backend.wait_for(1)
        is_in(runtime, "used", Residence.AWAKE)
        monkeypatch.setattr(residents, "decide", decide)
        caller = Caller(runtime, x(2), timeout_s=PATIENCE_S)
        wait_until(lambda: looks, PATIENCE_S)
        backend.is_quick = True
        held.answer()
        assert caller.result() == 2
        assert future.result(PATIENCE_S).outputs["Y"].flat[0] == 7


def test_a_request_that_comes_while_a_model_is_put_to_sleep_is_answered(tmp_path: Path) -> None:
    with sleepy(tmp_path, "m", "other", models=1) as (backend, runtime):
        ask(runtime, "m")
        gate = backend.ends["m"] = Gate()
        future = runtime.submit("other", x(1))
        gate.wait()
        assert entry_of(runtime, "m").state is Residence.LEAVING
        caller = Caller(runtime, x(9), timeout_s=PATIENCE_S)
        waits(runtime, "m", 1)
        gate.opened.set()
        assert caller.result() == 9
        assert future.result(PATIENCE_S).outputs["Y"].flat[0] == 1
        assert backend.begun("m") == 2


@pytest.mark.promise(
    "Lifecycle", "An unload, or the end of the runtime, meets a start on demand without a loss of either."
)
def test_an_unload_while_a_model_is_started_comes_after_it(tmp_path: Path) -> None:
    with sleepy(tmp_path, "m") as (backend, runtime):
        gate = backend.starts["m"] = Gate()
        caller = Caller(runtime, x(3), timeout_s=PATIENCE_S)
        gate.wait()
        unloading = threading.Thread(target=runtime.unload, args=("m",))
        unloading.start()
        gate.opened.set()
        unloading.join(PATIENCE_S)
        assert caller.result() == 3
        assert runtime.models() == {}


def test_an_unload_while_a_model_waits_for_room_fails_its_requests(tmp_path: Path) -> None:
    with sleepy(tmp_path, "m", "used", models=1) as (backend, runtime):
        backend.is_quick = False
        future = runtime.submit("used", x(7))
        held = backend.wait_for(1)
        caller = Caller(runtime, x(3), timeout_s=PATIENCE_S)
        is_in(runtime, "m", Residence.WAITING)
        runtime.unload("m")
        assert isinstance(caller.result(), ModelUnavailable)
        held.answer()
        future.result(PATIENCE_S)


def test_the_runtime_closes_while_a_model_is_started(tmp_path: Path) -> None:
    with sleepy(tmp_path, "m") as (backend, runtime):
        gate = backend.starts["m"] = Gate()
        caller = Caller(runtime, x(3), timeout_s=PATIENCE_S)
        gate.wait()
        closing = threading.Thread(target=runtime.close)
        closing.start()
        # The start is given up, which opens the gate.
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        assert isinstance(caller.result(), ModelUnavailable)


def test_the_runtime_closes_while_a_model_waits_for_room(tmp_path: Path) -> None:
    with sleepy(tmp_path, "m", "used", models=1) as (backend, runtime):
        backend.is_quick = False
        future = runtime.submit("used", x(7))
        held = backend.wait_for(1)
        caller = Caller(runtime, x(3), timeout_s=PATIENCE_S)
        is_in(runtime, "m", Residence.WAITING)
        closing = threading.Thread(target=runtime.close)
        closing.start()
        assert isinstance(caller.result(), ModelUnavailable)
        held.answer()
        future.result(PATIENCE_S)
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


def test_a_model_that_breaks_is_restarted_and_can_sleep_later(tmp_path: Path) -> None:
    with sleepy(tmp_path, "m", "other", models=1) as (backend, runtime):
        backend.is_quick = False
        future = runtime.submit("m", x(7))
        backend.wait_for(1).break_down(ConnectionError("gone"))
        assert future.exception(PATIENCE_S) is not None
        backend.is_quick = True
        assert ask(runtime, "m") == 1
        assert ask(runtime, "other") == 1
        assert runtime.instances("m") == []


def test_a_load_of_a_sleeping_model_with_other_groups_changes_its_next_start(tmp_path: Path) -> None:
    with sleepy(tmp_path, "m") as (backend, runtime):
        runtime.scale("m", 3)
        assert backend.begun("m") == 0
        ask(runtime, "m")
        is_in(runtime, "m", Residence.AWAKE)
        assert backend.begun("m") == 3


@pytest.mark.promise(
    "Lifecycle",
    "With `MOONPOOL_IDLE_S`, the instances of a model that nobody asks end after so long, and the next request starts "
    "them again.",
)
def test_a_model_that_nobody_asks_sleeps_and_comes_back(folder: Path) -> None:
    backend = SleepyBackend()
    with Runtime(backends=[backend]) as runtime:
        idle = {"MOONPOOL_IDLE_S": "0.05"}
        runtime.load("m", folder, config=config(backend="holding"), options=idle)
        assert backend.begun("m") == 1
        is_in(runtime, "m", Residence.ASLEEP)
        assert runtime.instances("m") == []
        assert runtime.is_ready("m")
        assert entry_of(runtime, "m").sleeps["idle"] >= 1
        assert ask(runtime, "m", 4) == 4
    backend.check_pairs()


def test_a_model_with_a_sequence_stays(tmp_path: Path) -> None:
    sequences = {"sequence_batching": {"max_sequence_idle_microseconds": 60_000_000, "control_input": []}}
    backend = SleepyBackend()
    backend.is_quick = True
    with Runtime(backends=[backend]) as runtime:
        idle = {"MOONPOOL_IDLE_S": "0.02"}
        whole = config(backend="holding", max_batch_size=1, **sequences)
        folder = model_directory(tmp_path / "m", 1)
        runtime.load("m", folder, config=whole, options=idle)
        row = {"X": x(1)["X"].reshape(1, 1)}
        runtime.infer("m", row, correlation_id=1, flags=1, timeout_s=PATIENCE_S)
        scheduler = hosted_in(runtime, "m").scheduler
        assert scheduler.is_used
        assert not scheduler.doze()
        # A look from before the request may just find out that it cannot sleep.
        is_in(runtime, "m", Residence.AWAKE)
        runtime.infer("m", row, correlation_id=1, flags=2, timeout_s=PATIENCE_S)
        is_in(runtime, "m", Residence.ASLEEP)


def test_models_that_completed_their_configuration_are_known(tmp_path: Path) -> None:
    """A configuration in the file that is complete costs no process; another one is completed at the start."""
    seen: list[bool] = []

    class Seeing(SleepyBackend):
        def model_initialize(self, model: Model) -> None:
            seen.append(model.completes)
            super().model_initialize(model)

    backend = Seeing()
    with Runtime(backends=[backend], resident=Resident()) as runtime:
        folder = model_directory(tmp_path / "m", 1)
        runtime.load("m", folder, config=config(backend="holding"))
        runtime.load("n", folder, config={**config(backend="holding"), "output": []})
        assert seen == [False, True]
