"""Shared by the commands: a runtime with its progress and log on stderr, options for hosting, tables of text."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.policy import LEVELS
from moonpool.runtime.hosting.progress import Progress
from moonpool.runtime.log import flush
from moonpool.runtime.model.config.options import by_pattern, read_model_option
from moonpool.runtime.model.config.schema import unread
from moonpool.runtime.process.terminal import harmless
from moonpool.runtime.repository.environment_builder import LOG_OF_BUILDS
from moonpool.runtime.repository.grants import as_flag, read_grant
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.schedule.scheduler import ABANDONED_S

_NO_CACHE = "commands keep no responses, `moonpool serve` does with --cache-config=local,size=BYTES"


class UsageError(MoonpoolError):
    """The command line is wrong. The text is shown with the command's usage."""

    code = "INVALID_ARG"


def add_repository(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Add the arguments for the directories of models and backends."""
    parser.add_argument(
        "repository",
        metavar="REPO",
        nargs="?" if is_optional else None,
        help="the directory of the models" + ("; not with --url" if is_optional else ""),
    )
    add_hosting(parser)


def add_hosting(parser: argparse._ActionsContainer) -> None:
    """Add the arguments for hosting models, which `moonpool serve` has, too."""
    parser.add_argument(
        "--backend-directory", metavar="DIR", help="the directory of Python-based backends, each as DIR/NAME/model.py"
    )
    parser.add_argument(
        "--sandbox", choices=LEVELS, help="the lowest sandbox level of all models, as for `moonpool serve`"
    )
    parser.add_argument(
        "--sandbox-grants",
        metavar="MODEL[:KEY=VALUE,…]",
        type=_read_by(read_grant),
        action="append",
        default=[],
        help="let a model's configuration give the model more than its sandbox does: these values, or anything "
        "if there is no key; may be given many times",
    )
    parser.add_argument(
        "--model-option",
        metavar="MODEL:KEY=VALUE",
        type=_read_by(read_model_option),
        action="append",
        default=[],
        help="set an option of a model in place of its configuration's; * in MODEL stands for any characters; may be "
        "given many times",
    )


def hosting_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `Runtime` for the options that `add_hosting` added."""
    return {
        "backend_directory": options.backend_directory,
        "sandbox": options.sandbox,
        "sandbox_grants": options.sandbox_grants,
        "model_options": by_pattern(options.model_option),
    }


def check_no_hosting(options: argparse.Namespace) -> None:
    """Refuse the options that `add_hosting` added, because a server hosts the models. Raises `UsageError`."""
    for name in ("backend_directory", "sandbox", "sandbox_grants", "model_option"):
        if getattr(options, name):
            raise UsageError(f"--{name.replace('_', '-')} is for models in this process, not for --url")


def _read_by(read: Callable[[str], object]) -> Callable[[str], object]:
    """Make a type for argparse, which shows only the texts of its own errors."""

    def read_text(text: str) -> object:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(unread(error, text)) from None

    return read_text


@contextlib.contextmanager
def session(
    repository: str | None,
    hosting: Mapping[str, Any] | None = None,
    *,
    verbose: bool,
    quiet: bool = False,
    progress: bool = True,
) -> Iterator[Runtime]:
    """Open a runtime without loaded models, and close it at the end.

    `hosting` comes from `hosting_of`. Warnings go to stderr unless it is `quiet`. If it is `verbose`, everything
    that the runtime and the models print and log goes there. Raises `RepositoryError`.
    """
    shown = Progress(is_brief=True)
    with _log_to(shown, verbose, quiet):
        listener = shown if progress else None
        with Runtime(
            repository, models=(), listener=listener, drain_timeout_s=ABANDONED_S, **(hosting or {})
        ) as runtime:
            rules = runtime._models.rules
            runtime._models.rules = replace(rules, grant_form=as_flag, cache_advice=_NO_CACHE)
            yield runtime


@contextlib.contextmanager
def _log_to(progress: Progress, verbose: bool, quiet: bool) -> Iterator[None]:
    handler = _Handler(progress)
    if not verbose:
        handler.addFilter(partial(_is_shown, quiet))
    builds = logging.getLogger(LOG_OF_BUILDS)
    before = builds.level
    builds.setLevel(logging.INFO)
    try:
        with logged_to(handler, logging.INFO if verbose else logging.WARNING):
            yield
    finally:
        builds.setLevel(before)


def _is_shown(quiet: bool, record: logging.LogRecord) -> bool:
    """Return True for what commands that are not verbose show: warnings, and steps that may take minutes.

    Errors that are raised are shown by the command, so they are not logged a second time. Output of models is not
    shown.
    """
    if record.name == LOG_OF_BUILDS:
        return True
    is_warning = logging.WARNING <= record.levelno < logging.ERROR
    return not quiet and is_warning and record.name != "moonpool.stub"


@contextlib.contextmanager
def logged_to(handler: logging.Handler, level: int) -> Iterator[None]:
    """Send moonpool's log from `level` on to `handler`, and nowhere else, inside."""
    log = logging.getLogger("moonpool")
    before = log.level, log.propagate
    log.setLevel(level)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        flush()
        log.removeHandler(handler)
        # Loggers below cache the level until it is set again.
        log.setLevel(before[0])
        log.propagate = before[1]


class _Handler(logging.Handler):
    """Writes log lines between the lines of the progress, without breaking them."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        lines = self.format(record).split("\n")
        self._progress.say("\n".join(harmless(line) for line in lines))


def table(rows: Sequence[Sequence[str]], *, align: str, indent: int = 0) -> list[str]:
    """Write rows as lines of aligned columns; `align` has a `<` or a `>` for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)]
        lines.append(" " * indent + "  ".join(cells).rstrip())
    return lines


def load_in_words(load_average: float) -> str:
    """Say how busy the machine is: a figure that was measured beside other programs is no figure of the server."""
    cores = len(os.sched_getaffinity(0))
    return f"load average {load_average:.2f} on {cores} core{'' if cores == 1 else 's'} before the measurement"


def figure(value: float, digits: int = 3) -> str:
    """Write a number with significant digits, and commas between thousands: 0.0123, 1.23, 12,300."""
    if value == 0:
        return "0"
    shown = float(f"{value:.{digits}g}")
    if abs(shown) >= 10 ** (digits - 1):
        return f"{shown:,.0f}"
    return f"{shown:,.{digits}g}"
