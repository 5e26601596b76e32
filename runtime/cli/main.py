"""The command `moonpool`: its arguments, and from any end of a command to an exit code.

0 is success, 1 failure (the command line was right, what it asked for did not work), 2 a wrong command line,
128 + n the end by signal n.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.cli import (
    bench,
    check,
    completion,
    demo,
    infer,
    run_model,
    sandbox,
    serve,
    top,
    triton,
)
from moonpool.runtime.cli.command_parser import CommandParser
from moonpool.runtime.cli.completion import offer_completions
from moonpool.runtime.cli.session import UsageError
from moonpool.runtime.config_shape import suggestion
from moonpool.runtime.output import harmless
from moonpool.runtime.sigterm import exit_on_sigterm
from moonpool.runtime.terminal import Terminal
from moonpool.runtime.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

OK, FAILED, WRONG_USAGE = 0, 1, 2

_COMMANDS = (demo, serve, top, infer, check, sandbox, triton, run_model, bench, completion)
_EPILOG = """\
exit codes: 0 success, 1 failure, 2 wrong command line, 130 interrupted

example:
  moonpool demo
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code, or raises SystemExit as argparse does."""
    for stream in (sys.stdout, sys.stderr):
        # A µ or an … that the terminal cannot show is no reason to fail.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    parser = make_parser()
    offer_completions(parser)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        options.parser.error(
            f"unrecognized arguments: {' '.join(unknown)}{_nearest(unknown, options)}"
        )
    try:
        with exit_on_sigterm():
            code: int = options.run(options)
            # Also what is still in the buffer may meet a reader that has gone.
            sys.stdout.flush()
            return code
    except UsageError as error:
        options.parser.print_usage(sys.stderr)
        _complain(str(error))
        return WRONG_USAGE
    except KeyboardInterrupt:
        Terminal(sys.stderr).line("moonpool: interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Nobody reads our output any more, as in `moonpool … | head`; Python would flush once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (MoonpoolError, OSError) as error:
        _complain(_text_of(error))
        if options.verbose:
            _complain_more(error)
        return FAILED


def _nearest(unknown: Sequence[str], options: argparse.Namespace) -> str:
    known = [flag for flag in options.parser._option_string_actions if flag.startswith("--")]
    return suggestion(unknown[0].partition("=")[0], known)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moonpool",
        description="Serve models from sealed processes, over shared memory.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for command in _COMMANDS:
        subparser = subparsers.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.DESCRIPTION,
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.add_argument(
            "-v",
            "--verbose",
            action="store_true",
            help="show what the models print and log, and tracebacks of errors",
        )
        subparser.set_defaults(run=command.run, parser=subparser)
    return parser


def _text_of(error: MoonpoolError | OSError) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error) or type(error).__name__


def _complain_more(error: BaseException) -> None:
    """The traceback: the model's own if it was the model, else that of this program."""
    text = getattr(error, "traceback", "") or "".join(traceback.format_exception(error))
    for line in text.rstrip().split("\n"):
        Terminal(sys.stderr).line(f"  {harmless(line)}")


def _complain(text: str) -> None:
    """Say what is wrong on stderr: the first line marked, the rest below it."""
    terminal = Terminal(sys.stderr)
    first, *rest = [harmless(line) for line in text.rstrip().split("\n")]
    terminal.line(f"moonpool: {terminal.paint('error:', 'red', 'bold')} {first}")
    for line in rest:
        terminal.line(f"  {line}".rstrip())
