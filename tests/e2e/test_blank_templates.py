"""Tests of stubs that are forked from a process which has imported numpy and nothing of a model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.figures import children_of, command
from tests.e2e.hosting import Config, hosted, is_running, options, tensor
from tests.waiting import wait_until

import moonpool
from moonpool.ipc import syscalls
from moonpool.runtime.process import blank_templates
from moonpool.runtime.process.spawner import where_processes_start

MODEL = """
import ctypes, gc, json, os, signal, sys, threading
import numpy as np
import triton_python_backend_utils as pb_utils


def robust_list():
    # Where the C library lists the locks that others get when this process dies: an offset from a lock, and the size.
    head, size = ctypes.c_void_p(), ctypes.c_size_t()
    number = NUMBER
    assert ctypes.CDLL(None).syscall(number, 0, ctypes.byref(head), ctypes.byref(size)) == 0
    return [head.value is not None, size.value]


class TritonPythonModel:
    def execute(self, requests):
        do = pb_utils.get_input_tensor_by_name(requests[0], "DO").as_numpy()[0].decode()
        if do == "exit":
            os._exit(3)
        said = {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "session": os.getsid(0),
            "group": os.getpgid(0),
            "folder": os.getcwd(),
            "variable": os.environ.get("MADE_UP"),
            "test": os.environ.get("PYTEST_CURRENT_TEST"),
            "number": int(np.random.default_rng(None).integers(1 << 62)),
            "global number": float(np.random.random()),
            "program": open("/proc/self/cmdline").read().split("\\0")[:4],
            "blas": float((np.ones((300, 300)) @ np.ones((300, 300))).sum()),
            "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "thread": threading.main_thread().native_id - os.getpid(),
            "processors": sorted(os.sched_getaffinity(0)),
            "nice": os.nice(0),
            "collects": gc.isenabled(),
            "robust": robust_list(),
            "files": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)),
        }
        answer = np.array([json.dumps(said)], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SAID", answer)])]
"""
SIGNATURE: Config = {"input": [tensor("DO", "STRING", 1)], "output": [tensor("SAID", "STRING", 1)]}
FORGIVING: dict[str, object] = {"RESTART_WINDOW_S": 0.001, "RESTART_BACKOFF_S": 0}
TEMPLATE = b"moonpool_blank_template"


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets for how long a template without forks is kept: not at all in other tests."""
    return partial(monkeypatch.setattr, blank_templates, "KEEP_S")


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let numpy start threads, which must end before a fork, and begin again in it."""
    # More than anybody who runs the suite sets, so that these tests have templates of their own.
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    number = syscalls.numbers(syscalls.this_machine())["get_robust_list"]
    path.write_text(MODEL.replace("NUMBER", str(number)))
    return path


def config(**more: object) -> Config:
    return SIGNATURE | options(**{"SANDBOX": "standard", **more})


def ask(runtime: moonpool.Runtime, name: str = "m", do: str = "") -> dict[str, Any]:
    said: dict[str, Any] = json.loads(runtime.infer(name, {"DO": [do]}, timeout_s=60.0)["SAID"][0])
    return said


# Templates of runtimes that other tests keep.
_OTHERS: set[int] = set()


@pytest.fixture(scope="module", autouse=True)
def _note_others() -> None:
    _OTHERS.update(templates())


def templates() -> list[int]:
    return [pid for pid in children_of(os.getpid()) if TEMPLATE in command(pid) and pid not in _OTHERS]


@pytest.mark.promise(
    "Forked instances",
    "At `off` and `standard`, a stub is forked from a process that has imported numpy and nothing of a model, unless "
    "`MOONPOOL_PREFORK` is `no`. The fork is a child of the runtime, as a stub that was started.",
)
@pytest.mark.parametrize("level", ["off", "standard"])
def test_a_fork_is_what_a_started_stub_is(runtime: moonpool.Runtime, file: Path, level: str) -> None:
    with hosted(runtime, "m", file, config(SANDBOX=level), instances=2):
        (template,) = templates()
        forked = ask(runtime)
    with hosted(runtime, "m", file, config(SANDBOX=level, PREFORK="no")):
        # That of the fork may be about to end.
        wait_until(lambda: not templates())
        started = ask(runtime)

    pid = forked["pid"]
    assert template not in (pid, forked["parent"])
    assert (forked["session"], forked["group"]) == (pid, pid)
    assert forked["program"][1].endswith("boot.py")
    assert forked["program"][2] == "triton_python_backend_stub"
    assert forked["program"][3] in ("m_0_0", "m_0_1")
    same = ("parent", "folder", "blas", "blocked", "thread", "processors", "nice", "collects", "robust")
    assert {key: forked[key] for key in same} == {key: started[key] for key in same}
    assert forked["parent"] == os.getpid()
    assert forked["robust"][0]
    # One pipe for the output.
    assert len(set(forked["files"])) == len(set(started["files"])) == 2


@pytest.mark.promise("Forked instances", "At `off` and `standard`, a stub is forked …")
@pytest.mark.parametrize(
    "more",
    [
        {"SANDBOX": "strict"},
        {"SANDBOX": "best-effort"},
        {"PREFORK": "no"},
        {"CPUS": min(os.sched_getaffinity(0))},
        {"MEMORY_LIMIT_BYTES": "8G"},
    ],
)
def test_others_are_started(runtime: moonpool.Runtime, file: Path, more: dict[str, object]) -> None:
    with hosted(runtime, "m", file, config(**more)):
        assert not templates()


@pytest.mark.promise(
    "Forked instances", "The end of a template costs the next start the time of another one, and nothing else."
)
def test_the_end_of_a_template_costs_nothing_but_a_start(runtime: moonpool.Runtime, file: Path) -> None:
    with hosted(runtime, "m", file, config()):
        (template,) = templates()
        before = ask(runtime)["pid"]
        os.kill(template, signal.SIGKILL)
        wait_until(lambda: not is_running(template))
        assert ask(runtime)["pid"] == before

        with hosted(runtime, "n", file, config()):
            (another,) = templates()
            assert another != template
            assert ask(runtime, "n")["parent"] == os.getpid()
        assert ask(runtime)["pid"] == before


def test_a_template_that_stands_still_is_replaced(
    runtime: moonpool.Runtime, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blank_templates, "_FORK_S", 0.2)
    with hosted(runtime, "m", file, config()):
        (template,) = templates()
        os.kill(template, signal.SIGSTOP)
        # Whatever comes of the machine's speed, the model loads.
        with hosted(runtime, "n", file, config()):
            assert ask(runtime, "n")["parent"] == os.getpid()
            assert template not in templates()


@pytest.mark.promise("Forked instances", "At `off` and `standard`, a stub is forked …")
def test_a_fork_that_dies_is_forked_again_and_its_end_is_known(
    runtime: moonpool.Runtime, file: Path, caplog: pytest.LogCaptureFixture, keep: Callable[[float], None]
) -> None:
    keep(1000.0)
    with hosted(runtime, "m", file, config(**FORGIVING)):
        (template,) = templates()
        before = ask(runtime)["pid"]
        with pytest.raises(moonpool.StubDied, match="exited with 3"):
            ask(runtime, do="exit")
        after = wait_until(lambda: _pid_of_another(runtime, before))
        os.kill(after, signal.SIGKILL)
        wait_until(lambda: _pid_of_another(runtime, after))
        assert templates() == [template]
        assert "killed by SIGKILL" in caplog.text
        keep(0.0)


def _pid_of_another(runtime: moonpool.Runtime, pid: int) -> int:
    (instance,) = runtime.instances("m")
    other = int(instance["pid"] or 0)
    return other if instance["state"] == "READY" and other != pid else 0


@pytest.mark.promise(
    "Forked instances", "A fork has the variables, the folder and the limits that a stub would be started with."
)
def test_a_fork_has_the_variables_and_the_folder_of_its_start(
    runtime: moonpool.Runtime, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosted(runtime, "m", file, config()):
        monkeypatch.setenv("MADE_UP", "one")
        monkeypatch.chdir(tmp_path)
        with hosted(runtime, "n", file, config()):
            assert len(templates()) == 2
            assert ask(runtime)["variable"] is None
            said = ask(runtime, "n")
            assert (said["variable"], said["folder"]) == ("one", str(tmp_path))


@pytest.mark.promise(
    "Forked instances",
    "`PYTEST_CURRENT_TEST`, which changes with every test, costs no template: a fork has it as it is then.",
)
def test_tests_of_pytest_have_one_template(
    runtime: moonpool.Runtime, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosted(runtime, "m", file, config()):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", "the next")
        with hosted(runtime, "n", file, config()):
            assert ask(runtime, "n")["test"] == "the next"
        monkeypatch.delenv("PYTEST_CURRENT_TEST")
        with hosted(runtime, "n", file, config()):
            assert ask(runtime, "n")["test"] is None
            assert len(templates()) == 1


@pytest.mark.promise("Forked instances", "All runtimes of a process share its templates.")
def test_runtimes_share_templates_until_the_last_has_no_fork(file: Path, keep: Callable[[float], None]) -> None:
    keep(1000.0)
    with moonpool.Runtime() as one:
        one.load("m", file, config=config())
        (template,) = templates()
        with moonpool.Runtime() as other:
            other.load("m", file, config=config())
            assert templates() == [template]
            one.close()
            assert ask(other)["parent"] == os.getpid()
            other.load("n", file, config=config())
            assert templates() == [template]
            keep(0.0)
        # The runtime of the whole run is open still, and ends what nobody uses.
    wait_until(lambda: not is_running(template))


def test_what_the_closed_runtime_was_to_end_another_one_ends(file: Path, keep: Callable[[float], None]) -> None:
    keep(1000.0)
    with moonpool.Runtime() as one:
        one.load("m", file, config=config())
        (template,) = templates()
        one.unload("m")
        assert is_running(template)
        keep(0.0)
    wait_until(lambda: not is_running(template))


def test_the_last_runtime_ends_the_templates(file: Path) -> None:
    program = (
        "import moonpool, os\n"
        "from tests.chaos.figures import children_of\n"
        "one, other = moonpool.Runtime(), moonpool.Runtime()\n"
        "for each in (one, other):\n"
        f"    each.load('m', {str(file)!r}, config={config()!r})\n"
        "counts = [len(children_of(os.getpid()))]\n"
        "for each in (one, other):\n"
        "    each.close()\n"
        "    counts.append(len(children_of(os.getpid())))\n"
        "print(counts)\n"
    )
    paths = Path(moonpool.__file__).parents[1], Path(__file__).parents[2]
    printed = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    ).stdout
    assert json.loads(printed) == [3, 2, 0]


def test_a_fork_has_the_processors_of_its_start(runtime: moonpool.Runtime, file: Path) -> None:
    with hosted(runtime, "m", file, config()):
        before = where_processes_start(lambda: os.sched_getaffinity(0))
        where_processes_start(lambda: os.sched_setaffinity(0, {min(before)}))
        try:
            with hosted(runtime, "n", file, config()):
                assert ask(runtime, "n")["processors"] == [min(before)]
        finally:
            where_processes_start(lambda: os.sched_setaffinity(0, before))
        assert ask(runtime)["processors"] == sorted(before)


def test_a_fork_outlives_the_thread_that_loaded_its_model(runtime: moonpool.Runtime, file: Path) -> None:
    load = threading.Thread(target=lambda: runtime.load("m", file, config=config()))
    load.start()
    load.join()
    try:
        assert ask(runtime)["pid"] == ask(runtime)["pid"]
        assert [each["restarts"] for each in runtime.instances("m")] == [0]
    finally:
        runtime.unload("m")


def test_forks_draw_different_random_numbers(runtime: moonpool.Runtime, file: Path) -> None:
    with hosted(runtime, "m", file, config()), hosted(runtime, "n", file, config()):
        one, other = ask(runtime, "m"), ask(runtime, "n")
        assert len(templates()) == 1
        assert one["number"] != other["number"]
        assert one["global number"] != other["global number"]


@pytest.mark.promise("Forked instances", "A template is ended when the last of its forks has been gone for a minute.")
def test_a_template_without_forks_is_ended(
    runtime: moonpool.Runtime, file: Path, keep: Callable[[float], None]
) -> None:
    keep(1000.0)
    with hosted(runtime, "m", file, config()):
        (template,) = templates()
    assert templates() == [template]
    keep(0.0)
    with hosted(runtime, "m", file, config()):
        assert templates() == [template]
    wait_until(lambda: not is_running(template))


def test_a_template_and_its_forks_end_with_the_runtime(file: Path) -> None:
    program = (
        "import os, sys, moonpool\n"
        "from tests.chaos.figures import children_of\n"
        "runtime = moonpool.Runtime()\n"
        f"runtime.load('m', {str(file)!r}, config={config()!r})\n"
        "print(*children_of(os.getpid()), flush=True)\n"
        "sys.stdin.read()\n"
    )
    paths = Path(moonpool.__file__).parents[1], Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        # Not because they see the end of their channels: the kernel ends them.
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        process.kill()
    wait_until(lambda: not any(is_running(pid) for pid in pids))
