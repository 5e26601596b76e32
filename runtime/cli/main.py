"""The command `moonpool`: it parses arguments, runs a command, and turns its end into an exit code.

0 is success, 1 a failure (the command line was right, but the work failed), 2 a wrong command line, and 128 + n the end
by signal n.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.cli.completion import are_wanted, offer_completions
from moonpool.runtime.cli.shared import UsageError
from moonpool.runtime.model.config.schema import suggestion
from moonpool.runtime.model.gpus import EXPERIMENTAL
from moonpool.runtime.process.diagnose import remedy
from moonpool.runtime.process.sigterm import exit_on_sigterm
from moonpool.runtime.process.spawner import fill_standard_descriptors
from moonpool.runtime.process.terminal import Terminal, harmless
from moonpool.runtime.version import VERSION


class HelpfulParser(argparse.ArgumentParser):
    """A parser of argparse whose errors say what was meant, and what an option wants."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += suggestion(str(value), map(str, action.choices or ()))
            raise

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            wanted = action.metavar or "|".join(map(str, action.choices or ()))
            error.message += f", {wanted}" if wanted else ""
            raise


class CommandParser(HelpfulParser):
    """A parser that accepts options anywhere: `check REPO --strict MODEL` means `check REPO MODEL --strict`.

    argparse gives all positional arguments their values at the first one that it meets. Its intermixed parsing reads
    the options first.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._is_intermixing = False

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        # The intermixed parsing of some versions of argparse calls this method again.
        if self._is_intermixing:
            return super().parse_known_args(args, namespace)
        self._is_intermixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_intermixing = False


OK, FAILED, WRONG_USAGE = 0, 1, 2

# Each command's module. To import them all takes as long again as to import the one that is run. Nothing else in the
# runtime knows the benchmarks, which lie above it.
_COMMANDS = {
    "demo": "moonpool.runtime.cli.demo",
    "serve": "moonpool.runtime.cli.serve",
    "top": "moonpool.runtime.cli.top",
    "infer": "moonpool.runtime.cli.infer",
    "check": "moonpool.runtime.cli.repositories.check",
    "convert": "moonpool.runtime.cli.repositories.convert",
    "sandbox": "moonpool.runtime.cli.sandbox",
    "env": "moonpool.runtime.cli.environments",
    "triton": "moonpool.runtime.cli.triton",
    "run": "moonpool.runtime.cli.run_source",
    "run-model": "moonpool.runtime.cli.run_model",
    "conformance": "moonpool.runtime.cli.conformance",
    "bench": "moonpool.benchmarks.commands.bench",
    "tune": "moonpool.benchmarks.commands.tune",
    "completion": "moonpool.runtime.cli.completion",
}
_EPILOG = f"""\
{EXPERIMENTAL}

exit codes: 0 success, 1 failure, 2 wrong command line, 130 interrupted

example:
  moonpool demo
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Raises SystemExit as argparse does."""
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        Terminal(sys.stderr).last_line("moonpool: interrupted")
        return 128 + signal.SIGINT


def _run(arguments: Sequence[str]) -> int:
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a µ or an … must not make a command fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    is_plain = arguments[:1] and arguments[0] in _COMMANDS and not are_wanted()
    parser = make_parser(arguments[:1] if is_plain else _COMMANDS)
    offer_completions(parser)
    if not arguments:
        parser.print_help(sys.stderr)
        return WRONG_USAGE
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{_nearest(unknown, options)}")
    try:
        with exit_on_sigterm():
            # The parent may have ignored SIGCHLD or blocked signals. Then the kernel would keep no exit codes of stubs,
            # or no signal would end the command. SIGINT, SIGQUIT and SIGHUP stay ignored, as in every background job.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            code: int = options.run(options)
            # Flush here, so that a reader that has gone raises BrokenPipeError below.
            sys.stdout.flush()
            return code
    except UsageError as error:
        options.parser.print_usage(sys.stderr)
        _complain(str(error))
        return WRONG_USAGE
    except BrokenPipeError:
        # The reader of our output has gone, as in `moonpool … | head`. Python flushes once more at exit, to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (MoonpoolError, OSError) as error:
        _complain(_text_of(error))
        if options.verbose:
            _complain_more(error)
        return FAILED


def _open_missing_streams() -> None:
    """Read from nowhere, and write to nowhere, where a supervisor or a shell (`2>&-`) has closed a standard stream."""
    fill_standard_descriptors()
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def _nearest(unknown: Sequence[str], options: argparse.Namespace) -> str:
    known = [flag for flag in options.parser._option_string_actions if flag.startswith("--")]
    return suggestion(unknown[0].partition("=")[0], known)


def make_parser(names: Iterable[str] = _COMMANDS) -> argparse.ArgumentParser:
    """Return a parser that knows these commands."""
    parser = HelpfulParser(
        prog="moonpool",
        description="Run Python models in isolated processes, with requests through shared memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    for name in names:
        command = import_module(_COMMANDS[name])
        subparser = subparsers.add_parser(
            name,
            help=command.HELP,
            description=command.DESCRIPTION,
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.add_argument(
            "-v", "--verbose", action="store_true", help="show the models' output and log, and tracebacks of errors"
        )
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser


def _text_of(error: MoonpoolError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}{remedy(error)}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        # Python names the file only if it cannot be opened.
        return f"cannot write all of the output: {os.strerror(error.errno)}"
    text = str(error) or type(error).__name__
    return text + remedy(error) if isinstance(error, OSError) else text


def _complain_more(error: BaseException) -> None:
    """Show the traceback of the model if the model has raised, else that of this program."""
    text = getattr(error, "traceback", "") or "".join(traceback.format_exception(error))
    for line in text.rstrip().split("\n"):
        Terminal(sys.stderr).line(f"  {harmless(line)}")


def _complain(text: str) -> None:
    """Write an error to stderr: its first line is marked, the others are below it."""
    terminal = Terminal(sys.stderr)
    first, *rest = [harmless(line) for line in text.rstrip().split("\n")]
    terminal.last_line(f"moonpool: {terminal.paint('error:', 'red', 'bold')} {first}")
    for line in rest:
        terminal.line(f"  {line}".rstrip())
