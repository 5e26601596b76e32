"""What a command works in: a runtime, with its progress and its log on stderr."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.output import harmless
from moonpool.runtime.progress import Progress
from moonpool.runtime.runtime import Runtime

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


class UsageError(MoonpoolError):
    """A command line that cannot be meant; shown with the command's usage."""

    code = "INVALID_ARG"


def add_repository(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """The arguments that say where the models and their backends are."""
    parser.add_argument(
        "repository",
        metavar="REPO",
        nargs="?" if is_optional else None,
        help="the directory of the models" + (", without --url" if is_optional else ""),
    )
    parser.add_argument(
        "--backend-directory",
        metavar="DIR",
        help="where Python-based backends are, each as DIR/NAME/model.py",
    )


@contextlib.contextmanager
def session(
    repository: str | None,
    backend_directory: str | None = None,
    *,
    verbose: bool,
    quiet: bool = False,
    progress: bool = True,
) -> Iterator[Runtime]:
    """A runtime in which no model is loaded yet; closed at the end.

    Warnings go to stderr unless it is `quiet`, and everything that the runtime and the models print and
    log if it is `verbose`. Raises `RepositoryError`.
    """
    shown = Progress()
    with _log_to(shown, verbose, quiet):
        listener = shown if progress else None
        with Runtime(
            repository, models=(), backend_directory=backend_directory, listener=listener
        ) as runtime:
            yield runtime


@contextlib.contextmanager
def _log_to(progress: Progress, verbose: bool, quiet: bool) -> Iterator[None]:
    handler = _Handler(progress)
    if not verbose:
        # Errors that matter are raised, and the command shows them; nor is what a model says ours.
        handler.addFilter(
            lambda record: (
                not quiet and record.levelno < logging.ERROR and record.name != "moonpool.stub"
            )
        )
    with logged_to(handler, logging.INFO if verbose else logging.WARNING):
        yield


@contextlib.contextmanager
def logged_to(handler: logging.Handler, level: int) -> Iterator[None]:
    """Inside, moonpool's log goes from `level` on to `handler`, and nowhere else."""
    log = logging.getLogger("moonpool")
    before = log.level, log.propagate
    log.setLevel(level)
    log.propagate = False
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        # Loggers below keep in mind what the level was until it is set again.
        log.setLevel(before[0])
        log.propagate = before[1]


class _Handler(logging.Handler):
    """Log lines among the lines of the progress, without tearing them."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        lines = self.format(record).split("\n")
        self._progress.say("\n".join(harmless(line) for line in lines))
