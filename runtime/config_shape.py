"""Raw configurations: their shape checked against the schema, every field present."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from moonpool.runtime.config_schema import ENUMS, MESSAGES, ONE_OF
from moonpool.runtime.config_source import Source

# A configuration in the form of JSON, as Triton prints it.  Its values are Any because its types
# stand in `config_schema`; whatever passed `shaped` has them.
Raw = dict[str, Any]

_INTEGERS = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint32": (0, 2**32 - 1),
    "uint64": (0, 2**64 - 1),
}
_ZEROS: dict[str, object] = {"string": "", "bool": False, "float": 0.0, "double": 0.0}


def shaped(raw: Mapping[str, object], source: Source) -> Raw:
    """A copy of a configuration in Triton's JSON form, with every field at least at its default.

    Messages that are not set stay absent.  Raises ConfigError for unknown fields, wrong types and
    numbers out of range; nothing is checked for sense.
    """
    return _message("ModelConfig", raw, "", source)


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean "…"?` where a known word is close, else nothing."""
    from difflib import get_close_matches  # only ever needed on the way to an error

    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{near[0]}"?' if near else ""


def _message(kind: str, value: object, path: str, source: Source) -> Raw:
    if not isinstance(value, Mapping):
        _refuse(source, path, f"must be a message with the fields of {kind}", value)
    schema = MESSAGES[kind]
    prefix = path + "." if path else ""
    for name in value:
        if name not in schema:
            what = f'no field "{name}" in {kind}{suggestion(str(name), schema)}'
            raise source.error(f"{prefix}{name}", what)
    result: Raw = {}
    for name, type_ in schema.items():
        given = value.get(name)
        if given is not None:
            result[name] = _field(type_, given, prefix + name, source)
        elif (default := _default(type_)) is not None:
            result[name] = default
    _one_of(kind, result, path, source)
    return result


def _one_of(kind: str, result: Raw, path: str, source: Source) -> None:
    names = [name for name in ONE_OF.get(kind, ()) if name in result]
    if len(names) > 1:
        where = f"{path}.{names[1]}" if path else names[1]
        raise source.error(where, f"{names[1]} and {names[0]} exclude each other; keep one")


def _default(type_: str) -> object:
    if type_.endswith("*"):
        return []
    if type_.startswith("{"):
        return {}
    if type_.endswith("?") or type_ in MESSAGES:
        return None
    return ENUMS[type_][0] if type_ in ENUMS else _ZEROS.get(type_, 0)


def _field(type_: str, value: object, path: str, source: Source) -> object:
    if type_.endswith("*"):
        return _list(type_[:-1], value, path, source)
    if type_.startswith("{"):
        key, _, item = type_[1:].partition("}")
        return _map(key, item, value, path, source)
    if type_ in MESSAGES:
        return _message(type_, value, path, source)
    return _scalar(type_.rstrip("?"), value, path, source)


def _list(type_: str, value: object, path: str, source: Source) -> list[object]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        _refuse(source, path, "must be a list", value)
    return [_field(type_, item, f"{path}[{i}]", source) for i, item in enumerate(value)]


def _map(key_type: str, type_: str, value: object, path: str, source: Source) -> Raw:
    if not isinstance(value, Mapping):
        _refuse(source, path, "must be a map", value)
    result: Raw = {}
    for key, item in value.items():
        where = f"{path}[{key}]"
        # JSON has no keys but strings.
        result[str(_scalar(key_type, key, where, source))] = _field(type_, item, where, source)
    return result


def _scalar(type_: str, value: object, path: str, source: Source) -> object:
    convert: Callable[[str, object], object]
    if type_ in ENUMS:
        convert, wanted = _enum, "one of " + ", ".join(ENUMS[type_])
    elif type_ in _INTEGERS:
        low, high = _INTEGERS[type_]
        convert, wanted = _integer, f"an integer from {low} to {high}"
    elif type_ in ("float", "double"):
        convert, wanted = _float, "a finite number"
    else:
        convert, wanted = _plain, "true or false" if type_ == "bool" else "a string"
    result = convert(type_, value)
    if result is None:
        hint = suggestion(str(value), ENUMS.get(type_, ()))
        _refuse(source, path, f"must be {wanted}", value, hint)
    return result


def _enum(type_: str, value: object) -> object:
    names = ENUMS[type_]
    if isinstance(value, str):
        return value if value in names else None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return names[value]
    return None


def _integer(type_: str, value: object) -> object:
    if isinstance(value, bool):
        return None
    try:
        # JSON made by protobuf has 64-bit integers as decimal strings.
        number = int(value, 10) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    low, high = _INTEGERS[type_]
    return number if low <= number <= high else None


def _float(_type: str, value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _plain(type_: str, value: object) -> object:
    if type_ == "bool":
        return value if isinstance(value, bool) else None
    # Half a surrogate pair cannot be sent to a model.
    return (
        value
        if isinstance(value, str) and value.encode(errors="ignore").decode() == value
        else None
    )


def _refuse(source: Source, path: str, wanted: str, value: object, hint: str = "") -> NoReturn:
    shown = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    raise source.error(path, f"{wanted}, not {shown}{hint}")
