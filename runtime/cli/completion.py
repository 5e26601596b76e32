"""`moonpool completion`: prints the script that lets a shell complete commands. argcomplete does the work."""

from __future__ import annotations

import argparse
import os
from typing import Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.process.extras import how_to_install

HELP = "print a script that lets a shell complete commands, options and names of models"
DESCRIPTION = """\
Print a script that lets a shell complete moonpool's commands, their options and values, directories and the names of
models. It needs the package argcomplete.
"""
EXAMPLES = """\
examples:
  eval "$(moonpool completion bash)"                             # in ~/.bashrc; zsh likewise
  moonpool completion fish > ~/.config/fish/completions/moonpool.fish
"""
_SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=_SHELLS)


def run(options: argparse.Namespace) -> int:
    try:
        import argcomplete
    except ModuleNotFoundError as error:
        raise MoonpoolError(f"the package argcomplete is not installed: {how_to_install('completion')}") from error
    print(argcomplete.shellcode(["moonpool"], shell=options.shell))
    return 0


def are_wanted() -> bool:
    """Return true if a shell has started this process for completions."""
    return "_ARGCOMPLETE" in os.environ


def offer_completions(parser: argparse.ArgumentParser) -> None:
    """Print completions and end the process if a shell has started it for them; else do nothing."""
    if not are_wanted():
        return
    import argcomplete

    for action in _actions(parser):
        completer = _completer_of(action)
        if completer is not None:
            action.completer = completer  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the actions of a parser and of its commands."""
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                found += _actions(command)
    return found


def _completer_of(action: argparse.Action) -> Any:
    from argcomplete.completers import DirectoriesCompleter, FilesCompleter

    if action.metavar in ("MODEL", "NAME"):
        return _models
    if action.metavar in ("REPO", "DIR", "BACKENDS") or action.dest == "model-repository":
        return DirectoriesCompleter()
    return FilesCompleter() if action.metavar == "FILE" else None


def _models(parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """The names of the models in the repository that the line names so far."""
    from moonpool.runtime.repository.repository import ModelRepository

    # If REPO is optional, as with --url, the only word of an unfinished line is taken for MODEL.
    repository = getattr(parsed_args, "repository", None) or getattr(parsed_args, "model", None)
    try:
        return ModelRepository(repository).models() if repository else []
    except (MoonpoolError, OSError):
        return []
