"""Tests of the prints of models: in programs without a log, in programs with one, and below the cells of a notebook."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moonpool

pytestmark = pytest.mark.promise(
    "Containment",
    "If a program has a log for its models, the output of a model goes there. If it has none, "
    "the output goes to the program's standard output, never to both. A program whose output "
    "nobody reads is not held up.",
)

SOURCE = Path(moonpool.__path__[0]).parent
PATIENCE_S = 60.0
MODEL = """
import threading
import time

import numpy as np

print("imported")


def later(text):
    print("later: " + text)


class Model:
    def __call__(self, X: "Float32[1]") -> "Float32[1]":
        print(f"has {X[0]:.0f}")
        if X[0] > 100:
            threading.Timer(0.5, later, [f"{X[0]:.0f}"]).start()
        return X
"""
PROGRAM = """
import logging
import sys
import numpy as np
import moonpool

{setting}
print("begins")
with moonpool.Runtime() as runtime:
    runtime.load("m", "model.py")
    for number in range(3):
        runtime.infer("m", {{"X": np.full(1, number, np.float32)}})
print("ends")
"""
# The process that completes the configuration becomes the instance.
LINES = [f"[m_0] {each}" for each in ("imported", "has 0", "has 1", "has 2")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(f"from moonpool import Float32\n{MODEL}")
    return tmp_path


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def run(folder: Path, setting: str) -> tuple[list[str], str]:
    """Return the lines on the program's standard output, and the whole standard error."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setting=setting)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    return ended.stdout.splitlines(), ended.stderr


@pytest.mark.parametrize("setting", ["", "logging.basicConfig()"])
def test_without_a_log_that_takes_it_print_is_on_the_standard_output(folder: Path, setting: str) -> None:
    lines, errors = run(folder, setting)
    assert lines[0] == "begins"
    assert lines[-1] == "ends"
    assert lines[1:-1] == LINES
    assert "m_0" not in errors


@pytest.mark.parametrize(
    "setting",
    ["logging.basicConfig(level='INFO')", "logging.getLogger('moonpool').addHandler(logging.StreamHandler())"],
)
def test_with_a_log_print_is_there_and_nowhere_else(folder: Path, setting: str) -> None:
    if "addHandler" in setting:
        setting += "; logging.getLogger('moonpool').setLevel('INFO')"
    lines, errors = run(folder, setting)
    assert lines == ["begins", "ends"]
    assert [errors.count(f"{line}\n") for line in LINES] == [1] * len(LINES)


@pytest.mark.parametrize(
    "setting",
    [
        "logging.getLogger('moonpool').setLevel('WARNING')",
        "logging.getLogger('moonpool.stub').addHandler(logging.NullHandler())",
    ],
)
def test_the_log_s_level_hides_prints(folder: Path, setting: str) -> None:
    lines, errors = run(folder, setting)
    assert lines == ["begins", "ends"]
    assert "m_0" not in errors


def test_a_program_whose_output_nobody_reads_goes_on(folder: Path) -> None:
    """Check that the runtime serves while a model prints more than a pipe holds; the number of lost lines is printed at
    the end.
    """
    (folder / "model.py").write_text(
        "from moonpool import Float32\n"
        "class Model:\n"
        "    def __call__(self, X: 'Float32[1]') -> 'Float32[1]':\n"
        "        print(chr(10).join('x' * 80 for _ in range(1000)))\n"
        "        return X\n"
    )
    program = (
        "import sys, numpy as np, moonpool\n"
        "with moonpool.Runtime() as runtime:\n"
        "    runtime.load('m', 'model.py', config={'parameters': {'MOONPOOL_LOG_LINES_PER_S': "
        "{'string_value': '100000'}}})\n"
        "    for number in range(20):\n"
        "        runtime.infer('m', {'X': np.zeros(1, np.float32)}, timeout_s=60.0)\n"
        "    print('all answered', file=sys.stderr, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.readline() == "all answered\n"
        said = process.stdout.read()
        assert process.wait(PATIENCE_S) == 0
    assert "lines of models were dropped: this output is not being read" in said


# Notebooks


# Runs cells in a kernel of Jupyter's, as a notebook does, and answers with the text below each. Every step is some
# cells that are sent at once, and a text to wait for when the last of them has ended. It is a process of its own, as
# the client leaves an event loop behind.
_NOTEBOOK = """
import json, queue, sys, time
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)
said = []
try:
    for cells, awaited in json.load(sys.stdin):
        numbers = [client.execute(cell, stop_on_error=False) for cell in cells]
        texts, busy, end_s = dict.fromkeys(numbers, ""), set(numbers), time.monotonic() + 60
        while (busy or awaited not in "".join(texts.values())) and time.monotonic() < end_s:
            try:
                message = client.get_iopub_msg(timeout=0.1)
            except queue.Empty:
                continue
            number, content = message["parent_header"].get("msg_id"), message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                texts[number] = texts.get(number, "") + content["text"]
            elif message["msg_type"] == "error":
                texts[number] += "".join(content["traceback"])
            elif content.get("execution_state") == "idle":
                busy.discard(number)
        said.append([texts.pop(number) for number in numbers])
        assert not texts, texts
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
json.dump(said, sys.stdout)
"""
Step = tuple[list[str], str]
needs_a_kernel = pytest.mark.skipif(not importlib.util.find_spec("ipykernel"), reason="ipykernel is not installed")


def notebook(folder: Path, *steps: Step) -> list[list[str]]:
    ended = subprocess.run(
        [sys.executable, "-c", _NOTEBOOK],
        input=json.dumps(steps),
        cwd=folder,
        env={**environment(), "IPYTHONDIR": str(folder / "ipython")},
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * PATIENCE_S,
    )
    assert ended.returncode == 0, ended.stderr
    said: list[list[str]] = json.loads(ended.stdout)
    return said


BEGIN = """
import numpy as np, moonpool, sys, threading
runtime = moonpool.Runtime()
runtime.load("m", "model.py")
def ask(number):
    print("asks", number)
    runtime.infer("m", {"X": np.full(1, number, np.float32)})
"""
# A cell that runs until the model has printed something later.
SLOW = """
is_there, write = threading.Event(), sys.stdout.write
def notice(text):
    write(text)
    if "later: 102" in text:
        is_there.set()
sys.stdout.write = notice
ask(102)
is_there.wait(60)
print('after')
"""


@pytest.mark.promise(
    "Containment",
    "In a notebook, the output of a model stands below the cell that called it. Output that "
    "comes later stands below the cell that runs then.",
)
@needs_a_kernel
def test_prints_appear_below_the_cell_that_asked_the_model(folder: Path) -> None:
    """Check that this holds if the next cells run at once and have output of their own."""
    asks = [f"ask({number})" for number in range(10)]
    ((first, *texts),) = notebook(folder, ([BEGIN, *asks, "print('none')", "runtime.close()"], ""))
    assert first.splitlines() == LINES[:1]
    for number, text in enumerate(texts[:10]):
        assert sorted(text.splitlines()) == [f"[m_0] has {number}", f"asks {number}"]
    assert texts[10:] == ["none\n", ""]


@pytest.mark.promise("Containment", "In a notebook, the output …")
@needs_a_kernel
def test_later_prints_appear_below_the_cell_of_that_moment(folder: Path) -> None:
    _, late, slow, _ = notebook(
        folder, ([BEGIN], ""), (["ask(1)", "ask(101)"], "later: 101\n"), ([SLOW], ""), (["runtime.close()"], "")
    )
    # What is printed between two cells appears below the earlier one.
    assert late == ["asks 1\n[m_0] has 1\n", "asks 101\n[m_0] has 101\n[m_0] later: 101\n"]
    # What is printed during a cell appears in the order of time.
    assert slow == ["asks 102\n[m_0] has 102\n[m_0] later: 102\nafter\n"]


@needs_a_kernel
def test_a_class_of_a_cell_prints_below_the_cell_that_asks(folder: Path) -> None:
    model = (
        "import numpy as np, moonpool\nfrom moonpool import Float32\n"
        "class Model:\n"
        "    def __call__(self, X: Float32[1]) -> Float32[1]:\n"
        "        print('has', X)\n"
        "        return X\n"
    )
    ask = (
        "with moonpool.Runtime() as runtime:\n"
        "    runtime.load('m', Model)\n"
        "    _ = runtime.infer('m', {'X': np.ones(1, np.float32)})\n"
    )
    assert notebook(folder, ([model, ask, "1"], "")) == [["", "[m_0] has [1.]\n", ""]]
