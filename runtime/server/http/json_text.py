"""JSON as Triton's HTTP frontend reads and writes it."""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import Any, TypeVar

import orjson

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import InvalidRequest

T = TypeVar("T", str, bool, int, dict[str, Any])
UINT64 = 2**64 - 1
WRONG: dict[type, str] = {
    str: "attempt to access JSON non-string as string",
    bool: "attempt to access JSON non-boolean as boolean",
    int: "attempt to access JSON non-unsigned-integer as unsigned-integer",
    list: "attempt to access JSON non-array as array",
    dict: "attempt to get members for non-object",
}
"""Triton's texts for values that should be of these types. Whole numbers are unsigned."""
# Triton's JSON may have these numbers, and no other JSON has.
_LITERALS = (b"NaN", b"Inf")
_BOM = b"\xef\xbb\xbf"
# Each array and object becomes one of Python's, many times as large as its text.
_MOST_CONTAINERS = 1 << 20
# Reading one takes as long as reading a dozen numbers. Strings may hold any number of colons.
_MOST_MEMBERS = 1 << 20
_MEMBER = re.compile(rb'"[ \t\r\n]*:')
# Each takes some 60 bytes, however short it is.
_MOST_STRINGS = 1 << 22
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class NotJson(MoonpoolError):
    """The text is not JSON, or not the JSON that was expected. Triton calls that an internal error."""

    _fault = "caller"


class TooMuchJson(NotJson):
    """The JSON has more parts than are read."""

    http_status = 413


def too_much_json(size_bytes: int, most_bytes: int) -> str:
    """Return the error text for JSON over the limit."""
    return (
        f"JSON of {size_bytes} bytes exceeds the maximum of {most_bytes} bytes: use binary data, or have "
        "--http-max-json-bytes raised"
    )


def check_values(size_bytes: int, most_bytes: int) -> None:
    """Raise `InvalidRequest` if outputs have more bytes, or their text has, than may be sent as JSON."""
    if size_bytes > most_bytes:
        raise InvalidRequest(
            f"the outputs have more than {most_bytes} bytes, which is the most that is sent as JSON: ask for binary data, or "
            "raise --http-max-json-bytes on the server"
        )


def _broken(what: str, at: int) -> NotJson:
    return NotJson(f"failed to parse the request JSON buffer: {what}. at {at}")


def loads(text: bytes | bytearray | memoryview) -> Any:
    """Return the value of a JSON text, which may hold `NaN` and `Infinity`. Raises `NotJson`, `TooMuchJson`.

    The caller bounds the size of the text: the value takes several times as much memory.
    """
    if not len(text):
        raise _broken("The document is empty", 0)
    if len(text) > _MOST_CONTAINERS:
        text = bytes(text)
        if text.count(b"[") + text.count(b"{") > _MOST_CONTAINERS:
            raise TooMuchJson(
                f"the request JSON has more than {_MOST_CONTAINERS} arrays and objects: send flat arrays, or "
                "binary data"
            )
        if text.count(b":") > _MOST_MEMBERS and any(
            islice(_MEMBER.finditer(text), _MOST_MEMBERS, None)
        ):
            raise TooMuchJson(f"the request JSON has more than {_MOST_MEMBERS} members of objects")
        if text.count(b'"') > 2 * _MOST_STRINGS and any(
            islice(_STRING.finditer(text), _MOST_STRINGS, None)
        ):
            raise TooMuchJson(
                f"the request JSON has more than {_MOST_STRINGS} strings: send binary data"
            )
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raw = bytes(text)
        if raw.startswith(_BOM) or any(literal in raw for literal in _LITERALS):
            return _lenient(raw.removeprefix(_BOM))
        raise _broken("Invalid value", error.pos) from None


def _lenient(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode())
    except json.JSONDecodeError as error:
        raise _broken("Invalid value", error.pos) from None
    except UnicodeDecodeError as error:
        raise _broken("Invalid encoding in string", error.start) from None
    except RecursionError:
        raise _broken("The document is nested too deeply", 0) from None
    except ValueError:  # so many digits that Python does not read them
        raise _broken("Number too big to be stored in double", 0) from None


def repeated_key(text: bytes) -> str | None:
    """Return a key that stands twice in one object of a text that `loads` has read, else None.

    Raises `NotJson` for objects that are nested too deeply.
    """
    found: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        keys: set[str] = set()
        for key, _ in pairs:
            if key in keys:
                found.append(key)
            keys.add(key)

    try:
        # Numbers stay text, as nobody reads them here and some are too long for Python.
        json.loads(text.removeprefix(_BOM), object_pairs_hook=look, parse_int=str, parse_float=str)
    except RecursionError:
        raise _broken("The document is nested too deeply", 0) from None
    return found[0] if found else None


def dumps(value: Any) -> bytes:
    """Return the text of a value of the kinds that `loads` returns. NaN and infinities are written as Triton writes them."""
    text = orjson.dumps(value)
    if b"null" in text:
        # orjson writes NaN and infinities so. No tensor has a null itself.
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return text


def member(root: Any, name: str, kind: type[T]) -> T | None:
    """Return a member of an object, or None if it is missing. Raises `NotJson` if it is of another type."""
    if not isinstance(root, dict) or name not in root:
        return None
    value: Any = root[name]
    if type(value) is not kind or (type(value) is int and not 0 <= value <= UINT64):
        raise NotJson(WRONG[kind])
    found: T = value
    return found
