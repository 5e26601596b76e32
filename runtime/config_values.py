"""How the texts of options are read: durations, sizes, choices."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moonpool.ipc.policy import LEVELS

# Some 23 days: the kernel counts the milliseconds of a wait in 31 bits.
_LONGEST_S = 2_000_000
# Each range is taken apart into its numbers.
_MOST_RANGES = 1024


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
    if not value > 0:
        raise ValueError("must be a number of seconds above 0")
    if value > _LONGEST_S:
        raise ValueError(f"must be at most {_LONGEST_S} seconds")
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


def _choice(meanings: Mapping[str, object]) -> Callable[[str], object]:
    def read(text: str) -> object:
        if text not in meanings:
            raise ValueError("must be " + " or ".join(f'"{word}"' for word in meanings))
        return meanings[text]

    return read


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("must be the path of an environment or of a packed one")
    return text


def _paths(text: str) -> tuple[tuple[str, bool], ...]:
    """Paths, and whether they may be written to."""
    paths = []
    for part in _names(text):
        path = part.removeprefix("rw:").strip()
        if not path.startswith("/") or "\0" in path or os.path.normpath(path) != path:
            raise ValueError(
                "must be absolute paths without '..', with rw: before those to write to"
            )
        paths.append((path, part.startswith("rw:")))
    return tuple(paths)


def _ports(text: str) -> tuple[int, ...]:
    ports = _names(text)
    if not all(re.fullmatch(r"[0-9]{1,5}", port) and 0 < int(port) < 65536 for port in ports):
        raise ValueError("must be numbers of TCP ports, from 1 to 65535")
    return tuple(map(int, ports))


def _calls(text: str) -> tuple[str, ...]:
    if not all(re.fullmatch(r"[a-z0-9_]+", name) for name in _names(text)):
        raise ValueError("must be names of system calls, such as fork or memfd_create")
    return _names(text)


def _cpus(text: str) -> tuple[int, ...]:
    cpus: set[int] = set()
    parts = _names(text)
    if len(parts) > _MOST_RANGES:
        raise ValueError(f"must be at most {_MOST_RANGES} numbers and ranges of processors")
    for part in parts:
        match = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part)
        if match is None:
            raise ValueError("must be numbers of processors, such as 0-3,5")
        first, last = int(match[1]), int(match[2] or match[1])
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def _weight(text: str) -> int:
    weight = _number(1)(text)
    if weight > 10_000:
        raise ValueError("must be a weight from 1 to 10000")
    return weight


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


YES_NO = Kind("yes, no", _choice({"yes": True, "no": False}))
SANDBOX = Kind(", ".join(LEVELS), _choice({level: level for level in LEVELS}))
TIMEOUT = Kind("seconds, none", _or_none(_seconds))
SECONDS = Kind("seconds", _seconds)
PAUSE = Kind("seconds", _pause)
SIZE = Kind("size", parse_size)
LIMIT = Kind("size, none", _or_none(parse_size))
COUNT = Kind("number", _number(0))
THREADS = Kind("number, none", _or_none(_number(1)))
POSITIVE = Kind("number", _number(1))
PATH = Kind("path", _path)
NAMES = Kind("names, separated by commas", _names)
PATHS = Kind("paths, separated by commas", _paths)
PORTS = Kind("ports, separated by commas", _ports)
SYSCALLS = Kind("names, separated by commas", _calls)
CPUS = Kind("numbers and ranges", _cpus)
# What every process has unless somebody says otherwise: `cpu.weight` of cgroups, `nice` 0.
USUAL_WEIGHT = 100
WEIGHT = Kind("1 to 10000", _weight)
AS_NUMPY = Kind("error, copy", _choice({"error": False, "copy": True}))
PREFORK = Kind("no, imports, initialize", _choice({w: w for w in ("no", "imports", "initialize")}))
