"""Tests of instances that break while something else happens to them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.inside import hosted_in, registry_of
from tests.refused_threads import refuse_threads
from tests.runtime.held_batches import HoldingBackend, holding, queued
from tests.runtime.recorder import PATIENCE_S, Planned, config, counted, x
from tests.waiting import wait_until

import moonpool
from moonpool import Runtime
from moonpool.ipc.errors import PeerGone


def in_thread(act: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=act, args=arguments)
    thread.start()
    return thread


def test_an_instance_that_breaks_while_idle_comes_back(folder: Path) -> None:
    with holding(folder) as (backend, runtime):
        (record,) = hosted_in(runtime, "m").supervisor.records
        for i in range(3):
            record.instance.report_broken(PeerGone(f"gone {i}"))
            wait_until(lambda i=i: record.restarts == i + 1)  # type: ignore[misc]
        backend.is_quick = True
        assert runtime.infer("m", x(1), timeout_s=PATIENCE_S)["Y"].flat[0] == 1
    backend.check_pairs()


@pytest.mark.promise(
    "At the limits",
    "An instance that breaks while no thread can be started comes back when one can, and an "
    "unload does not wait for that.",
)
@pytest.mark.parametrize("executes", [True, False], ids=["executing", "idle"])
def test_an_instance_comes_back_once_a_thread_can_be_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, executes: bool
) -> None:
    gone = PeerGone("the instance is gone")
    with holding(folder) as (backend, runtime):
        (record,) = hosted_in(runtime, "m").supervisor.records
        lost = runtime.submit("m", x(1)) if executes else None
        with monkeypatch.context() as patch:
            refuse_threads(patch)
            if lost is not None:
                backend.wait_for(1).break_down(gone)
            else:
                record.instance.report_broken(gone)
            wait_until(lambda: record.unrecovered is not None)
            # The reactor tries again, and must not wait for the instance either.
            tried = threading.Event()
            registry_of(runtime).stubs.reactor.call_later(0.3, tried.set)
            assert tried.wait(PATIENCE_S)
        if lost is not None:
            with pytest.raises(PeerGone, match="the instance is gone"):
                lost.result(PATIENCE_S)
        wait_until(lambda: record.restarts == 1)
        backend.is_quick = True
        assert runtime.infer("m", x(2), timeout_s=PATIENCE_S)["Y"].flat[0] == 2
    backend.check_pairs()


@pytest.mark.promise("At the limits", "An instance that breaks while no …")
def test_an_unload_recovers_an_instance_for_which_no_thread_can_be_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holding(folder) as (backend, runtime):
        (record,) = hosted_in(runtime, "m").supervisor.records
        lost = runtime.submit("m", x(1))
        with monkeypatch.context() as patch:
            refuse_threads(patch)
            backend.wait_for(1).break_down(PeerGone("the instance is gone"))
            wait_until(lambda: record.unrecovered is not None)
            runtime.unload("m")
        with pytest.raises(PeerGone, match="the instance is gone"):
            lost.result(PATIENCE_S)
    backend.check_pairs()


def test_a_broken_instance_that_nobody_can_explain_comes_back_and_its_callers_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise Planned("no idea")

    with holding(folder) as (backend, runtime):
        monkeypatch.setattr(backend, "explain", fail)
        lost = runtime.submit("m", x(1))
        backend.wait_for(1).break_down(PeerGone("the instance is gone"))
        with pytest.raises(PeerGone, match="the instance is gone"):
            lost.result(PATIENCE_S)
        backend.is_quick = True
        assert runtime.infer("m", x(2), timeout_s=PATIENCE_S)["Y"].flat[0] == 2
    assert "the backend cannot say why it broke" in caplog.text
    backend.check_pairs()


@pytest.mark.parametrize("breaks", [False, True])
def test_an_unload_waits_for_whoever_looks_after_an_idle_instance(
    folder: Path, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    inside, proceed = threading.Event(), threading.Event()

    def tidy(_: object) -> None:
        inside.set()
        assert proceed.wait(PATIENCE_S)
        if breaks:
            raise PeerGone("while it was looked after")

    with holding(folder) as (backend, runtime):
        hosted = hosted_in(runtime, "m")
        monkeypatch.setattr(backend, "tidy", tidy)
        tidying = in_thread(hosted.supervisor._tidy)
        assert inside.wait(PATIENCE_S)
        unloading = in_thread(runtime.unload, "m")
        wait_until(lambda: hosted.supervisor.records[0].machine.state == "DRAINING")
        assert unloading.is_alive()
        assert ("model_instance_finalize", "m:1 m_0_0") not in backend.calls
        proceed.set()
        for thread in (tidying, unloading):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert hosted.supervisor.records[0].machine.state == "STOPPED"
    backend.check_pairs()


def test_an_unload_waits_for_whoever_finds_out_why_an_instance_broke(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, proceed = threading.Event(), threading.Event()

    def explain(_: object, error: BaseException) -> BaseException:
        inside.set()
        assert proceed.wait(PATIENCE_S)
        return error

    with holding(folder, drain_timeout_s=0.0) as (backend, runtime):
        hosted = hosted_in(runtime, "m")
        monkeypatch.setattr(backend, "explain", explain)
        lost = runtime.submit("m", x(1))
        backend.wait_for(1).break_down(PeerGone("gone"))
        assert inside.wait(PATIENCE_S)
        unloading = in_thread(runtime.unload, "m")
        wait_until(lambda: hosted.supervisor.is_stopping)
        proceed.set()
        unloading.join(PATIENCE_S)
        assert not unloading.is_alive()
        with pytest.raises(PeerGone, match="gone"):
            lost.result(PATIENCE_S)
        assert hosted.supervisor.records[0].machine.state == "STOPPED"
    backend.check_pairs()


def test_instances_that_break_while_their_model_is_unloaded_end_in_order(folder: Path) -> None:
    # The death or the unload may come first. The loop repeats this many times, because the moment between them is
    # short.
    for _ in range(40):
        backend = HoldingBackend()
        with Runtime(backends=[backend], drain_timeout_s=0.0) as runtime:
            runtime.load("m", folder, config=config(backend="holding", **counted(3)))
            hosted = hosted_in(runtime, "m")
            start = threading.Barrier(4)

            def report(record: Any, start: threading.Barrier = start) -> None:
                start.wait(PATIENCE_S)
                record.instance.report_broken(PeerGone("gone"))

            threads = [in_thread(report, record) for record in hosted.supervisor.records]
            start.wait(PATIENCE_S)
            runtime.unload("m")
            for thread in threads:
                thread.join(PATIENCE_S)
            assert {record.machine.state for record in hosted.supervisor.records} == {"STOPPED"}
        backend.check_pairs()


def test_a_model_whose_instances_all_give_up_says_why_and_can_be_unloaded(folder: Path) -> None:
    parameters = {"MOONPOOL_MAX_RESTARTS": {"string_value": "0"}}
    with holding(folder, parameters=parameters, **counted(2)) as (backend, runtime):
        waiting = runtime.submit("m", x(1))
        held_batches = [backend.wait_for(1)]
        other = runtime.submit("m", x(2))
        held_batches.append(backend.wait_for(2))
        behind = runtime.submit("m", x(3))
        queued(runtime, 1)
        for held in held_batches:
            held.break_down(PeerGone("gone"))
        for future in (waiting, other):
            with pytest.raises(PeerGone):
                future.result(PATIENCE_S)
        with pytest.raises(moonpool.ModelUnavailable, match=r"has no instance left.*gone"):
            behind.result(PATIENCE_S)
        wait_until(lambda: not runtime.is_ready("m"))
        with pytest.raises(moonpool.ModelUnavailable, match="has no instance left"):
            runtime.infer("m", x(4))
        assert {shown["state"] for shown in runtime.instances("m")} == {"FAILED"}
        runtime.unload("m")
    backend.check_pairs()
