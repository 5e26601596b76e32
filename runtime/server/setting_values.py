"""Checks the values of settings that clients send, with Triton's error texts."""

from __future__ import annotations

from moonpool.ipc.errors import MoonpoolError

_UINT32 = 2**32 - 1


class BadSetting(MoonpoolError):
    """A value that a setting cannot have. `code` is the one that Triton gives."""

    def __init__(self, message: str, code: str = "INVALID_ARG") -> None:
        super().__init__(message)
        self.code = code


def text(value: object) -> str:
    """Return a JSON string."""
    if not isinstance(value, str):
        raise BadSetting("attempt to access JSON non-string as string", "INTERNAL")
    return value


def texts(value: object) -> list[str]:
    """Return a JSON array of strings."""
    if not isinstance(value, list):
        raise BadSetting("attempt to access JSON non-array as array", "INTERNAL")
    return [text(each) for each in value]


def boolean(value: object) -> bool:
    """Return a JSON true or false."""
    if not isinstance(value, bool):
        raise BadSetting("attempt to access JSON non-boolean as boolean", "INTERNAL")
    return value


def unsigned(value: object) -> int:
    """Return a JSON number that is whole and not negative."""
    if type(value) is not int or value < 0:
        raise BadSetting("attempt to access JSON non-unsigned-integer as unsigned-integer", "INTERNAL")
    return value


def number(name: str, value: str, low: int = 0) -> int:
    """Parse a number from `low` to 2^32 - 1."""
    try:
        parsed = int(value)
    except ValueError:
        raise BadSetting(f"Unable to parse '{name}', got: {value:.80}") from None
    if low < 0 and parsed < low:
        raise BadSetting(f"Unable to parse '{name}'. Expecting value >= {low}, got: {value:.80}")
    if not low <= parsed <= _UINT32:
        raise BadSetting(f"Unable to parse '{name}', value is out of range [ {low}, {_UINT32} ], got: {value:.80}")
    return parsed
