"""Tests of signal handlers that raise anywhere in a call: the instance stays usable, and other callers lose nothing."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.runtime.held_batches import Caller, holding, queued
from tests.runtime.recorder import PATIENCE_S, Recorder, config, echo, row
from tests.waiting import wait_until

import moonpool
from moonpool import ModelInstance, Runtime
from moonpool.ipc.errors import PeerGone
from moonpool.runtime.model.request import InferenceRequest, Outcome
from moonpool.runtime.schedule.execution import Execution
from moonpool.runtime.schedule.scheduler import Scheduler

ROOT = Path(__file__).parents[3]
BATCHING = {"max_batch_size": 8, "dynamic_batching": {}}


@pytest.fixture(autouse=True)
def _steps_are_those_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every step be a method that a test can interrupt. No handler runs between two steps of a quick form."""
    for module in ("callers", "scheduler"):
        monkeypatch.setattr(f"moonpool.runtime.schedule.{module}.forms", None)


class Interrupted(BaseException):
    """The exception that the signal handler raises."""


def interrupted_once(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool = False
) -> None:
    """Let a method raise, before or after its work, at the next call by the main thread."""
    method: Callable[..., Any] = getattr(owner, name)
    left = [None]

    def call(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() or not left:
            return method(*arguments, **options)
        left.pop()
        if after:
            method(*arguments, **options)
        raise Interrupted

    monkeypatch.setattr(owner, name, call)


# In these methods a thread that asks alone is interrupted, before or after their work.
ALONE = [
    (Scheduler, "submit", False),
    (Scheduler, "submit", True),
    (Scheduler, "_start", False),
    (Scheduler, "_start", True),
    (Scheduler, "_send", False),
    (Scheduler, "_send", True),
    (Execution, "take", True),
    (Execution, "drive", False),
    (Execution, "drive", True),
    (Scheduler, "finish", False),
    (Scheduler, "finish", True),
    (Scheduler, "settle", False),
    (Scheduler, "settle", True),
    (Execution, "record", False),
    (Execution, "record", True),
    (Scheduler, "_hand_back", False),
    (Scheduler, "_hand_back", True),
]


@pytest.mark.parametrize(("owner", "name", "after"), ALONE)
def test_an_interrupted_call_leaves_a_usable_instance_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: bool
) -> None:
    with holding(folder, **BATCHING) as (backend, runtime):
        backend.is_quick = True
        scheduler = runtime._models.find("m").scheduler
        with monkeypatch.context() as patch:
            interrupted_once(patch, owner, name, after=after)
            with pytest.raises(Interrupted):
                runtime.infer("m", row(1))
        for i in range(3):
            assert runtime.infer("m", row(i), timeout_s=PATIENCE_S)["Y"].flat[0] == i
        assert len(scheduler._idle) == 1
        assert not scheduler._busy
    backend.check_pairs()


# In these methods a thread is interrupted whose instance blocks in `execute`.
BLOCKED = [each for each in ALONE if each[0] is Scheduler and each[1] != "finish"]


# Each is a way to ask. True if the asking thread itself runs an `execute` that blocks.
WAYS: dict[str, tuple[Callable[[Runtime, int], Any], bool]] = {
    "without end": (lambda runtime, i: runtime.infer("m", row(i))["Y"], True),
    "in time": (lambda runtime, i: runtime.infer("m", row(i), timeout_s=PATIENCE_S)["Y"], False),
    "stream": (lambda runtime, i: next(iter(runtime.stream("m", row(i)))).outputs["Y"], False),
}


@pytest.mark.parametrize(("owner", "name", "after"), BLOCKED)
@pytest.mark.parametrize("way", WAYS)
def test_an_interrupted_call_leaves_a_usable_instance_behind_that_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: bool, way: str
) -> None:
    ask, does_the_work = WAYS[way]
    backend = Recorder()
    with Runtime(backends=[backend]) as runtime:
        runtime.load("m", folder, config=config(max_batch_size=8, dynamic_batching={}))
        scheduler = runtime._models.find("m").scheduler
        with monkeypatch.context() as patch:
            interrupted_once(patch, owner, name, after=after)
            with pytest.raises(Interrupted) if does_the_work else suppress(Interrupted):
                ask(runtime, 9)
        for i in range(3):
            assert ask(runtime, i).flat[0] == i
        wait_until(lambda: len(scheduler._idle) == 1, PATIENCE_S)
        assert not scheduler._busy
    backend.check_pairs()


def test_a_thread_that_did_the_work_itself_starts_no_batch_of_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Caller] = []

    def execute(instance: ModelInstance, requests: Sequence[InferenceRequest]) -> list[Outcome]:
        if not others:
            others.append(Caller(runtime, row(2)))
            queued(runtime, 1)
        return echo(instance, requests)

    with Runtime(backends=[Recorder(execute=execute)]) as runtime:
        runtime.load("m", folder, config=config(max_batch_size=8, dynamic_batching={}))
        with monkeypatch.context() as patch:
            interrupted_once(patch, Scheduler, "_form", after=True)
            assert runtime.infer("m", row(1))["Y"].flat[0] == 1
            assert others[0].result() == 2


def test_a_thread_whose_instance_is_gone_starts_no_batch_in_another_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = [PeerGone("the process has ended")]

    def execute(instance: ModelInstance, requests: Sequence[InferenceRequest]) -> list[Outcome]:
        if gone:
            raise gone.pop()
        return echo(instance, requests)

    two = [{"kind": "KIND_CPU", "count": 2}]
    with Runtime(backends=[Recorder(execute=execute)]) as runtime:
        runtime.load("m", folder, config=config(max_batch_size=8, instance_group=two))
        scheduler = runtime._models.find("m").scheduler
        with monkeypatch.context() as patch:
            interrupted_once(patch, Scheduler, "_form", after=True)
            with suppress(Interrupted):
                assert runtime.infer("m", row(1))["Y"].flat[0] == 1
        wait_until(lambda: len(scheduler._idle) == 2, PATIENCE_S)
        assert not scheduler._busy


# In these methods a thread that drives for others is interrupted, before or after their work.
DRIVING = [
    (Execution, "drive", False),
    (Execution, "drive", True),
    (Scheduler, "finish", False),
    (Scheduler, "settle", False),
    (Scheduler, "settle", True),
]


@pytest.mark.parametrize(("owner", "name", "after"), DRIVING)
def test_the_others_are_answered_when_the_thread_that_drives_is_interrupted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, after: bool
) -> None:
    with holding(folder, **BATCHING) as (backend, runtime):
        first = runtime.submit("m", row(0))
        others: list[Caller] = []

        def act() -> None:
            # The main thread is the first in the batch, so it drives the batch.
            queued(runtime, 1)
            for i in (2, 3):
                others.append(Caller(runtime, row(i)))
                queued(runtime, i)
            backend.wait_for(1).answer()
            held = backend.wait_for(2)
            behind.append(Caller(runtime, row(4)))
            queued(runtime, 1)
            backend.is_quick = True
            held.answer()

        behind: list[Caller] = []
        thread = threading.Thread(target=act)
        with monkeypatch.context() as patch:
            interrupted_once(patch, owner, name, after=after)
            thread.start()
            with pytest.raises(Interrupted):
                runtime.infer("m", row(1))
            thread.join()
            assert [caller.result() for caller in (*others, *behind)] == [2, 3, 4]
        assert first.result(PATIENCE_S).outputs["Y"].flat[0] == 0
        assert backend.sent[1:] == [[1, 2, 3], [4]]
        assert runtime.instances("m")[0]["restarts"] == 0


PROGRAM = """
import signal, sys, threading
import numpy as np
import moonpool


class Interrupted(BaseException):
    pass


armed = False


def handle(*_):
    global armed
    if armed:
        armed = False
        raise Interrupted


# If a handler raises while an object is collected, Python only prints that.
sys.unraisablehook = lambda unraisable: None
x = np.ones((1, 4), np.float32)
errors, done = [], threading.Event()


def ask():
    while not done.is_set():
        try:
            assert runtime.infer("m", {"A": x, "B": x}, timeout_s=60.0)["SUM"].sum() == 8
        except BaseException as error:
            errors.append(repr(error))


options = {"MOONPOOL_MAX_RESTARTS": "100000", "MOONPOOL_RESTART_BACKOFF_S": "0"}
options["MOONPOOL_RETRY"] = "yes"
parameters = {key: {"string_value": value} for key, value in options.items()}
with moonpool.Runtime() as runtime:
    runtime.load("m", sys.argv[1], instances=1, config={"parameters": parameters})
    threads = [threading.Thread(target=ask) for _ in range(int(sys.argv[2]))]
    for thread in threads:
        thread.start()
    signal.signal(signal.SIGALRM, handle)
    count = 0
    for i in range(300):
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + (i * 37 % 300) * 1e-5)
            while armed:
                runtime.infer("m", {"A": x, "B": x}, timeout_s=60.0)
        except Interrupted:
            count += 1
        armed = False
    for _ in range(100):
        assert runtime.infer("m", {"A": x, "B": x}, timeout_s=60.0)["SUM"].sum() == 8
    done.set()
    for thread in threads:
        thread.join()
    scheduler = runtime._models.find("m").scheduler
    assert scheduler.queued == scheduler.executing == 0
assert not errors, errors
assert count > 100, count
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 3])
def test_interrupts_at_any_moment_break_nothing(tmp_path: Path, others: int) -> None:
    from tests.runtime.adders import CONFIG, write_model

    folder = write_model(tmp_path, "m", 1, config=CONFIG + "dynamic_batching {}")
    program = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(others)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert (program.returncode, program.stdout) == (0, "done\n"), program.stderr[-3000:]


def test_a_stream_that_is_interrupted_does_not_take_others_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = {"preferred_batch_size": [2], "max_queue_delay_microseconds": 3_600_000_000}
    with holding(folder, max_batch_size=8, dynamic_batching=policy) as (backend, runtime):
        backend.is_quick = True
        other = Caller(runtime, row(1))
        queued(runtime, 1)
        with monkeypatch.context() as patch:
            interrupted_once(patch, Scheduler, "_launch")
            try:
                stream = runtime.stream("m", row(2), timeout_s=PATIENCE_S)
            except Interrupted:
                stream = None
        assert other.result() == 1
        assert stream is not None
        assert [each.outputs["Y"].flat[0] for each in stream] == [2]


PACKAGES = tuple(str(Path(moonpool.__path__[0], name)) for name in ("runtime", "ipc", "stub"))


class RaisesAt:
    """Lets the main thread raise at an event of its own in moonpool, by number: where a handler of a signal could run.

    Python runs handlers when a function begins, and after a function has returned, also one in C.
    """

    def __init__(self, number: int) -> None:
        self.left = number

    def __enter__(self) -> RaisesAt:
        # The end of an object of another test is no place to raise.
        gc.disable()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # What is raised in a destructor goes nowhere.
        if event == "c_call" or code.co_name == "__del__":
            return
        if code.co_filename.startswith(PACKAGES):
            self.left -= 1
            if not self.left:
                raise Interrupted


def interrupted_everywhere(ask: Callable[[], Any], check: Callable[[], Any]) -> int:
    """Interrupt `ask` at one event after the other, and `check` after each. Returns the number of events."""
    for number in itertools.count(1):
        with suppress(Interrupted), RaisesAt(number) as raises:
            ask()
        check()
        if raises.left > 0:
            return number
    raise AssertionError


@pytest.mark.parametrize("timeout_s", [None, PATIENCE_S])
def test_an_interrupt_at_any_call_leaves_a_usable_instance_behind(
    folder: Path, timeout_s: float | None
) -> None:
    # An instance that is interrupted while it takes a batch or gives an answer counts as lost.
    options = {"MOONPOOL_MAX_RESTARTS": "1000", "MOONPOOL_RESTART_BACKOFF_S": "0"}
    parameters = {key: {"string_value": value} for key, value in options.items()}
    with holding(folder, **BATCHING, parameters=parameters) as (backend, runtime):
        backend.is_quick = True
        scheduler = runtime._models.find("m").scheduler

        def check() -> None:
            assert runtime.infer("m", row(2), timeout_s=PATIENCE_S)["Y"].flat[0] == 2
            # The reactor may still have what the caller left.
            wait_until(lambda: len(scheduler._idle) == 1 and not scheduler._busy, PATIENCE_S)
            assert not scheduler.queued

        count = interrupted_everywhere(
            lambda: runtime.infer("m", row(1), timeout_s=timeout_s), check
        )
        assert count > 30
    backend.check_pairs()
