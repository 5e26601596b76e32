"""The command line as users have it: another process, whose output is read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.dispositions import default_signals
from tests.forks import Forks

import moonpool

PATIENCE_S = 120.0
PACKAGE = Path(next(iter(moonpool.__path__)))
MODELS = PACKAGE / "examples" / "models"


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, with a moonpool that need not be installed and nothing about colours or this test."""
    left_out = ("NO_COLOR", "COLUMNS", "PYTEST_CURRENT_TEST")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PYTHONPATH": str(PACKAGE.parent), "TERM": "xterm", **(extra or {})}


# Answers with as many numbers as X says, each in a response of its own.
COUNTS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(request.inputs()[0].as_numpy().flat[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("N", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNTS_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "X" data_type: TYPE_INT32 dims: 1 }
output { name: "N" data_type: TYPE_INT32 dims: 1 }
"""
# Adds up what comes in a sequence.
SUMS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    sums = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            x, start, id = [each.as_numpy().flat[0] for each in request.inputs()]
            self.sums[id] = x + (0 if start else self.sums[id])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([[self.sums[id]]], np.int32))]))
        return responses
"""
SUMS_CONFIG = """
backend: "python"
max_batch_size: 1
input { name: "X" data_type: TYPE_INT32 dims: 1 }
output { name: "Y" data_type: TYPE_INT32 dims: 1 }
sequence_batching {
  max_sequence_idle_microseconds: 120000000
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""
# One step, which counts.
STEPS_CONFIG = """
platform: "ensemble"
model_transaction_policy { decoupled: true }
input { name: "X" data_type: TYPE_INT32 dims: 1 }
output { name: "N" data_type: TYPE_INT32 dims: 1 }
ensemble_scheduling {
  step { model_name: "counts" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "N" value: "N" } }
}
"""


def write_kinds(models: Path) -> None:
    """Write a decoupled model, an ensemble of it, and a model with sequences."""
    write_model(models, "counts", COUNTS, COUNTS_CONFIG)
    write_model(models, "sums", SUMS, SUMS_CONFIG)
    write_model(models, "steps", "", STEPS_CONFIG)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Return the process that forks the commands of this run."""
    made = Forks(environment())
    yield made
    made.close()


@pytest.fixture
def cli(tmp_path: Path, forks: Forks) -> CommandLine:
    """moonpool's command line, in an empty folder."""
    return CommandLine(tmp_path, forks)


class CommandLine:
    """Runs moonpool in a folder of its own. Commands that run to their end are forked if they have the usual
    variables.
    """

    def __init__(self, folder: Path, forks: Forks | None = None) -> None:
        self.folder = folder
        self._forks = forks

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "moonpool", *map(str, arguments)]

    def __call__(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run it to its end; whatever it is, there is no traceback."""
        variables = environment()
        if self._forks is not None and self._forks.variables == variables:
            ended = self._forks.run(list(map(str, arguments)), self.folder)
        else:
            ended = subprocess.run(
                self.command(*arguments),
                capture_output=True,
                text=True,
                check=False,
                cwd=self.folder,
                env=variables,
                timeout=PATIENCE_S,
            )
        if "Traceback" in ended.stderr:
            pytest.fail(f"a traceback for {arguments}:\n{ended.stderr}", pytrace=False)
        return ended

    def start(
        self, *arguments: object, stdout: int | None, stderr: int | None, **variables: str
    ) -> subprocess.Popen[bytes]:
        with default_signals():
            return subprocess.Popen(
                self.command(*arguments), stdout=stdout, stderr=stderr, cwd=self.folder, env=environment(variables)
            )


def write_model(repository: Path, name: str, code: str, config: str = "") -> Path:
    """A model of one version; returns its file."""
    file = repository / name / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text(code)
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    return file
