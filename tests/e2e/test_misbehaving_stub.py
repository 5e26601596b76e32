"""Tests of stubs that break the protocol: they are ended, with a reason, and no other model is disturbed.

The stub is `tests/faults/misbehave.py`, which is started in place of the real one and misbehaves in the way
that a request names.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, hosted, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.faults.known import MISBEHAVE
from tests.inside import boot_with, registry_of
from tests.waiting import wait_until

import moonpool
from moonpool import ExecuteTimedOut, LoadFailed, StubDied
from moonpool.runtime.stubs.calls import dispatcher

SIGNATURE: Config = {
    "input": [tensor("X", "FP32", 4)],
    "output": [tensor("Y", "FP32", -1), tensor("STRINGS", "STRING", -1)],
}
SEEN = {"ENVIRONMENT": "FAULT_*", "RESTART_WINDOW_S": 0.001}
pytestmark = pytest.mark.usefixtures("undisturbed")
X = np.zeros(4, np.float32)


@pytest.fixture(scope="module")
def completes() -> bool:
    return True


@pytest.fixture(scope="module")
def instead_of_the_stub(
    sibling_model: None,  # noqa: ARG001 - to be loaded before
) -> Iterator[None]:
    """Start the misbehaving stub in place of the real one from now on; the sibling is a real one."""
    with pytest.MonkeyPatch.context() as patch:
        boot_with(MISBEHAVE, patch)
        yield


@pytest.fixture(scope="module")
def rogue(
    runtime: moonpool.Runtime,
    instead_of_the_stub: None,  # noqa: ARG001 - to be in its place
) -> Iterator[None]:
    with hosted(runtime, "rogue", MODELS / "echo.py", SIGNATURE | options(**SEEN)):
        yield


def ask(runtime: moonpool.Runtime, fault: str = "", timeout_s: float = 30.0) -> None:
    runtime.infer("rogue", {"X": X}, request_id=fault, timeout_s=timeout_s)


def pid_of(runtime: moonpool.Runtime, model: str = "rogue") -> int:
    pid = runtime.instances(model)[0]["pid"]
    if not isinstance(pid, int):
        raise TypeError(f"{model} has no process")
    return pid


def is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def comes_back(runtime: moonpool.Runtime, pid: int) -> None:
    """Wait until another process serves."""
    wait_until(lambda: is_gone(pid), 60.0)
    ask(runtime)
    assert pid_of(runtime) != pid


@pytest.mark.promise("Containment", "A second answer to a batch is never taken as the answer to another batch.")
@pytest.mark.usefixtures("rogue")
def test_a_second_answer_is_not_taken_for_the_next_batch(runtime: moonpool.Runtime) -> None:
    ask(runtime, "answers twice")
    pid = pid_of(runtime)

    with pytest.raises(StubDied, match="an answer to batch"):
        ask(runtime)

    comes_back(runtime, pid)


@pytest.mark.usefixtures("rogue")
def test_a_stub_that_answers_without_reading_is_ended(runtime: moonpool.Runtime) -> None:
    pid = pid_of(runtime)
    ask(runtime, "answers in advance")

    # The request that no longer fits into the channel goes to the next process.
    for _ in range(5000):
        ask(runtime)
        if pid_of(runtime) != pid:
            break

    comes_back(runtime, pid)


@pytest.mark.promise("Containment", "Descriptors that a stub sends are discarded.")
@pytest.mark.needs("descriptors")
@pytest.mark.usefixtures("rogue")
def test_descriptors_that_a_stub_sends_are_dropped(runtime: moonpool.Runtime) -> None:
    ask(runtime)
    pid, before = pid_of(runtime), len(os.listdir("/proc/self/fd"))

    for _ in range(5):
        ask(runtime, "sends descriptors")

    # Threads that look at processes have files of /proc open for a moment.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert pid_of(runtime) == pid


def answers_again(runtime: moonpool.Runtime) -> None:
    """Wait for an answer: on a busy machine, one may take longer than the second that the model has for each."""

    def has_answered() -> bool:
        with contextlib.suppress(ExecuteTimedOut):
            runtime.infer("flood", {"X": X}, timeout_s=60.0)
            return True
        return False

    wait_until(has_answered, 60.0)


@pytest.mark.usefixtures("instead_of_the_stub")
def test_a_stub_that_floods_the_log_is_heard_in_part_and_cut_off_at_its_time_limit(
    runtime: moonpool.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)  # otherwise the output of models does not go to the log
    limits = options(**SEEN, EXECUTE_TIMEOUT_S=1, LOG_LINES_PER_S=5)

    with hosted(runtime, "flood", MODELS / "echo.py", SIGNATURE | limits):
        with pytest.raises(ExecuteTimedOut):
            runtime.infer("flood", {"X": X}, request_id="floods the log", timeout_s=60.0)
        answers_again(runtime)

    assert "lines were left out: too many a second" in caplog.text


@pytest.mark.promise("What a stub says", "A stub that sends more …")
@pytest.mark.promise("Metrics", "One model cannot use up …")
@pytest.mark.usefixtures("instead_of_the_stub")
def test_metrics_can_be_read_while_a_stub_floods_with_them(runtime: moonpool.Runtime) -> None:
    limits = options(**SEEN, EXECUTE_TIMEOUT_S=1)
    with hosted(runtime, "flood", MODELS / "echo.py", SIGNATURE | limits), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(runtime.infer, "flood", {"X": X}, request_id="floods with metrics", timeout_s=60.0)
        while not asked.done():
            assert 'nv_inference_count{model="sibling",version="1"}' in runtime.metrics()
        with pytest.raises(ExecuteTimedOut):
            asked.result()
        answers_again(runtime)


@pytest.mark.promise(
    "What a stub says",
    "Lines that are dropped cost nothing, long ones count as several, and none is longer than 64 Ki characters.",
)
@pytest.mark.usefixtures("instead_of_the_stub")
def test_a_stub_that_prints_nothing_but_ends_of_lines_delays_nobody_for_long(
    runtime: moonpool.Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    limits = options(**SEEN, EXECUTE_TIMEOUT_S=1, LOG_LINES_PER_S=5)
    with hosted(runtime, "flood", MODELS / "echo.py", SIGNATURE | limits), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(runtime.infer, "flood", {"X": X}, request_id="floods its output", timeout_s=60.0)
        while not asked.done():
            assert 'nv_inference_count{model="sibling",version="1"}' in runtime.metrics()
        with pytest.raises(ExecuteTimedOut):
            asked.result()

    assert "lines were left out: too many a second" in caplog.text
    assert len(caplog.records) < 100


@pytest.mark.promise(
    "What a stub says",
    "A stub may have 4096 calls open, each under a number of its own, and leaves no timer behind for any of them.",
)
@pytest.mark.usefixtures("instead_of_the_stub")
def test_a_stub_may_not_ask_more_than_it_may_have_open(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT_HAS_CHECK", "1")

    with (
        hosted(runtime, "asker", MODELS / "echo.py", SIGNATURE | options(**SEEN)),
        pytest.raises(moonpool.ModelError, match="4096 to 4105 were refused"),
    ):
        runtime.infer("asker", {"X": X}, request_id="asks too often", timeout_s=60.0)


@pytest.mark.usefixtures("rogue")
def test_a_stub_that_closes_its_control_channel_and_lives_on_is_ended(runtime: moonpool.Runtime) -> None:
    pid = pid_of(runtime)

    with pytest.raises(StubDied, match="closed its control channel"):
        ask(runtime, "closes the control channel")

    comes_back(runtime, pid)


@pytest.mark.promise("Containment", "Running out of memory is an …")
@pytest.mark.usefixtures("rogue")
def test_a_stub_that_asks_for_more_memory_than_there_is_is_refused(runtime: moonpool.Runtime) -> None:
    pid = pid_of(runtime)

    for _ in range(3):
        with pytest.raises(moonpool.ModelError, match=r"cannot set aside|are allowed"):
            ask(runtime, "grows beyond all")

    assert pid_of(runtime) == pid


@pytest.mark.promise("GPUs in the runtime", "A stub that lies about events …")
@pytest.mark.usefixtures("rogue")
def test_a_stub_that_asks_for_memory_of_a_device_that_is_not_there_is_refused(runtime: moonpool.Runtime) -> None:
    pid = pid_of(runtime)

    words = "no driver|no GPU|device 4000 cannot be used|handles no memory of devices"
    with pytest.raises(moonpool.ModelError, match=words):
        ask(runtime, "grows on a device")

    assert pid_of(runtime) == pid


@pytest.mark.promise(
    "The wire",
    "If many clients leave at once, a stub that is too busy to read is not harmed: it learns "
    "later of each client that left.",
)
@pytest.mark.usefixtures("instead_of_the_stub")
def test_a_stub_that_is_behind_with_hearing_who_has_left_can_be_told_what_it_must(runtime: moonpool.Runtime) -> None:
    config: Config = {"input": [tensor("X", "FP32", -1)], "output": SIGNATURE["output"]}
    count, large = 400, np.zeros(1 << 16, np.float32)

    async def leave() -> None:
        waiting = [
            asyncio.ensure_future(runtime.ainfer("late", {"X": X}, request_id="leaves it open")) for _ in range(count)
        ]
        await asyncio.to_thread(wait_until, lambda: runtime.statistics("late")["execution_count"] == count, 60.0)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    with hosted(runtime, "late", MODELS / "echo.py", config | options(**SEEN, REGION_BYTES="4K")):
        pid = pid_of(runtime, "late")
        asyncio.run(leave())
        # This request needs another region, so the stub gets a message about that, too.
        with pytest.raises(moonpool.ModelError, match=f"^{count} were cancelled"):
            runtime.infer("late", {"X": large}, request_id="ends the cancelled", timeout_s=60.0)
        assert pid_of(runtime, "late") == pid


@pytest.mark.usefixtures("instead_of_the_stub")
def test_memory_that_a_stub_never_lets_go_of_ends_with_the_stub(runtime: moonpool.Runtime) -> None:
    limits = options(**SEEN, REGION_BYTES="4K", REGION_LIMIT_BYTES="8K")

    def keep() -> None:
        for _ in range(1000):
            runtime.infer("hoarder", {"X": X}, request_id="keeps its input", timeout_s=60.0)

    with hosted(runtime, "hoarder", MODELS / "echo.py", SIGNATURE | limits):
        with pytest.raises(moonpool.OutOfMemory, match="MOONPOOL_REGION_LIMIT_BYTES"):
            keep()
        wait_until(lambda: runtime.is_ready("hoarder"))


STARTS = {
    "boot:dies": "was killed by SIGKILL",
    "boot:never says anything": "was not ready in time and was ended",
    "boot:closes both channels": "closed its ",
    "boot:says garbage": "a packet that is not msgpack",
    "complete:never says anything": "was not ready in time and was ended",
    "complete:dies": "was killed by SIGKILL",
    "complete:says garbage": "a packet that is not msgpack",
    "complete:loads instead of completing": "LOADED",
    "complete:completes with no JSON": "completed configuration",
    "complete:completes with a number": "completed configuration",
    "complete:completes with no end": "completed configuration",
    "complete:completes and dies": "was killed by SIGKILL",
    "complete:completes and completes again": "COMPLETED",
    "complete:completes and answers": "ANSWER came out of turn; COMPLETED or FAILED or LOADED",
    "serve:never says anything": "was not ready in time and was ended",
    "serve:dies": "was killed by SIGKILL",
    "serve:closes both channels": "closed its ",
    "serve:says garbage": "a packet that is not msgpack",
    "serve:answers what was not asked": "ANSWER came out of turn; COMPLETED or FAILED or LOADED",
    "serve:completes instead of loading": "COMPLETED",
    "serve:fails with an error number that exec does not have": "00139999",
}


@pytest.mark.parametrize(("fault", "words"), STARTS.items(), ids=list(STARTS))
@pytest.mark.usefixtures("instead_of_the_stub")
def test_a_stub_that_does_not_start_as_agreed_fails_the_load(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch, fault: str, words: str
) -> None:
    monkeypatch.setenv("FAULT_AT_START", fault)
    limits = options(**SEEN, LOAD_TIMEOUT_S=1 if "in time" in words else 60)
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(LoadFailed) as caught:
        runtime.load("stillborn", MODELS / "echo.py", config=SIGNATURE | limits)

    assert words in str(caught.value)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


@pytest.mark.usefixtures("rogue")
def test_a_stub_cannot_ask_for_more_instances_than_the_configuration_has(runtime: moonpool.Runtime) -> None:
    """Let `misbehave.py` complete every configuration with 64 instances."""
    assert len(runtime.instances("rogue")) == 1


def peak_bytes(act: Callable[[], object]) -> int:
    """Measure the most memory that this process had meanwhile, above its memory before."""

    def most() -> int:
        (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(line) << 10

    try:
        Path("/proc/self/clear_refs").write_text("5")
    except PermissionError:
        pytest.skip("this user may not have the kernel count the memory of this process anew")
    before = most()
    act()
    return most() - before


@pytest.mark.promise("The sandbox: `strict`", "The runtime copies only the beginning of a load that was not granted.")
@pytest.mark.promise(
    "Containment",
    "The runtime reads the beginning of a message in a stub's memory before it copies the rest. "
    "It never copies a load that is not granted or not possible in this mode. A request to "
    "another model has at most 16 MiB beside its tensors, all other messages 64 MiB. The copies "
    "for one instance are at most 64 MiB of requests and 1 GiB of loads at once, or a single "
    "larger load.",
)
@pytest.mark.usefixtures("instead_of_the_stub")
@pytest.mark.parametrize("why", ["not granted", "not in this mode", "granted"])
def test_loads_are_copied_only_where_they_are_granted_and_as_many_as_there_is_room_for(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    grants = {"SANDBOX_MODELS": "another"} if why == "granted" else {}
    seen = {"SANDBOX": "strict", "ENVIRONMENT": "FAULT_*", "RESTART_WINDOW_S": 0.001, **grants}
    if why == "granted":
        monkeypatch.setattr(dispatcher, "COPIED_LOADS_BYTES", 200 << 20)
    with hosted(runtime, "loads", MODELS / "echo.py", SIGNATURE | options(**seen)):
        if why == "not in this mode":
            monkeypatch.setattr(registry_of(runtime), "refuses_control", "not in this mode")
        runtime.infer("loads", {"X": X}, timeout_s=60.0)
        said = []

        def load() -> None:
            with pytest.raises(moonpool.ModelError) as caught:
                runtime.infer("loads", {"X": X}, request_id="loads much", timeout_s=60.0)
            said.append(str(caught.value))

        taken_bytes = peak_bytes(load)

        assert said[0].startswith("1 to 40: [")
        # The region takes 64 MiB. If loads are granted, so do three messages, and a fourth one twice: as it lay in the
        # region and as it was read.
        most = 5 * 64 if why == "granted" else 0
        assert taken_bytes < (64 + most + 32) << 20
        monkeypatch.undo()
