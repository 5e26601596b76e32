"""The source of a configuration: its file, the line of each field, and errors that name them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from moonpool.ipc.errors import MoonpoolError

# The most characters in the text of an error.
_LONGEST_FIELD, _LONGEST_WHAT = 200, 2000


class ConfigError(MoonpoolError):
    """A configuration that cannot be used. The text is `file:line: field: what`.

    `file` and `line` are None, and `field` is "", if there is nothing to name: a configuration made in Python has no file,
    and a field that the file leaves out has no line.
    """

    __module__ = "moonpool"
    code = "INVALID_ARG"
    _fault = "setup"

    def __init__(
        self, what: str, *, field: str = "", file: str | None = None, line: int | None = None
    ) -> None:
        place = ":".join(str(part) for part in (file, line) if part is not None)
        # A configuration may have names and values of any length, and logs and clients get the text.
        parts = (place, _cut(field, _LONGEST_FIELD), _cut(what, _LONGEST_WHAT))
        super().__init__(": ".join(part for part in parts if part))
        self.what = what
        self.file = file
        self.line = line
        self.field = field


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
        return ConfigError(what, field=path, file=self.file, line=self.line(path))


# The path of a field, its offset in the text, and True if the path names an entry of a map by its key.
_Field = tuple[str, int, bool]


def fields(text: str) -> Iterator[_Field]:
    """Yield every field of protobuf text, in order. Every step of a path has an index.

    The entries of a map come twice, by number and by key.
    """
    scanner = _Scanner()
    for match in _TOKEN.finditer(text):
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
