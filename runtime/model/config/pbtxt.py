"""Reads `config.pbtxt`: protobuf text, against the full schema of Triton's ModelConfig.

Protobuf parses the text, and is imported only here and only when a file is read. It knows no lines after that, so the text is
scanned once more for the lines of its fields (`Source`), and protobuf's own errors are rewritten to name the field.
"""

from __future__ import annotations

import re
from pathlib import Path

from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.model import normalise
from moonpool.runtime.model.config.schema import MESSAGES, Raw, suggestion
from moonpool.runtime.model.config.source import ConfigError, Source, field_at, steps
from moonpool.runtime.process.files import open_file


def read(path: str | Path) -> Raw:
    """Read the configuration in a file, as the JSON that Triton prints for it.

    Raises ConfigError with file, line and field.
    """
    return read_with_source(path)[0]


def read_with_source(
    path: str | Path, within: Path | None = None, limits: ConfigLimits | None = None
) -> tuple[Raw, Source]:
    """Read a file as `read` does, and return the lines of its fields, too, for errors that are found later.

    With `within`, the file has to lie in that folder, wherever links lead. `limits` are the usual ones if not given.
    """
    limits = limits or ConfigLimits()
    return parse(_text(Path(path), within, limits), str(path), limits)


def parse(text: str, file: str, limits: ConfigLimits | None = None) -> tuple[Raw, Source]:
    """Parse the text of a configuration; `file` only names it in errors."""
    from google.protobuf import json_format, text_format

    from moonpool.runtime.model.protobuf import config_messages

    try:
        message = text_format.Parse(text, config_messages().ModelConfig())
    except text_format.ParseError as error:
        raise _located(error, text, file) from None
    source = Source.scan(file, text)
    raw = json_format.MessageToDict(message, preserving_proto_field_name=True)
    (limits or ConfigLimits()).check(raw, source)
    return normalise(raw, source), source


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


def _located(error: Exception, text: str, file: str) -> ConfigError:
    """Turn a parse error of protobuf into one that names the field."""
    line = int(getattr(error, "GetLine", lambda: 0)() or 0)
    column = int(getattr(error, "GetColumn", lambda: 0)() or 0)
    what = re.sub(r"^\d+:\d+ : ", "", str(error))
    # Protobuf quotes the whole line before some messages.
    what = re.sub(r"^'.*': (?=[A-Z])", "", what, flags=re.DOTALL)
    field = _readable(field_at(text, _offset(text, line, column))) if line else ""
    unknown = re.fullmatch(r'Message type "inference\.([\w.]+)" has no field named "(.*)"\.', what)
    if unknown:
        kind, name = unknown.groups()
        known = ("key", "value") if kind.endswith("Entry") else MESSAGES.get(kind, ())
        what = f'no field "{name}" in {kind}{suggestion(name, known)}'
    return ConfigError(what, field=field, file=file, line=line or None)


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
