"""Models that end badly, never, or too often: who else notices, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.hosting import is_running
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.attacker import answers, load_attacker
from tests.hostile.conftest import Attackers
from tests.leaks import shm_names
from tests.waiting import wait_until

import moonpool

LEVELS = ["standard", "strict"]

pytestmark = pytest.mark.parametrize("level", LEVELS)

CRASHES = {
    "exit": "exited with 7",
    "SIGSEGV": "was killed by SIGSEGV",
    "abort": "was killed by SIGABRT",
    "SIGKILL": "was killed by SIGKILL",
}


@pytest.mark.promise(
    "The sandbox: `standard`",
    "A crash, an exit, an abort or a stack overflow ends the model's process and no other. Its "
    "requests fail with the reason, and it is restarted.",
)
@pytest.mark.parametrize("how", CRASHES)
def test_a_crash_is_the_model_s_own(attackers: Attackers, level: str, how: str) -> None:
    attacker = attackers(level)
    pid = attacker.pid

    outcome = attacker.tries("self.crash", how=how)

    assert CRASHES[how] in str(outcome.died)
    assert attacker.finds("kernel.make", name="getpid") == attacker.pid != pid
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.promise("The sandbox: `standard`", "A model gains …")
def test_a_crash_leaves_no_core_file(attackers: Attackers, level: str) -> None:
    attacker = attackers(level)
    assert attacker.finds("self.limit", name="RLIMIT_CORE") == [0, 0]

    attacker.tries("self.core")

    assert not list(Path.cwd().glob("core*"))


@pytest.mark.promise(
    "The sandbox: `standard`",
    "A model that never answers, because it waits, spins or was stopped, is ended at its deadline.",
)
@pytest.mark.parametrize("how", ["stop", "spin", "wait"])
def test_a_model_that_never_answers_is_ended_at_its_deadline(
    runtime: moonpool.Runtime, model_folder: Path, level: str, how: str
) -> None:
    attacker = load_attacker(runtime, level, model_folder, "hanging", EXECUTE_TIMEOUT_S=1)
    try:
        outcome = attacker.tries("self.hang", how=how)
        assert "took longer than 1 s to execute" in str(outcome.died)
        assert answers(runtime)
        # On a busy machine the first answer of a process may take longer than a second, too.
        found = wait_until(lambda: attacker.tries("kernel.make", name="getpid").done)
        assert found == attacker.pid
    finally:
        runtime.unload("hanging")


@pytest.mark.promise(
    "The sandbox: `standard`", "A model that always dies is given up. Deaths leave no process and no descriptor behind."
)
def test_a_model_that_always_dies_is_given_up(runtime: moonpool.Runtime, model_folder: Path, level: str) -> None:
    settings = {"RESTART_WINDOW_S": 60, "MAX_RESTARTS": 2, "RESTART_BACKOFF_S": 0}
    attacker = load_attacker(runtime, level, model_folder, "dying", **settings)
    try:
        for _ in range(3):
            assert attacker.tries("self.crash", how="exit").word == "died"
        with pytest.raises(moonpool.ModelUnavailable):
            wait_until(lambda: attacker.tries("self.crash", how="exit").word != "died")
    finally:
        runtime.unload("dying")


@pytest.mark.promise("The sandbox: `standard`", "A model that always …")
def test_many_ends_leave_no_descriptor_and_no_process(attackers: Attackers, level: str) -> None:
    attacker = attackers(level)
    attacker.finds("kernel.make", name="getpid")
    before = len(os.listdir("/proc/self/fd"))
    pids = []

    for _ in range(5):
        pids.append(attacker.finds("kernel.make", name="getpid"))
        assert attacker.tries("self.crash", how="SIGKILL").word == "died"
    attacker.finds("kernel.make", name="getpid")

    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


PROGRAM = """
import sys, threading
from pathlib import Path
import moonpool
from tests.hostile.attacker import load_attacker
runtime = moonpool.Runtime()
attacker = load_attacker(runtime, sys.argv[1], Path(sys.argv[2]))
attacker.tries("kernel.forget_the_parent")
attacker.finds("kernel.make", name="getpid")
print(attacker.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.promise(
    "The sandbox: `standard`", "No model outlives a runtime that was killed, even if it asked the kernel for that."
)
def test_a_model_does_not_outlive_a_runtime_that_was_killed(model_folder: Path, tmp_path: Path, level: str) -> None:
    paths = [str(Path(__file__).parents[2]), *sys.path]
    names = shm_names()
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, level, str(model_folder)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            # No process is left to remove the scratch folder, so the test's own folder holds it.
            "TMPDIR": str(tmp_path),
        },
        stdout=subprocess.PIPE,
    )
    try:
        assert program.stdout is not None
        pid = int(program.stdout.readline())
        program.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
        wait_until(lambda: not shm_names() - names)
    finally:
        program.kill()
        program.communicate()
