"""Tests of signals that a parent of the runtime ignored or blocked: stubs and commands start with default
dispositions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hosting import Config, options, tensor

import moonpool

PATIENCE_S = 120.0
SOURCE = str(Path(next(iter(moonpool.__path__))).parent)
# These are ignored by a shell for a background job, by nohup, by a daemon, and by a program that waits for signals in a
# thread.
IGNORED = ("SIGINT", "SIGQUIT", "SIGHUP", "SIGCHLD", "SIGUSR1", "SIGALRM")
BLOCKED = ("SIGTERM", "SIGINT", "SIGUSR2", "SIGALRM")

MODEL = """
import json, os, signal
import numpy as np
import triton_python_backend_utils as pb_utils

def seen():
    return {
        "ignored": [n.name for n in signal.Signals if signal.getsignal(n) is signal.SIG_IGN],
        "blocked": [n.name for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    }

AT_IMPORT = seen()
CHILD = (
    "import json, signal; print(json.dumps([n.name for n in signal.Signals if signal.getsignal(n) is signal.SIG_IGN]))"
)

class TritonPythonModel:
    def execute(self, requests):
        told = {"at import": AT_IMPORT, "later": seen()}
        if os.environ.get("STARTS"):
            import subprocess, sys
            child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, check=True)
            told["child"] = json.loads(child.stdout)
        text = np.array([json.dumps(told)], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", text)]) for _ in requests]
"""
# The program sets its signals before it makes a runtime, as its parent would.
PROGRAM = """
import json, signal, sys
ignored, blocked, config = map(json.loads, sys.argv[2:])
for name in ignored:
    signal.signal(signal.Signals[name], signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.Signals[name] for name in blocked])
import numpy as np, moonpool
with moonpool.Runtime() as runtime:
    runtime.load("model", sys.argv[1], config=config)
    print(runtime.infer("model", {"X": np.zeros(1, np.float32)})["SEEN"][0].decode())
"""
SIGNATURE: Config = {"input": [tensor("X", "FP32", 1)], "output": [tensor("SEEN", "STRING", 1)]}


def seen_by_a_model(folder: Path, **values: object) -> Any:
    """Ask a model about its signals, in a program that was started with many of them ignored and blocked."""
    (folder / "model.py").write_text(MODEL)
    config = {**SIGNATURE, **options(ENVIRONMENT="STARTS", **values)}
    ended = subprocess.run(
        [*(sys.executable, "-c", PROGRAM, str(folder / "model.py")), *map(json.dumps, (IGNORED, BLOCKED, config))],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=False,
    )
    return json.loads(ended.stdout)


# Python itself ignores these two, and gives them back to the programs that it starts.
PYTHONS_OWN = {"ignored": ["SIGPIPE", "SIGXFSZ"], "blocked": []}


@pytest.mark.promise(
    "Lifecycle",
    "A stub, and each program that its model starts, begins with the default dispositions of "
    "all signals and with none blocked, whatever the runtime's parent ignored or blocked.",
)
@pytest.mark.slow
@pytest.mark.parametrize("level", ["off", "standard", "strict"])
@pytest.mark.parametrize("prefork", ["no", "blank", "initialize"])
def test_a_stub_starts_with_default_dispositions(tmp_path: Path, level: str, prefork: str) -> None:
    seen = seen_by_a_model(tmp_path, SANDBOX=level, PREFORK=prefork)

    assert seen == {"at import": PYTHONS_OWN, "later": PYTHONS_OWN}


@pytest.mark.promise("Lifecycle", "A stub, and each program …")
def test_programs_of_a_model_have_default_dispositions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARTS", "yes")

    assert seen_by_a_model(tmp_path, SANDBOX="off")["child"] == PYTHONS_OWN["ignored"]


# This program ignores the ends of its children, and becomes a command.
BECOMES = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "moonpool", *sys.argv[1:]])
"""


@pytest.mark.promise("The server (`moonpool serve`)", "Signals end a server whose parent …")
@pytest.mark.slow
def test_a_command_knows_how_its_stubs_end(tmp_path: Path) -> None:
    model = tmp_path / "dies" / "1" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text("import os\nos._exit(42)\n")

    command = [sys.executable, "-c", BECOMES, "infer", str(tmp_path), "dies"]
    ended = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert "42" in ended.stderr
    assert "reaped by somebody else" not in ended.stderr
