"""The source of a configuration: its file, the line of each field, and errors that name them.

Theory of operation. The code that reads a configuration raises an error for the first mistake, and puts each part that
can be read without the others into a `part`. A load needs no more than the first mistake. `moonpool check` reads with
the same code inside of `all_mistakes`, where a part notes its error and the reader goes on to the next one. A context
variable says which of both it is, so it holds for one thread and its calls.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from moonpool.ipc.errors import MoonpoolError

# The most characters in the text of an error.
_LONGEST_FIELD, _LONGEST_WHAT = 200, 2000


class ConfigError(MoonpoolError):
    """A configuration that cannot be used. The text is `file:line: field: what`.

    `file` and `line` are None, and `field` is "", if there is nothing to name: a configuration made in Python has no
    file, and a field that the file leaves out has no line.
    """

    __module__ = "moonpool"
    code = "INVALID_ARG"
    _fault = "setup"

    def __init__(self, what: str, *, field: str = "", file: str | None = None, line: int | None = None) -> None:
        place = ":".join(str(part) for part in (file, line) if part is not None)
        # A configuration may have names and values of any length, and logs and clients get the text.
        parts = (place, _cut(field, _LONGEST_FIELD), _cut(what, _LONGEST_WHAT))
        super().__init__(": ".join(part for part in parts if part))
        self.what = what
        self.file = file
        self.line = line
        self.field = field
        # The fields whose text cannot be read, so nothing is known of their values.
        self.unread: tuple[str, ...] = ()
        # True if the file leaves out the field.
        self.is_absent = False


# The mistakes that were noted until now; None where the first one is raised.
_noted: ContextVar[list[MoonpoolError] | None] = ContextVar("noted", default=None)
# The most mistakes of one model that are noted.
_MOST_NOTED = 100


@contextlib.contextmanager
def all_mistakes() -> Iterator[list[MoonpoolError]]:
    """Collect all mistakes that are found inside into the list that this gives.

    If there are any, what was read inside is not to be used.
    """
    found: list[MoonpoolError] = []
    token = _noted.set(found)
    try:
        with part():
            yield found
    finally:
        _noted.reset(token)


class _Part:
    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        return isinstance(error, MoonpoolError) and is_noted(error)


_PART = _Part()


def part() -> _Part:
    """Surround code that reads one part of a configuration. See the theory of operation."""
    return _PART


def is_noted(error: MoonpoolError) -> bool:
    """Note a mistake if all are collected, and return True then. Otherwise the caller has to raise it."""
    found = _noted.get()
    if found is None:
        return False
    # The versions of a model share its configuration, so its mistakes are found once for each.
    is_known = any(str(error) == str(each) or _follows(error, each) for each in found)
    if len(found) < _MOST_NOTED and not is_known:
        found.append(error)
    return True


def _follows(error: MoonpoolError, noted: MoonpoolError) -> bool:
    """Return True if an error is there because another field could not be read.

    It is about something around that field or inside, or about a field beside it that is missing.
    """
    if not (isinstance(error, ConfigError) and isinstance(noted, ConfigError)):
        return False
    ours = steps(error.field)
    for theirs in map(steps, noted.unread):
        is_nested = ours == theirs[: len(ours)] or theirs == ours[: len(theirs)]
        if (ours and is_nested) or (error.is_absent and ours[:-1] == theirs[:-1]):
            return True
    return False


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


@dataclass(frozen=True, slots=True)
class Source:
    """The file of a configuration and the lines of its fields.

    Fields are named by path: `max_batch_size`, `input[1].dims`, `parameters[KEY]`.
    """

    file: str | None = None
    lines: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def scan(cls, file: str, text: str) -> Source:
        """Note the lines of the fields in protobuf text that is known to be well formed."""
        lines: dict[str, int] = {}
        keys: dict[str, int] = {}
        line, counted = 1, 0
        for path, offset, is_key in fields(text):
            # Offsets do not go back, so each part of the text is counted once.
            line += text.count("\n", counted, offset)
            counted = offset
            (keys if is_key else lines).setdefault(path, line)
        return cls(file, lines | keys)

    def line(self, path: str) -> int | None:
        """Return the line of a field, or of the nearest one around it that the file has."""
        key = _indexed(path)
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        return self.lines.get(key)

    def error(self, path: str, what: str) -> ConfigError:
        error = ConfigError(what, field=path, file=self.file, line=self.line(path))
        error.is_absent = _indexed(path) not in self.lines
        return error

    def mistake(self, path: str, what: str) -> None:
        """Raise the error of a mistake after which the reader can go on, or note it if all mistakes are collected."""
        error = self.error(path, what)
        if not is_noted(error):
            raise error


# The path of a field, its offset in the text, and True if the path names an entry of a map by its key.
_Field = tuple[str, int, bool]


def fields(text: str) -> Iterator[_Field]:
    """Yield every field of protobuf text, in order. Every step of a path has an index.

    The entries of a map come twice, by number and by key. Text that is nested deeper than any configuration ends the
    list.
    """
    scanner = _Scanner()
    for match in _TOKEN.finditer(text):
        if scanner.depth > _DEEPEST:
            return
        token = match.group()
        if not (token.isspace() or token.startswith("#")):
            yield from scanner.take(token, match.start())


def token_at(text: str, offset: int) -> str:
    """Return the token of protobuf text that begins at an offset, such as a name, a number, a string or a bracket."""
    match = _TOKEN.match(text, offset)
    return "" if match is None else match.group()


def field_at(text: str, offset: int) -> str:
    """Return the path of the last field before an offset, "" for none. The text need not be well formed."""
    found = ""
    for path, start, is_key in fields(text):
        if start > offset:
            break
        found = found if is_key else path
    return found


_TOKEN = re.compile(
    r"\s+|\#[^\n]*"
    r"|\"(?:\\.|[^\"\\\n])*\"?|'(?:\\.|[^'\\\n])*'?"
    r"|[{}<>\[\]:;,]"
    r"|[^\s{}<>\[\]:;,\#\"']+"
)


_QUOTES = "\"'"
# The schema has fewer levels. The path of each field has a step for each level.
_DEEPEST = 32


def _indexed(path: str) -> str:
    return ".".join(step if step.endswith("]") else step + "[0]" for step in steps(path))


def steps(path: str) -> list[str]:
    """Take the path of a field apart: `input[1].dims` becomes `input[1]` and `dims`."""
    # A dot inside brackets belongs to the key of a map.
    return re.findall(r"[^.\[\]]+(?:\[[^\]]*\])?", path)


class _Scanner:
    """Follows the nesting of protobuf text. It knows the grammar and no schema."""

    def __init__(self) -> None:
        self._prefix = ""
        self._counts: dict[str, int] = {}
        self._name: str | None = None
        self._in_list = False
        self._outer: list[tuple[str, dict[str, int], str | None, bool]] = []

    @property
    def depth(self) -> int:
        return len(self._outer)

    def take(self, token: str, offset: int) -> Iterator[_Field]:
        if token in ":,;-":
            return
        if token == "[":
            self._in_list = True
        elif token == "]":
            self._in_list = False
            self._name = None
        elif token in "{<":
            yield from self._open(offset)
        elif token in "}>":
            self._close()
        elif self._name is not None:
            yield from self._value(token, offset)
        elif token[0] not in "\"'":  # a string here is the second half of the one before
            self._name = token
            yield f"{self._prefix}{token}[{self._counts.get(token, 0)}]", offset, False

    def _open(self, offset: int) -> Iterator[_Field]:
        name = self._name or ""
        path = f"{self._prefix}{name}[{self._next(name)}]"
        yield path, offset, False
        self._outer.append((self._prefix, self._counts, self._name, self._in_list))
        self._prefix, self._counts, self._name, self._in_list = path + ".", {}, None, False

    def _close(self) -> None:
        if self._outer:
            self._prefix, self._counts, self._name, self._in_list = self._outer.pop()
        if not self._in_list:
            self._name = None

    def _value(self, token: str, offset: int) -> Iterator[_Field]:
        name = self._name or ""
        yield f"{self._prefix}{name}[{self._next(name)}]", offset, False
        if name == "key":
            entry = self._prefix.rpartition("[")[0]
            yield f"{entry}[{token.strip(_QUOTES)}]", offset, True
        if not self._in_list:
            self._name = None

    def _next(self, name: str) -> int:
        index = self._counts.get(name, 0)
        self._counts[name] = index + 1
        return index
