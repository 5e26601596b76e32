"""All commands have help, exit codes and their ways to end in common."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.runtime.cli.shell import MODELS, PATIENCE_S, CommandLine, environment, write_model
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.cli.main import make_parser

COMMANDS = (
    "demo", "infer", "check", "conformance", "bench", "serve", "top", "triton", "sandbox", "run", "run-model",
    "completion",
)  # fmt: skip


def test_the_version_is_printed(cli: CommandLine) -> None:
    assert cli("--version").stdout == f"moonpool {moonpool.__version__}\n"


def test_the_help_lists_the_commands_and_exit_codes() -> None:
    text = make_parser().format_help()

    assert [command for command in COMMANDS if f"\n    {command}" not in text] == []
    assert "exit codes" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args([command, "--help"])

    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"  moonpool {command}" in text
    examples = re.findall(rf"moonpool ({command} [^\n)>]*)", text.partition("\nexample")[2])
    for words in (shlex.split(example, comments=True) for example in examples):
        options = make_parser().parse_args(words)
        is_compare = words[:2] == ["bench", "compare"]
        # No example keeps the state of sequences, or speaks OpenAI's API.
        others = {"--sequence", "--openai"}
        if command in ("infer", "bench") and not is_compare and others.isdisjoint(words):
            assert (MODELS / options.model).is_dir(), words


def test_the_pages_name_all_commands_that_take_the_operator_s_options(capsys: pytest.CaptureFixture[str]) -> None:
    commands = re.findall(r"^    ([a-z-]+) ", make_parser().format_help(), re.MULTILINE)
    takes = []
    for command in commands:
        with pytest.raises(SystemExit):
            make_parser().parse_args([command, "--help"])
        if "--sandbox-grants" in capsys.readouterr().out:
            takes.append(command)
    docs = Path(__file__).parents[3] / "docs"
    sentences = [
        re.search(r"`--sandbox-grants` are options of ([^.]+)\.", (docs / "SANDBOX.md").read_text()),
        re.search(r"`moonpool (check`, [^.]+) take `--sandbox`", (docs / "SERVING.md").read_text()),
    ]
    assert len(takes) > 3
    for sentence in sentences:
        assert sentence is not None
        named = re.findall("[a-z]+(?=`)", sentence[1])
        assert {*named, "serve"} == {*takes, "serve"}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["infer", "models"],
        ["infer", "models", "m", "--input", "X"],
        ["infer", "models", "m", "--input", "X=[1"],
        ["infer", "models", "m", "--timeout", "-1"],
        ["bench", "models", "m", "--concurrency", "1,none"],
        ["bench", "models", "m", "--seconds", "0"],
        ["demo", "--seconds", "0"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_code_2_with_the_usage(cli: CommandLine, arguments: list[str]) -> None:
    ended = cli(*arguments)

    assert ended.returncode == 2
    assert ended.stderr.startswith("usage: moonpool")


@pytest.mark.promise("The command line", "Options of every command may stand anywhere behind its name.")
@pytest.mark.parametrize(
    "words",
    [
        "check REPO --strict normalise",
        "check --strict REPO normalise",
        "check REPO normalise --strict",
        "check --sandbox standard REPO --strict normalise --allow-missing",
        "infer REPO --json normalise --input X=[[1,2]]",
        "infer --input X=[[1,2]] REPO normalise",
        "bench --seconds 0.01 REPO --concurrency 1 normalise --windows 1",
    ],
)
def test_options_stand_anywhere(cli: CommandLine, words: str) -> None:
    ended = cli(*[str(MODELS) if word == "REPO" else word for word in words.split()])

    assert ended.returncode == 0, ended.stderr
    assert "normalise" in ended.stdout or "Y" in ended.stdout


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("srve", '; did you mean "serve"?'),
        ("env buidl", '; did you mean "build"?'),
        ("serve m --strict-readiness", "--strict-readiness: expected one argument, true|false"),
        ("infer r m --model-option=m:MOONPOL_THREADS=1", '; did you mean "MOONPOOL_THREADS"?'),
        ("serve m --model-option=m:MOONPOL_THREADS=1", '; did you mean "MOONPOOL_THREADS"?'),
        ("infer r m --model-option=m", "--model-option: must be MODEL:OPTION=VALUE, not 'm'"),
        ("infer r m --sandbox-grants=m:GPU=1", "'GPU' cannot be granted; did you mean \"GPUS\"?"),
    ],
)
def test_a_wrong_word_gets_one_sentence(cli: CommandLine, words: str, end: str) -> None:
    ended = cli(*words.split())

    assert ended.returncode == 2
    assert ended.stderr.endswith(end + "\n")


def test_no_command_shows_the_help(cli: CommandLine) -> None:
    assert "\n    serve " in cli().stderr


def test_a_full_disk_is_one_line(cli: CommandLine) -> None:
    with open("/dev/full", "w") as full:
        process = cli.start("check", MODELS, "primes", stdout=full.fileno(), stderr=subprocess.PIPE)
        with process:
            _, said = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 1
    assert said == b"moonpool: error: cannot write all of the output: No space left on device\n"


def test_missing_arguments_are_named_but_not_optional_ones(cli: CommandLine) -> None:
    assert cli("check").stderr.endswith("the following arguments are required: REPO\n")


@pytest.mark.parametrize("command", [["infer", "nowhere", "m"], ["check", "nowhere"]])
def test_a_failure_is_exit_code_1_with_one_line(cli: CommandLine, command: list[str]) -> None:
    ended = cli(*command)

    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == (f"moonpool: error: model repository: there is no directory {cli.folder}/nowhere\n")


def first_line(process: subprocess.Popen[bytes]) -> bytes:
    """Return a process's first line of output. A process that prints nothing is killed."""
    if process.stdout is None:
        pytest.fail("the process was started without a pipe")
    timer = threading.Timer(PATIENCE_S, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()
        timer.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_and_what_it_started(cli: CommandLine, number: signal.Signals) -> None:
    process = cli.start("demo", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        line = first_line(process)
        process.send_signal(number)
        _, complaint = process.communicate(timeout=PATIENCE_S)

    assert line.startswith(b"moonpool")
    assert process.returncode == 128 + number
    assert complaint == (b"moonpool: interrupted\n" if number == signal.SIGINT else b"")


def test_a_load_that_takes_too_long_for_the_user_can_be_interrupted(cli: CommandLine) -> None:
    write_model(
        cli.folder / "models",
        "slow",
        "import time\n"
        "from moonpool import Float32\n"
        "class Slow:\n"
        "    def __init__(self):\n"
        "        open('begun', 'w').close()\n"
        "        time.sleep(3600)\n"
        "    def __call__(self, X: Float32[1]) -> Float32[1]:\n"
        "        return X\n",
    )
    process = cli.start("infer", "models", "slow", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with process:
        begun = cli.folder / "begun"
        wait_until(lambda: begun.exists() or process.poll(), PATIENCE_S, "the construction")
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 130
    assert complaint == b"moonpool: interrupted\n"


# Works until its request is cancelled, and ends never.
STUCK = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        open("asked", "w").close()
        while not requests[0].is_cancelled():
            time.sleep(0.01)
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("cancelled"))]

    def finalize(self):
        while True:
            time.sleep(1)
"""
STUCK_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "Y" data_type: TYPE_FP32 dims: 1 }
"""


@pytest.mark.promise(
    "The command line",
    "Ctrl-C ends a command. If a model takes its time to end, the command says so, and a second "
    "Ctrl-C ends it at once.",
)
def test_a_second_signal_ends_a_command_that_waits_for_its_model(cli: CommandLine) -> None:
    write_model(cli.folder / "models", "stuck", STUCK, STUCK_CONFIG)
    errors = cli.folder / "errors"
    with errors.open("wb") as stderr:
        process = cli.start(
            "infer", "models", "stuck", "--input", "X=[1]", stdout=subprocess.DEVNULL, stderr=stderr.fileno(),
        )  # fmt: skip

    def says(words: str) -> bool:
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}:\n{errors.read_text()}")
        return words in errors.read_text()

    with process:
        try:
            asked = cli.folder / "asked"
            wait_until(lambda: says("") and asked.exists(), PATIENCE_S, "the request")
            process.send_signal(signal.SIGINT)
            why = "takes its time: stuck:1 finalizes (MOONPOOL_FINALIZE_TIMEOUT_S). Ctrl-C ends it at once."
            wait_until(lambda: says(why), PATIENCE_S, "the line about what it waits for")
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)
        except BaseException:
            process.kill()
            raise

    assert process.returncode == 130
    assert errors.read_text().endswith("moonpool: interrupted\n")


def test_a_reader_that_goes_away_ends_a_command_quietly(cli: CommandLine) -> None:
    process = cli.start("check", MODELS, "primes", "normalise", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        if process.stdout is None or process.stderr is None:
            pytest.fail("the process was started without a pipe")
        process.stdout.close()
        complaint = process.stderr.read()
        process.wait(PATIENCE_S)

    assert process.returncode == 128 + signal.SIGPIPE
    assert complaint == b""


@pytest.mark.promise(
    "The command line",
    "A command whose standard streams are closed works all the same, and ends with the same exit code.",
)
@pytest.mark.parametrize(
    ("closed", "words", "code"),
    [
        ("2>&-", ["check", str(MODELS), "primes"], 0),
        (">&-", ["infer", str(MODELS), "normalise", "--input", "X=[[1,2]]"], 0),
        ("<&-", ["top", "--once", "--url", "http://127.0.0.1:1"], 1),
        (">&-", ["--version"], 0),
        ("<&- >&- 2>&-", ["check", "nowhere"], 1),
        ("<&- >&- 2>&-", ["infer"], 2),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_needs_no_standard_streams(cli: CommandLine, closed: str, words: list[str], code: int) -> None:
    program = [sys.executable, "-m", "moonpool", *words]
    ended = subprocess.run(
        ["bash", "-c", f'exec "$@" {closed}', "bash", *program],
        env=environment(),
        cwd=cli.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )

    assert (ended.returncode, "Traceback" in ended.stderr) == (code, False), ended.stderr
