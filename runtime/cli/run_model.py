"""`moonpool run-model`: one request to one model, in this very process, where a debugger can look at it."""

from __future__ import annotations

import argparse
import contextlib
import logging
import pdb
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Iterator, Sequence

from moonpool.runtime.cli.infer import datatypes_of, show_response
from moonpool.runtime.cli.inputs import as_arrays, parse_inputs
from moonpool.runtime.cli.shared import UsageError, logged_to
from moonpool.runtime.process.terminal import Terminal, harmless

HELP = "run a model in this process, for debugging it"
DESCRIPTION = """\
Load one model into this process, send it one request, and print its responses. There is no stub, so breakpoint() and
everything else that needs a terminal works in the model. The model runs in this interpreter, whatever environment its
configuration names.

An input is JSON, or @ and a .npy file. A model with batches takes rows: [[1, 2]] is one row of two elements.
"""
EXAMPLES = """\
examples:
  moonpool run-model models/add_sub --input 'INPUT0=[[1,2,3,4]]' --input 'INPUT1=[[5,6,7,8]]'
  moonpool run-model models/add_sub --debug --input INPUT0=@rows.npy --input INPUT1=@rows.npy
  moonpool run-model models/normalise --json --input X=@rows.npy
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", help="the model's directory, or its Python file")
    parser.add_argument(
        "--input",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="the value of an input, as NAME=JSON or NAME=@FILE.npy; once for each input",
    )
    parser.add_argument(
        "--model",
        metavar="NAME=DIR",
        dest="models",
        action="append",
        default=[],
        help="another model to which this one sends requests, such as add_sub=models/add_sub; once for each",
    )
    parser.add_argument("--json", action="store_true", help="print each response as a JSON object")
    parser.add_argument("--version", metavar="N", type=int, help="the version of the model; default the latest")
    parser.add_argument(
        "--debug", action="store_true", help="if the model raises, start Python's debugger at that line"
    )


def run(options: argparse.Namespace) -> int:
    # Imported here, because no other command has a model in its own process.
    from moonpool.testing.load import load_any

    values = parse_inputs(options.input)
    models = _models(options.models)
    # While a person debugs, no time is too long.
    timeout_s = None if options.debug else 30.0
    level = logging.DEBUG if options.verbose else logging.INFO
    try:
        with logged_to(_Handler(), level), contextlib.ExitStack() as stack:
            with _debugged(enabled=options.debug):
                model = load_any(options.model, version=options.version, models=models, timeout_s=timeout_s)
                stack.enter_context(model)
            with _debugged(enabled=options.debug):
                responses = model.stream(as_arrays(values, model.config))
                for number, response in enumerate(responses, 1):
                    place = number if model.config.decoupled else 0
                    outputs = response.check().outputs
                    show_response(outputs, datatypes_of(model.config), place, as_json=options.json)
    except BdbQuit:
        Terminal(sys.stderr).line("moonpool: the debugger was quit")
        return 1
    return 0


def _models(arguments: Sequence[str]) -> dict[str, str]:
    """Read `NAME=DIR` arguments into directories by name. Raises `UsageError`."""
    models: dict[str, str] = {}
    for argument in arguments:
        name, equals, directory = argument.partition("=")
        if not (name and equals and directory):
            raise UsageError(f"--model must be NAME=DIR, not {argument!r}")
        models[name] = directory
    return models


@contextlib.contextmanager
def _debugged(*, enabled: bool) -> Iterator[None]:
    """Start the debugger where the model raised, if `enabled`, before the error goes on."""
    try:
        yield
    except Exception as error:
        # An error of moonpool's own has no cause, and there is nothing to debug.
        cause = error.__cause__
        if enabled and cause is not None and not isinstance(error, BdbQuit):
            traceback.print_exception(cause)
            pdb.post_mortem(cause.__traceback__)
        raise


class _Handler(logging.Handler):
    """Writes the model's log to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).split("\n"):
            Terminal(sys.stderr).line(harmless(line))
