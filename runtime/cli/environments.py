"""`moonpool env`: lists, builds and removes the environments of models that moonpool keeps."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.policy import is_contained
from moonpool.runtime.cli.shared import UsageError, add_hosting, hosting_of, session, table
from moonpool.runtime.process.files import parsed_json, read_file
from moonpool.runtime.process.terminal import Terminal, harmless
from moonpool.runtime.repository.environment import EnvironmentCache, resolve
from moonpool.runtime.repository.environment_builder import NOTE
from moonpool.runtime.repository.folder_cache import CachedFolder
from moonpool.runtime.repository.grants import Grants, quoted_name
from moonpool.runtime.repository.loading import Wanted, prepare
from moonpool.runtime.runtime import Runtime

HELP = "list, build or remove the environments of models"
DESCRIPTION = """\
moonpool keeps environments that came packed or as a list of packages (EXECUTION_ENV_PATH in a model's
configuration), one for each content. docs/ENVIRONMENTS.md has the rest.

  list     show the environments, their sizes, and when each was used last
  build    unpack or build those of the models of REPO, as their loads would do; exits with 1 if one fails.
           Give it the options for hosting that the server gets: contained models have environments of wheels
  prune    remove those that no runtime uses now
"""
EXAMPLES = """\
examples:
  moonpool env list
  moonpool env build models
  moonpool env build models add_sub
  moonpool env build models --sandbox=strict
  moonpool env prune --older-than 30
"""
_DAY_S = 86_400.0
_MOST_NOTE_BYTES = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="ACTION", choices=("list", "build", "prune"), help="list, build or prune")
    parser.add_argument("repository", metavar="REPO", nargs="?", help="with build: the directory of the models")
    parser.add_argument(
        "models", metavar="MODEL", nargs="*", default=[], help="with build: only these models; default all"
    )
    parser.add_argument(
        "--older-than",
        metavar="DAYS",
        type=float,
        default=0.0,
        help="with prune: only those that were not used for so long; default %(default)s",
    )
    add_hosting(parser)


def run(options: argparse.Namespace) -> int:
    if (options.action == "build") != (options.repository is not None):
        raise UsageError("REPO is for build, which needs it")
    terminal = Terminal(sys.stdout)
    cache = EnvironmentCache(shows_progress=sys.stderr.isatty())
    if options.action == "build":
        return _build(options, cache, terminal)
    if options.action == "prune":
        for path in cache.remove_unused(options.older_than * _DAY_S):
            terminal.line(f"removed {path}")
        return 0
    rows = [_row(folder) for folder in cache.folders()]
    for line in table([("size", "last use", "folder", "of"), *rows], align="><<<") if rows else ():
        terminal.line(line)
    return 0


def _row(folder: CachedFolder) -> tuple[str, str, str, str]:
    size_mb = sum(_size(Path(root, name)) for root, _, names in os.walk(folder.path) for name in names)
    ago_s = max(0.0, time.time() - folder.used_s)
    used = "now" if folder.is_used else f"{ago_s / _DAY_S:.1f} days ago"
    return f"{size_mb / 1e6:.0f} MB", used, str(folder.path), harmless(_origin(folder.path))


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        # It may be removed at any time.
        return 0


def _origin(folder: Path) -> str:
    """Return the list of packages that an environment was built from. Who may write into it may write anything
    there.
    """
    try:
        note = parsed_json(read_file(folder / NOTE, _MOST_NOTE_BYTES))
        return str(note["list"])
    except (OSError, ValueError, KeyError, TypeError):
        return "an archive"


def _build(options: argparse.Namespace, cache: EnvironmentCache, terminal: Terminal) -> int:
    is_well = True
    with session(options.repository, hosting_of(options), verbose=options.verbose) as runtime:
        for name in options.models or runtime._models.repositories.models():
            begin_s = time.monotonic()
            try:
                for path in _built(runtime, name, cache):
                    took_s = time.monotonic() - begin_s
                    terminal.line(harmless(f"{name}: {path} ({took_s:.1f} s)"))
            except (MoonpoolError, OSError) as error:
                is_well = False
                terminal.line(f"{name}: {terminal.paint('error', 'red')}: {harmless(str(error))}")
    return 0 if is_well else 1


def _built(runtime: Runtime, name: str, cache: EnvironmentCache) -> Iterator[Path]:
    """Make the environments of a model's versions, and yield the roots of those that are not moonpool's own."""
    registry = runtime._models
    free = replace(registry.rules, grants=Grants([quoted_name(name)]))
    prepared = prepare(Wanted(name), registry.repositories, registry.backends.locate, free)
    try:
        for model in prepared.models:
            is_confined = is_contained(model.options.sandbox)
            path, folder = model.options.execution_env_path, model.source.model_directory
            environment = resolve(path, folder, cache=cache, only_wheels=is_confined)
            environment.release()
            if environment.root is not None:
                yield environment.root
    finally:
        prepared.discard()
