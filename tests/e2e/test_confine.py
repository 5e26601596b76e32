"""Tests of a model's own interpreter: it runs nothing before it is confined, and is an ordinary stub then."""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import ECHO, Config, hosted

import moonpool
from moonpool import LoadFailed
from moonpool.stub.sandbox import landlock

pytestmark = pytest.mark.promise(
    "Layers of the sandbox",
    "An interpreter of a model's environment runs nothing before it is confined, and stays confined.",
)

if landlock.abi() < landlock.KNOWS_TRUNCATE:
    pytest.skip("this kernel has no Landlock, or an old one", allow_module_level=True)

MODEL = """
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        print("variables", sorted(os.environ))
        for attempt in (os.fork, lambda: os.execv("/bin/true", ["true"]), lambda: open("/etc/passwd")):
            try:
                attempt()
            except PermissionError:
                print("denied")

    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(each, "X").as_numpy() for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT_X", each)]) for each in inputs]
"""


def environment(tmp_path: Path, program: str) -> Config:
    """Make a configuration for a strict model with an environment whose interpreter is this program."""
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(program)
    python.chmod(0o755)
    (tmp_path / "environment" / "lib").mkdir()
    values = {
        "EXECUTION_ENV_PATH": str(python.parent.parent),
        "MOONPOOL_SANDBOX": "strict",
        "MOONPOOL_SANDBOX_PATHS": f"{sys.prefix}, {sys.base_prefix}",
    }
    return ECHO | {"parameters": {name: {"string_value": value} for name, value in values.items()}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model" / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text(MODEL)
    for path in (tmp_path, file.parent.parent, file.parent):
        path.chmod(0o755)
    file.chmod(0o644)
    return file.parent.parent


def test_it_runs_inside_the_sandbox_from_its_first_instruction_on(
    runtime: moonpool.Runtime, tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    program = (
        "#!/bin/sh\n"
        "while read line; do echo stolen $line; done < /etc/passwd\n"
        f"kill -0 {os.getpid()} && echo stolen signal\n"
        "echo x > /tmp/outside && echo stolen file\n"
        "echo inside with LD_LIBRARY_PATH=$LD_LIBRARY_PATH and HOME=$HOME\n"
        f'exec {sys.executable} "$@"\n'
    )
    config = environment(tmp_path, program)

    with hosted(runtime, "foreign", model, config):
        x = np.arange(3, dtype=np.float32)
        answer = runtime.infer("foreign", {"X": x}, timeout_s=60.0)["OUT_X"]
        confinement = str(runtime.instances("foreign"))

    assert answer.tolist() == x.tolist()
    assert "landlock" in confinement
    assert "stolen" not in caplog.text
    assert re.search(r"cannot open /etc/passwd: Permission denied", caplog.text)
    lib = tmp_path / "environment" / "lib"
    assert f"inside with LD_LIBRARY_PATH={lib}" in caplog.text
    assert re.search(r"and HOME=\S*moonpool-scratch-", caplog.text)
    # Three lines of the script were denied, and it left no variable behind.
    assert caplog.text.count("] denied") == 3
    assert "MOONPOOL_HANDED_ON" not in caplog.text


def test_its_libraries_are_none_of_the_launcher_s(runtime: moonpool.Runtime, tmp_path: Path, model: Path) -> None:
    config = environment(tmp_path, f'#!/bin/sh\nunset LD_LIBRARY_PATH\nexec {sys.executable} "$@"\n')
    # The shell does not need these libraries. Python would not start with such files in their place.
    for name in ("libm.so.6", "libpthread.so.0", "libdl.so.2"):
        (tmp_path / "environment" / "lib" / name).write_bytes(b"\x7fELF and nothing else")

    with hosted(runtime, "foreign", model, config):
        assert runtime.is_ready("foreign")


def test_an_interpreter_that_cannot_start_inside_fails_the_load(
    runtime: moonpool.Runtime, tmp_path: Path, model: Path
) -> None:
    config = environment(tmp_path, "#!/sbin/../nowhere/python\n")

    with pytest.raises(LoadFailed):
        runtime.load("foreign", model, config=config)


def test_a_layer_that_is_refused_stops_it_before_it_began(
    runtime: moonpool.Runtime, tmp_path: Path, model: Path
) -> None:
    config = environment(tmp_path, "#!/bin/sh\necho began\n")
    config["parameters"]["MOONPOOL_SANDBOX_SYSCALLS"] = {"string_value": "levitate"}

    with pytest.raises(LoadFailed, match=r"seccomp: there is no system call levitate"):
        runtime.load("foreign", model, config=config)
