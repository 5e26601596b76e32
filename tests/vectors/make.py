"""Packets with what they say, or why they are refused: one file for each channel, for both sides of the wire to read.

`python -m tests.vectors.make` writes them anew. A vector that changes is a change of the wire, which old peers do not
know: PROTOCOL_VERSION or LAUNCHER_VERSION is raised with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
from tests.ipc.described import plain as plain_value
from tests.ipc.described import with_one_changed

from moonpool.ipc.codec import Codec, encode
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import (
    CALLS,
    CONTROL,
    WORK,
    Flag,
    Int,
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
from moonpool.runtime.triton.messages import LAUNCHER, End

if TYPE_CHECKING:
    from moonpool.ipc.messages import Spec

FOLDER = Path(__file__).parent
CHANNELS: dict[str, tuple[dict[Any, Message], type[IntEnum]]] = {
    "work": (WORK, Side),
    "control": (CONTROL, Side),
    "calls": (CALLS, Side),
    "launcher": (LAUNCHER, End),
}
# Longer ones would fill the files and show nothing more.
_LONGEST = 300
Vector = dict[str, Any]


def full(spec: Spec) -> Any:
    """A value with something of everything in it."""
    if isinstance(spec, Int):
        return spec.high
    if isinstance(spec, Row):
        return [full(field) for field in spec.fields.values()]
    if isinstance(spec, OneOf):
        return full(spec.items[-1])
    if isinstance(spec, ListOf):
        return [plain_value(spec.item), full(spec.item)]
    if isinstance(spec, Packed):
        return msgpack.packb(full(spec.item))
    if isinstance(spec, Maybe):
        return full(spec.item)
    scalars = {"": True, "ß": -(2**63), "c": 2**64 - 1, "d": 0.5, "e": "€", "f": -1}
    plain: dict[type, Any] = {Text: "aß€\U0001f600", Raw: b"\0\xff", Flag: True, Real: -1.5, Table: scalars}
    return plain[type(spec)]


def bad(spec: Spec) -> Iterator[Any]:
    """Values that are not allowed, each for one reason."""
    if isinstance(spec, OneOf):
        yield from (b"", None, -1)
    elif isinstance(spec, Int):
        yield "1"
        yield True
        # The numbers that msgpack has end where some of the table's do.
        yield from [v for v in (spec.low - 1, spec.high + 1) if v < 2**64]
    elif isinstance(spec, Table):
        yield from ([], {b"k": 1}, {"k": None}, {"k": b""}, {"k": [1]}, {"k": {}}, {1: 1})
    elif isinstance(spec, ListOf):
        yield {}
        if spec.length < _LONGEST:
            yield [plain_value(spec.item)] * (spec.length + 1)
    elif isinstance(spec, Row):
        whole = plain_value(spec)
        yield from (b"", whole[1:], [*whole, 0])
    elif not isinstance(spec, Maybe):
        yield {Text: b"", Raw: "", Packed: "", Flag: 1, Real: 1}[type(spec)]
        yield []
        if isinstance(spec, Text) and spec.length < _LONGEST:
            yield "ß" * (spec.length + 1)
    yield from with_one_changed(spec, bad, plain_value(spec))


def packets(kind: IntEnum, message: Message) -> Iterator[bytes]:
    """Make valid packets of one kind."""
    fields = list(message.fields.values())
    smallest = [int(kind), *map(plain_value, fields)]
    yield encode(*smallest)
    yield encode(kind, *map(full, fields))
    for i, field in enumerate(fields, 1):
        for value in bad(field):
            yield msgpack.packb([*smallest[:i], value, *smallest[i + 1 :]])
    yield msgpack.packb([*smallest, None])
    yield msgpack.packb(smallest)[:-1]
    yield msgpack.packb(smallest) + b"\0"


def damaged(kind: IntEnum, message: Message) -> Iterator[bytes]:
    """Make packets that are no message, or none of a known kind."""
    yield from (b"", b"\x90", b"\xc0", b"\xc1", b"\x91", b"\x91\xa1", b"\x91\xdc", b"\xdd\xff\xff\xff\xff")
    yield from (b"\x91\x7f", b"\x91\xff", b"\x91\xcb" + bytes(8), b"\x91\xc3", b"\x80")
    whole = encode(kind, *map(full, message.fields.values()))
    yield whole[:1] + b"\xcc" + whole[1:2] + whole[2:]  # the kind in a longer form than necessary
    yield whole[:1] + b"\xd3" + bytes(7) + whole[1:2] + whole[2:]
    text = "aß€\U0001f600".encode()
    for other in (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\xf0\x80\x80\x80"):
        yield whole.replace(text, other.ljust(len(text), b"a"))
    yield whole.replace(text, b"\xc3\xbf\xef\xbf\xbf\xf4\x8f\xbf\xbf".ljust(len(text), b"a"))
    for extension in (b"\xd4\x05\0", b"\xd6\xff\0\0\0\0", b"\xc1"):
        yield whole.replace(b"\xaa" + text, extension)


def vectors(channel: str) -> list[Vector]:
    """Return all vectors of a channel, each for the side that receives it."""
    table, sides = CHANNELS[channel]
    made: dict[tuple[int, bytes], Vector] = {}
    for kind, message in table.items():
        senders = [message.sender] if message.sender else list(sides)
        for sender in senders:
            for packet in packets(kind, message):
                made[sender, packet] = read(channel, sender, packet)
        for other in set(sides) - set(senders):
            packet = encode(kind, *map(plain_value, message.fields.values()))
            made[other, packet] = read(channel, other, packet)
    named = next(k for k, m in table.items() if any(isinstance(f, Text) for f in m.fields.values()))
    for packet in damaged(named, table[named]):
        sender = table[named].sender
        made[sender, packet] = read(channel, sender, packet)
    return list(made.values())


def read(channel: str, sender: int, packet: bytes) -> Vector:
    """The vector of a packet, as the codec of the side that is sent it has it."""
    table, sides = CHANNELS[channel]
    (us,) = set(sides) - {sender}
    vector = {"from": sides(sender).name, "packet": packet.hex()}
    try:
        return vector | {"says": plain(Codec(table, us).decode(packet))}
    except RemoteProtocolError as error:
        return vector | {"refused": reason(str(error))}


def reason(error: str) -> str:
    """Return the error. About a packet that is not msgpack, each library has words of its own, which are left out."""
    known = "a packet that is not msgpack"
    return known if error.startswith(known) else error


def plain(value: Any) -> Any:
    """Return the value in a form that JSON has."""
    if isinstance(value, bytes):
        return {"raw": value.hex()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def text(channel: str) -> str:
    """The file of a channel."""
    lines = [json.dumps(vector) for vector in vectors(channel)]
    return "[\n" + ",\n".join(lines) + "\n]\n"


if __name__ == "__main__":
    for name in CHANNELS:
        (FOLDER / f"{name}.json").write_text(text(name), encoding="utf-8")
