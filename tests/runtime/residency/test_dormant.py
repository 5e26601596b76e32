"""Tests of models that sleep with their instances: what happens when something else comes at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.inside import hosted_in
from tests.runtime.held_batches import Caller
from tests.runtime.recorder import PATIENCE_S, config, x
from tests.runtime.residency.test_residents import Gate, SleepyBackend, ask, entry_of, is_in, waits
from tests.waiting import wait_until

from moonpool import ModelInstance, ModelUnavailable, Runtime
from moonpool.runtime.model.states import Residence


class HookedBackend(SleepyBackend):
    """Has instances that can sleep, when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks: list[str] = []
        self.sleeping, self.waking = Gate(), Gate()
        self.sleeping.opened.set()
        self.waking.opened.set()
        self.interrupted: BaseException | None = None

    def can_sleep(self, instance: ModelInstance) -> bool:  # noqa: ARG002
        return True

    def model_instance_sleep(self, instance: ModelInstance) -> None:  # noqa: ARG002
        self._hook("sleep", self.sleeping)

    def model_instance_wake(self, instance: ModelInstance) -> None:  # noqa: ARG002
        self._hook("wake", self.waking)

    def _hook(self, name: str, gate: Gate) -> None:
        self.hooks.append(name)
        gate.pass_through()
        if self.interrupted is not None:
            raise self.interrupted

    def abort(self, instance: ModelInstance, reason: BaseException) -> None:  # noqa: ARG002
        self.interrupted = reason
        self.sleeping.opened.set()
        self.waking.opened.set()


@contextmanager
def hooked(folder: Path, idle_s: float = 0.02, **options: str) -> Iterator[tuple[HookedBackend, Runtime]]:
    backend = HookedBackend()
    with Runtime(backends=[backend], drain_timeout_s=30.0) as runtime:
        given = {"MOONPOOL_IDLE_S": str(idle_s), "MOONPOOL_RESTART_BACKOFF_S": "0"} | options
        runtime.load("m", folder, config=config(backend="holding"), options=given)
        try:
            yield backend, runtime
        finally:
            backend.sleeping.opened.set()
            backend.waking.opened.set()
            for held in list(backend.held_batches.values()):
                held.answer()
    backend.check_pairs()


@pytest.mark.promise(
    "Lifecycle", "A request that comes while a model's `sleep` runs waits for its end, and wakes the model."
)
def test_a_request_comes_while_a_model_falls_asleep(folder: Path) -> None:
    with hooked(folder) as (backend, runtime):
        is_in(runtime, "m", Residence.DORMANT)
        backend.sleeping = Gate()
        assert ask(runtime, "m", 1) == 1
        backend.sleeping.wait()
        caller = Caller(runtime, x(2), timeout_s=PATIENCE_S)
        waits(runtime, "m", 1)
        backend.sleeping.opened.set()
        assert caller.result() == 2
        # One process, and never `execute` between a sleep and the wake after it.
        assert backend.begun("m") == 1
        hooks = list(backend.hooks)
        assert hooks == ["sleep", "wake"] * (len(hooks) // 2) + ["sleep"] * (len(hooks) % 2)


def test_requests_that_come_meanwhile_wake_a_model_once(folder: Path) -> None:
    with hooked(folder) as (backend, runtime):
        is_in(runtime, "m", Residence.DORMANT)
        backend.waking = Gate()
        callers = [Caller(runtime, x(i), timeout_s=PATIENCE_S) for i in range(8)]
        backend.waking.wait()
        waits(runtime, "m", 8)
        # So that it does not sleep again before all are counted.
        backend.sleeping = Gate()
        backend.waking.opened.set()
        assert sorted(each.result() for each in callers) == list(range(8))
        assert backend.hooks.count("wake") == 1
        assert backend.begun("m") == 1


def test_a_model_with_a_request_inside_is_not_asked_to_sleep(folder: Path) -> None:
    with hooked(folder) as (backend, runtime):
        is_in(runtime, "m", Residence.DORMANT)
        backend.is_quick = False
        future = runtime.submit("m", x(7))
        held = backend.wait_for(1)
        before = list(backend.hooks)
        hosted = hosted_in(runtime, "m")
        # The looks of the runtime do the same, again and again.
        assert not hosted.fall_asleep(may_stay=True)
        assert backend.hooks == before
        backend.is_quick = True
        held.answer()
        assert future.result(PATIENCE_S).outputs["Y"].flat[0] == 7


@pytest.mark.parametrize("hook", ["sleep", "wake"])
def test_the_runtime_closes_while_a_hook_runs(folder: Path, hook: str) -> None:
    with hooked(folder) as (backend, runtime):
        is_in(runtime, "m", Residence.DORMANT)
        caller = None
        if hook == "wake":
            backend.waking = Gate()
            caller = Caller(runtime, x(3), timeout_s=PATIENCE_S)
            backend.waking.wait()
        else:
            backend.sleeping = Gate()
            assert ask(runtime, "m") == 1
            backend.sleeping.wait()
        closing = threading.Thread(target=runtime.close)
        closing.start()
        # The hook is given up, which opens the gate.
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        if caller is not None:
            # The instance may have been started anew in time.
            found = caller.result()
            assert found == 3 or isinstance(found, ModelUnavailable)


def test_an_instance_that_breaks_while_it_sleeps_ends_with_its_model(folder: Path) -> None:
    with hooked(folder) as (_, runtime):
        is_in(runtime, "m", Residence.DORMANT)
        (record,) = hosted_in(runtime, "m").supervisor.records
        record.instance.report_broken(ConnectionError("gone"))
        wait_until(lambda: runtime.instances("m") == [], PATIENCE_S)
        is_in(runtime, "m", Residence.ASLEEP)
        assert entry_of(runtime, "m").sleeps["idle"] >= 1
        assert ask(runtime, "m", 4) == 4


@pytest.mark.promise(
    "Lifecycle",
    "A model whose last instance is given up while the model wakes refuses requests, and those that wait fail.",
)
def test_a_model_that_is_given_up_while_it_wakes_lets_nobody_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hooked(folder, MOONPOOL_MAX_RESTARTS="0") as (backend, runtime):
        is_in(runtime, "m", Residence.DORMANT)
        hosted = hosted_in(runtime, "m")
        wake_all = hosted.supervisor.wake_all

        def give_up_first() -> BaseException | None:
            failure = wake_all()
            wait_until(lambda: hosted.has_given_up, PATIENCE_S)
            return failure

        # The model accepts requests after this, and must not do so for good.
        monkeypatch.setattr(hosted.supervisor, "wake_all", give_up_first)
        backend.interrupted = RuntimeError("no memory")
        with pytest.raises(ModelUnavailable):
            runtime.submit("m", x(3)).result(PATIENCE_S)
        is_in(runtime, "m", Residence.AWAKE)
        wait_until(lambda: not runtime.is_ready("m"), PATIENCE_S)
        with pytest.raises(ModelUnavailable):
            runtime.submit("m", x(4)).result(PATIENCE_S)
        # Nor does its idle time change that: it has no process that could end.
        assert hosted.has_given_up
        backend.interrupted = None
        runtime.unload("m")
