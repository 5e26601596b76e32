"""Reads the options of a server from the command line, the environment and a TOML file, all in the same way."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from typing import Any, cast

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.model.config.options import ModelOption
from moonpool.runtime.model.config.schema import suggestion, unread
from moonpool.runtime.server.options.table import (
    KNOWN,
    OPTIONS,
    PREFIX,
    REFUSED,
    SYNONYMS,
    WITHOUT_EFFECT,
    ServerOption,
    ServerOptions,
    shown,
)

CONFIG = "config"
CONFIG_VARIABLE = PREFIX + "CONFIG"
_SEPARATOR = ";"
# The option that sets options of models, and the table with the same options in the file.
_OF_MODELS, _TABLE_OF_MODELS = "model-option", "models"
_FLAGS = (*KNOWN, *SYNONYMS)
# The names of variables after the prefix, with their flags.
_VARIABLES = {flag.upper().replace("-", "_"): flag for flag in _FLAGS}


class BadOption(MoonpoolError):
    """An unknown option, or a value that it cannot have. The text says where it stands."""

    code = "INVALID_ARG"


def read_options(
    arguments: Mapping[str, list[str]], environment: Mapping[str, str]
) -> tuple[ServerOptions, dict[str, str]]:
    """Return the options, and the reasons why some flags that were set have no effect.

    `arguments` are the texts of the command line by flag. Raises `BadOption`, also for a file that cannot be read.
    """
    values: dict[str, object] = {}
    ignored: dict[str, str] = {}
    path = (arguments.get(CONFIG) or [environment.get(CONFIG_VARIABLE, "")])[-1]
    said: dict[str, tuple[str, list[str]]] = {}
    by_model: list[ModelOption] = []
    # A later place replaces an earlier one.
    for flag, place, texts in (
        *_of_file(path),
        *_of_environment(environment),
        *((flag, f"--{flag}", texts) for flag, texts in arguments.items() if flag != CONFIG),
    ):
        flag = SYNONYMS.get(flag, flag)
        if flag == _OF_MODELS:
            # Each option of each model stands for itself: the last place that sets it counts.
            by_model += cast("tuple[ModelOption, ...]", _value(KNOWN[flag], place, texts))
        else:
            said[flag] = place, texts
    for flag, (place, texts) in said.items():
        option = KNOWN[flag]
        value = _value(option, place, texts)
        if flag in OPTIONS:
            values[option.attribute] = value
        elif flag in WITHOUT_EFFECT:
            ignored[flag] = option.meaning
        elif value:
            raise BadOption(f"{place} cannot be {texts[-1]}: {REFUSED[flag].meaning}")
    return ServerOptions(**values, model_option=tuple(by_model)), ignored  # type: ignore[arg-type]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every option to a parser, as an argument whose texts `given` returns unread."""
    groups: dict[str, Any] = {}
    defaults = {field.name: field.default for field in fields(ServerOptions)}
    for option in OPTIONS.values():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        default = shown(defaults[option.attribute])
        _add(groups[option.group], option, f"{option.meaning} Default: {default}.")
    # The page on options lists these, and says why they have no effect.
    for option in (*WITHOUT_EFFECT.values(), *REFUSED.values()):
        _add(parser, option, None)
    for old in SYNONYMS:
        parser.add_argument(f"--{old}", dest=old, action="append", help=argparse.SUPPRESS)


def _add(group: argparse._ActionsContainer, option: ServerOption, meaning: str | None) -> None:
    title = option.kind.title.replace("\\|", "|")
    extra: dict[str, Any] = (
        {"metavar": title if "|" in title else title.upper(), "action": "append"}
        if option.needs_value
        else {"const": "true", "action": "append_const"}
    )
    if len(words := title.split()) > 1:
        extra |= {"nargs": len(words), "metavar": tuple(words)}
    help_text = argparse.SUPPRESS if meaning is None else meaning.replace("%", "%%")
    group.add_argument(f"--{option.flag}", dest=option.flag, help=help_text, **extra)


def given(namespace: argparse.Namespace) -> dict[str, list[str]]:
    """Return the texts of all flags that were given on the command line. Several words are one text."""
    flags = {*_FLAGS, CONFIG}
    found = {flag: texts for flag, texts in vars(namespace).items() if flag in flags and texts}
    return {flag: [_joined(each) for each in texts] for flag, texts in found.items()}


def _joined(words: str | list[str]) -> str:
    return words if isinstance(words, str) else " ".join(words)


def _value(option: ServerOption, place: str, texts: list[str]) -> object:
    try:
        values = [option.kind.read(text) for text in texts]
    except ValueError as error:
        wrong = next(text for text in texts if _is_wrong(option, text))
        raise BadOption(f"{place}: {unread(error, wrong)}") from None
    return tuple(values) if option.is_many else values[-1]


def _is_wrong(option: ServerOption, text: str) -> bool:
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
        if name == _TABLE_OF_MODELS:
            yield from _of_models(value, place)
            continue
        flag = name.replace("_", "-")
        _check_known(flag, place, (*_FLAGS, _TABLE_OF_MODELS))
        option = KNOWN[SYNONYMS.get(flag, flag)]
        if isinstance(value, list) and option.is_many:
            yield flag, place, [_text(each, place) for each in value]
        else:
            yield flag, place, [_text(value, place)]


def _of_models(table: object, place: str) -> Iterator[tuple[str, str, list[str]]]:
    """Read the tables `[models.NAME]` as texts of `--model-option`."""
    if not isinstance(table, dict):
        raise BadOption(f"{place}: must be tables such as [{_TABLE_OF_MODELS}.NAME]")
    for pattern, options in table.items():
        here = f"{place}.{pattern}"
        if not isinstance(options, dict):
            raise BadOption(f"{here}: must be a table of options, [{_TABLE_OF_MODELS}.{pattern}]")
        for key, value in options.items():
            inner = f"{here}.{key}"
            if isinstance(value, dict):
                dotted = f'a name with a dot needs quotes, as in [{_TABLE_OF_MODELS}."{pattern}.{key}"]'
                raise BadOption(f"{inner}: must be an option and no table; {dotted}")
            if isinstance(value, list):
                raise BadOption(f"{inner}: must be a text, with commas between several values")
            yield _OF_MODELS, inner, [f"{pattern}:{key}={_text(value, inner)}"]


def _text(value: object, place: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise BadOption(f"{place}: must be a text, a number, true or false")
