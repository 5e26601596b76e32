"""Processes that a contained model starts and leaves: they end with it, however it ends, and are limited with it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests import lesser_kernel
from tests.e2e.hosting import Config, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.server.running import running
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.isolation import users
from moonpool.stub.sandbox.granted import closed_above

GONE_S = 60.0
MIB = 1 << 20
# At its import and at every request the model leaves a process behind that has lost its parent and its session. The
# name of the process tells which one it is.
MODEL = """
import contextlib, ctypes, os, sys, time
import triton_python_backend_utils as pb_utils

LIBC = ctypes.CDLL(None)


def leave(mebibytes=1):
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    with contextlib.suppress(OSError):
        os.setsid()
    # Inherited, so that the process has it before anybody looks.
    LIBC.prctl(15, {name!r}.encode(), 0, 0, 0)
    if os.fork() == 0:
        kept = os.urandom(1 << 20) * mebibytes
        time.sleep(600)
    os._exit(0)


# What a fork of a template puts on.
sys.modules["moonpool.stub.sandbox.layers"].tighten = lambda policy: None
with contextlib.suppress(PermissionError):  # the process that completes the configuration may not
    leave()


class TritonPythonModel:
    def initialize(self, args):
        leave()

    def execute(self, requests):
        for request in requests:
            for mebibytes in request.inputs()[0].as_numpy():
                leave(int(mebibytes))
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
SIGNATURE: Config = {"input": [tensor("MEBIBYTES", "INT32", -1)], "output": [tensor("Y", "INT32", 1)]}
WAYS = {
    "processes that were granted": {"SANDBOX_SYSCALLS": "fork"},
    "a template": {"PREFORK": "imports"},
    "a template that is initialized": {"PREFORK": "initialize"},
}
PATIENT = {"RESTART_WINDOW_S": 0.001}


@pytest.fixture
def name() -> str:
    """The name under which the kernel shows the processes that are left."""
    return "left-" + os.urandom(4).hex()


@pytest.fixture
def folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / "repository" / "leaving" / "1").mkdir(parents=True)
    (tmp_path / "repository" / "leaving" / "1" / "model.py").write_text(MODEL.replace("{name!r}", repr(name)))
    return tmp_path / "repository" / "leaving"


def left(name: str) -> list[int]:
    """The processes of this name that live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                lines = (entry / "status").read_text().splitlines()
                if lines[0] == f"Name:\t{name}" and "State:\tZ (zombie)" not in lines:
                    found.append(int(entry.name))
    return found


def bytes_of(pids: list[int]) -> int:
    """The memory that these processes have, what they share divided among those that share it."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += sum(map(int, re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE))) * 1024
    return total


def load(runtime: moonpool.Runtime, folder: Path, level: str = "strict", **settings: object) -> None:
    config = SIGNATURE | options(**{"SANDBOX": level, **PATIENT, **settings})
    runtime.load("leaving", folder, config=config)


def leave(runtime: moonpool.Runtime, *mebibytes: int) -> None:
    runtime.infer("leaving", {"MEBIBYTES": np.array(mebibytes, np.int32)}, timeout_s=60.0)


def pid_of(runtime: moonpool.Runtime) -> int:
    return int(str(runtime.instances("leaving")[0]["pid"] or 0))


@pytest.mark.promise(
    "The sandbox: `strict`",
    "If it may start processes, by `fork` or from a template, they end with the instance, with "
    "the model and with a killed runtime. Their memory and their number are limited together. If "
    "nothing on the machine would end them, the model does not load.",
)
@pytest.mark.promise(
    "Layers of the sandbox",
    "Processes that a contained model started, also in a session of their own and at import, "
    "end with it, with its template and with a runtime that is killed: by a PID namespace, else "
    "by a user that only they have. If there is neither, nor a cgroup, the model does not load.",
)
@pytest.mark.parametrize("way", WAYS)
def test_processes_that_a_model_left_end_when_it_is_unloaded(
    runtime: moonpool.Runtime, folder: Path, name: str, way: str
) -> None:
    load(runtime, folder, **WAYS[way])
    leave(runtime, 1, 1)
    assert len(left(name)) >= 2

    runtime.unload("leaving")

    wait_until(lambda: not left(name), GONE_S, "their end")


@pytest.mark.promise("The sandbox: `strict`", "If it may …")
@pytest.mark.promise("Layers of the sandbox", "Processes that a contained model started, …")
@pytest.mark.parametrize("way", WAYS)
def test_processes_that_an_instance_left_end_with_it(
    runtime: moonpool.Runtime, folder: Path, name: str, way: str
) -> None:
    load(runtime, folder, **WAYS[way])
    try:
        leave(runtime, 1, 1)
        before, pid = set(left(name)), pid_of(runtime)
        os.kill(pid, signal.SIGKILL)

        wait_until(lambda: pid_of(runtime) not in (0, pid), GONE_S, "another instance")
        wait_until(lambda: not before & set(left(name)), GONE_S, "their end")
    finally:
        runtime.unload("leaving")


@pytest.mark.promise("The sandbox: `strict`", "If it may …")
@pytest.mark.promise("Layers of the sandbox", "Processes that a contained model started, …")
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_of_a_server_that_was_killed(folder: Path, name: str, way: str) -> None:
    lines = "".join(
        f'parameters {{ key: "MOONPOOL_{key}" value: {{ string_value: "{text}" }} }}\n'
        for key, text in WAYS[way].items()
    )
    (folder / "config.pbtxt").write_text(
        'backend: "python"\ninput [{ name: "MEBIBYTES" data_type: TYPE_INT32 dims: [-1] }]\n'
        'output [{ name: "Y" data_type: TYPE_INT32 dims: [1] }]\ninstance_group [{ kind: KIND_CPU }]\n' + lines
    )
    with running(folder.parent, "--sandbox=strict", "--sandbox-grants=leaving") as server:
        assert left(name)
        server.tell(signal.SIGKILL)
        server.wait()

    wait_until(lambda: not left(name), GONE_S, "their end")


@pytest.mark.promise("The sandbox: `strict`", "If it may …")
@pytest.mark.promise("Layers of the sandbox", "The memory of a contained model's processes is limited together.")
@pytest.mark.parametrize("way", WAYS)
def test_memory_is_limited_over_all_of_them(
    runtime: moonpool.Runtime, folder: Path, name: str, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    load(runtime, folder, MEMORY_LIMIT_BYTES=400 * MIB, **WAYS[way])
    try:
        # Each process alone stays below the limit.
        with contextlib.suppress(moonpool.MoonpoolError):
            leave(runtime, *[100] * 12)

        wait_until(lambda: "(MOONPOOL_MEMORY_LIMIT_BYTES)" in caplog.text, GONE_S, "the reason")
        # A template and its instance may have twice the limit together. Processes that met it first may have ended.
        wait_until(lambda: bytes_of(left(name)) <= 2 * 400 * MIB, GONE_S, "less memory")
    finally:
        runtime.unload("leaving")


# This program runs a model without namespaces.
ELSEWHERE = """
import os, sys
from pathlib import Path
import moonpool
from tests.hostile import test_outliving as here
with moonpool.Runtime() as runtime:
    try:
        here.load(runtime, Path(sys.argv[1]), sys.argv[3], SANDBOX_SYSCALLS="fork")
    except moonpool.LoadFailed as error:
        print("refused", error)
    else:
        here.leave(runtime, 1)
        if sys.argv[4:]:
            print("left", len(here.left(sys.argv[2])), flush=True)
            os.kill(os.getpid(), 9)
        print("left", len(here.left(sys.argv[2])))
        runtime.unload("leaving")
        print("left", len(here.left(sys.argv[2])))
"""


@pytest.mark.promise("The sandbox: `strict`", "If it may …")
@pytest.mark.promise("Layers of the sandbox", "Processes that a contained model started, …")
@pytest.mark.parametrize("level", ["strict", "best-effort"])
def test_without_namespaces_they_end_by_their_user_or_there_are_none(
    folder: Path, name: str, level: str, is_root: bool
) -> None:
    program = lesser_kernel.command([sys.executable, "-c", ELSEWHERE, str(folder), name, level], unshare=1)
    paths = [str(Path(__file__).parents[2]), *sys.path]

    ended = subprocess.run(
        program,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )

    said = ended.stdout.splitlines()
    if is_root and closed_above(os.path.realpath(sys.base_prefix), users.LAST):
        assert "which this instance is, cannot read" in said[0]
    elif is_root:
        assert [line.split()[0] for line in said] == ["left", "left"], ended.stderr
        assert int(said[0].split()[1]) >= 3
        assert said[1] == "left 0"
    else:
        assert "nothing here would end them with it" in said[0], ended.stderr
    assert not left(name)


def test_without_a_sandbox_they_stay(runtime: moonpool.Runtime, folder: Path, name: str) -> None:
    load(runtime, folder, "off")
    runtime.unload("leaving")

    stayed = left(name)
    wait_until(lambda: all(map(kill, left(name))) and not left(name), GONE_S, "their end")
    assert len(stayed) >= 2


def kill(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True
