"""Messages drawn from the tables, and a plain reading of the tables with which the codec is compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgpack
import pytest
from hypothesis import strategies as st

from moonpool.ipc.codec import Codec, compile_check, encode
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import (
    CALLS,
    CONTROL,
    WORK,
    Flag,
    Int,
    Kind,
    ListOf,
    Maybe,
    Message,
    OneOf,
    Packed,
    Raw,
    Real,
    Row,
    Side,
    Table,
    Text,
)

if TYPE_CHECKING:
    from moonpool.ipc.messages import Spec

TABLES = {"work": WORK, "control": CONTROL, "calls": CALLS}
ROWS = [(name, kind) for name, table in TABLES.items() for kind in table]
EVERY_ROW = pytest.mark.parametrize(("channel", "kind"), ROWS, ids=lambda v: getattr(v, "name", v))


def receiver(channel: str, kind: Kind) -> Codec:
    """A codec of the side that `kind` is sent to. It has received one of that kind, so that its check is compiled."""
    us = Side.STUB if TABLES[channel][kind].sender is not Side.STUB else Side.RUNTIME
    codec = Codec(TABLES[channel], us)
    codec._checks[int(kind)] = compile_check(kind, TABLES[channel][kind])
    return codec


def accepts(codec: Codec, fields: Any) -> bool:
    """Return what a plain reading of the tables says of a message to that side."""
    return message_fits(codec._table, codec._us, fields)


@functools.cache
def values(spec: Spec) -> st.SearchStrategy[Any]:
    """Whatever the table allows there; long things are kept short."""
    if isinstance(spec, Int):
        edges = st.sampled_from([spec.low, spec.high])
        return edges | st.integers(spec.low, min(spec.high, spec.low + 300))
    if isinstance(spec, Text):
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=min(spec.length, 12))
    if isinstance(spec, Raw):
        return st.binary(max_size=min(spec.length, 12))
    if isinstance(spec, Flag):
        return st.booleans()
    if isinstance(spec, Real):
        return st.floats()
    if isinstance(spec, Table):
        scalars = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text("aß", max_size=3)
        return st.dictionaries(st.text("abc", max_size=4), scalars, max_size=3)
    if isinstance(spec, ListOf):
        return st.lists(values(spec.item), max_size=3)
    if isinstance(spec, Row):
        return st.tuples(*map(values, spec.fields.values())).map(list)
    if isinstance(spec, Packed):
        return values(spec.item).map(lambda item: encode(*item))
    if isinstance(spec, Maybe):
        return st.none() | values(spec.item)
    return st.one_of(*map(values, spec.items))


@functools.cache
def messages(channel: str, kind: Kind) -> st.SearchStrategy[list[Any]]:
    fields = TABLES[channel][kind].fields.values()
    return st.tuples(st.just(int(kind)), *map(values, fields)).map(list)


def plain(spec: Spec, number: int = 0, real: float = 0.0, text: str = "") -> Any:
    """Return the smallest value that is allowed, or one near these."""
    if isinstance(spec, Int):
        return max(spec.low, number) if number else spec.low
    if isinstance(spec, Row):
        return [plain(field, number, real, text) for field in spec.fields.values()]
    if isinstance(spec, OneOf):
        return plain(spec.items[0], number, real, text)
    if isinstance(spec, Packed):
        return msgpack.packb(plain(spec.item, number, real, text))
    found: dict[type, Any] = {
        Text: text, Raw: b"", Flag: False, Real: real, Table: {}, ListOf: [], Maybe: None,
    }  # fmt: skip
    return found[type(spec)]


def with_one_changed(spec: Spec, change: Callable[[Spec], Iterable[Any]], whole: Any) -> Iterator[Any]:
    """Yield the values of a list, of a row, or of a field that may be missing, with one part of them changed."""
    if isinstance(spec, ListOf):
        yield from ([each] for each in change(spec.item))
    elif isinstance(spec, Maybe):
        yield from change(spec.item)
    elif isinstance(spec, Row):
        for i, field in enumerate(spec.fields.values()):
            yield from ([*whole[:i], value, *whole[i + 1 :]] for value in change(field))


def fits(spec: Spec, value: Any) -> bool:
    """A plain reading of the table, to hold the compiled one against."""
    if isinstance(spec, Int):
        return type(value) is int and spec.low <= value <= spec.high
    if isinstance(spec, Flag):
        return type(value) is bool
    if isinstance(spec, Real):
        return type(value) is float
    if isinstance(spec, Maybe):
        return value is None or fits(spec.item, value)
    if isinstance(spec, OneOf):
        return any(fits(item, value) for item in spec.items)
    if isinstance(spec, Row):
        same = type(value) is list and len(value) == len(spec.fields)
        return same and all(map(fits, spec.fields.values(), value))
    expected = {Text: str, Raw: bytes, Packed: bytes, Table: dict, ListOf: list}[type(spec)]
    if type(value) is not expected:
        return False
    if len(value.encode() if isinstance(value, str) else value) > spec.length:
        return False
    if isinstance(spec, ListOf):
        return all(fits(spec.item, item) for item in value)
    if isinstance(spec, Table):
        scalars = (str, int, float, bool)
        return all(type(k) is str and type(v) in scalars for k, v in value.items())
    return True


def message_fits(table: dict[Kind, Message], us: Side, fields: Any) -> bool:
    if type(fields) is not list or not fields or type(fields[0]) is not int:
        return False
    message = table.get(fields[0])  # type: ignore[call-overload]
    return message is not None and message.sender is not us and fits(Row(kind=Int(), **message.fields), fields)


def refused(codec: Codec, packet: bytes) -> str:
    """Why; twice, because a kind that was met before takes a shorter way."""
    with pytest.raises(RemoteProtocolError) as first:
        codec.decode(packet)
    with pytest.raises(RemoteProtocolError) as second:
        codec.decode(packet)
    assert str(first.value) == str(second.value)
    return str(first.value)
