"""`moonpool check`: what is wrong with the models of a repository, before anybody needs them."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.policy import LEVELS, is_contained
from moonpool.runtime.cli.session import UsageError, add_repository, session
from moonpool.runtime.config import ConfigError, ModelConfig, unused_fields
from moonpool.runtime.config_limits import ConfigLimits
from moonpool.runtime.config_options import ModelOptions
from moonpool.runtime.environment_error import BadEnvironment
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.loading import HostingRules
from moonpool.runtime.output import harmless
from moonpool.runtime.repository import ModelDirectory, ModelRepository
from moonpool.runtime.sandbox.hints import closed_files
from moonpool.runtime.terminal import Terminal

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from moonpool.runtime.runtime import Runtime

NAME = "check"
HELP = "say what is wrong with the models of a repository"
DESCRIPTION = """\
Check each model of a repository: read its configuration, import it in its own environment, start its
instances and end them again. One line a finding:

  LEVEL: MODEL: FILE:LINE: what      (LEVEL is ok, warning or error)

Exits with 1 if there is an error, or a warning under --strict.
"""
EXAMPLES = """\
examples:
  moonpool check models
  moonpool check models add_sub normalise
  moonpool check models --allow-missing      # on a machine that lacks some environments
  moonpool check models --sandbox strict     # as `moonpool serve --sandbox strict` would load them
"""

# So many closed files of a model are named.
_MOST_CLOSED = 5
_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}
# A place in a model's own file, as the texts of failed loads name it.
_PLACE = re.compile(r"^  (/[^\n]+\.py)(?:\((\d+)\))?(?::|$)", re.MULTILINE)
_SYNTAX_ERROR_LINE = re.compile(r"\(\S+\.py, line (\d+)\)")


class Finding(NamedTuple):
    """One line of the report; `place` is a file with or without a line, or empty."""

    level: str
    model: str
    place: str
    what: str

    def __str__(self) -> str:
        parts = (self.level, self.model, self.place, self.what)
        return harmless(": ".join(part for part in parts if part))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_repository(parser)
    parser.add_argument(
        "models", metavar="MODEL", nargs="*", default=[], help="only these; default all"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 on warnings, too")
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="an environment or a package that is not on this machine is a warning, not an error",
    )
    parser.add_argument(
        "--sandbox",
        choices=LEVELS,
        help="the least level of the models' sandboxes, as of a server with that option",
    )
    parser.add_argument(
        "--sandbox-grants",
        metavar="MODEL",
        action="append",
        default=[],
        help="let this model have what its configuration gives it beside its sandbox; may be given many times",
    )
    parser.add_argument(
        "--model-config-limit",
        metavar="LIMIT=NUMBER",
        action="append",
        default=[],
        help="the most that a configuration may ask for, as of a server with that option; may be given many times",
    )


def run(options: argparse.Namespace) -> int:
    terminal = Terminal(sys.stdout)
    repository = ModelRepository(options.repository)
    names = options.models or repository.models()
    counts = dict.fromkeys(_STYLES, 0)
    try:
        limits = ConfigLimits().raised(options.model_config_limit)
    except ValueError as error:
        raise UsageError(f"--model-config-limit {error}") from error
    with session(
        options.repository, options.backend_directory, verbose=options.verbose, quiet=True
    ) as runtime:
        runtime.registry.rules = HostingRules(
            options.sandbox, grants=frozenset(options.sandbox_grants), limits=limits
        )
        for name in names:
            for finding in findings(runtime, repository, name, options.allow_missing):
                counts[finding.level] += 1
                level, rest = str(finding).split(":", 1)
                terminal.line(f"{terminal.paint(level, _STYLES[level])}:{rest}")
    if not names:
        counts["warning"] += 1
        terminal.line(str(Finding("warning", "", _shown(repository.path), "there are no models")))
    return 1 if counts["error"] or (options.strict and counts["warning"]) else 0


def findings(
    runtime: Runtime, repository: ModelRepository, name: str, allow_missing: bool
) -> Iterator[Finding]:
    """What there is to say about a model: its warnings, then that it is ok, or the first error."""
    try:
        directory = repository.find(name)
        yield from _configuration(directory, runtime.registry.rules)
        yield from _closed(directory, runtime.registry.rules)
        begin_s = time.monotonic()
        runtime.load(name)
        took_s = time.monotonic() - begin_s
        instances = len(runtime.instances(name))
        versions = ", ".join(map(str, runtime.models()[name]))
        runtime.unload(name)
    except (MoonpoolError, OSError) as error:
        level = "warning" if allow_missing and _is_missing(error) else "error"
        limits = runtime.registry.rules.limits
        yield _as_finding(level, name, repository.path / name, error, limits)
    else:
        plural = "" if instances == 1 else "s"
        what = f"version {versions}, {instances} instance{plural}, loaded in {took_s:.1f} s"
        yield Finding("ok", name, "", what)


def _configuration(directory: ModelDirectory, rules: HostingRules) -> Iterator[Finding]:
    raw, source = directory.read_config(rules.limits)
    config = ModelConfig.from_dict(raw, source=source, partial=True)
    for field in unused_fields(config.raw):
        place = _shown(source.file, source.line(field)) if source.file else ""
        yield Finding("warning", directory.name, place, f"{field}: has no effect in moonpool yet")
    for ignored in directory.ignored():
        what = "is no version: versions are numbers above 0 without leading zeros"
        yield Finding("warning", directory.name, _shown(directory.path / ignored), what)


def _closed(directory: ModelDirectory, rules: HostingRules) -> Iterator[Finding]:
    """What instances could not read because they are users of their own, where root starts them."""
    raw, source = directory.read_config(rules.limits)
    config = ModelConfig.from_dict(raw, source=source, partial=True)
    level = rules.level_of(config, ModelOptions.from_parameters(config))
    if os.geteuid() != 0 or not is_contained(level):
        return
    closed = list(closed_files(directory.path))
    for path in closed[:_MOST_CLOSED]:
        what = f"is closed to the users that instances are in the sandbox '{level}': chmod -R o+rX"
        yield Finding("warning", directory.name, _shown(path), what)
    if len(closed) > _MOST_CLOSED:
        what = f"{len(closed) - _MOST_CLOSED} more files are closed"
        yield Finding("warning", directory.name, _shown(directory.path), what)


def _is_missing(error: Exception) -> bool:
    """Whether the model may well be right, on another machine."""
    text = str(error)
    if isinstance(error, BadEnvironment):
        return text.startswith("Failed to get the canonical path")
    return isinstance(error, LoadFailed) and text.startswith("ModuleNotFoundError: ")


def _as_finding(
    level: str, name: str, folder: Path, error: Exception, limits: ConfigLimits
) -> Finding:
    text = str(error) or type(error).__name__
    if isinstance(error, ConfigError) and error.file is not None:
        place = ":".join(str(part) for part in (error.file, error.line) if part is not None)
        return Finding(
            level, name, _shown(error.file, error.line), _joined(text.removeprefix(f"{place}: "))
        )
    if isinstance(error, BadEnvironment):
        return Finding(level, name, _environment_line(folder, limits), _joined(text))
    # The innermost place in the model's own files; below that it is somebody else's code.
    places = [
        (within, line) for file, line in _PLACE.findall(text) if (within := _within(file, folder))
    ]
    what = _joined(text.split("\n\nAt:\n")[0])
    if not places:
        return Finding(level, name, _shown(folder), what)
    file, line = places[-1]
    if not line and (match := _SYNTAX_ERROR_LINE.search(what)):
        line = match[1]
    return Finding(level, name, _shown(file, int(line) if line else None), what)


def _within(file: str, folder: Path) -> Path | None:
    """A file of the folder by the folder's own name, as Python may tell where it really is."""
    for parent in (folder, folder.resolve()):
        if Path(file).is_relative_to(parent):
            return folder / Path(file).relative_to(parent)
    return None


def _environment_line(folder: Path, limits: ConfigLimits) -> str:
    _, source = ModelDirectory(folder).read_config(limits)
    line = source.line("parameters[EXECUTION_ENV_PATH]")
    return _shown(source.file or folder, line)


def _shown(path: str | os.PathLike[str], line: int | None = None) -> str:
    """A path as it is shortest to type from here, with its line."""
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute)
    shown = absolute if relative.startswith("..") else relative
    return shown if line is None else f"{shown}:{line}"


def _joined(text: str) -> str:
    """Several lines as one."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
