"""Tests of models whose number of instances follows the load."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.recorder import PATIENCE_S, Planned, config, counted, x
from tests.runtime.residency.test_residents import Gate, SleepyBackend, entry_of, is_in
from tests.waiting import wait_until

from moonpool import ConfigError, Runtime
from moonpool.runtime.model.states import Residence
from moonpool.runtime.residency import autoscaling, residents


@contextmanager
def scaled(folder: Path, **options: Any) -> Iterator[tuple[SleepyBackend, Runtime]]:
    """Make a runtime with the model `m`, which has these options."""
    backend = SleepyBackend()
    backend.is_quick = False
    with Runtime(backends=[backend], drain_timeout_s=30.0) as runtime:
        given = {f"MOONPOOL_{key}": str(value) for key, value in options.items()}
        runtime.load("m", folder, config=config(backend="holding"), options=given)
        try:
            yield backend, runtime
        finally:
            backend.is_quick = True
            for held in list(backend.held_batches.values()):
                held.answer()
    backend.check_pairs()


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processors be idle however busy the machine is, and let instances go soon."""
    monkeypatch.setattr(residents, "spare_cores", lambda *_: 8.0)
    monkeypatch.setattr(autoscaling, "DOWN_S", 0.3)


def has(runtime: Runtime, count: int) -> None:
    wait_until(lambda: len(runtime.instances("m")) == count, PATIENCE_S, f"{count} instances")


@pytest.mark.promise(
    "Lifecycle",
    "With `MOONPOOL_INSTANCES`, instances come while requests wait for longer than the target, and go when they have "
    "nothing to do, each step with its reason in the log.",
)
def test_instances_follow_the_requests_that_wait(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moonpool"), scaled(folder, INSTANCES="1..4") as (backend, runtime):
        has(runtime, 1)
        futures = [runtime.submit("m", x(i)) for i in range(6)]
        has(runtime, 4)
        assert runtime.config("m").instance_groups[0].count == 4
        entry = entry_of(runtime, "m")
        wait_until(lambda: entry.autoscaler and entry.autoscaler.held_because, PATIENCE_S)
        assert entry.autoscaler is not None
        assert "4 are the most" in entry.autoscaler.held_because
        backend.is_quick = True
        for held in list(backend.held_batches.values()):
            held.answer()
        for number, future in enumerate(futures):
            assert future.result(PATIENCE_S).outputs["Y"].flat[0] == number
        has(runtime, 1)
        # A step is counted when its instances have come or gone.
        wait_until(lambda: entry.steps["down"] == 3, PATIENCE_S, "the last step")
        # One more at a time, as nobody knows what memory they take.
        assert entry.steps["up"] == 3
        assert 'moonpool_model_scale_steps_total{direction="up"' in runtime.metrics()
    assert "1 → 2 instances: requests have waited for" in caplog.text
    # The last answer may come while another instance goes already.
    assert re.search(r"2 → 1 instances: [01]\.\d of 2 have been busy", caplog.text)


def test_a_step_that_fails_changes_nothing_and_is_not_repeated_at_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with scaled(folder, INSTANCES="1..2") as (backend, runtime):
        backend.failures["model_instance_initialize", "m:1 m_0_1"] = Planned("no memory")
        futures = [runtime.submit("m", x(i)) for i in range(2)]
        entry = entry_of(runtime, "m")
        wait_until(lambda: entry.scales_from_s, PATIENCE_S)
        assert "was not scaled: 1 → 2 instances" in caplog.text
        assert len(runtime.instances("m")) == 1
        assert runtime.config("m").instance_groups[0].count == 1
        backend.is_quick = True
        backend.wait_for(1).answer()
        for future in futures:
            future.result(PATIENCE_S)


def test_a_model_that_wakes_has_the_least_number(folder: Path) -> None:
    with scaled(folder, INSTANCES="2..4", IDLE_S="0.05") as (backend, runtime):
        is_in(runtime, "m", Residence.ASLEEP)
        backend.is_quick = True
        assert runtime.infer("m", x(1), timeout_s=PATIENCE_S)["Y"].flat[0] == 1
        wait_until(lambda: backend.begun("m") == 4, PATIENCE_S)


def test_an_unload_waits_for_a_step(folder: Path) -> None:
    with scaled(folder, INSTANCES="1..2") as (backend, runtime):
        first = runtime.submit("m", x(1))
        backend.starts["m"] = gate = Gate()
        second = runtime.submit("m", x(2))
        gate.wait()
        gate.opened.set()
        backend.is_quick = True
        backend.wait_for(1).answer()
        runtime.unload("m")
        assert first.result(PATIENCE_S).outputs["Y"].flat[0] == 1
        assert second.result(PATIENCE_S).outputs["Y"].flat[0] == 2


def test_a_range_needs_one_group_and_keeps_to_the_limits(folder: Path) -> None:
    backend = SleepyBackend()
    with Runtime(backends=[backend], config_limits=["instances=4"]) as runtime:
        two: dict[str, Any] = {"instance_group": 2 * counted(1)["instance_group"]}
        given = {"MOONPOOL_INSTANCES": "1..3"}
        with pytest.raises(ConfigError, match="2 groups of instances"):
            runtime.load("m", folder, config=config(backend="holding", **two), options=given)
        with pytest.raises(ConfigError, match="instances"):
            runtime.load("m", folder, config=config(backend="holding"), options={"MOONPOOL_INSTANCES": "1..5"})
