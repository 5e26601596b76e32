"""Tests of supervision: deaths are noticed, instances restarted, and callers get errors."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import ECHO, MODELS, Config, hosted, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.e2e.test_ways_agree import link_of
from tests.inside import hosted_in, registry_of
from tests.leaks import Holdings
from tests.waiting import wait_until

import moonpool
from moonpool import ExecuteTimedOut, ModelUnavailable, RequestTimedOut, Response, StubDied
from moonpool.ipc.channel import Channel
from moonpool.runtime.stubs import handle as handles

FILE = MODELS / "dies.py"
SIGNATURE: Config = {"input": [tensor("COMMAND", "STRING", 1)], "output": [tensor("PID", "INT64", 1)]}
SEEN = {"ENVIRONMENT": "FAULT_AT"}
FORGIVING = {**SEEN, "RESTART_WINDOW_S": 0.001}


def send(runtime: moonpool.Runtime, command: str, model: str = "victim") -> Future[Response]:
    return runtime.submit(model, {"COMMAND": [command]})


def pid_from(response: Future[Response]) -> int:
    return int(response.result(60.0).outputs["PID"][0])


def ask(runtime: moonpool.Runtime, command: str = "answer", model: str = "victim") -> int:
    return pid_from(send(runtime, command, model))


def state(runtime: moonpool.Runtime, number: int = 0) -> str:
    return str(runtime.instances("victim")[number]["state"])


def kill(runtime: moonpool.Runtime, number: int = 0) -> int:
    pid = int(runtime.instances("victim")[number]["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def is_taken(runtime: moonpool.Runtime) -> bool:
    """Return True if the process of the first instance has a batch; one that it never took would go to the next."""
    is_sent = hosted_in(runtime, "victim").scheduler.executing > 0
    return is_sent and getattr(link_of(runtime, "victim").conversation.channel, "was_taken", True)


def ended(runtime: moonpool.Runtime, pid: int) -> None:
    """Wait until the runtime knows that the process of the first instance has ended. Its next one may be ready
    already.
    """

    def is_known() -> bool:
        (instance, *_) = runtime.instances("victim")
        return instance["state"] != "READY" or instance["pid"] not in (pid, None)

    wait_until(is_known, 60.0)


# Death and return


def test_the_end_of_a_process_that_is_known_late_does_not_count_for_the_next_one(runtime: moonpool.Runtime) -> None:
    with hosted(runtime, "victim", FILE, SIGNATURE):
        (record,) = hosted_in(runtime, "victim").supervisor.records
        first = record.instance.state
        pid = kill(runtime)
        wait_until(lambda: runtime.instances("victim")[0]["restarts"] == 1, 60.0)
        assert ask(runtime) != pid
        first._on_exit()
        assert ask(runtime) != pid
        assert (state(runtime), runtime.instances("victim")[0]["restarts"]) == ("READY", 1)


@pytest.mark.promise(
    "Lifecycle",
    "A death is noticed at once, and the instance is restarted without a request. Its "
    "siblings serve on, and queued requests wait.",
)
def test_a_death_while_idle_is_noticed_and_mended_without_a_request(
    runtime: moonpool.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    with hosted(runtime, "victim", FILE, SIGNATURE):
        pid = kill(runtime)
        wait_until(lambda: runtime.instances("victim")[0]["restarts"] == 1, 60.0)
        wait_until(lambda: runtime.is_ready("victim"))
        assert ask(runtime) != pid

    assert (
        "Stub process 'victim_0' is not healthy. It was killed by SIGKILL (not sent by moonpool; "
        "often by the kernel's out-of-memory killer) while it was idle."
    ) in caplog.text


@pytest.mark.promise(
    "Requests", "A request that was sent to a process which died before it took it goes to the next one."
)
def test_a_request_that_a_process_never_took_goes_to_the_next_one(runtime: moonpool.Runtime) -> None:
    with hosted(runtime, "victim", FILE, SIGNATURE):
        pid = ask(runtime)
        if type(link_of(runtime, "victim").conversation.channel) is Channel:
            pytest.skip("a socket does not tell what its reader has taken")
        os.kill(pid, signal.SIGSTOP)
        sent = send(runtime, "answer")
        wait_until(lambda: hosted_in(runtime, "victim").scheduler.executing == 1)
        os.kill(pid, signal.SIGKILL)
        assert pid_from(sent) != pid


def test_an_instance_that_dies_too_often_is_given_up_and_says_why(runtime: moonpool.Runtime) -> None:
    limits = options(MAX_RESTARTS=2, RESTART_BACKOFF_S=0.01)
    with hosted(runtime, "victim", FILE, SIGNATURE | limits):
        for _ in range(3):
            wait_until(lambda: state(runtime) == "READY", 60.0)
            ended(runtime, kill(runtime))
        wait_until(lambda: state(runtime) == "FAILED", 60.0)

        with pytest.raises(ModelUnavailable) as caught:
            runtime.infer("victim", {"COMMAND": ["answer"]})
        assert caught.value.code == "UNAVAILABLE"
        for words in (
            "Request for model 'victim' which has no instance left: victim_0 ",
            "died 3 times within 60 s, in which 2 restarts are allowed; the last time: ",
            "was killed by SIGKILL",
        ):
            assert words in str(caught.value)
        assert not runtime.is_ready("victim")
        assert runtime.instances("victim")[0]["pid"] is None

    with hosted(runtime, "victim", FILE, SIGNATURE):
        assert ask(runtime) > 0


def test_a_restart_that_fails_counts_as_a_death_and_those_who_wait_are_told(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = options(**SEEN, MAX_RESTARTS=2, RESTART_BACKOFF_S=0.1)
    go = tmp_path / "go"
    with hosted(runtime, "victim", FILE, SIGNATURE | limits):
        monkeypatch.setenv("FAULT_AT", f"initialize:exit after {go}")
        kill(runtime)
        wait_until(lambda: state(runtime) != "READY", 60.0)
        waiting = [send(runtime, "answer") for _ in range(3)]
        go.touch()

        for each in waiting:
            with pytest.raises(ModelUnavailable, match="exited with 3"):
                each.result(60.0)
        assert state(runtime) == "FAILED"


def test_an_instance_that_dies_while_it_is_restarted_is_restarted_again(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosted(runtime, "victim", FILE, SIGNATURE | options(**FORGIVING)):
        monkeypatch.setenv("FAULT_AT", "initialize:hang")
        first = kill(runtime)
        second = wait_until(lambda: starting(runtime, first), 60.0) or 0
        monkeypatch.delenv("FAULT_AT")
        os.kill(second, signal.SIGKILL)

        assert ask(runtime) not in (first, second)


def starting(runtime: moonpool.Runtime, former: int) -> int | None:
    """Return the process that is being started in place of a former one."""
    instance = runtime.instances("victim")[0]
    is_other = instance["state"] == "STARTING" and instance["pid"] not in (None, former)
    return int(instance["pid"]) if is_other else None


@pytest.mark.promise("Lifecycle", "After twenty deaths, no process, descriptor or thread is left behind.")
def test_twenty_deaths_leave_nothing_behind(runtime: moonpool.Runtime) -> None:
    def counts() -> tuple[int, int, int]:
        now = Holdings()
        return len(now.children), len(now.descriptors), threading.active_count()

    with hosted(runtime, "victim", FILE, SIGNATURE | options(**FORGIVING)):
        ask(runtime)
        before = counts()
        for number in range(20):
            with pytest.raises(StubDied):
                ask(runtime, "execute:_exit 3")
            assert ask(runtime) > 0
            assert runtime.instances("victim")[0]["restarts"] == number + 1

        # At the beginning, a thread of the load may not have ended yet.
        wait_until(
            lambda: all(now <= then for now, then in zip(counts(), before, strict=True)),
            what=f"no more than {before} children, descriptors, threads",
        )


# Requests around a death


@pytest.mark.promise("Lifecycle", "A death is noticed at …")
def test_queued_requests_survive_the_death_of_the_instance(runtime: moonpool.Runtime) -> None:
    with hosted(runtime, "victim", FILE, SIGNATURE):
        before = ask(runtime)
        first = send(runtime, "execute:hang")
        wait_until(lambda: is_taken(runtime))
        queued = [send(runtime, "answer") for _ in range(5)]
        kill(runtime)

        with pytest.raises(StubDied, match="was killed by SIGKILL"):
            first.result(60.0)
        pids = {pid_from(each) for each in queued}
        assert len(pids) == 1
        assert before not in pids


@pytest.mark.promise("Lifecycle", "A death is noticed at …")
def test_siblings_of_a_dead_instance_serve_on(runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted(runtime, "victim", FILE, SIGNATURE | options(**FORGIVING), instances=2):
        monkeypatch.setenv("FAULT_AT", "initialize:hang")
        dead = kill(runtime)
        wait_until(lambda: state(runtime) == "STARTING", 60.0)

        answers = {ask(runtime) for _ in range(20)}

        assert answers == {runtime.instances("victim")[1]["pid"]}
        assert dead not in answers
        assert runtime.is_ready("victim")


def test_an_idempotent_request_is_tried_once_more(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    once = f"execute:once {tmp_path / 'first'}"
    with hosted(runtime, "victim", FILE, SIGNATURE | options(**FORGIVING, RETRY="yes")):
        before = ask(runtime)
        assert ask(runtime, once) != before

        with pytest.raises(StubDied, match="exited with 3"):
            ask(runtime, "execute:_exit 3")
        wait_until(lambda: runtime.instances("victim")[0]["restarts"] == 3, 60.0)

    with hosted(runtime, "victim", FILE, SIGNATURE | options(**FORGIVING)):
        with pytest.raises(StubDied, match="exited with 3"):
            ask(runtime, f"execute:once {tmp_path / 'second'}")
        assert ask(runtime) > 0


def test_a_request_that_took_too_long_is_not_tried_once_more(runtime: moonpool.Runtime) -> None:
    limits = options(**FORGIVING, RETRY="yes", EXECUTE_TIMEOUT_S=2)
    with hosted(runtime, "victim", FILE, SIGNATURE | limits):
        with pytest.raises(ExecuteTimedOut, match="took longer than 2 s"):
            ask(runtime, "execute:hang")
        wait_until(lambda: runtime.instances("victim")[0]["restarts"] == 1, 60.0)
        assert ask(runtime) > 0


@pytest.mark.promise("Lifecycle", "A model that hangs in …")
def test_where_a_model_hung_is_in_the_log(runtime: moonpool.Runtime, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moonpool")
    limits = options(EXECUTE_TIMEOUT_S=3)
    with hosted(runtime, "victim", FILE, SIGNATURE | limits), pytest.raises(ExecuteTimedOut):
        ask(runtime, "execute:hang")

    assert "dies.py" in caplog.text
    assert "in execute" in caplog.text


def test_a_caller_who_leaves_a_hanging_model_harms_nobody(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    with hosted(runtime, "victim", FILE, SIGNATURE, instances=1):
        go = tmp_path / "go"
        with pytest.raises(RequestTimedOut):
            runtime.infer("victim", {"COMMAND": [f"execute:wait for {go}"]}, timeout_s=0.05)
        waiting = send(runtime, "answer")
        go.touch()

        assert pid_from(waiting) == runtime.instances("victim")[0]["pid"]


def test_a_stopped_process_is_ended_at_its_limits(runtime: moonpool.Runtime) -> None:
    limits = options(**FORGIVING, EXECUTE_TIMEOUT_S=2, FINALIZE_TIMEOUT_S=0.2)
    with hosted(runtime, "victim", FILE, SIGNATURE | limits):
        os.kill(ask(runtime), signal.SIGSTOP)
        with pytest.raises(ExecuteTimedOut):
            ask(runtime)
        pid = ask(runtime)
        os.kill(pid, signal.SIGSTOP)

    assert not os.path.exists(f"/proc/{pid}")


# Unload


def test_a_runtime_that_nobody_refers_to_any_more_is_closed() -> None:
    runtime = moonpool.Runtime()
    runtime.load("victim", FILE, config=SIGNATURE)
    pid = int(runtime.instances("victim")[0]["pid"])
    answer = send(runtime, "answer")

    del runtime

    assert pid_from(answer) == pid
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 60.0)
    wait_until(lambda: "moonpool-close" not in {thread.name for thread in threading.enumerate()})


def test_unload_breaks_off_what_does_not_end() -> None:
    with moonpool.Runtime(drain_timeout_s=0.1) as runtime:
        runtime.load("victim", FILE, config=SIGNATURE)
        executing = send(runtime, "execute:hang")
        queued = send(runtime, "answer")
        runtime.unload("victim")

        for each in (executing, queued):
            with pytest.raises(ModelUnavailable, match="is being unloaded"):
                each.result(60.0)


def test_unload_waits_for_what_ends(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    runtime.load("victim", FILE, config=SIGNATURE)
    go = tmp_path / "go"
    executing = send(runtime, f"execute:wait for {go}")
    queued = send(runtime, "answer")
    unloading = threading.Thread(target=runtime.unload, args=("victim",))
    unloading.start()
    wait_until(lambda: "victim" not in runtime.models())
    go.touch()
    unloading.join(60.0)

    assert pid_from(executing) == pid_from(queued)


def test_unload_does_not_wait_for_a_restart(runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.load("victim", FILE, config=SIGNATURE | options(**FORGIVING, LOAD_TIMEOUT_S=1000))
    monkeypatch.setenv("FAULT_AT", "initialize:hang")
    former = kill(runtime)
    pid = wait_until(lambda: starting(runtime, former), 60.0)

    runtime.unload("victim")

    assert not os.path.exists(f"/proc/{pid}")


def test_unload_does_not_wait_for_the_time_of_a_restart(runtime: moonpool.Runtime) -> None:
    limits = options(RESTART_BACKOFF_S=1000, RESTART_BACKOFF_MAX_S=1000)
    runtime.load("victim", FILE, config=SIGNATURE | limits)
    for restarts in (0, 1):
        wait_until(lambda: state(runtime) == "READY", 60.0)
        assert runtime.instances("victim")[0]["restarts"] == restarts
        ended(runtime, kill(runtime))
    wait_until(lambda: state(runtime) == "BACKING_OFF", 60.0)

    runtime.unload("victim")

    assert "victim" not in runtime.models()


# Failures that are not the model's fault


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open no descriptors until the end."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The lowest number that is free. Others may be free below the highest one that is taken.
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.promise(
    "Lifecycle",
    "A start that fails for want of descriptors, memory or processes is tried again and is no death of the model.",
)
def test_a_start_for_which_the_runtime_has_no_descriptors_is_no_death_of_the_model(
    runtime: moonpool.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    limits = options(MAX_RESTARTS=1, RESTART_BACKOFF_S=0.01)
    with hosted(runtime, "victim", FILE, SIGNATURE | limits):
        pid = ask(runtime)
        with no_descriptors():
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: caplog.text.count("restart failed") >= 4, 60.0)
            assert state(runtime) in ("BACKING_OFF", "STARTING")
        assert "Too many open files" in caplog.text

        assert ask(runtime) != pid
        # The stub died once, and was restarted once with success.
        assert runtime.instances("victim")[0]["restarts"] == 1


@pytest.mark.promise("Lifecycle", "A model that was given up …")
def test_a_model_that_nobody_can_load_again_comes_back_by_itself(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = options(**SEEN, MAX_RESTARTS=0, RESTART_WINDOW_S=5, RESTART_BACKOFF_MAX_S=5)
    with hosted(runtime, "victim", FILE, SIGNATURE | limits):
        monkeypatch.setattr(registry_of(runtime), "refuses_control", "not in this mode")
        monkeypatch.setenv("FAULT_AT", "initialize:_exit 3")
        pid = kill(runtime)
        wait_until(lambda: state(runtime) == "FAILED", 60.0)
        with pytest.raises(ModelUnavailable, match="has no instance left"):
            runtime.infer("victim", {"COMMAND": ["answer"]})
        assert not runtime.is_ready("victim")
        monkeypatch.delenv("FAULT_AT")

        wait_until(lambda: runtime.is_ready("victim"), 60.0)
        assert ask(runtime) != pid


@pytest.mark.promise(
    "Lifecycle",
    "A model that was given up stays so if somebody can load it again. If nobody can, it is "
    "started again after a rest.",
)
def test_a_model_that_somebody_can_load_again_stays_given_up(runtime: moonpool.Runtime) -> None:
    limits = options(MAX_RESTARTS=0, RESTART_WINDOW_S=5, RESTART_BACKOFF_MAX_S=5)
    with hosted(runtime, "victim", FILE, SIGNATURE | limits):
        kill(runtime)
        wait_until(lambda: state(runtime) == "FAILED", 60.0)
        wait_until(lambda: not any("recover" in each.name for each in threading.enumerate()))

        assert state(runtime) == "FAILED"


def test_a_stub_that_waits_for_a_reactor_that_does_nothing_waits_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = threading.Event()
    with moonpool.Runtime() as runtime, hosted(runtime, "echo", MODELS / "echo.py", ECHO):
        stub = hosted_in(runtime, "echo").supervisor.records[0].instance.state
        registry_of(runtime).stubs.reactor.call_soon(lambda: held.wait(60.0))
        monkeypatch.setattr(handles, "_REACTOR_S", 0.01)
        try:
            with pytest.raises(moonpool.MoonpoolError, match=r"\[echo_0\] .* has done nothing for 0.01 s"):
                stub._on_reactor(print)
        finally:
            held.set()
        monkeypatch.undo()
        outputs = runtime.infer("echo", {"X": np.ones(3, np.float32)}, timeout_s=60.0)
        assert outputs["OUT_X"].sum() == 3
