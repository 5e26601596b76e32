"""Programs and models in odd surroundings: a folder that was deleted, streams that are closed, libraries that replace
threads.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import ECHO, MODELS, hosted, options, tensor

import moonpool

PATIENCE_S = 60.0
# Makes children of every kind that a runtime starts, after a folder was deleted or a stream closed.
PROGRAM = f"""
import os, pathlib, signal, sys
import numpy as np
import moonpool

config = {ECHO!r}

def serves(runtime, name):
    return runtime.infer(name, {{"X": np.ones(2, np.float32)}}, timeout_s=60.0)["OUT_X"].tolist() == [1.0, 1.0]

"""
X = np.zeros(1, np.float32)


def run(code: str, folder: Path, **streams: object) -> subprocess.CompletedProcess[str]:
    """Run a program with its paths to modules, in a folder."""
    ended: subprocess.CompletedProcess[str] = subprocess.run(
        [sys.executable, "-c", PROGRAM + code, str(MODELS / "echo.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=folder,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        **streams,  # type: ignore[call-overload]
    )
    return ended


@pytest.mark.promise(
    "Lifecycle", "Models load and instances start again after the working folder of the runtime was deleted."
)
@pytest.mark.parametrize("prefork", ["no", "blank"])
def test_a_runtime_outlives_its_working_folder(tmp_path: Path, prefork: str) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    code = f"""
config |= {options(PREFORK=prefork, RESTART_WINDOW_S=0.001)!r}
with moonpool.Runtime() as runtime:
    runtime.load("one", sys.argv[1], config=config)
    os.rmdir({str(folder)!r})
    runtime.load("two", sys.argv[1], config=config)
    first = runtime.instances("one")[0]["pid"]
    os.kill(first, signal.SIGKILL)
    for _ in range(1000):
        try:
            assert serves(runtime, "one")
            break
        except moonpool.MoonpoolError:
            pass
    assert runtime.instances("one")[0]["pid"] != first
    print("SERVES", serves(runtime, "one"), serves(runtime, "two"))
"""
    ended = run(code, folder, capture_output=True)

    assert ended.stdout.splitlines()[-1:] == ["SERVES True True"], ended.stderr


@pytest.mark.promise("Lifecycle", "A program whose standard streams are closed can host models.")
def test_a_program_without_standard_streams_hosts_models(tmp_path: Path) -> None:
    """Sockets would get the numbers 0 to 2 otherwise, and a stub's output would take the place of a channel."""
    code = """
for fd in range(3):
    os.close(fd)
with moonpool.Runtime() as runtime:
    runtime.load("one", sys.argv[1], config=config)
    nowhere = {os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)}
    pathlib.Path("said").write_text(f"{serves(runtime, 'one')} {nowhere}")
"""
    ended = run(code, tmp_path)

    assert ended.returncode == 0
    assert (tmp_path / "said").read_text() == "True {'/dev/null'}"


PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
    "uvloop": "import uvloop; uvloop.install()",
    "nest_asyncio2": "import nest_asyncio2; nest_asyncio2.apply()",
}


def patch_of(library: str) -> str:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    return PATCHES[library]


PATCHED = """
{patch}
import threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily("patched_total", "asked", pb_utils.MetricFamily.COUNTER)
        self.asked = self.family.Metric(labels={{}})

    def is_ready(self):
        return True

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", self.count(r))]) for r in requests]

    def count(self, request):
        number = request.inputs()[0].as_numpy()
        self.asked.increment(1)
        if number[0] == 0:
            time.sleep(0.001)
            return number
        found = []
        less = pb_utils.Tensor("X", number - 1)

        def ask():
            request = pb_utils.InferenceRequest(model_name="patched", requested_output_names=["Y"], inputs=[less])
            found.append(pb_utils.get_output_tensor_by_name(request.exec(), "Y").as_numpy())

        threads = [threading.Thread(target=ask) for _ in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return found[0] + found[1] + 1
"""


@pytest.mark.promise(
    "Models",
    "A model that patches the interpreter at its top, as with gevent or eventlet, loads, serves, asks other models "
    "from its threads, and keeps metrics.",
)
@pytest.mark.needs("names of metrics")
@pytest.mark.parametrize("prefork", ["no", "imports"])
@pytest.mark.parametrize("library", PATCHES)
def test_a_model_may_patch_its_interpreter(tmp_path: Path, library: str, prefork: str) -> None:
    file = tmp_path / "model.py"
    file.write_text(PATCHED.format(patch=patch_of(library)))
    config = {"input": [tensor("X", "FP32", -1)], "output": [tensor("Y", "FP32", -1)]}
    with moonpool.Runtime() as runtime:
        config |= options(PREFORK=prefork)
        with hosted(runtime, "patched", file, config, instances=3):
            answer = runtime.infer("patched", {"X": X + 1}, timeout_s=PATIENCE_S)

            assert answer["Y"].tolist() == [1.0]
            assert runtime.is_ready("patched")
            assert "patched_total 3" in runtime.metrics()


@pytest.mark.promise(
    "Models",
    "In a program that gevent or eventlet has patched, a Runtime says at once what was replaced, and where to host the "
    "models.",
)
@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_a_patched_program_is_told_where_to_host_its_models(library: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", f"{patch_of(library)}\nimport moonpool\nmoonpool.Runtime()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )

    last = ended.stderr.splitlines()[-1]
    assert f"{library} has replaced _thread.start_new_thread" in last
    assert "moonpool serve" in last


def test_a_library_that_only_was_imported_is_no_reason() -> None:
    patch_of("gevent")
    code = "import gevent, moonpool; moonpool.Runtime().close(); print('fine')"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )

    assert ended.stdout == "fine\n", ended.stderr
