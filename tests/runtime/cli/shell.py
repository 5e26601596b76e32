"""The command line as users have it: another process, whose output is read.

To import all that a command may need takes half a second of processor time. So a command that runs to its end is forked from a
process that has imported it already, if it is to have the variables of that process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest
from tests.dispositions import default_signals

import moonpool

PATIENCE_S = 120.0
PACKAGE = Path(next(iter(moonpool.__path__)))
MODELS = PACKAGE / "examples" / "models"


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, with a moonpool that need not be installed and nothing about colours or this test."""
    left_out = ("NO_COLOR", "COLUMNS", "PYTEST_CURRENT_TEST")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PYTHONPATH": str(PACKAGE.parent), "TERM": "xterm", **(extra or {})}


# Forks a command for each message, and sends the number of its process and the status with which it ended.
PROGRAM = """
import gc, json, os, socket, sys
from moonpool.runtime.cli.main import main, make_parser

channel = socket.socket(fileno=int(sys.argv[1]))
make_parser()  # imports each command
gc.freeze()
while True:
    message, outputs, _, _ = socket.recv_fds(channel, 1 << 18, 2)
    if not message:
        sys.exit()
    pid = os.fork()
    if pid == 0:
        break
    for output in outputs:
        os.close(output)
    channel.send(b"%d" % pid)
    channel.send(b"%d" % os.waitpid(pid, 0)[1])
channel.close()
arguments, folder = json.loads(message)
for number, output in enumerate(outputs, 1):
    os.dup2(output, number)
    os.close(output)
os.chdir(folder)
sys.path[0] = folder
sys.argv = ["moonpool", *arguments]
sys.exit(main())
"""


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
ensemble_scheduling { step { model_name: "counts" model_version: -1 input_map { key: "X" value: "X" } output_map { key: "N" value: "N" } } }
"""


def write_kinds(models: Path) -> None:
    """Write a decoupled model, an ensemble of it, and a model with sequences."""
    write_model(models, "counts", COUNTS, COUNTS_CONFIG)
    write_model(models, "sums", SUMS, SUMS_CONFIG)
    write_model(models, "steps", "", STEPS_CONFIG)


class WarmCommands:
    """A process that has imported the command line, and forks commands one after the other."""

    def __init__(self) -> None:
        self.variables = environment()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=self.variables,
                pass_fds=[theirs.fileno()],
            )

    def run(self, arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command in this folder to its end."""
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            code = self.wait(self.start(arguments, folder, stdout, stderr))
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())

    def start(
        self, arguments: Sequence[str], folder: Path, stdout: IO[str], stderr: IO[str]
    ) -> int:
        """Begin a command, and return the number of its process. The next one begins after `wait`."""
        message = json.dumps([arguments, str(folder)]).encode()
        socket.send_fds(self._channel, [message], [stdout.fileno(), stderr.fileno()])
        self._channel.settimeout(PATIENCE_S)
        return int(self._channel.recv(32))

    def has_ended(self) -> bool:
        """Return true if the command that was started has ended, and `wait` returns at once."""
        return bool(select.select([self._channel], [], [], 0)[0])

    def wait(self, pid: int) -> int:
        """Wait for the command that was started, and return its exit code."""
        try:
            return os.waitstatus_to_exitcode(int(self._channel.recv(32)))
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            # The next command is not to be told this one's status.
            self._channel.recv(32)
            raise

    def close(self) -> None:
        self._channel.close()
        self._process.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def warm_commands() -> Iterator[WarmCommands]:
    """Return the process that forks the commands of this run."""
    warm = WarmCommands()
    yield warm
    warm.close()


@pytest.fixture
def cli(tmp_path: Path, warm_commands: WarmCommands) -> CommandLine:
    """moonpool's command line, in an empty folder."""
    return CommandLine(tmp_path, warm_commands)


class CommandLine:
    """Runs moonpool in a folder of its own."""

    def __init__(self, folder: Path, warm: WarmCommands | None = None) -> None:
        self.folder = folder
        self._warm = warm

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "moonpool", *map(str, arguments)]

    def __call__(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run it to its end; whatever it is, there is no traceback."""
        variables = environment()
        if self._warm is not None and self._warm.variables == variables:
            ended = self._warm.run(list(map(str, arguments)), self.folder)
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
                self.command(*arguments),
                stdout=stdout,
                stderr=stderr,
                cwd=self.folder,
                env=environment(variables),
            )


def write_model(repository: Path, name: str, code: str, config: str = "") -> Path:
    """A model of one version; returns its file."""
    file = repository / name / "1" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text(code)
    if config:
        (repository / name / "config.pbtxt").write_text(config)
    return file
