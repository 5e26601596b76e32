"""Tests of live updates: instances, versions and policies change while a model serves."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.inside import hosted_in
from tests.runtime.held_batches import Caller, HoldingBackend, holding, queued
from tests.runtime.recorder import PATIENCE_S, Planned, config, counted, model_directory, row, x
from tests.waiting import wait_until

from moonpool import (
    ConfigError,
    InvalidRequest,
    LoadFailed,
    ModelNotFound,
    ModelUnavailable,
    QueueFull,
    RequestTimedOut,
    Runtime,
    SequenceLost,
)
from moonpool.ipc.errors import PeerGone
from moonpool.runtime.hosting.scaling import InstanceSpec, matched

SPECS = st.lists(
    st.builds(
        InstanceSpec,
        st.integers(0, 9).map(lambda number: f"m_{number % 2}_{number}"),
        st.sampled_from(["CPU", "GPU"]),
        st.integers(0, 1),
    ),
    unique_by=lambda spec: spec.name,
    max_size=8,
)
START, END = 1, 2


@given(SPECS, SPECS)
def test_as_few_instances_come_and_go_as_can_be(present: list[InstanceSpec], wanted: list[InstanceSpec]) -> None:
    stay, come, go = matched(present, wanted)

    assert sorted([*stay, *go]) == sorted(present)
    kinds = Counter(spec[1:] for spec in wanted)
    assert Counter(spec[1:] for spec in [*stay, *come]) == kinds
    assert not {spec[1:] for spec in come} & {spec[1:] for spec in go}
    names = [spec.name for spec in [*present, *come]]
    assert len(set(names)) == len(names)
    assert matched([*stay, *come], wanted) == ([*matched([*stay, *come], wanted).stay], [], [])


def names(runtime: Runtime) -> list[str]:
    return [shown["name"] for shown in runtime.instances("m")]


def begun(backend: HoldingBackend) -> list[str]:
    return [subject.split()[1] for call, subject in backend.calls if call == "model_instance_initialize"]


def in_thread(act: Any, *arguments: Any, **named: Any) -> threading.Thread:
    thread = threading.Thread(target=act, args=arguments, kwargs=named)
    thread.start()
    return thread


@pytest.mark.promise(
    "Lifecycle",
    "Instances are added to a model while it serves, without waiting for what runs, and taken away once nothing is in "
    "them. The others keep their processes, and no request is lost.",
)
def test_instances_come_without_waiting_and_go_when_nothing_is_in_them(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        callers = [Caller(runtime, x(0))]
        first = backend.wait_for(1)
        callers.append(Caller(runtime, x(1)))
        queued(runtime, 1)
        runtime.scale("m", 3)
        assert names(runtime) == ["m_0_0", "m_0_1", "m_0_2"]
        second = backend.wait_for(2)
        scaling = in_thread(runtime.scale, "m", 1)
        wait_until(lambda: len(names(runtime)) == 3 and backend.calls[-1][0].endswith("finalize"), PATIENCE_S)
        wait_until(lambda: second.instance.serves_until < 0, PATIENCE_S)
        # One of them executes, and the other is gone. New requests wait for the one that stays.
        callers.append(Caller(runtime, x(2)))
        queued(runtime, 1)
        second.answer()
        scaling.join(PATIENCE_S)
        assert names(runtime) == ["m_0_0"]
        first.answer()
        backend.wait_for(3).answer()
        assert sorted(caller.result() for caller in callers) == [0, 1, 2]
        assert begun(backend).count("m_0_0") == 1
    backend.check_pairs()


def test_a_load_with_other_instance_groups_alone_is_an_update(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        two = config(backend="holding", **counted(2))
        runtime.load("m", folder, config=two)
        runtime.load("m", folder, config={**two, "instance_group": [{"count": 1}, {"count": 2}]})
        assert names(runtime) == ["m_0_0", "m_0_1", "m_1_1"]
        assert begun(backend) == ["m_0_0", "m_0_1", "m_1_1"]
        assert runtime.config("m").raw["instance_group"][1]["count"] == 2
        runtime.load("m", folder, config=config(backend="holding"))
        assert names(runtime) == ["m_0_0"]
        assert [call for call, _ in backend.calls].count("model_initialize") == 1
    backend.check_pairs()


@pytest.mark.promise("Lifecycle", "If an instance that is to be added does not start, nothing has changed.")
def test_an_update_that_fails_changes_nothing(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        backend.failures["model_instance_initialize", "m:1 m_0_2"] = Planned("no")
        with pytest.raises(LoadFailed, match="no"):
            runtime.scale("m", 3)
        with pytest.raises(LoadFailed, match="no"):
            runtime.load("m", folder, config=config(backend="holding", **counted(3)))
        assert names(runtime) == ["m_0_0"]
        assert runtime.config("m").instance_groups[0].count == 1
        backend.is_quick = True
        assert runtime.infer("m", x(1), timeout_s=PATIENCE_S)["Y"].flat[0] == 1
        assert runtime.is_ready("m")
    backend.check_pairs()


def test_what_does_not_end_in_time_is_ended_with_its_instance(folder: Path) -> None:
    with holding(folder, drain_timeout_s=0.2, **counted(2)) as (backend, runtime):
        callers = [Caller(runtime, x(i)) for i in range(2)]
        batches = backend.wait_for(1), backend.wait_for(2)
        runtime.scale("m", 1)
        (stays,) = (each for each in batches if each.instance.name == "m_0_0")
        stays.answer()
        outcomes = sorted((caller.result() for caller in callers), key=str)
        assert outcomes[0] in (0, 1)
        assert isinstance(outcomes[1], ModelUnavailable)
        assert names(runtime) == ["m_0_0"]
    backend.check_pairs()


FOR_EVER_S = 1e6


def leave_by_an_exception(runtime: Runtime) -> None:
    """Leave `with` by an exception while somebody waits for a request."""
    runtime.submit("m", x(1))
    with pytest.raises(KeyError), runtime:
        raise KeyError("on purpose")


@pytest.mark.promise(
    "Lifecycle",
    "An instance that is to end does not wait for a batch whose callers have all left, nor, if `with` is left by an "
    "exception, for more than a second.",
)
@pytest.mark.parametrize(
    "end",
    [Runtime.close, leave_by_an_exception, lambda runtime: runtime.unload("m"), lambda runtime: runtime.scale("m", 1)],
    ids=["close", "with", "unload", "scale"],
)
def test_an_end_does_not_wait_for_what_nobody_wants(folder: Path, end: Callable[[Runtime], object]) -> None:
    with holding(folder, drain_timeout_s=FOR_EVER_S, **counted(2)) as (backend, runtime):
        for count in (1, 2):
            with pytest.raises(RequestTimedOut):
                runtime.infer("m", x(count), timeout_s=0.01)
        end(runtime)
        assert backend.aborted
    backend.check_pairs()


@pytest.mark.parametrize("is_executing", [True, False])
def test_an_instance_that_breaks_while_it_leaves_is_not_started_again(folder: Path, is_executing: bool) -> None:
    with holding(folder, **counted(2)) as (backend, runtime):
        records = hosted_in(runtime, "m").supervisor.records
        callers = [Caller(runtime, x(i)) for i in range(2)] if is_executing else []
        if is_executing:
            backend.wait_for(2)
            scaling = in_thread(runtime.scale, "m", 1)
            wait_until(records[1].stopping.is_set)
            backend.held_batches["m_0_1"].break_down(PeerGone("gone"))
            scaling.join(PATIENCE_S)
        else:
            records[1].instance.report_broken(PeerGone("gone"))
            runtime.scale("m", 1)
        assert names(runtime) == ["m_0_0"]
        assert records[1].machine.state == "STOPPED"
        backend.held_batches["m_0_0"].answer()
        assert len([caller for caller in callers if not isinstance(caller.result(), PeerGone)]) == len(callers) / 2
    backend.check_pairs()


@pytest.mark.promise("Lifecycle", "A sequence on an instance that is taken away is finished there.")
def test_a_sequence_is_finished_where_it_is(folder: Path) -> None:
    batching = {"sequence_batching": {"max_sequence_idle_microseconds": 60_000_000}}
    with holding(folder, max_batch_size=1, **counted(2), **batching) as (backend, runtime):
        backend.is_quick = True

        def ask(sequence: int, flags: int = 0) -> str:
            runtime.infer("m", row(1), correlation_id=sequence, flags=flags, timeout_s=PATIENCE_S)
            return backend.batches[-1][0].instance.name

        places = {sequence: ask(sequence, START) for sequence in (1, 2)}
        assert set(places.values()) == {"m_0_0", "m_0_1"}
        (going,) = (sequence for sequence in places if places[sequence] == "m_0_1")
        scaling = in_thread(runtime.scale, "m", 1)
        wait_until(hosted_in(runtime, "m").supervisor.records[1].stopping.is_set)
        assert ask(going) == "m_0_1"
        assert scaling.is_alive()
        assert ask(going, END) == "m_0_1"
        scaling.join(PATIENCE_S)
        assert names(runtime) == ["m_0_0"]
        assert ask(3 - going) == "m_0_0"
        with pytest.raises(InvalidRequest):
            ask(going)
    backend.check_pairs()


def test_a_sequence_that_does_not_end_in_time_is_lost(folder: Path) -> None:
    batching = {"sequence_batching": {"max_sequence_idle_microseconds": 60_000_000}}
    with holding(folder, max_batch_size=1, drain_timeout_s=0.2, **counted(2), **batching) as (backend, runtime):
        backend.is_quick = True
        for sequence in (1, 2):
            runtime.infer("m", row(1), correlation_id=sequence, flags=START, timeout_s=PATIENCE_S)
        runtime.scale("m", 1)
        outcomes = []
        for sequence in (1, 2):
            try:
                runtime.infer("m", row(1), correlation_id=sequence, timeout_s=PATIENCE_S)
                outcomes.append("goes on")
            except SequenceLost:
                outcomes.append("lost")
        assert sorted(outcomes) == ["goes on", "lost"]


def test_versions_come_and_go_and_the_others_stay(tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "m", 1, 2, 3)

    def policy(*versions: int) -> dict[str, Any]:
        return {"version_policy": {"specific": {"versions": list(versions)}}}

    with holding(folder, **policy(1, 2)) as (backend, runtime):
        runtime.load("m", folder, config=config(backend="holding", **policy(2, 3)))
        assert runtime.models() == {"m": [2, 3]}
        calls = [subject for call, subject in backend.calls if call == "model_initialize"]
        assert calls == ["m:1", "m:2", "m:3"]
        wait_until(lambda: ("model_finalize", "m:1") in backend.calls, PATIENCE_S)
        backend.failures["model_initialize", "m:1"] = Planned("no")
        with pytest.raises(LoadFailed):
            runtime.load("m", folder, config=config(backend="holding", **policy(1, 2, 3)))
        assert runtime.models() == {"m": [2, 3]}
        backend.is_quick = True
        assert runtime.infer("m", x(1), version=2, timeout_s=PATIENCE_S)["Y"].flat[0] == 1
    backend.check_pairs()


def delayed(delay_us: int, size: int = 0, preferred: int = 8) -> dict[str, Any]:
    policy = {"max_queue_size": size}
    return {
        "max_batch_size": 8,
        "dynamic_batching": {
            "preferred_batch_size": [preferred],
            "max_queue_delay_microseconds": delay_us,
            "default_queue_policy": policy,
        },
    }


@pytest.mark.promise(
    "Lifecycle",
    "Deadlines, the delay of a batcher and its queue policies change while a model serves, also for requests that "
    "wait.",
)
def test_policies_change_for_requests_that_wait(folder: Path) -> None:
    with holding(folder, **delayed(600_000_000)) as (backend, runtime):
        callers = [Caller(runtime, row(i)) for i in range(3)]
        queued(runtime, 3)
        runtime.load("m", folder, config=config(backend="holding", **delayed(0, size=1)))
        backend.wait_for(1)
        assert begun(backend) == ["m_0_0"]
        callers += [Caller(runtime, row(3))]
        queued(runtime, 1)
        with pytest.raises(QueueFull):
            runtime.infer("m", row(4), timeout_s=PATIENCE_S)
        backend.is_quick = True
        backend.held_batches["m_0_0"].answer()
        assert sorted(caller.result() for caller in callers) == [0, 1, 2, 3]
        runtime.load("m", folder, config=config(backend="holding", **delayed(0, preferred=4)))
        assert begun(backend) == ["m_0_0", "m_0_0"]


def test_a_limit_for_executions_that_comes_later_holds(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        caller = Caller(runtime, x(1))
        backend.wait_for(1)
        limit: dict[str, Any] = {"parameters": {"MOONPOOL_EXECUTE_TIMEOUT_S": "0.2"}}
        runtime.load("m", folder, config=config(backend="holding", **limit))
        assert "longer than 0.2 s" in str(caller.result())
        assert begun(backend)[:1] == ["m_0_0"]
        backend.is_quick = True
        wait_until(lambda: runtime.is_ready("m"), PATIENCE_S)
        runtime.load("m", folder, config=config(backend="holding"))
        assert begun(backend) == ["m_0_0", "m_0_0"]


def test_a_model_that_does_not_serve_is_loaded_anew(folder: Path) -> None:
    given_up: dict[str, Any] = {"parameters": {"MOONPOOL_MAX_RESTARTS": "0"}}
    with holding(folder, **given_up) as (backend, runtime):
        hosted_in(runtime, "m").supervisor.records[0].instance.report_broken(PeerGone("gone"))
        wait_until(lambda: not runtime.is_ready("m"), PATIENCE_S)
        wait_until(lambda: runtime.instances("m")[0]["state"] == "FAILED", PATIENCE_S)
        runtime.load("m", folder, config=config(backend="holding", **given_up, **counted(2)))
        assert [shown["state"] for shown in runtime.instances("m")] == ["READY", "READY"]
        assert begun(backend).count("m_0_0") == 2


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_a_number_of_instances_is_a_whole_number_from_1_up(folder: Path, count: Any) -> None:
    with holding(folder) as (_, runtime), pytest.raises(InvalidRequest, match="must be a whole number from 1"):
        runtime.scale("m", count)


def test_scales_that_cannot_be_are_refused(folder: Path) -> None:
    groups = {"instance_group": [{"count": 1}, {"count": 1}]}
    with holding(folder, **groups) as (_, runtime):
        with pytest.raises(InvalidRequest, match="has 2 groups of instances"):
            runtime.scale("m", 2)
        with pytest.raises(ModelNotFound, match="model 'other' is not loaded"):
            runtime.scale("other", 2)
        runtime.load("m", folder, config=config(backend="holding"))
        with pytest.raises(ConfigError, match="asks for 2000 instances, and 1024 is the most"):
            runtime.scale("m", 2000)


def test_no_request_is_lost_while_instances_come_and_go(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        backend.is_quick = True
        stop, outcomes = threading.Event(), list[Any]()

        def ask() -> None:
            while not stop.is_set():
                try:
                    outcomes.append(runtime.infer("m", x(1), timeout_s=PATIENCE_S)["Y"].flat[0])
                except BaseException as error:
                    outcomes.append(error)

        threads = [in_thread(ask) for _ in range(3)]
        for count in (3, 1, 4, 2, 5, 1) * 5:
            runtime.scale("m", count)
            assert len(names(runtime)) == count
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert set(outcomes) == {1}
    backend.check_pairs()
