"""How the texts of options are read: durations, sizes, choices."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """How the text of an option is read; `read` raises ValueError saying what it must be."""

    title: str
    read: Callable[[str], object]


def parse_size(text: str) -> int:
    """Bytes: a number above 0 with an optional K, M, G or T (powers of 1024)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise ValueError("must be a number of bytes, such as 1048576, 512K, 64M or 2G")
    number, suffix = match.groups()
    factor = 1 << (10 * " KMGT".index(suffix.upper() or " "))
    # Whole numbers stay whole, however large.
    size = int(number) * factor if number.isdigit() else int(float(number) * factor)
    if not 0 < size < 1 << 63:
        raise ValueError("must be a number of bytes above 0 and below 2^63")
    return size


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError("must be a number of seconds above 0")
    return value


def _pause(text: str) -> float:
    return 0.0 if re.fullmatch(r"0+(\.0*)?", text) else _seconds(text)


def _number(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
            raise ValueError(f"must be a whole number from {least} up")
        return int(text)

    return read


def _or_none(read: Callable[[str], object]) -> Callable[[str], object]:
    def read_or_none(text: str) -> object:
        if text.lower() == "none":
            return None
        try:
            return read(text)
        except ValueError as error:
            raise ValueError(f'{error}, or "none"') from None

    return read_or_none


def _choice(**meanings: object) -> Callable[[str], object]:
    def read(text: str) -> object:
        if text not in meanings:
            raise ValueError("must be " + " or ".join(f'"{word}"' for word in meanings))
        return meanings[text]

    return read


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("must be the path of an environment or of a packed one")
    return text


YES_NO = Kind("yes, no", _choice(yes=True, no=False))
# From the loosest to the tightest.
SANDBOX_LEVELS = ("off", "standard", "strict")
SANDBOX = Kind(", ".join(SANDBOX_LEVELS), _choice(**{level: level for level in SANDBOX_LEVELS}))
TIMEOUT = Kind("seconds, none", _or_none(_seconds))
SECONDS = Kind("seconds", _seconds)
PAUSE = Kind("seconds", _pause)
SIZE = Kind("size", parse_size)
LIMIT = Kind("size, none", _or_none(parse_size))
COUNT = Kind("number", _number(0))
THREADS = Kind("number, none", _or_none(_number(1)))
POSITIVE = Kind("number", _number(1))
PATH = Kind("path", _path)
NAMES = Kind(
    "names, separated by commas",
    lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
)
