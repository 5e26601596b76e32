"""JSON as Triton's HTTP frontend reads and writes it."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import orjson

from moonpool.ipc.errors import MoonpoolError

T = TypeVar("T", str, bool, int, dict[str, Any])
# What numbers may be in Triton's JSON, and in nobody else's.
_LITERALS = (b"NaN", b"Inf")
_BOM = b"\xef\xbb\xbf"


class NotJson(MoonpoolError):
    """The text is none, or not what it should be; Triton calls that an internal error."""


def _broken(what: str, at: int) -> NotJson:
    return NotJson(f"failed to parse the request JSON buffer: {what}. at {at}")


def loads(text: bytes | bytearray | memoryview) -> Any:
    """The value of a JSON text, which may have `NaN` and `Infinity` in it. Raises `NotJson`."""
    if not len(text):
        raise _broken("The document is empty", 0)
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


def dumps(value: Any) -> bytes:
    """The text of a value made of what `loads` gives. Numbers that JSON does not have are written as Triton does."""
    text = orjson.dumps(value)
    if b"null" in text:
        # What orjson makes of NaN and infinities; null itself comes from no tensor.
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return text


_KINDS: dict[type, str] = {
    str: "attempt to access JSON non-string as string",
    bool: "attempt to access JSON non-boolean as boolean",
    int: "attempt to access JSON non-unsigned-integer as unsigned-integer",
    dict: "attempt to get members for non-object",
}
_UINT64 = 2**64 - 1


def member(root: Any, name: str, kind: type[T]) -> T | None:
    """A member of an object, None where there is none. Raises `NotJson` where it is something else."""
    if not isinstance(root, dict) or name not in root:
        return None
    value: Any = root[name]
    if type(value) is not kind or (type(value) is int and not 0 <= value <= _UINT64):
        raise NotJson(_KINDS[kind])
    found: T = value
    return found
