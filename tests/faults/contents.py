"""Messages of every kind that a stub may send, each with one field that nobody expects.

They are made out of the tables of messages, so that a kind or a field that is added there is sent as well. Most keep to
the table. The codec refuses all others in the same way, so there is one of these for each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tests.ipc import described
from tests.ipc.described import with_one_changed

from moonpool.ipc.codec import Codec, calls_codec, control_codec, encode
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import (
    CALLS,
    CONTROL,
    Flag,
    Int,
    Kind,
    ListOf,
    Maybe,
    Message,
    Packed,
    Raw,
    Real,
    Row,
    Side,
    Table,
    Text,
)

# These begin lines, move the cursor, turn text around, or are not valid characters.
CONTROLS = "\n[forged_0] \x1b[31m\r\x85\u2028\u202e\0\ud7ff\uffff"
MANY = 400


# A value that an honest stub might send.
plain = partial(described.plain, number=1, real=1.0, text="nobody")


def strange(spec: Any) -> Iterator[Any]:
    """Yield values for a field, at its bounds and beyond them."""
    if isinstance(spec, Int):
        yield from {spec.low, min(spec.high, 2**64 - 1), max(spec.low - 1, -(2**63))}
        yield from (2**64 - 1, 1.0, True, None)
    elif isinstance(spec, Real):
        yield from (float("nan"), float("inf"), -float("inf"), 1)
    elif isinstance(spec, Text):
        yield from ("", CONTROLS, "\U0001f47e" * min(spec.length + 1, 3000), "%s%n{0}", b"x", None)
    elif isinstance(spec, Raw):
        yield from (b"", b"\xff" * min(spec.length + 1, 12_000), "x")
    elif isinstance(spec, Flag):
        yield from (True, 1)
    elif isinstance(spec, Table):
        yield from ({CONTROLS: float("nan")}, {str(each): each for each in range(MANY)}, {1: 1})
    elif isinstance(spec, Packed):
        yield from (b"", b"\xc1", b"\x91" * 1000, b"\x91\x90")
    elif isinstance(spec, ListOf):
        yield from ([plain(spec.item)], [plain(spec.item)] * MANY, None)
    elif isinstance(spec, Row):
        yield []
    elif isinstance(spec, Maybe):
        yield plain(spec.item)
    else:
        for each in spec.items:
            yield from strange(each)
    yield from with_one_changed(spec, strange, plain(spec))


def channels() -> Iterator[tuple[str, Kind]]:
    """Yield each kind that a stub may send at any time, with the name of its channel."""
    tables: Mapping[str, Mapping[Kind, Message]] = {"control": CONTROL, "calls": CALLS}
    for channel, table in tables.items():
        for kind, message in table.items():
            if message.sender in (Side.STUB, None):
                yield channel, kind


def packets(channel: str, kind: Kind) -> list[bytes]:
    """Yield packets of that kind, each with another strange value in it."""
    is_call = channel == "calls"
    fields = (CALLS if is_call else CONTROL)[kind].fields
    codec = calls_codec(Side.RUNTIME) if is_call else control_codec(Side.RUNTIME)
    honest = [plain(spec) for spec in fields.values()]
    made = [encode(kind, *honest)]
    for index, spec in enumerate(fields.values()):
        before, after = honest[:index], honest[index + 1 :]
        made += [encode(kind, *before, value, *after) for value in strange(spec)]
    return [encode(kind), *(packet for packet in dict.fromkeys(made) if _fits(codec, packet))]


def _fits(codec: Codec, packet: bytes) -> bool:
    try:
        codec.decode(packet)
    except RemoteProtocolError:
        return False
    return True
