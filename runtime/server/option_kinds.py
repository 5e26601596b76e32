"""How the texts of a server's options are read."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from moonpool.ipc.policy import LEVELS
from moonpool.runtime.config_values import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

_TRUE, _FALSE = ("true", "1", "on"), ("false", "0", "off")


def _boolean(text: str) -> bool:
    lower = text.lower()
    if lower not in _TRUE + _FALSE:
        raise ValueError("must be true or false")
    return lower in _TRUE


def _whole(
    most: float = math.inf, what: str = "a whole number from 0 on", least: int = 0
) -> Callable[[str], int]:
    def read(text: str) -> int:
        is_number = text.isascii() and text.isdigit() and len(text) < 20
        if not (is_number and least <= int(text) <= most):
            raise ValueError(f"must be {what}")
        return int(text)

    return read


def _signed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError("must be a number above 0")
    return value


def _text(text: str) -> str:
    if "\0" in text:
        raise ValueError("must have no NUL character")
    return text


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"must be a regular expression ({error})") from None
    return text


def _choice(*words: str) -> Kind:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be {', '.join(words[:-1])} or {words[-1]}")
        return text

    return Kind("\\|".join(words), read)


# A switch is a boolean that needs no value on the command line.
KINDS = {
    "text": Kind("text", _text),
    "regex": Kind("pattern", _regex),
    "path": Kind("path", _text),
    "boolean": Kind("true\\|false", _boolean),
    "switch": Kind("", _boolean),
    "whole": Kind("number", _whole()),
    "positive": Kind("number", _whole(what="a whole number from 1 on", least=1)),
    "signed": Kind("number", _signed),
    "port": Kind("port", _whole(65535, "a port: a number from 0 (any that is free) to 65535")),
    "number": Kind("number", _number),
    "mode": _choice("none", "poll", "explicit"),
    "log_format": _choice("default", "ISO8601", "json"),
    "level": _choice("none", "low", "medium", "high"),
    "sandbox": _choice(*LEVELS),
}
