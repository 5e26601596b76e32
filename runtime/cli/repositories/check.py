"""`moonpool check`: finds mistakes in the models of a repository before they are served."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.policy import is_contained
from moonpool.runtime.cli.shared import UsageError, add_repository, hosting_of, session
from moonpool.runtime.ensemble.drawing import drawn
from moonpool.runtime.errors import BadEnvironment, LoadFailed
from moonpool.runtime.hosting.registry import ModelRegistry
from moonpool.runtime.isolation.hints import closed_files
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.model import AS_CPU, ModelConfig, remarks
from moonpool.runtime.model.config.options import ModelOption
from moonpool.runtime.model.config.source import ConfigError, all_mistakes
from moonpool.runtime.model.config.templates import read_fill
from moonpool.runtime.process.terminal import Terminal, harmless
from moonpool.runtime.repository.cloud_address import is_address
from moonpool.runtime.repository.grants import Grants, as_argument, as_flag, asks, paste, quoted_name
from moonpool.runtime.repository.hub_model import as_text
from moonpool.runtime.repository.loading import HostingRules, Wanted, describe, place
from moonpool.runtime.repository.repository import ModelDirectory, suggesting
from moonpool.runtime.runtime import Runtime

HELP = "find mistakes in the models of a repository"
DESCRIPTION = """\
Check each model of a repository: read its configuration, import it in its own environment, start its
instances and end them again. All mistakes that the files of a model show are listed at once. Each finding is one line:

  LEVEL: MODEL: FILE:LINE: text      (LEVEL is ok, warning or error; step is a step of an ensemble, or a part of a
                                      model of the Hub)

Exits with 1 if there is an error, or with --strict a warning.
"""
EXAMPLES = """\
examples:
  moonpool check models
  moonpool check models add_sub normalise
  moonpool check models --as-cpu             # on a machine without GPUs
  moonpool check models --allow-missing      # on a machine that lacks GPUs, processors, environments or packages
  moonpool check models --fill max_batch_size=8 --fill dtype=FP32      # models that are templates
  moonpool check hf://owner/model --sandbox strict       # what it would like to do, before any of it runs
  moonpool check models --sandbox strict     # as `moonpool serve --sandbox strict` would load them, and what to grant
"""

# The most closed files of a model that are named.
_MOST_CLOSED = 5
_STYLES = {"ok": "green", "warning": "yellow", "error": "red", "step": "dim"}
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
    parser.add_argument("models", metavar="MODEL", nargs="*", default=[], help="check only these models; default all")
    parser.add_argument("--strict", action="store_true", help="exit with 1 on warnings, too")
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="make what this machine lacks a warning, not an error: an environment, a package, a GPU, a processor, "
        "a path",
    )
    parser.add_argument(
        "--as-cpu",
        action="store_true",
        help=f"check models as if their instances were for CPUs, as the option {AS_CPU}=yes of all models does",
    )
    parser.add_argument(
        "--fill",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="put a value into the places ${NAME}, {{NAME}} and so on of configurations that are templates; may be "
        "given many times",
    )
    parser.add_argument(
        "--model-config-limit",
        metavar="LIMIT=NUMBER",
        action="append",
        default=[],
        help="raise a limit of configurations, as the option of `moonpool serve` does; may be given many times",
    )


def run(options: argparse.Namespace) -> int:
    terminal = Terminal(sys.stdout)
    repository = options.repository
    counts = dict.fromkeys(_STYLES, 0)

    def report(finding: Finding) -> None:
        counts[finding.level] += 1
        level, rest = str(finding).split(":", 1)
        terminal.line(f"{terminal.paint(level, _STYLES[level])}:{rest}")

    limits = _read("--model-config-limit", ConfigLimits().raised, options.model_config_limit)
    fill = _read("--fill", read_fill, options.fill)
    with session(options.repository, hosting_of(options), verbose=options.verbose, quiet=True) as runtime:
        registry = runtime._models
        registry.rules = replace(registry.rules, limits=limits)
        registry.repositories.fill = fill
        found = registry.repositories.models()
        names = options.models or found
        for text in registry.rules.about_none_of(found):
            report(Finding("warning", "", _shown(repository), text))
        if options.as_cpu:
            registry.rules = _with(registry.rules, {AS_CPU: "yes"})
        for name in names:
            for finding in _Check(runtime, repository, name, options.allow_missing).findings():
                report(finding)
    if not names:
        report(Finding("warning", "", _shown(repository), "there are no models"))
    for key in fill.unused:
        what = f"no configuration has a place {key!r:.80} that --fill could fill in"
        report(Finding("warning", "", _shown(repository), what))
    return 1 if counts["error"] or (options.strict and counts["warning"]) else 0


_Value = TypeVar("_Value")


def _read(flag: str, read: Callable[[list[str]], _Value], texts: list[str]) -> _Value:
    try:
        return read(texts)
    except ValueError as error:
        raise UsageError(f"{flag} {error}") from error


def _with(rules: HostingRules, options: Mapping[str, str]) -> HostingRules:
    """Return the rules with these options for all models but those for which the operator has set them by name."""
    more = [ModelOption("*", key, value) for key, value in options.items()]
    return replace(rules, options=rules.options.also(more))


class _Check:
    """The check of one model: first of its files, then of a load."""

    def __init__(self, runtime: Runtime, repository: str, name: str, allow_missing: bool) -> None:
        self._runtime, self._registry, self._name = runtime, runtime._models, name
        self._allow_missing = allow_missing
        self._folder = Path(os.path.abspath(repository)) / name
        # Options with which the model does without what this machine lacks.
        self._without: dict[str, str] = {}

    def findings(self) -> Iterator[Finding]:
        """Yield all mistakes that the files show. If the model can be loaded, yield why a load fails, or `ok`."""
        rules = self._registry.rules
        yield from self._of_hub()
        found, can_load = self._of_files()
        yield from found
        try:
            while can_load:
                self._registry.rules = _with(rules, self._without)
                finding, can_load = self._of_load()
                if finding not in found:
                    yield finding
                found.append(finding)
        finally:
            self._registry.rules = rules

    def _of_hub(self) -> Iterator[Finding]:
        """Yield what a repository of the Hub is and would like to do, before any of it is copied."""
        try:
            model = self._registry.repositories.describe(self._name, self._registry.rules.said_of(Wanted(self._name)))
        except MoonpoolError:
            return  # which `_of_files` finds, too
        if model is None:
            return
        yield Finding("step", self._name, "", as_text(model))
        for file in model.files:
            yield Finding("step", self._name, "", f"{file.path}, {file.size_bytes:,} bytes")
        for line in model.config.splitlines():
            yield Finding("step", self._name, "", line)
        for text in model.remarks:
            yield Finding("warning", self._name, "", text)

    def _of_files(self) -> tuple[list[Finding], bool]:
        """Return what the files show, and True if the model can be loaded."""
        rules = self._registry.rules
        models: list[Model] = []
        found: list[Finding] = []
        try:
            with all_mistakes() as mistakes:
                with suggesting(self._name, lambda: self._registry.repositories.listing().names):
                    said = rules.said_of(Wanted(self._name))
                    directory = self._registry.repositories.find(self._name, said)
                self._folder = directory.path
                found += _configuration(directory, rules, mistakes)
                models += _with_all_granted(self._runtime, self._name)
                found += _closed(directory, models[0].options.sandbox)
                place(models, rules)
        except OSError as error:
            return [*found, self._as_finding(error)], False
        refused = list(_ungranted(rules, models)) if models else []
        found += [self._as_finding(each) for each in sorted(mistakes, key=_line)]
        ways = [_options_without(each) for each in mistakes]
        for options in ways:
            self._without |= options
        # Several mistakes may have the same way.
        return found + refused, all(ways) and not refused

    def _of_load(self) -> tuple[Finding, bool]:
        """Load the model.

        Return the finding, and True if there is a way to load it again without what this machine lacks.
        """
        runtime, name = self._runtime, self._name
        begin_s = time.monotonic()
        try:
            runtime.load(name)
            took_s = time.monotonic() - begin_s
            parts = _parts(runtime, name)
            versions = ", ".join(map(str, runtime.models()[name]))
            self._registry.unload(name, with_members=True)
        except (MoonpoolError, OSError) as error:
            return self._as_finding(error), self._can_do_without(error)
        what = f"version {versions}, {parts}, loaded in {took_s:.1f} s"
        without = " and ".join(f"{key}={value}" for key, value in self._without.items())
        return Finding("ok", name, "", f"{what} with {without}" if without else what), False

    def _can_do_without(self, error: Exception) -> bool:
        """Note the options with which the model does without what this machine lacks.

        Return True if some were not tried.
        """
        instead = _options_without(error)
        is_new = not instead.keys() <= self._without.keys()
        self._without |= instead
        return is_new

    def _as_finding(self, error: Exception) -> Finding:
        level = "warning" if self._allow_missing and _is_missing(error) else "error"
        return _as_finding(level, self._name, self._folder, error, self._registry)


def _line(error: Exception) -> tuple[bool, int]:
    """A key for sorting: mistakes in the order of their lines, then those without a line."""
    line = getattr(error, "line", None)
    return line is None, line or 0


def _parts(runtime: Runtime, name: str) -> str:
    """Count the instances of a model, or the steps of an ensemble."""
    ensemble = runtime.config(name).ensemble
    count, what = (len(runtime.instances(name)), "instance") if ensemble is None else (len(ensemble.steps), "step")
    return f"{count} {what}{'' if count == 1 else 's'}"


def _configuration(
    directory: ModelDirectory, rules: HostingRules, mistakes: Collection[Exception]
) -> Iterator[Finding]:
    raw, source = directory.read_config(rules.limits)
    config = ModelConfig.from_dict(raw, source=source, partial=True)
    if config.ensemble is not None:
        for line in drawn(config.ensemble):
            yield Finding("step", directory.name, "", line)
    wrong = {re.sub(r"\[\d+\]", "", getattr(each, "field", "")) for each in mistakes}
    for field, what in remarks(config.raw):
        if field in wrong:
            continue
        place = _shown(source.file, source.line(field)) if source.file else ""
        yield Finding("warning", directory.name, place, f"{field}: {what}")
    for ignored in directory.ignored():
        what = "is no version: versions are numbers without leading zeros"
        yield Finding("warning", directory.name, _shown(directory.path / ignored), what)


def _with_all_granted(runtime: Runtime, name: str) -> list[Model]:
    """Return the versions of a model as a load makes them, with whatever they ask for."""
    registry = runtime._models
    free = replace(registry.rules, grants=Grants([quoted_name(name)]))
    prepared = describe(Wanted(name), registry.repositories, registry.backends.locate, free)
    prepared.discard()
    return prepared.models


def _ungranted(rules: HostingRules, models: list[Model]) -> Iterator[Finding]:
    """List everything that a model asks for and is not granted, then the option that grants all of it."""
    name = models[0].name
    said = rules.said_of(Wanted(name))
    if not is_contained(rules.floor_of(said) or "off") or name in rules.grants.whole:
        return
    # The versions have one configuration; their links are their own.
    found = list(dict.fromkeys(ask for model in models for ask in asks(model, said)))
    refused = [ask for ask in found if not rules.grants.covers(name, ask)]
    source = models[0].config.source
    for ask in refused:
        place = _shown(source.file, source.line(ask.field)) if source.file else ""
        what = f"asks for {ask.what}, beyond its sandbox"
        yield Finding("error", name, place, what)
    if not refused:
        return
    if all(ask.is_pastable for ask in found):
        grant, what = paste(name, found), "to grant this and no more"
    else:
        grant, what = quoted_name(name), "to grant whatever its configuration says, now and later"
    advice = f"{what}: {as_flag(grant)}; in Python: {as_argument(grant)}"
    yield Finding("error", name, "", advice)


def _closed(directory: ModelDirectory, level: str) -> Iterator[Finding]:
    """Yield files that instances could not read. If root starts them, they are users of their own."""
    if os.geteuid() != 0 or not is_contained(level):
        return
    closed = list(closed_files(directory.path))
    for path in closed[:_MOST_CLOSED]:
        what = f"is closed to the users that instances are in the sandbox '{level}': chmod -R o+rX"
        yield Finding("warning", directory.name, _shown(path), what)
    if len(closed) > _MOST_CLOSED:
        what = f"{len(closed) - _MOST_CLOSED} more files are closed"
        yield Finding("warning", directory.name, _shown(directory.path), what)


def _options_without(error: Exception) -> dict[str, str]:
    """Return the options with which a model does without what this machine lacks; none if there is no way."""
    return getattr(error, "instead", None) or {}


def _is_missing(error: Exception) -> bool:
    """Return True if the model may be right on another machine."""
    if isinstance(error, LoadFailed) and str(error).startswith("ModuleNotFoundError: "):
        return True
    return isinstance(error, MoonpoolError) and error.instead is not None


def _as_finding(level: str, name: str, folder: Path, error: Exception, registry: ModelRegistry) -> Finding:
    text = str(error) or type(error).__name__
    if isinstance(error, ConfigError) and error.file is not None:
        place = ":".join(str(part) for part in (error.file, error.line) if part is not None)
        return Finding(level, name, _shown(error.file, error.line), _joined(text.removeprefix(f"{place}: ")))
    if isinstance(error, BadEnvironment):
        return Finding(level, name, _environment_line(registry, name), _joined(text))
    # The innermost place in the model's own files. Deeper places are in libraries.
    places = [(within, line) for file, line in _PLACE.findall(text) if (within := _within(file, folder))]
    what = _joined(text.split("\n\nAt:\n")[0])
    if not places:
        return Finding(level, name, _shown(folder), what)
    file, line = places[-1]
    if not line and (match := _SYNTAX_ERROR_LINE.search(what)):
        line = match[1]
    return Finding(level, name, _shown(file, int(line) if line else None), what)


def _within(file: str, folder: Path) -> Path | None:
    """Return the path of a file in the folder. Python may have resolved the folder's links."""
    for parent in (folder, folder.resolve()):
        if Path(file).is_relative_to(parent):
            return folder / Path(file).relative_to(parent)
    return None


def _environment_line(registry: ModelRegistry, name: str) -> str:
    directory = registry.repositories.find(name)
    _, source = directory.read_config(registry.rules.limits)
    line = source.line("parameters[EXECUTION_ENV_PATH]")
    return _shown(source.file or directory.path, line)


def _shown(path: str | os.PathLike[str], line: int | None = None) -> str:
    """Return the shorter of relative and absolute path, with the line. An address stays as it is."""
    if is_address(path):
        return str(path)
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute)
    shown = absolute if relative.startswith("..") else relative
    return shown if line is None else f"{shown}:{line}"


def _joined(text: str) -> str:
    """Join lines into one."""
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
