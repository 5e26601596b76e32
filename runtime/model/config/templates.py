"""Places of a template in the text of a configuration that nobody has filled in, and the values to fill them in for a
check.

Public models come as templates: a script puts values in place of `${max_batch_size}`, `{{ dtype }}`, `MAX_BATCH` or
`TYPE_#DTYPE`. Before that, they are no configurations. Protobuf stops at the first such place, and cuts its name where
its grammar does, so the places are found here: by their signs, and by names in capital letters where the schema has a
number or a truth value. The time that this takes grows with the length of the text and no faster, as strangers write
it.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moonpool.runtime.model.config.schema import ENUMS, MESSAGES
from moonpool.runtime.model.config.source import ConfigError, fields, steps, token_at

# The signs by which templates mark a place, each with the name inside.
_SIGNS = (
    r"\$\{(?P<dollar>[^{}\n]*)\}",
    r"\{\{(?P<braces>[^{}\n]*)\}\}",
    r"\{%(?P<block>[^{}%\n]*)%\}",
    r"<(?P<angles>[A-Za-z_][\w.-]*)>",
    r"@(?P<at>\w+)@",
    r"%(?P<percent>\w+)%",
    r"\$(?P<plain>[A-Za-z_]\w*)",
)
_SIGN = re.compile("|".join(_SIGNS))
# Strings and comments come first, so that signs inside are no places. A comment does not begin inside a word:
# `TYPE_#DTYPE`.
_TOKEN = re.compile(
    r"\"(?:\\.|[^\"\\\n])*\"?|'(?:\\.|[^'\\\n])*'?|(?<![^\s{}\[\],;:\"'])\#[^\n]*|(?P<sign>"
    + re.sub(r"\?P<\w+>", "?:", "|".join(_SIGNS))
    + ")"
)
_DOLLAR = re.compile(_SIGNS[0])
_CAPITALS = re.compile(r"_*[A-Z][A-Z0-9_.-]*")
# A comment directly after a word that is no value is the name of a place.
_GLUED = re.compile(r"[A-Za-z_][\w.-]*#(\w+)")
# Words that people write for truth values and for nothing. They are wrong values.
_WORDS = ("TRUE", "FALSE", "YES", "NO", "ON", "OFF", "NONE", "NULL", "INF", "NAN", "AUTO")
_SCALARS = ("bool", "int32", "int64", "uint32", "uint64", "float", "double")
# Fields whose strings are no texts of the model.
_NAMES = ("name[0]", "platform[0]", "backend[0]", "default_model_filename[0]")
# The most places that are looked at, and that an error names.
_MOST_PLACES, _MOST_NAMED = 1000, 20


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A part of a text, from `start` to `stop`.

    `name` is the one of a place that is not filled in, by which `Fill` knows it.
    """

    start: int
    stop: int
    name: str


def places(text: str) -> list[TextSpan]:
    """Return the places that are not filled in, in order.

    Those in strings count only in the fields of `_NAMES`: models know what theirs mean.
    """
    signs = [_of_sign(match) for match in _TOKEN.finditer(text) if match["sign"]][:_MOST_PLACES]
    starts = [place.start for place in signs]
    # Signs have brackets, which are no brackets of the configuration.
    plain = cleared(text, signs, "_")
    found = {place.start: place for place in signs}
    for path, offset, is_key in fields(plain):
        end = offset + len(token_at(plain, offset))
        if is_key or len(found) >= _MOST_PLACES or bisect(starts, end - 1) > bisect(starts, offset - 1):
            continue
        if place := _value(plain, offset, path):
            found[place.start] = place
    return [found[start] for start in sorted(found)]


def _of_sign(match: re.Match[str]) -> TextSpan:
    inner = _SIGN.fullmatch(match["sign"])
    name = "" if inner is None else next(filter(None, inner.groups()), "")
    return TextSpan(match.start(), match.end(), name.strip())


def _value(text: str, offset: int, path: str) -> TextSpan | None:
    """Return the place in the value of a field at an offset, if there is one."""
    token, type_ = token_at(text, offset), type_of(path)
    if path in _NAMES:
        inside = _DOLLAR.search(token)
        return inside and TextSpan(offset + inside.start(), offset + inside.end(), inside["dollar"])
    if (type_ not in _SCALARS and type_ not in ENUMS) or token in ENUMS.get(type_, ()):
        return None
    glued = _GLUED.match(text, offset)
    if glued is not None and glued.start(1) == offset + len(token) + 1:
        return TextSpan(glued.start(1) - 1, glued.end(), glued[1])
    is_name = type_ in _SCALARS and _CAPITALS.fullmatch(token) and token not in _WORDS
    return TextSpan(offset, offset + len(token), token) if is_name else None


def type_of(path: str) -> str:
    """Return the type in the schema of a field, such as `input[1].dims[0]`; "" for a field that is not in it."""
    known: Mapping[str, str] = MESSAGES["ModelConfig"]
    type_ = ""
    for step in steps(path):
        type_ = known.get(step.partition("[")[0], "").rstrip("*?")
        key, brace, inner = type_.rpartition("}")
        known = {"key": key.lstrip("{"), "value": inner} if brace else MESSAGES.get(type_, {})
    return type_


def cleared(text: str, spans: Iterable[TextSpan], sign: str = " ") -> str:
    """Return the text with a sign in place of each character of the spans but line breaks, so that all offsets stay."""
    parts, end = [], 0
    for span in sorted(spans, key=lambda span: span.start):
        # Two places may lie in one field.
        start = max(span.start, end)
        if span.stop > start:
            parts += [text[end:start], re.sub(r"[^\n]", sign, text[start : span.stop])]
            end = span.stop
    return "".join([*parts, text[end:]])


def not_filled_in(text: str, found: Sequence[TextSpan], file: str) -> ConfigError:
    """Return the error of a text with such places, which names all of them."""
    lines: dict[str, dict[int, None]] = {}
    for place in found:
        line = text.count("\n", 0, place.start) + 1
        lines.setdefault(_whole(text, place), {})[line] = None
    shown = [
        f"{name:.80} (line{'s' * (len(at) > 1)} {', '.join(map(str, list(at)[:_MOST_NAMED]))})"
        for name, at in list(lines.items())[:_MOST_NAMED]
    ]
    more = f" and {len(lines) - len(shown)} more" if len(lines) > len(shown) else ""
    what = (
        f"is a template that is not filled in: {', '.join(shown)}{more}; put values there, as the tool or script that "
        "comes with the model does; `moonpool check --fill NAME=VALUE` checks it with them"
    )
    return ConfigError(what, file=file, line=text.count("\n", 0, found[0].start) + 1)


def _whole(text: str, place: TextSpan) -> str:
    """Return the value with a place in it: `TYPE_#DTYPE` for `#DTYPE`."""
    start, stop = place.start, place.stop
    while start and re.match(r"[\w.-]", text[start - 1]):
        start -= 1
    while stop < len(text) and re.match(r"[\w.-]", text[stop]):
        stop += 1
    return text[start:stop]


def in_strings(text: str) -> list[str]:
    """Return the places `${name}` in a string of a configuration."""
    return [match[0] for match in _DOLLAR.finditer(text)]


class Fill:
    """Values for the places of templates, by their names, and the names that no configuration had. For one thread."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._used: set[str] = set()

    @property
    def unused(self) -> list[str]:
        """The names that no text had until now."""
        return [name for name in self._values if name not in self._used]

    def into(self, text: str) -> str:
        """Return the text with the values in their places, also in strings."""
        if not self._values:
            return text
        parts, end = [], 0
        for place in self._places(text):
            if place.name in self._values and place.start >= end:
                parts += [text[end : place.start], self._values[place.name]]
                end = place.stop
                self._used.add(place.name)
        return "".join([*parts, text[end:]])

    def _places(self, text: str) -> list[TextSpan]:
        strings = (TextSpan(each.start(), each.end(), each["dollar"].strip()) for each in _DOLLAR.finditer(text))
        return sorted({*strings, *places(text)}, key=lambda place: place.start)


def read_fill(texts: Iterable[str]) -> Fill:
    """Read `NAME=VALUE`. Raises `ValueError`."""
    return Fill(dict(map(_one, texts)))


def _one(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (equals and name):
        raise ValueError(f"must be NAME=VALUE, such as max_batch_size=8, not {text!r:.80}")
    return name.strip(), value
