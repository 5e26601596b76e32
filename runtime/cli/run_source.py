"""`moonpool run`: a file of source in a confined process, with inputs, files and limits."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.cli.inputs import parse_inputs
from moonpool.runtime.cli.shared import UsageError
from moonpool.runtime.process.files import read_file
from moonpool.runtime.process.terminal import Terminal
from moonpool.runtime.sandboxes.printed import shown
from moonpool.runtime.sandboxes.sandbox import RunResult
from moonpool.runtime.sandboxes.sandbox import run as run_source
from moonpool.runtime.sandboxes.settings import RunOptions

HELP = "run a file of source in a confined process"
DESCRIPTION = """\
Run a file of Python, which need not be trusted, in a process at the sandbox level strict, and print its output and the
value of its last expression. Files that it writes below out/ are written to --out. docs/RUN.md has the rest.
"""
EXAMPLES = """\
exit codes: 0 success, 1 an error of the source, 2 wrong command line, 124 out of time, 137 out of memory

examples:
  moonpool run snippet.py --timeout 10 --memory 512M
  moonpool run snippet.py --input x=@x.npy --input 'n=[1, 2]' --file in.csv --out results
  echo 'print(1 + 1)' | moonpool run -
"""
_MOST_BYTES = 16 << 20
_CODES = {"timeout_s": 124, "memory": 137}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FILE", help="the file; - reads the standard input")
    parser.add_argument(
        "--input",
        metavar="NAME=JSON|NAME=@FILE.npy",
        action="append",
        default=[],
        help="a variable of the source; may be repeated",
    )
    parser.add_argument(
        "--file",
        metavar="[NAME=]FILE",
        action="append",
        default=[],
        help="a file for the working directory of the source, by its own name or another; may be repeated",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        help="copy the files that the source writes below out/ into this folder; made if missing",
    )
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=30.0, help="default %(default)s")
    parser.add_argument("--memory", metavar="SIZE", help="such as 512M; default half of the machine's")
    parser.add_argument(
        "--files-bytes",
        metavar="SIZE",
        default="64M",
        help="most bytes of all files that the source gets and writes; default %(default)s",
    )
    parser.add_argument(
        "--path",
        metavar="[rw:]PATH",
        action="append",
        default=[],
        help="a folder that the source may read, or write to; may be repeated",
    )
    parser.add_argument(
        "--environment", metavar="PATH", help="the interpreter's environment, or a file with a list of packages"
    )
    parser.add_argument("--json", action="store_true", help="print the value as JSON, arrays as lists")


def run(options: argparse.Namespace) -> int:
    wanted: RunOptions = {
        "timeout_s": options.timeout,
        "memory": options.memory,
        "files_bytes": options.files_bytes,
        "paths": options.path,
        "environment": options.environment,
    }
    text = _read(options.source)
    files = dict(_file(each) for each in options.file)
    inputs = parse_inputs(options.input)
    try:
        done = run_source(text, inputs, files=files, on_output=_pass_on, **wanted)
    except ValueError as error:
        if isinstance(error, MoonpoolError):
            raise
        raise UsageError(str(error)) from None
    if options.out is not None:
        _write(options.out, done)
    if done.error is None:
        if done.value is not None:
            Terminal(sys.stdout).line(_as_json(done.value) if options.json else _as_text(done))
        return 0
    errors = Terminal(sys.stderr)
    # The header says what anybody sees.
    for line in done.error.traceback.removeprefix("Traceback (most recent call last):\n").rstrip().split("\n")[:-1]:
        errors.line(line)
    limit = f" (limit: {done.error.limit})" if done.error.limit else ""
    errors.line(f"moonpool: {errors.paint('error:', 'red', 'bold')} {shown(str(done.error))}{limit}")
    return _CODES.get(done.error.limit, 1)


def _read(path: str) -> str:
    if path == "-":
        path, content = "the standard input", sys.stdin.buffer.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UsageError(f"{path} has more than {_MOST_BYTES:,} bytes")
    else:
        content = read_file(Path(path), _MOST_BYTES)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error}") from None


def _file(argument: str) -> tuple[str, Path]:
    name, equals, path = argument.partition("=")
    found = Path(path if equals else argument)
    return (name if equals else found.name), found


def _pass_on(text: str, stream: str) -> None:
    to = sys.stderr if stream == "stderr" else sys.stdout
    to.write(text)
    to.flush()


def _write(folder: Path, done: RunResult) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in done.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _as_text(done: RunResult) -> str:
    return shown(done.value if done.is_repr else repr(done.value))


def _as_json(value: object) -> str:
    return json.dumps(_plain(value))


def _plain(value: Any) -> object:
    """Return a value that JSON has: lists for arrays, and texts for bytes, also as keys, and for complex numbers."""
    if isinstance(value, dict):
        return {_plain(key) if isinstance(key, bytes) else key: _plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
