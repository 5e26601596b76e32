"""Tests of recent errors: they are kept, counted, shortened and in the end forgotten."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, hosted, options, tensor
from tests.inside import registry_of
from tests.waiting import wait_until

import moonpool
from moonpool import ConfigError, LoadFailed, ModelError, StubDied
from moonpool.runtime.errors import ModelUnavailable
from moonpool.runtime.observe.recent_errors import MAX_BYTES, RecentError, RecentErrors

pytestmark = pytest.mark.promise(
    "The overview",
    "Errors of models, deaths and failed loads are kept with their text, the model's traceback, "
    "and how many requests they cost; the latest fifty that differ.",
)


def errors(runtime: moonpool.Runtime) -> list[RecentError]:
    return registry_of(runtime).errors.latest()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


# The list


def test_an_error_that_comes_again_is_counted_and_comes_first() -> None:
    recent = RecentErrors()
    recent.add("m", 1, ModelError("one"), instance="m_0_0", request_id="a", requests=1)
    recent.add("m", 1, ModelError("two"), requests=1)
    recent.add("m", 1, ModelError("one"), instance="m_0_1", requests=1)
    recent.add("m", 2, ModelError("one"))

    shown = [(e.version, e.text, e.requests, e.instance, e.request_id) for e in recent.latest()]
    assert shown == [(2, "one", 0, "", ""), (1, "one", 2, "m_0_1", "a"), (1, "two", 1, "", "")]


def test_the_oldest_make_room() -> None:
    recent = RecentErrors(most=2)
    for text in "abc":
        recent.add("m", 1, text)

    assert [error.text for error in recent.latest()] == ["c", "b"]


def test_a_long_text_keeps_its_ends() -> None:
    recent = RecentErrors()
    recent.add("m", 1, "begin " + "x" * 10 * MAX_BYTES + " end")

    (error,) = recent.latest()
    assert len(error.text) <= MAX_BYTES
    assert error.text.startswith("begin ")
    assert error.text.endswith(" end")


def test_bytes_that_are_not_utf_8_become_a_text() -> None:
    recent = RecentErrors()
    recent.add("m", 1, os.fsdecode(b"no file \xff"))

    assert recent.latest()[0].text == "no file ?"


def test_an_error_that_cannot_be_printed_is_told_by_its_name() -> None:
    recent = RecentErrors()
    recent.add("m", 1, Unprintable())

    assert recent.latest()[0].text == "Unprintable"


def test_a_traceback_finds_its_error_whichever_comes_first() -> None:
    recent = RecentErrors()
    logged = "it failed\n\nTraceback (most recent call last):\n  here\nOne: it failed\n"
    recent.add("late", 1, "it failed\n")
    for model in ("late", "early", "other"):
        recent.logged(model, 1, logged)
    recent.add("early", 1, "it failed\n")
    recent.logged("early", 1, "something else\n")

    traceback = "Traceback (most recent call last):\n  here\nOne: it failed"
    assert [(e.model, e.traceback) for e in recent.latest()] == [("early", traceback), ("late", traceback)]


# Errors that are listed


def test_a_model_s_error_is_kept_with_the_place_in_its_file(tmp_path: Path) -> None:
    file = tmp_path / "fails.py"
    file.write_text(
        "from moonpool import Float32\n"
        "class Fails:\n"
        "    def __call__(self, X: Float32[1]) -> Float32[1]:\n"
        "        raise ValueError('not today')\n"
    )
    with moonpool.Runtime() as runtime:
        runtime.load("fails", file)
        for number in range(3):
            with pytest.raises(ModelError):
                runtime.request("fails", {"X": np.zeros(1, np.float32)}, request_id=f"r{number}")
        # The traceback arrives on another channel.
        wait_until(lambda: errors(runtime)[0].traceback)
        (error,) = errors(runtime)

    assert error.traceback.startswith("Traceback (most recent call last):\n")
    assert "    raise ValueError('not today')\nValueError: not today" in error.traceback
    assert "ValueError: not today\n\nAt:\n" in error.text
    assert f"{file}(4): __call__" in error.text
    assert (error.model, error.version, error.instance) == ("fails", 1, "fails_0")
    assert (error.requests, error.request_id) == (3, "r2")
    assert error.first_ms <= error.last_ms


def test_a_death_is_kept_once_with_the_requests_that_it_cost() -> None:
    config = {
        "input": [tensor("COMMAND", "STRING", 1)],
        "output": [tensor("PID", "INT64", 1)],
        **options(ENVIRONMENT="FAULT_AT"),
    }
    with moonpool.Runtime() as runtime, hosted(runtime, "victim", MODELS / "dies.py", config):
        with pytest.raises(StubDied):
            runtime.infer("victim", {"COMMAND": ["execute:_exit 3"]})
        wait_until(lambda: runtime.is_ready("victim"), 60.0)
        os.kill(int(runtime.instances("victim")[0]["pid"]), signal.SIGKILL)
        wait_until(lambda: len(errors(runtime)) > 1, 60.0)
        idle, busy = errors(runtime)
        wait_until(lambda: runtime.is_ready("victim"), 60.0)

    assert "exited with 3 during execute" in busy.text
    assert (busy.requests, busy.instance) == (1, "victim_0")
    assert "killed by SIGKILL" in idle.text
    assert idle.requests == 0


def test_a_load_that_fails_is_kept_with_the_model_s_traceback(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("def helper():\n    raise KeyError('nothing')\nhelper()\n")
    with moonpool.Runtime() as runtime:
        with pytest.raises(LoadFailed):
            runtime.load("broken", file)
        with pytest.raises(ConfigError):
            runtime.load("odd", MODELS / "echo.py", config={"max_batch_size": -1})
        odd, broken = errors(runtime)

    assert broken.traceback.startswith("Traceback (most recent call last):")
    assert "in helper" in broken.traceback
    assert (broken.model, broken.requests) == ("broken", 0)
    assert odd.model == "odd"
    assert "max_batch_size" in odd.text


def test_a_request_that_nobody_waits_for_is_not_an_error() -> None:
    config = {
        "input": [tensor("COMMAND", "STRING", 1)],
        "output": [tensor("PID", "INT64", 1)],
        **options(ENVIRONMENT="FAULT_AT"),
    }
    runtime = moonpool.Runtime(drain_timeout_s=0.0)
    with runtime:
        runtime.load("victim", MODELS / "dies.py", config=config)
        waits = runtime.submit("victim", {"COMMAND": ["execute:hang"]})
        left = runtime.submit("victim", {"COMMAND": ["answer"]})
        assert left.cancel()
        runtime.unload("victim")
        with pytest.raises(ModelUnavailable):
            waits.result(60.0)
        kept = errors(runtime)

    assert [error.requests for error in kept] == [1]
