"""Options of a server from the command line, the environment and a TOML file, read the same way."""

from __future__ import annotations

import argparse
import os
import tomllib
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.config_shape import suggestion
from moonpool.runtime.server.option_table import (
    KNOWN,
    OPTIONS,
    PREFIX,
    REFUSED,
    SYNONYMS,
    WITHOUT_EFFECT,
    shown,
)
from moonpool.runtime.server.options import ServerOptions

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from moonpool.runtime.server.option_table import Option

CONFIG = "config"
CONFIG_VARIABLE = PREFIX + "CONFIG"
_SEPARATOR = ";"
_FLAGS = (*KNOWN, *SYNONYMS)
# Behind the prefix, with the flag of each.
_VARIABLES = {flag.upper().replace("-", "_"): flag for flag in _FLAGS}


class BadOption(MoonpoolError):
    """An option that is not known, or has a value that cannot be; says where it stands."""

    code = "INVALID_ARG"


def read_options(
    arguments: Mapping[str, list[str]], environment: Mapping[str, str]
) -> tuple[ServerOptions, dict[str, str]]:
    """The options, and the flags that were set but have no effect, with the reason for each.

    `arguments` are the texts of the command line by flag. Raises `BadOption`, also for a file that cannot be read.
    """
    values: dict[str, object] = {}
    ignored: dict[str, str] = {}
    path = (arguments.get(CONFIG) or [environment.get(CONFIG_VARIABLE, "")])[-1]
    said: dict[str, tuple[str, list[str]]] = {}
    # The last that says something counts.
    for flag, place, texts in (
        *_of_file(path),
        *_of_environment(environment),
        *((flag, f"--{flag}", texts) for flag, texts in arguments.items() if flag != CONFIG),
    ):
        said[SYNONYMS.get(flag, flag)] = place, texts
    for flag, (place, texts) in said.items():
        option = KNOWN[flag]
        value = _value(option, place, texts)
        if flag in OPTIONS:
            values[option.attribute] = value
        elif flag in WITHOUT_EFFECT:
            ignored[flag] = option.meaning
        elif value:
            raise BadOption(f"{place} cannot be {texts[-1]}: {REFUSED[flag].meaning}")
    return ServerOptions(**values), ignored  # type: ignore[arg-type]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every option as an argument whose texts are left as they are, for `given`."""
    groups: dict[str, Any] = {}
    defaults = {field.name: field.default for field in fields(ServerOptions)}
    for option in OPTIONS.values():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        default = shown(defaults[option.attribute])
        _add(groups[option.group], option, f"{option.meaning} Default: {default}.")
    # Listed in the page on options, where it is said why they do nothing.
    for option in (*WITHOUT_EFFECT.values(), *REFUSED.values()):
        _add(parser, option, None)
    for old in SYNONYMS:
        parser.add_argument(f"--{old}", dest=old, action="append", help=argparse.SUPPRESS)


def _add(group: argparse._ActionsContainer, option: Option, meaning: str | None) -> None:
    title = option.kind.title.replace("\\|", "|")
    extra: dict[str, Any] = (
        {"metavar": title if "|" in title else title.upper(), "action": "append"}
        if option.needs_value
        else {"const": "true", "action": "append_const"}
    )
    told = argparse.SUPPRESS if meaning is None else meaning.replace("%", "%%")
    group.add_argument(f"--{option.flag}", dest=option.flag, help=told, **extra)


def given(namespace: argparse.Namespace) -> dict[str, list[str]]:
    """The texts of all flags that stand on the command line."""
    flags = {*_FLAGS, CONFIG}
    return {flag: texts for flag, texts in vars(namespace).items() if flag in flags and texts}


def _value(option: Option, place: str, texts: list[str]) -> object:
    try:
        values = [option.kind.read(text) for text in texts]
    except ValueError as error:
        wrong = next(text for text in texts if _is_wrong(option, text))
        raise BadOption(f"{place}: {error}, not {wrong!r:.80}") from None
    return tuple(values) if option.is_many else values[-1]


def _is_wrong(option: Option, text: str) -> bool:
    try:
        option.kind.read(text)
    except ValueError:
        return True
    return False


def _check_known(name: str, place: str, known: Collection[str]) -> None:
    if name not in known:
        raise BadOption(f"{place}: there is no such option{suggestion(name, known)}")


def _of_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, str, list[str]]]:
    for name in sorted(environment):
        if name.startswith(PREFIX) and name != CONFIG_VARIABLE:
            word = name.removeprefix(PREFIX).upper()
            _check_known(word, name, _VARIABLES)
            flag, text = _VARIABLES[word], environment[name]
            option = KNOWN[SYNONYMS.get(flag, flag)]
            yield flag, name, text.split(_SEPARATOR) if option.is_many else [text]


def _of_file(path: str) -> Iterator[tuple[str, str, list[str]]]:
    if not path:
        return
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise BadOption(f"{path}: {os.strerror(error.errno or 0)}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadOption(f"{path}: {error}") from error
    for name, value in table.items():
        place = f"{path}: {name}"
        flag = name.replace("_", "-")
        _check_known(flag, place, _FLAGS)
        option = KNOWN[SYNONYMS.get(flag, flag)]
        if isinstance(value, list) and option.is_many:
            yield flag, place, [_text(each, place) for each in value]
        else:
            yield flag, place, [_text(value, place)]


def _text(value: object, place: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise BadOption(f"{place}: must be a text, a number, true or false")
