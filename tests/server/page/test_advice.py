"""Advice on models that would profit from another instance, with real processes, and a machine with or without room."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import tensor
from tests.inside import hosted_in, registry_of
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.cli.top import overview_lines
from moonpool.runtime.observe import another_instance
from moonpool.runtime.process.usage import Reading, usage_of
from moonpool.runtime.server.meter import ClientRequests
from moonpool.runtime.server.openai.meter import OpenAIMeter
from moonpool.runtime.server.page.adviser import Adviser
from moonpool.runtime.server.page.history import History
from moonpool.runtime.server.page.overview import Overview

pytestmark = pytest.mark.promise("The overview", "A model for which requests wait …")

# The model sleeps or spins for as long as its input says.
MODEL = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        seconds = max(float(pb_utils.get_input_tensor_by_name(r, "S").as_numpy().max()) for r in requests)
        end_s = time.thread_time() + seconds
        if __DOES__ == "sleeps":
            time.sleep(seconds)
        while __DOES__ == "spins" and time.thread_time() < end_s:
            pass
        inputs = [pb_utils.get_input_tensor_by_name(request, "S").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("S", each)]) for each in inputs]
"""
CONFIG = {"input": [tensor("S", "FP32", 1)], "output": [tensor("S", "FP32", 1)]}
CALLERS = 6
# The test's own clock runs so much faster than the real one.
HASTE = 20.0


@pytest.fixture
def runtime() -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime() as runtime:
        yield runtime


def load(runtime: moonpool.Runtime, folder: Path, does: str, **more: object) -> None:
    file = folder / f"{does}.py"
    file.write_text(MODEL.replace("__DOES__", repr(does)))
    runtime.load("m", file, config={**CONFIG, **more})


def machine(clock: Callable[[], float], *, is_idle: bool) -> Callable[[], Reading]:
    """Return readings of a machine whose processors are idle or all busy."""

    def read() -> Reading:
        now_s = clock()
        cpus = os.sched_getaffinity(0)
        return Reading(now_s, dict.fromkeys(cpus, now_s if is_idle else 0.0), ())

    return read


def quick() -> float:
    return time.monotonic() * HASTE


@contextmanager
def pressed(runtime: moonpool.Runtime, seconds: float, callers: int = CALLERS) -> Iterator[None]:
    """Keep so many requests under way."""
    is_batching = runtime.config("m").max_batch_size > 0
    inputs = {"S": np.full((1, 1) if is_batching else (1,), seconds, np.float32)}
    is_over = False

    def again(_: object) -> None:
        if not is_over:
            runtime.submit("m", inputs).add_done_callback(again)

    for _ in range(callers):
        again(None)
    try:
        yield
    finally:
        is_over = True
        hosted = hosted_in(runtime, "m")
        wait_until(lambda: not hosted.scheduler.queued and not hosted.scheduler.executing, 60.0)


class Watcher:
    """Takes a sample on demand, at most five times a second of its clock."""

    def __init__(self, runtime: moonpool.Runtime, clock: Callable[[], float] = quick, *, is_idle: bool = True) -> None:
        self.adviser = Adviser(clock, machine(clock, is_idle=is_idle))
        self._runtime = runtime
        self._clock = clock
        self._due_s = 0.0

    def advice(self) -> dict[str, Any] | None:
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + 0.2
            self.adviser.sample(registry_of(self._runtime).served())
        return self.adviser.of(str(hosted_in(self._runtime, "m")))

    def has_seen_a_window(self) -> bool:
        self.advice()
        (watched,) = self.adviser._watched.values()
        return watched._watch.load is not None


def test_a_model_that_keeps_a_core_busy_is_said_to_profit(
    runtime: moonpool.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(another_instance, "WINDOW_S", 2.0)
    load(runtime, tmp_path, "spins")
    pid = runtime.instances("m")[0]["pid"]

    def clock() -> float:
        """Return the time as it would pass if the instance had a core to itself, which a busy machine does not give
        it.
        """
        usage = usage_of(pid)
        return 0.0 if usage is None else usage.cpu_s

    with pressed(runtime, 0.002):
        found = wait_until(Watcher(runtime, clock).advice, 60.0, "advice")

    assert found is not None
    assert found["reason"] == "processor"
    assert "its instance keeps 1.0 cores busy;" in found["text"]
    assert found["line"] == "instance_group [{ count: 2 kind: KIND_CPU }]"


def test_a_model_that_waits_for_something_else_is_told_from_it(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    load(runtime, tmp_path, "sleeps", instance_group=[{"count": 2, "kind": "KIND_CPU"}])

    with pressed(runtime, 0.05, callers=2 * CALLERS):
        found = wait_until(Watcher(runtime).advice, 60.0, "advice")

    assert found is not None
    assert found["reason"] == "waiting"
    assert "its 2 instances spend their time waiting, as for I/O" in found["text"]
    assert found["line"] == "instance_group [{ count: 3 kind: KIND_CPU }]"


def test_nothing_is_said_where_no_core_is_free(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    load(runtime, tmp_path, "sleeps")
    watcher = Watcher(runtime, is_idle=False)

    with pressed(runtime, 0.05):
        wait_until(watcher.has_seen_a_window, 60.0, "a window")

        assert watcher.advice() is None


@pytest.mark.parametrize(("callers", "is_advised"), [(CALLERS, False), (40, True)])
def test_a_queue_that_fits_into_a_batch_is_none(
    runtime: moonpool.Runtime, tmp_path: Path, callers: int, is_advised: bool
) -> None:
    load(runtime, tmp_path, "sleeps", max_batch_size=8, dynamic_batching={})
    watcher = Watcher(runtime)

    with pressed(runtime, 0.05, callers):
        wait_until(watcher.has_seen_a_window, 60.0, "a window")

        assert (watcher.advice() is not None) == is_advised


def test_it_is_taken_back_when_nothing_waits_any_more(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    load(runtime, tmp_path, "sleeps")
    watcher = Watcher(runtime)
    with pressed(runtime, 0.05):
        wait_until(watcher.advice, 60.0, "advice")

    wait_until(lambda: watcher.advice() is None, 60.0, "nothing")


def test_nothing_is_measured_where_nothing_waits(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    load(runtime, tmp_path, "sleeps")
    readings: list[float] = []

    def read() -> Reading:
        readings.append(quick())
        return Reading(quick(), {}, ())

    adviser = Adviser(quick, read)
    for _ in range(5):
        runtime.infer("m", {"S": np.zeros(1, np.float32)})
        adviser.sample(registry_of(runtime).served())

    assert readings == []


def test_a_kernel_that_does_not_say_is_borne(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    def read() -> Reading:
        raise PermissionError("/proc/stat")

    load(runtime, tmp_path, "sleeps")
    adviser = Adviser(quick, read)
    with pressed(runtime, 0.05):
        hosted = hosted_in(runtime, "m")
        wait_until(lambda: hosted.scheduler.queued > 1, 60.0)
        for _ in range(5):
            adviser.sample(registry_of(runtime).served())

    assert adviser.of(str(hosted)) is None


def test_overview_and_terminal_have_it(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    load(runtime, tmp_path, "sleeps")
    overview = Overview(registry_of(runtime), list, ClientRequests().counts, OpenAIMeter().pieces)
    overview._history = history = History(
        registry_of(runtime),
        ClientRequests().counts,
        OpenAIMeter().pieces,
        Adviser(quick, machine(quick, is_idle=True)),
    )

    def advised() -> dict[str, object]:
        history.sample()
        return dict(overview.snapshot()["models"][0]["advice"] or {})

    with pressed(runtime, 0.05):
        advice = wait_until(advised, 60.0, "advice")
        shown = overview.snapshot()
    overview.close()

    assert advice["reason"] == "waiting"
    shown["models"][0]["advice"] = advice
    lines = [line.text for line in overview_lines(shown, "http://x", 300)]
    assert f"  {advice['text']}" in lines
    assert "  in config.pbtxt: instance_group [{ count: 2 kind: KIND_CPU }]" in lines
