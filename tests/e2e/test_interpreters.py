"""Tests of the interpreters that run models, and of the errors of those that cannot."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, hosted, options, tensor
from tests.e2e.soaking import MODELS_BY_KIND, Soak, load_all, settle
from tests.other_pythons import WHY_NONE, made
from tests.waiting import wait_until

import moonpool
from moonpool import BadEnvironment, LoadFailed
from moonpool.runtime.stubs import handle as stub_handle

FILE = MODELS / "dies.py"
SIGNATURE: Config = {"input": [tensor("COMMAND", "STRING", 1)], "output": [tensor("PID", "INT64", 1)]}


def ask(runtime: moonpool.Runtime, command: str = "answer") -> int:
    """Give the model a command; returns the id of the process that answered."""
    inputs = {"COMMAND": [command]}
    return int(runtime.infer("victim", inputs, timeout_s=60.0)["PID"][0])


def environment(tmp_path: Path, write: Callable[[Path], object]) -> Config:
    """Make a configuration with an environment whose interpreter `write` makes."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    write(python)
    path = str(python.parent.parent)
    return {"parameters": {"EXECUTION_ENV_PATH": {"string_value": path}}}


def program(text: bytes, mode: int = 0o755) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        path.write_bytes(text)
        path.chmod(mode)

    return write


INTERPRETERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda _: None, "has no bin/python"),
    "a link to nowhere": (lambda path: path.symlink_to("/nowhere/python"), "which is not there"),
    "not executable": (program(b"#!/bin/sh\n", 0o644), "bin/python is not a program"),
    "a folder": (lambda path: path.mkdir(), "bin/python is not a program"),
    "no program": (program(b"\x7fELF of another machine"), "is not a program for this machine"),
    "empty": (program(b""), "is not a program for this machine"),
    "a script for a missing shell": (program(b"#!/nowhere/sh\n"), "a loader, which is not there"),
    "a program that is no Python": (program(b"#!/bin/sh\nexit 5\n"), "exited with 5"),
    "a program that says why": (
        program(b"#!/bin/sh\necho no luck today >&2\nexit 1\n"),
        "its last words were: no luck today",
    ),
    "a program that never ends": (program(b"#!/bin/sh\nexec sleep 1000\n"), "was not ready in time"),
}


@pytest.fixture(scope="module")
def completes() -> bool:
    return True


@pytest.mark.promise("Lifecycle", "If a stub does not start, one sentence says why.")
@pytest.mark.promise("Environments", "If an interpreter cannot run a model, one sentence says why.")
@pytest.mark.parametrize("name", INTERPRETERS)
def test_an_interpreter_that_is_none_is_told_in_a_sentence(
    runtime: moonpool.Runtime, tmp_path: Path, name: str
) -> None:
    write, words = INTERPRETERS[name]
    config = environment(tmp_path, write)
    config["parameters"] |= options(LOAD_TIMEOUT_S=1 if "in time" in words else 60)["parameters"]
    before = len(os.listdir("/proc/self/fd"))

    with pytest.raises(moonpool.MoonpoolError) as caught:
        runtime.load("victim", FILE, config=SIGNATURE | config)

    assert words in str(caught.value)
    assert isinstance(caught.value, LoadFailed | BadEnvironment)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def python_without_numpy() -> str:
    python = "/usr/bin/python3.11"
    if not os.path.exists(python):
        pytest.skip(f"there is no {python} here")
    if os.spawnv(os.P_WAIT, python, [python, "-Ic", "import numpy"]) == 0:
        pytest.skip(f"{python} has numpy")
    return python


@pytest.mark.promise("Lifecycle", "If a stub does not …")
def test_an_interpreter_without_numpy_is_told_to_have_none(runtime: moonpool.Runtime, tmp_path: Path) -> None:
    python = python_without_numpy()
    config = environment(tmp_path, lambda path: path.symlink_to(python))

    with pytest.raises(LoadFailed, match=r"numpy cannot be imported by .*; install it there"):
        runtime.load("victim", FILE, config=SIGNATURE | config)


def test_two_versions_of_the_protocol_are_told_apart(
    runtime: moonpool.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stub_handle, "PROTOCOL_VERSION", 999)

    with pytest.raises(LoadFailed, match=r"the runtime speaks protocol 999 and this stub \d"):
        runtime.load("victim", FILE, config=SIGNATURE)


ENVIRONMENTS = made()


@pytest.mark.promise(
    "Environments",
    "A model runs under any Python from 3.9 up, whichever runs the runtime, with all that models can do.",
)
@pytest.mark.skipif(not ENVIRONMENTS, reason=WHY_NONE)
@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.name)
def test_a_model_runs_under_another_python(runtime: moonpool.Runtime, path: Path) -> None:
    config: Config = {"parameters": {"EXECUTION_ENV_PATH": {"string_value": str(path)}}}

    with hosted(runtime, "victim", FILE, SIGNATURE | config):
        pid = ask(runtime)
        assert os.readlink(f"/proc/{pid}/exe") == os.path.realpath(f"{path}/bin/python")
        with pytest.raises(moonpool.ModelError, match="ValueError: on purpose"):
            ask(runtime, "execute:exception")
        assert np.int64(ask(runtime)) == pid


@pytest.mark.promise("Environments", "A model runs under any Python …")
@pytest.mark.skipif(not ENVIRONMENTS, reason=WHY_NONE)
@pytest.mark.parametrize("path", ENVIRONMENTS, ids=lambda path: path.name)
def test_all_kinds_of_requests_are_answered_under_another_python(path: Path) -> None:
    """Check batches, senders, streams, coroutines, requests between models, cancellations and errors."""
    with moonpool.Runtime() as runtime:
        load_all(runtime, {"parameters": {"EXECUTION_ENV_PATH": {"string_value": str(path)}}})
        pids = [row["pid"] for name in MODELS_BY_KIND for row in runtime.instances(name)]

        Soak(runtime).all(1000)

        settle(runtime)
        assert pids == [row["pid"] for name in MODELS_BY_KIND for row in runtime.instances(name)]
