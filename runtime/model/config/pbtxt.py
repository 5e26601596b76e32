"""Reads `config.pbtxt`: protobuf text, against the full schema of Triton's ModelConfig.

Protobuf parses the text, and is imported only here and only when a file is read. It knows no lines after that, so the
text is scanned once more for the lines of its fields (`Source`), and protobuf's own errors are rewritten to name the
field.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.model import normalise
from moonpool.runtime.model.config.schema import MESSAGES, Raw, exclusive, is_type, refusal, suggestion
from moonpool.runtime.model.config.source import ConfigError, Source, field_at, fields, is_noted, steps, token_at
from moonpool.runtime.model.config.templates import Fill, TextSpan, cleared, not_filled_in, places, type_of
from moonpool.runtime.process.files import open_file

# Each wrong field costs one more parsing of the text, of so many characters in all.
_MOST_ROUNDS, _MOST_PARSED = 100, 10_000_000
_QUOTES = "\"'"


def read(path: str | Path) -> Raw:
    """Read the configuration in a file, as the JSON that Triton prints for it.

    Raises ConfigError with file, line and field.
    """
    return read_with_source(path)[0]


def read_with_source(
    path: str | Path, within: Path | None = None, limits: ConfigLimits | None = None, fill: Fill | None = None
) -> tuple[Raw, Source]:
    """Read a file as `read` does, and return the lines of its fields, too, for errors that are found later.

    With `within`, the file has to lie in that folder, wherever links lead. `limits` are the usual ones if not given,
    and `fill` has values for the places of a template.
    """
    limits = limits or ConfigLimits()
    return parse(_text(Path(path), within, limits), str(path), limits, fill)


def parse(text: str, file: str, limits: ConfigLimits | None = None, fill: Fill | None = None) -> tuple[Raw, Source]:
    """Parse the text of a configuration; `file` only names it in errors. `fill` has values for places of a template."""
    from google.protobuf import json_format

    message, text = _parsed(text if fill is None else fill.into(text), file)
    source = Source.scan(file, text)
    raw = json_format.MessageToDict(message, preserving_proto_field_name=True)
    (limits or ConfigLimits()).check(raw, source)
    return normalise(raw, source), source


def _parsed(text: str, file: str) -> tuple[Any, str]:
    """Return the message, and the text without the parts that are wrong, if all mistakes are collected."""
    from google.protobuf import text_format

    from moonpool.runtime.model.protobuf import config_messages

    for _ in range(min(_MOST_ROUNDS, 1 + _MOST_PARSED // (1 + len(text)))):
        message, mistake = None, None
        wrong: list[TextSpan] = []
        try:
            message = text_format.Parse(text, config_messages().ModelConfig())
        except text_format.ParseError as error:
            mistake, wrong = _located(error, text, file)
        plain = text
        if (message is None or "${" in text) and (found := places(text)):
            mistake, wrong = not_filled_in(text, found, file), found
            plain = cleared(text, found, "_")
        if mistake is None:
            return message, text
        if not is_noted(mistake) or not wrong:
            raise mistake
        # The field around each is taken out. What is read of the rest gives no reason to miss it.
        whole = _fields_around(plain, wrong)
        mistake.unread = tuple(path for path, _ in whole)
        text = cleared(text, [place for _, place in whole])
    raise ConfigError("has more mistakes; mend these first", file=file)


def _text(path: Path, within: Path | None, limits: ConfigLimits) -> str:
    try:
        with open_file(path, () if within is None else (within,)) as file:
            data = file.read(limits.config_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=str(path)) from error
    limits.check_size(len(data), str(path))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        what = f"is not UTF-8 text (byte 0x{data[error.start]:02x})"
        raise ConfigError(what, file=str(path), line=line) from None


# Errors of protobuf after which the rest of the text can be read: those about one field or its value.
_UNKNOWN = re.compile(r'Message type "inference\.([\w.]+)" has no field named "(.*)"\.', re.DOTALL)
_WRONG_VALUE = re.compile(
    r"Couldn't parse .*|Value out of range: .*|Enum type .* has no value .*|Expected \"{\"\..*"
    r"|Expected \"true\" or \"false\"\..*|Expected string but found: .*",
    re.DOTALL,
)
_TWICE = re.compile(r"Message type .* should not have multiple .* fields\.")
_EXCLUSIVE = re.compile(r'Field "(\w+)" is specified along with field "(\w+)".*')


def _located(error: Exception, text: str, file: str) -> tuple[ConfigError, list[TextSpan]]:
    """Turn a parse error of protobuf into one that names the field.

    Return the place of the token, too, if the rest can be read without the field.
    """
    line = int(getattr(error, "GetLine", lambda: 0)() or 0)
    column = int(getattr(error, "GetColumn", lambda: 0)() or 0)
    what = re.sub(r"^\d+:\d+ : ", "", str(error))
    # Protobuf quotes the whole line before some messages.
    what = re.sub(r"^'.*': (?=[A-Z])", "", what, flags=re.DOTALL)
    offset = _offset(text, line, column)
    path = field_at(text, offset) if line else ""
    token, type_ = token_at(text, offset), type_of(path)
    can_go_on = False
    if unknown := _UNKNOWN.fullmatch(what):
        kind, name = unknown.groups()
        known = ("key", "value") if kind.endswith("Entry") else MESSAGES.get(kind, ())
        what, can_go_on = f'no field "{name}" in {kind}{suggestion(name, known)}', True
    elif _TWICE.fullmatch(what):
        what, can_go_on = "is there twice; keep one", True
    elif both := _EXCLUSIVE.fullmatch(what):
        what, can_go_on = exclusive(*both.groups()), True
    elif _WRONG_VALUE.fullmatch(what) and is_type(type_):
        can_go_on = bool(token.strip())
        what = refusal(type_, token) if can_go_on else "has no value"
        what += f'; put it into quotes: "{token:.60}"' if type_ == "string" and can_go_on else ""
    mistake = ConfigError(what, field=_readable(path), file=file, line=line or None)
    return mistake, [TextSpan(offset, offset + len(token), "")] if can_go_on else []


def _fields_around(text: str, spans: Sequence[TextSpan]) -> list[tuple[str, TextSpan]]:
    """Return the paths of the innermost fields around spans of a text, each with its place.

    If a field has no end, the place is that of the span.
    """
    names = [
        (begin, path)
        for path, begin, is_key in fields(text)
        if not is_key and token_at(text, begin) == steps(path)[-1].partition("[")[0]
    ]
    # Many spans may lie in one long field.
    ends: dict[int, int | None] = {}
    found = []
    for span in spans:
        index = bisect(names, span.start, key=lambda name: name[0]) - 1
        start, path = names[index] if index >= 0 else (span.start, "")
        if start not in ends:
            ends[start] = _end_of_field(text, start) if index >= 0 else None
        stop = ends[start]
        if stop is None or stop <= span.start:
            start, stop = span.start, span.stop
        found.append((_readable(path), TextSpan(start, stop, "")))
    return found


def _end_of_field(text: str, start: int) -> int | None:
    """Return the end of the value of the field whose name begins at `start`."""
    depth, has_value, offset = 0, False, start + len(token_at(text, start))
    has_colon = False
    while offset < len(text):
        token = token_at(text, offset)
        if token.isspace() or token.startswith("#") or (token == ":" and not has_value):
            has_colon |= token == ":"
            offset += len(token)
            continue
        if not (has_value or has_colon or token in "{[<"):
            return None
        if depth == 0 and has_value and token[0] not in _QUOTES:
            return offset
        if token in "{[<":
            depth += 1
        elif token in "}]>":
            depth -= 1
        has_value = True
        offset += len(token)
        if depth == 0 and token[0] not in _QUOTES:
            return offset
        if depth < 0:
            return None
    return offset if depth == 0 and has_value else None


def _readable(path: str) -> str:
    """Return a path without the indices of fields that are not repeated."""
    shown = []
    fields = MESSAGES["ModelConfig"]
    for step in steps(path):
        name = step.partition("[")[0]
        type_ = fields.get(name, "")
        shown.append(step if type_.endswith("*") or type_.startswith("{") else name)
        fields = MESSAGES.get(type_.rpartition("}")[2].rstrip("*"), {})
    return ".".join(shown)


def _offset(text: str, line: int, column: int) -> int:
    start = 0
    for _ in range(line - 1):
        start = text.find("\n", start) + 1
    return start + max(column - 1, 0)
