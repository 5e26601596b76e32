"""Tests of the process that completes a model's configuration: it becomes the first instance unless code of the model
ran there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import hosted, is_running, open_to_all, options
from tests.waiting import wait_until

import moonpool

NATIVE = """
import os
from moonpool import Float32

with open({begun!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")


class Model:
    def __call__(self, X: Float32[2]) -> Float32[2]:
        return X + 1
"""
TRITON = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

with open({begun!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")


class TritonPythonModel:
    mark = 1.0

    def initialize(self, args):
        assert '"dims":[2]' in args["model_config"].replace(" ", "")
        self.name = args["model_instance_name"]

    def execute(self, requests):
        assert self.name.startswith("m_0")
        y = pb_utils.Tensor("Y", np.full(2, TritonPythonModel.mark, np.float32))
        return [pb_utils.InferenceResponse([y]) for _ in requests]

    def finalize(self):
        with open({begun!r}, "a") as file:
            file.write("finalized\\n")
"""
COMPLETES = """
    @staticmethod
    def auto_complete_config(config):
        TritonPythonModel.mark = 2.0
        config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [2]})
        config.add_output({"name": "Y", "data_type": "TYPE_FP32", "dims": [2]})
        return config
"""
SIGNATURE = {
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [2]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [2]}],
}
X = np.zeros(2, np.float32)
LEVELS = pytest.mark.parametrize("level", ["standard", "strict"])


@pytest.fixture
def runtime() -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime() as runtime:
        yield runtime


class Written:
    """A model that writes down the numbers of the processes that import its file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "model.py"
        self._begun = folder / "begun"
        open_to_all(self._begun)
        self.grants = {"SANDBOX_PATHS": f"rw:{self._begun}"}

    def write(self, text: str, more: str = "") -> Path:
        self.file.write_text(text.format(begun=str(self._begun)) + more)
        return self.file

    @property
    def lines(self) -> list[str]:
        return self._begun.read_text().split()


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def pids(runtime: moonpool.Runtime) -> set[str]:
    return {str(instance["pid"]) for instance in runtime.instances("m")}


@pytest.mark.promise(
    "Backends",
    "The process that completes the configuration becomes the first instance, unless the model has an "
    "`auto_complete_config` of its own. That runs in a process that ends.",
)
@LEVELS
@pytest.mark.parametrize("text", [NATIVE, TRITON], ids=["native", "triton"])
def test_the_process_that_completes_becomes_the_first_instance(
    runtime: moonpool.Runtime, written: Written, text: str, level: str
) -> None:
    given = {} if text == NATIVE else SIGNATURE
    config = given | options(SANDBOX=level, **written.grants)
    with hosted(runtime, "m", written.write(text), config, instances=2):
        assert set(written.lines) == pids(runtime)
        assert len(written.lines) == 2
        (output,) = runtime.infer("m", {"X": X}, timeout_s=60.0).values()
        assert output.tolist() == [1.0, 1.0]
    assert written.lines[2:] == ([] if text == NATIVE else ["finalized"] * 2)


@pytest.mark.promise("Backends", "The process that completes the configuration becomes …")
@LEVELS
def test_code_that_completes_a_configuration_leaves_nothing_in_an_instance(
    runtime: moonpool.Runtime, written: Written, level: str
) -> None:
    config = options(SANDBOX=level, **written.grants)
    with hosted(runtime, "m", written.write(TRITON, COMPLETES), config):
        first, second = written.lines
        assert {second} == pids(runtime)
        assert not is_running(int(first))
        assert runtime.infer("m", {"X": X}, timeout_s=60.0)["Y"].tolist() == [1.0, 1.0]


def test_a_configuration_that_is_wrong_when_it_is_complete_leaves_no_process(
    runtime: moonpool.Runtime, written: Written
) -> None:
    file = written.write(TRITON)
    missing = {"input": SIGNATURE["input"], "output": [{"name": "Y"}]} | options(**written.grants)
    with pytest.raises(moonpool.ConfigError):
        runtime.load("m", file, config=missing)
    for pid in written.lines:
        assert not is_running(int(pid))


def test_an_instance_that_dies_is_started_anew(runtime: moonpool.Runtime, written: Written) -> None:
    config = SIGNATURE | options(RESTART_BACKOFF_S=0, **written.grants)
    with hosted(runtime, "m", written.write(TRITON), config):
        (first,) = written.lines
        os.kill(int(first), signal.SIGKILL)
        wait_until(lambda: len(written.lines) == 2 and runtime.is_ready("m"))
        assert runtime.infer("m", {"X": X}, timeout_s=60.0)["Y"].tolist() == [1.0, 1.0]
