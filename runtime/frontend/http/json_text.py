"""JSON as Triton's HTTP frontend reads and writes it."""

from __future__ import annotations

import json
from typing import Any

import orjson

from moonpool.ipc.errors import MoonpoolError

# What numbers may be in Triton's JSON, and in nobody else's.
_LITERALS = (b"NaN", b"Inf")
_BOM = b"\xef\xbb\xbf"


class NotJson(MoonpoolError):
    """The text is none; Triton calls that an internal error."""

    def __init__(self, what: str, at: int) -> None:
        super().__init__(f"failed to parse the request JSON buffer: {what}. at {at}")


def loads(text: bytes | bytearray | memoryview) -> Any:
    """The value of a JSON text, which may have `NaN` and `Infinity` in it. Raises `NotJson`."""
    if not len(text):
        raise NotJson("The document is empty", 0)
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raw = bytes(text)
        if raw.startswith(_BOM) or any(literal in raw for literal in _LITERALS):
            return _lenient(raw.removeprefix(_BOM))
        raise NotJson("Invalid value", error.pos) from None


def _lenient(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode())
    except json.JSONDecodeError as error:
        raise NotJson("Invalid value", error.pos) from None
    except UnicodeDecodeError as error:
        raise NotJson("Invalid encoding in string", error.start) from None
    except RecursionError:
        raise NotJson("The document is nested too deeply", 0) from None


def dumps(value: Any) -> bytes:
    """The text of a value made of what `loads` gives. Numbers that JSON does not have are written as Triton does."""
    text = orjson.dumps(value)
    if b"null" in text:
        # What orjson makes of NaN and infinities; null itself comes from no tensor.
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    return text
