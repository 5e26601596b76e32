"""JSON as Triton's HTTP frontend reads and writes it.

Theory of operation. orjson holds the interpreter's lock while it parses: 2 ms for a MiB of long strings, 20 ms for one
of small numbers, 170 ms for one of empty arrays. A text as large as the limit would stop the loop for a second. So
`loads` gives it pieces of at most `_PIECE_BYTES`, and between two of them another thread may have the lock. A piece is
a run of whole members of one object, or of elements of one array, in brackets of its own. Where it ends is found here,
with patterns that know strings, commas and brackets and see no more than a piece at a time. Whether it is JSON, orjson
decides: a cut in a wrong place would give an error and no wrong value.

A member that is larger than a piece is taken apart in the same way. A large array of very many elements, or of arrays,
becomes a `LongArray`, which keeps its innermost values in parts. So what is done with them later does not hold the lock
for long, either: to look at their types, to convert and to free them, and to look for garbage among a million rows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.tensors import MAX_DIMS
from moonpool.runtime.errors import InvalidRequest
from moonpool.runtime.server.http.head import Body
from moonpool.runtime.server.inference.tensors import ARRAYS, LongArray

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

# So short a text has not too much of anything.
_SHORT_BYTES = 4 << 10
# The most that orjson gets in one go: about 20 ms of empty arrays, 3 ms of numbers.
_PIECE_BYTES = 128 << 10
# Signs are counted in so many bytes in one go.
_COUNTED_BYTES = 1 << 20
# An array with more elements stays in pieces.
_LIST_VALUES = 1 << 16
MOST_LISTED = 1 << 20
"""The most elements of long arrays that stay in lists."""
# Containers in containers, each of them larger than a piece. Tensors have fewer dimensions.
_MOST_LARGE = 64
# orjson reads no more levels.
_MOST_LEVELS = 1024


def _items() -> bytes:
    """Return the pattern of an item: it has no comma but in strings and in as many levels of brackets as tensors
    have.
    """
    string = rb'"(?:[^"\\]++|\\.)*+"'
    inside = rb"""(?:[^"\[\]{}]++|%b)*+""" % string
    for _ in range(MAX_DIMS):
        inside = rb"""(?:[^"\[\]{}]++|%b|[\[{]%b[\]}])*+""" % (string, inside)
    return rb"""(?:[^"\[\]{},]++|%b|[\[{]%b[\]}])*+""" % (string, inside)


# Items that each end with a comma. Those without strings and brackets, as of most tensors, take one step for all.
_ITEMS = re.compile(rb"""(?:[^"\[\]{}]*,|%b,)++""" % _items(), re.DOTALL)
_LAST_ITEM = re.compile(rb"%b([\]}])" % _items(), re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")
# A number or a literal, or what is none.
_PLAIN = re.compile(rb"""[^"\[\]{},: \t\r\n]++""")
_BRACKET_OR_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}"]', re.DOTALL)
# A part of a string. A cut does not part an escape, nor one half of a surrogate pair from the other.
_CHARACTERS = re.compile(
    rb"""(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])....|\\u[dD][89abAB]..(?:\\u....|(?=[^\\]|\\[^u])))*+""", re.DOTALL
)
_SIGNS = (b'"', b"[", b"]", b"{", b"}")
_CLOSING = {ord("["): ord("]"), ord("{"): ord("}")}


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
            f"the outputs have more than {most_bytes} bytes, which is the most that is sent as JSON: ask for binary "
            "data, or raise --http-max-json-bytes on the server"
        )


def _broken(what: str, at: int) -> NotJson:
    return NotJson(f"failed to parse the request JSON buffer: {what}. at {at}")


def loads(text: Body, *, has_lists: bool = False) -> Any:
    """Return the value of a JSON text, which may hold `NaN` and `Infinity`. Raises `NotJson`, `TooMuchJson`.

    Large arrays of very many elements, or of arrays, are `LongArray`. If the text `has_lists`, all arrays are lists,
    and the long ones have at most `MOST_LISTED` elements together. The caller bounds the size of the text: the value
    takes several times as much memory. Long texts are for a thread, which lets others have the interpreter meanwhile.
    """
    if len(text) <= _SHORT_BYTES:
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:  # read once more for the error, or as Triton reads it
            pass
    if not len(text):
        raise _broken("The document is empty", 0)
    count = _Count(text)
    if len(text) > _PIECE_BYTES:
        return _Reader(text, lambda piece, at: _read(piece, at, count), has_lists=has_lists).whole()
    return _read(text, 0, count)


class _Count:
    """Counts what must not be too much in a text."""

    def __init__(self, text: Body) -> None:
        """Raise `TooMuchJson` for too many arrays and objects."""
        self._members = self._strings = 0
        self._has_many_members = self._has_many_strings = False
        if len(text) <= _MOST_CONTAINERS:
            return
        containers = colons = quotes = 0
        for begin in range(0, len(text), _COUNTED_BYTES):
            part = bytes(text[begin : begin + _COUNTED_BYTES])
            containers += _count_in(part, b"[") + _count_in(part, b"{")
            colons += _count_in(part, b":")
            quotes += _count_in(part, b'"')
        if containers > _MOST_CONTAINERS:
            raise TooMuchJson(
                f"the request JSON has more than {_MOST_CONTAINERS} arrays and objects: send flat arrays, or "
                "binary data"
            )
        self._has_many_members = colons > _MOST_MEMBERS
        self._has_many_strings = quotes > 2 * _MOST_STRINGS

    def add(self, piece: Body) -> None:
        """Count a piece. Raises `TooMuchJson`."""
        if self._has_many_members:
            self._members += len(_MEMBER.findall(piece))
            if self._members > _MOST_MEMBERS:
                raise TooMuchJson(f"the request JSON has more than {_MOST_MEMBERS} members of objects")
        if self._has_many_strings:
            self._strings += len(_STRING.findall(piece))
            if self._strings > _MOST_STRINGS:
                raise TooMuchJson(f"the request JSON has more than {_MOST_STRINGS} strings: send binary data")


def _count_in(part: bytes, sign: bytes) -> int:
    """Count a character in a part of the text. To find none takes a thirtieth of the time for counting."""
    return part.count(sign) if sign in part else 0


def _read(piece: Body, at: int, count: _Count) -> Any:
    """Return the value of a piece, which begins at a place of the text. Raises `NotJson`, `TooMuchJson`."""
    count.add(piece)
    try:
        return orjson.loads(piece)
    except orjson.JSONDecodeError as error:
        raw = bytes(piece)
        is_marked = at == 0 and raw.startswith(_BOM)
        if is_marked or any(literal in raw for literal in _LITERALS):
            return _lenient(raw.removeprefix(_BOM) if is_marked else raw, at)
        raise _broken("Invalid value", at + error.pos) from None


def _lenient(raw: bytes, at: int) -> Any:
    try:
        return json.loads(raw.decode())
    except json.JSONDecodeError as error:
        raise _broken("Invalid value", at + error.pos) from None
    except UnicodeDecodeError as error:
        raise _broken("Invalid encoding in string", at + error.start) from None
    except RecursionError:
        raise _broken("The document is nested too deeply", at) from None
    except ValueError:  # so many digits that Python does not read them
        raise _broken("Number too big to be stored in double", at) from None


class _Reader:
    """Reads one long text in pieces."""

    def __init__(self, text: Body, read: Callable[[bytes, int], Any], *, has_lists: bool = False) -> None:
        """`read` makes the value of a piece, which begins at a place of the text, and raises `NotJson`."""
        self._has_lists = has_lists
        self._listed = 0
        self._text = memoryview(text)
        self._end = len(text)
        self._read = read
        # Where the arrays and objects begin that have been seen to be large, the outermost last. They may be in each
        # other, and each of them would be looked through again otherwise.
        self._known_large: list[int] = []
        # A key that stands in two pieces of one object.
        self.repeated: str | None = None

    def whole(self) -> Any:
        """Return the value of the text. Raises `NotJson`."""
        begin = len(_BOM) if self._text[: len(_BOM)] == _BOM else 0
        value, at = self._value(self._after_space(begin), 0)
        at = self._after_space(at)
        if at < self._end:
            raise _broken("Invalid value", at)
        return value

    def lists(self, count: int) -> bool:
        """Return True if so many more elements of a large array stay in a list. Raises `TooMuchJson`."""
        self._listed += count
        if self._has_lists and self._listed > MOST_LISTED:
            raise TooMuchJson(f"the request JSON has long arrays with more than {MOST_LISTED} elements together")
        return self._has_lists

    def _has(self, at: int, sign: int) -> bool:
        return at < self._end and self._text[at] == sign

    def _behind(self, at: int, sign: int) -> int:
        """Return the place behind a sign that has to be there."""
        if not self._has(at, sign):
            raise _broken("Invalid value", at)
        return at + 1

    def _after_space(self, at: int) -> int:
        while True:
            found = _SPACE.match(self._text, at, at + _PIECE_BYTES)
            if found is None or found.end() == at:
                return at
            at = found.end()

    def _piece(self, begin: int, end: int, brackets: bytes = b"%b") -> Any:
        """Return the value of a part of the text, in these brackets."""
        piece = brackets % bytes(self._text[begin:end])
        return self._read(piece, begin if brackets == b"%b" else begin - 1)

    def _value(self, at: int, level: int) -> tuple[Any, int]:
        """Return the value that begins at a place, and its end."""
        if at == self._end:
            raise _broken("Invalid value", at)
        first = self._text[at]
        if first in _CLOSING:
            end = 0 if at == self._next_large(at) else self._end_of_small(at)
            return (self._piece(at, end), end) if end else self._large(at, level)
        if first == ord('"'):
            return self._string(at)
        found = _PLAIN.match(self._text, at, at + _PIECE_BYTES)
        end = at if found is None else found.end()
        if not 0 < end - at < _PIECE_BYTES:
            raise _broken("Invalid value", at)
        return self._piece(at, end), end

    def _next_large(self, at: int) -> int:
        """Return where the next array or object begins that is known to be large, or the end of the text."""
        known = self._known_large
        while known and known[-1] < at:
            known.pop()
        return known[-1] if known else self._end

    def _end_of_small(self, at: int) -> int:
        """Return the end of an array or object that is at most a piece, else 0."""
        begins: list[int] = []
        for found in _BRACKET_OR_STRING.finditer(self._text, at, at + _PIECE_BYTES):
            sign = self._text[found.start()]
            if sign in _CLOSING:
                begins.append(found.start())
                if len(begins) > _MOST_LEVELS:
                    raise _broken("The document is nested too deeply", at)
            elif sign != ord('"'):
                begins.pop()
                if not begins:
                    return found.end()
            elif found.end() == found.start() + 1:  # a string that ends behind the piece
                break
        # Those that have not ended after half a piece are taken apart as well.
        self._known_large = [each for each in reversed(begins) if each - at <= _PIECE_BYTES // 2]
        return 0

    def _large(self, at: int, level: int) -> tuple[Any, int]:
        """Return the value of a large array or object, and its end."""
        if level == _MOST_LARGE:
            raise _broken("The document is nested too deeply", at)
        closing = _CLOSING[self._text[at]]
        parts: _Members | _Elements = _Members(self) if closing == ord("}") else _Elements(self)
        at, is_first = at + 1, True
        while True:
            end, is_last = self._items(at, closing)
            if end:
                some = self._piece(at, end - 1, parts.brackets)
                # Only an array or object without anything has nothing before its end.
                if not some and not (is_last and is_first):
                    raise _broken("Invalid value", at)
                parts.add(some)
                at, is_first = end, False
                if is_last:
                    return parts.whole(), at
                continue
            at = self._after_space(at)
            if is_first and self._has(at, closing):
                return parts.whole(), at + 1
            if closing == ord("}"):
                key, at = self._key(at)
                value, at = self._value(at, level + 1)
                parts.add({key: value})
            else:
                value, at = self._value(at, level + 1)
                parts.add([value])
            at, is_first = self._after_space(at), False
            if self._has(at, closing):
                return parts.whole(), at + 1
            at = self._behind(at, ord(","))

    def _items(self, at: int, closing: int) -> tuple[int, bool]:
        """Return the end of some whole items, with the comma or closing bracket behind them, and True for the latter.

        The end is 0 if the first one is larger than a piece, or has too many levels.
        """
        part = bytes(self._text[at : min(at + _PIECE_BYTES, self._next_large(at))])
        # As in most tensors. This takes a tenth of the time of the pattern.
        if not any(sign in part for sign in _SIGNS):
            return at + part.rfind(b",") + 1 if b"," in part else 0, False
        if found := _ITEMS.match(part):
            return at + found.end(), False
        found = _LAST_ITEM.match(part)
        is_last = found is not None and found[1][0] == closing
        return (at + found.end() if found is not None and is_last else 0), is_last

    def _key(self, at: int) -> tuple[str, int]:
        """Return the key that begins at a place, and the place of its value."""
        if not self._has(at, ord('"')):
            raise _broken("Invalid value", at)
        key, at = self._string(at)
        return key, self._after_space(self._behind(self._after_space(at), ord(":")))

    def _string(self, at: int) -> tuple[str, int]:
        """Return the string that begins at a place, and its end."""
        parts, at = [], at + 1
        while True:
            part = bytes(self._text[at : at + _PIECE_BYTES])
            found = _CHARACTERS.match(part) if b'"' in part or b"\\" in part else None
            end = at + (len(part) if found is None else found.end())
            if self._has(end, ord('"')):
                parts.append(self._piece(at, end, b'"%b"'))
                return "".join(parts), end + 1
            # A character of several bytes is not parted, either.
            while end > at and end < self._end and self._text[end] & 0xC0 == 0x80:
                end -= 1
            if end == at or end == self._end:
                raise _broken("Invalid value", end)
            parts.append(self._piece(at, end, b'"%b"'))
            at = end


class _Members:
    """The members of a large object."""

    brackets = b"{%b}"

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._found: dict[str, Any] = {}

    def add(self, some: Any) -> None:
        """Add an object with the members of a piece. The last of several with one key counts."""
        if not self._found.keys().isdisjoint(some):
            self._reader.repeated = next(key for key in some if key in self._found)
        self._found |= some

    def whole(self) -> dict[str, Any]:
        return self._found


class _Elements:
    """The elements of a large array."""

    brackets = b"[%b]"

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._few: list[Any] = []
        self._many: LongArray | None = None

    def add(self, some: Any) -> None:
        """Add an array with the elements of a piece. Of very many, or of arrays, only the innermost values are kept."""
        if self._many is None:
            self._few += some
            if self._reader.lists(len(some)):
                return
            has_arrays_alone = some and set(map(type, some)) <= ARRAYS
            if len(self._few) <= _LIST_VALUES and not has_arrays_alone:
                return
            some, self._few, self._many = self._few, [], LongArray()
        self._many.add(some)

    def whole(self) -> list[Any] | LongArray:
        return self._few if self._many is None else self._many


def repeated_key(text: Body) -> str | None:
    """Return a key that one object of a text has twice, else None. `loads` has read the text.

    Raises `NotJson` for objects that are nested too deeply.
    """
    found: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for key, _ in pairs:
            if key in keys:
                found.append(key)
            keys[key] = None
        return keys

    def read(piece: Body, at: int) -> Any:
        raw = bytes(piece).removeprefix(_BOM)
        try:
            # Numbers stay text, as nobody reads them here and some are too long for Python.
            value = json.loads(raw, object_pairs_hook=look, parse_int=str, parse_float=str)
        except RecursionError:
            raise _broken("The document is nested too deeply", at) from None
        # Of arrays, nothing has to be kept but that they have elements.
        return value[:1] if isinstance(value, list) else value

    if len(text) <= _PIECE_BYTES:
        read(text, 0)
        return found[0] if found else None
    reader = _Reader(text, read)
    reader.whole()
    return found[0] if found else reader.repeated


def dumps(value: Any) -> bytes:
    """Return the text of a value of the kinds that `loads` returns. NaN and infinities are written as Triton writes
    them.
    """
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
