"""Tests of stubs after the program that has the runtime ended, in each way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.e2e.hosting import is_running
from tests.waiting import wait_until

import moonpool

MODEL = """
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        open(os.path.join(os.path.dirname(__file__), "executing"), "w").close()
        while not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
            pass
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT_X", r.inputs()[0].as_numpy())])
                for r in requests]

    def finalize(self):
        while os.path.exists(os.path.join(os.path.dirname(__file__), "stuck")):
            pass
        open(os.path.join(os.path.dirname(__file__), f"finalized {os.getpid()}"), "w").close()
"""

HEAD = """
import signal, sys, threading, time
import numpy as np
import moonpool

# It may be ignored if the tests run in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)
config = {
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUT_X", "data_type": "TYPE_FP32", "dims": [-1]}],
}
X = np.ones(2, np.float32)

def load(**options):
    runtime = moonpool.Runtime(**options)
    runtime.load("model", sys.argv[1], config=config, instances=2)
    return runtime

def loaded():
    runtime = load()
    tell(runtime)
    return runtime

def tell(runtime):
    print(*[instance["pid"] for instance in runtime.instances("model")], flush=True)

def wait_for_a_signal():
    # In pieces: Python does not see one that comes just before it begins to wait.
    while True:
        threading.Event().wait(0.1)
"""

# The signal comes once the stubs are told, and must not come before `with` has begun.
WAITS = "    tell(runtime)\n    wait_for_a_signal()\n"
# A call that would wait for a request for ever.
CALLS = """
runtime = load(drain_timeout_s=1e6)
request = runtime.submit('model', {{'X': X}})
tell(runtime)
{}
"""
BODIES = {
    "inside exit_on_sigterm": "with moonpool.exit_on_sigterm(), load() as runtime:\n" + WAITS,
    "inside with": "with load() as runtime:\n" + WAITS,
    "without close": "runtime = loaded()\n",
    "forgotten": "def forget():\n    loaded()\nforget()\n",
    "left in a function": "def leave():\n    runtime = loaded()\n    sys.exit(3)\nleave()\n",
    "by an exception": "runtime = loaded()\nraise ValueError('on purpose')\n",
    "by sys.exit in a thread's time": (
        "runtime = loaded()\nthreading.Thread(target=time.sleep, args=(0.05,)).start()\nsys.exit(4)\n"
    ),
    "while a request runs": (
        "with moonpool.exit_on_sigterm(), loaded() as runtime:\n"
        "    request = runtime.submit('model', {'X': X})\n"
        "    request.add_done_callback(lambda f: print('answered', f.result(), flush=True))\n"
        "    print('asked', flush=True)\n    wait_for_a_signal()\n"
    ),
    "in a request": ("with moonpool.exit_on_sigterm(), loaded() as runtime:\n    runtime.infer('model', {'X': X})\n"),
    "in a finalize": "with load() as runtime:\n" + WAITS,
    "in a close": CALLS.format("runtime.close()"),
    "in an unload": CALLS.format("runtime.unload('model')"),
    "in a later close": CALLS.format("threading.Thread(target=runtime.close).start(); runtime.close()"),
}


class Program:
    """Another program, which has a runtime with two instances."""

    def __init__(self, folder: Path, body: str) -> None:
        self.folder = folder
        (folder / "model.py").write_text(MODEL)
        (folder / "program.py").write_text(HEAD + body)
        paths = [str(Path(moonpool.__path__[0]).parent), *sys.path]
        with (folder / "errors").open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", str(folder / "program.py"), folder / "model.py"],
                env={**os.environ, "PYTHONPATH": ":".join(paths)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.stubs = [int(pid) for pid in self.line().split()]

    def line(self) -> str:
        """Return the next line that the program prints itself, without its models' lines."""
        if self.process.stdout is None:
            raise ValueError("the program has no output")
        while (line := self.process.stdout.readline()).startswith("[model_"):
            pass
        return line

    def finalized(self) -> list[int]:
        """Return the stubs whose models were finalized."""
        return sorted(int(path.name.split()[1]) for path in self.folder.glob("finalized *"))

    def errors(self) -> str:
        return (self.folder / "errors").read_text()

    def is_alone(self) -> bool:
        """Return True if all stubs are gone."""
        return not any(is_running(pid) for pid in self.stubs)

    def end(self) -> int:
        """Wait for the program's exit status."""
        return self.process.wait(60.0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Program]]:
    programs = []

    def start(body: str) -> Program:
        programs.append(Program(tmp_path, BODIES[body]))
        return programs[-1]

    yield start
    for program in programs:
        program.process.kill()
        program.process.communicate()


@pytest.mark.promise(
    "Lifecycle",
    "No stub outlives a program that was killed. A program that gets a signal to end finalizes its models first.",
)
def test_no_stub_outlives_a_program_that_was_killed(start: Callable[[str], Program]) -> None:
    program = start("inside with")

    program.process.send_signal(signal.SIGKILL)

    assert program.end() == -signal.SIGKILL
    assert len(program.stubs) == 2
    wait_until(program.is_alone)
    assert program.finalized() == []


@pytest.mark.promise("Lifecycle", "No stub outlives a program …")
@pytest.mark.parametrize(
    ("body", "number", "status"),
    [
        ("inside exit_on_sigterm", signal.SIGTERM, 128 + signal.SIGTERM),
        ("inside exit_on_sigterm", signal.SIGINT, -signal.SIGINT),
        ("inside with", signal.SIGINT, -signal.SIGINT),
    ],
)
def test_a_program_that_is_told_to_end_finalizes_its_models(
    start: Callable[[str], Program], body: str, number: int, status: int
) -> None:
    program = start(body)

    program.process.send_signal(number)

    assert program.end() == status, program.errors()
    assert program.finalized() == sorted(program.stubs)
    assert program.is_alone()


@pytest.mark.promise("Lifecycle", "No stub outlives a program …")
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("without close", 0),
        ("forgotten", 0),
        ("left in a function", 3),
        ("by an exception", 1),
        ("by sys.exit in a thread's time", 4),
    ],
)
def test_a_program_that_closes_nothing_finalizes_its_models(
    start: Callable[[str], Program], body: str, status: int
) -> None:
    program = start(body)

    assert program.end() == status, program.errors()
    assert program.finalized() == sorted(program.stubs)
    assert program.is_alone()
    assert program.errors() == "" or status == 1


@pytest.mark.parametrize("body", ["while a request runs", "in a request"])
def test_a_request_that_runs_when_the_program_is_told_to_end_is_finished(
    start: Callable[[str], Program], tmp_path: Path, body: str
) -> None:
    program = start(body)
    if body == "while a request runs":
        assert program.line() == "asked\n"
    wait_until((tmp_path / "executing").exists, 60.0, "an execute")

    program.process.send_signal(signal.SIGTERM)
    (tmp_path / "go").touch()

    assert program.end() == 128 + signal.SIGTERM, program.errors()
    assert program.finalized() == sorted(program.stubs)
    if body == "while a request runs":
        assert program.line().startswith("answered <Response OUT_X")


@pytest.mark.promise(
    "Lifecycle",
    "Closing a runtime, unloading a model and leaving `with` say after a second what they wait for, and Ctrl-C ends "
    "that at once: requests fail, processes end without `finalize`, and KeyboardInterrupt is raised.",
)
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("in a finalize", "finalizes (MOONPOOL_FINALIZE_TIMEOUT_S)"),
        ("in a close", "has 1 request to finish (drain_timeout_s)"),
        ("in an unload", "has 1 request to finish (drain_timeout_s)"),
        ("in a later close", "has 1 request to finish (drain_timeout_s)"),
    ],
)
def test_ctrl_c_ends_a_wait_at_the_end_whose_reason_is_told(
    start: Callable[[str], Program], tmp_path: Path, body: str, why: str
) -> None:
    (tmp_path / "stuck").touch()
    program = start(body)
    if body == "in a finalize":
        program.process.send_signal(signal.SIGINT)
    wait_until(lambda: f"takes its time: model:1 {why}" in program.errors(), 60.0, "a line")

    program.process.send_signal(signal.SIGINT)

    assert program.end() == -signal.SIGINT, program.errors()
    # A thread that ends with the program may have logged something later.
    assert "KeyboardInterrupt" in program.errors().splitlines()
    assert program.is_alone()
    assert program.finalized() == []
