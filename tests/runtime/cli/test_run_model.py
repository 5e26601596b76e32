"""`moonpool run-model`: a model in the process of the command, and a debugger in the model."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.cli.shell import MODELS, CommandLine, environment, write_model
from tests.waiting import Deadline

pytestmark = pytest.mark.promise(
    "Testing models",
    "`moonpool run-model` gives the model the terminal: breakpoints, and the debugger where it raised.",
)

ADD_SUB = ["--input", "INPUT0=[[1,2,3,4]]", "--input", "INPUT1=[[5,6,7,8]]"]

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            {line}
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
        return answers
"""
CONFIG = """
input {{ name: "X" data_type: TYPE_INT32 dims: 1 }}
output {{ name: "Y" data_type: TYPE_INT32 dims: 1 }}
{more}
"""


def write(folder: Path, line: str, more: str = "") -> Path:
    file = write_model(folder, "m", MODEL.format(line=line), CONFIG.format(more=more))
    return file.parent.parent


def test_it_prints_what_infer_prints(cli: CommandLine) -> None:
    ended = cli("run-model", MODELS / "add_sub", *ADD_SUB)

    assert ended.stderr == ""
    assert ended.stdout == ("OUTPUT0  FP32 [1,4]\n[[ 6.  8. 10. 12.]]\nOUTPUT1  FP32 [1,4]\n[[-4. -4. -4. -4.]]\n")
    assert ended.returncode == 0


def test_prints_and_logs_of_the_model_are_shown(cli: CommandLine) -> None:
    model = write(cli.folder, "print('printed'); pb_utils.Logger.log_info('logged\\x1b[2J')")
    ended = cli("run-model", model, "--input", "X=[1]", "--json")

    assert ended.stdout.splitlines() == ["printed", json.dumps({"Y": [1]})]
    assert ended.stderr == "[m] logged\\x1b[2J (model.py:9)\n"


def test_an_error_is_a_failure_with_its_place(cli: CommandLine) -> None:
    ended = cli("run-model", write(cli.folder, "raise ValueError('no')"), "--input", "X=[1]")

    assert ended.returncode == 1
    assert "message: ValueError: no" in ended.stderr
    assert "model.py(9): execute" in ended.stderr


def test_the_model_may_ask_others(cli: CommandLine) -> None:
    line = (
        "x = pb_utils.get_output_tensor_by_name(pb_utils.InferenceRequest(model_name='add_sub', "
        "requested_output_names=['OUTPUT0'], inputs=[pb_utils.Tensor(n, x.repeat(4)[None]"
        ".astype('f4')) for n in ('INPUT0', 'INPUT1')]).exec(), 'OUTPUT0').as_numpy()[0, :1]"
        ".astype('i4')"
    )
    model = write(cli.folder, line)
    others = ["--model", f"add_sub={MODELS / 'add_sub'}"]
    ended = cli("run-model", model, "--input", "X=[4]", "--json", *others)

    assert ended.stdout == '{"Y": [8]}\n'


def test_every_response_of_a_decoupled_model_is_printed(cli: CommandLine) -> None:
    line = (
        "s = request.get_response_sender(); t = pb_utils.InferenceResponse([pb_utils.Tensor('Y', x)]);"
        " s.send(t); s.send(t, 1); return None"
    )
    model = write(cli.folder, line, "model_transaction_policy { decoupled: true }")
    ended = cli("run-model", model, "--input", "X=[4]")

    assert ended.stdout == "response 1\nY  INT32 [1]\n[4]\nresponse 2\nY  INT32 [1]\n[4]\n"


@pytest.mark.parametrize("argument", ["other", "=dir", "other="])
def test_a_model_without_a_directory_is_a_wrong_command_line(cli: CommandLine, argument: str) -> None:
    ended = cli("run-model", MODELS / "add_sub", "--model", argument)

    assert ended.returncode == 2
    assert "must be NAME=DIR" in ended.stderr


class Terminal:
    """The command in a terminal of its own, with somebody who reads and types."""

    def __init__(self, cli: CommandLine, *arguments: object) -> None:
        self._deadline = Deadline(120.0)
        self._seen = ""
        self._fd, theirs = pty.openpty()
        # `setsid --ctty` makes it the terminal of the command: a fork of this process would stop at locks of its
        # threads.
        with open(theirs, "r+b", buffering=0) as terminal:
            self._process = subprocess.Popen(
                ["setsid", "--ctty", *cli.command(*arguments)],
                cwd=cli.folder,
                env=environment({"PYTHON_COLORS": "0", "NO_COLOR": "1"}),
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
            )

    def read_until(self, text: str) -> str:
        """Read up to this text, and return the output since the last call, this text included."""
        while text not in self._seen:
            ready, _, _ = select.select([self._fd], [], [], self._deadline.remaining_s)
            try:
                read = os.read(self._fd, 4096) if ready else b""
            except OSError:  # reading a terminal fails so when its last program has ended
                read = b""
            if not read:
                raise AssertionError(f"{text!r} did not come; there was:\n{self._seen}")
            self._seen += read.decode()
        before, self._seen = self._seen.split(text, 1)
        return before + text

    def type(self, line: str) -> None:
        os.write(self._fd, line.encode() + b"\n")

    def end(self) -> int:
        """The exit code, after reading what is left."""
        return self._process.wait(self._deadline.remaining_s)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._fd)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_a_breakpoint_in_the_model_works(cli: CommandLine, terminals: list[Terminal]) -> None:
    model = write(cli.folder, "breakpoint()")
    terminal = Terminal(cli, "run-model", model, "--input", "X=[41]")
    terminals.append(terminal)

    terminal.read_until("(Pdb) ")
    terminal.type("p x + 1")
    assert "array([42], dtype=int32)" in terminal.read_until("(Pdb) ")
    terminal.type("x[0] = 7")
    terminal.read_until("(Pdb) ")
    terminal.type("continue")
    terminal.read_until("Y  INT32 [1]")
    terminal.read_until("[7]")
    assert terminal.end() == 0


def test_the_debugger_may_be_quit(cli: CommandLine, terminals: list[Terminal]) -> None:
    terminal = Terminal(cli, "run-model", write(cli.folder, "breakpoint()"), "--input", "X=[1]")
    terminals.append(terminal)

    terminal.read_until("(Pdb) ")
    terminal.type("quit")
    terminal.read_until("moonpool: the debugger was quit")
    assert terminal.end() == 1


@pytest.mark.parametrize("line", ["y = x / 0; y.no_such_attribute", "raise SystemExit(3)"])
def test_debug_starts_the_debugger_where_the_model_raised(
    cli: CommandLine, terminals: list[Terminal], line: str
) -> None:
    terminal = Terminal(cli, "run-model", write(cli.folder, line), "--debug", "--input", "X=[5]")
    terminals.append(terminal)

    assert "Traceback" in terminal.read_until("(Pdb) ")
    terminal.type("p request.inputs()[0].name(), x")
    assert "('X', array([5], dtype=int32))" in terminal.read_until("(Pdb) ")
    terminal.type("quit")
    terminal.read_until("error: ")
    assert terminal.end() == 1


def test_debug_starts_the_debugger_where_a_load_failed(cli: CommandLine, terminals: list[Terminal]) -> None:
    file = write_model(cli.folder, "m", "# TritonPythonModel\nhere = 42\nhere.nothing\n")
    terminal = Terminal(cli, "run-model", file.parent.parent, "--debug")
    terminals.append(terminal)

    terminal.read_until("(Pdb) ")
    terminal.type("p here")
    assert "42" in terminal.read_until("(Pdb) ")
    terminal.type("quit")
    terminal.read_until("AttributeError: 'int' object has no attribute 'nothing'")
    assert terminal.end() == 1
