"""Packs and unpacks messages, and refuses all that the tables do not describe.

The checks are compiled from the tables: for each kind one function of plain comparisons, which is made when the first
message of the kind arrives. To interpret the table for every message would cost more than all other work on a small
request.

A packet is small, so msgpack unpacks it at once. A message that lies in memory may be large, and an empty list has one
byte there and seventy in Python. So `check_items` counts the values of such a message before it is unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any

import msgpack

from moonpool.ipc.errors import LocalProtocolError, RemoteProtocolError
from moonpool.ipc.messages import (
    CALLS,
    CONTROL,
    LAYOUT,
    WORK,
    Details,
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
    Spec,
    Table,
    Text,
)
from moonpool.ipc.signals import raised_again

Fields = list[Any]
Check = Callable[[Fields], None]

# The largest message of an honest peer, a batch of 65536 requests with blocks and remarks, has a third of these values.
MAX_ITEMS = 1 << 21

# For all of moonpool: `stub/boot.py` imports msgpack for this module, and takes it away before the others of a stub are
# imported.
unpack = msgpack.unpackb
# One packer for all threads: packing runs in C and keeps the interpreter's lock. The pure-Python
# packer would mix the messages of two threads, so with it each message has its own packer.
pack = (
    msgpack.packb
    if msgpack.Packer.__module__ == "msgpack.fallback"
    else msgpack.Packer(autoreset=True, use_bin_type=True).pack
)
# For values (`ipc/source/values.py`): packs with options, and adds what msgpack does not have.
pack_with, Extension = msgpack.packb, msgpack.ExtType
# A check takes up to a millisecond to make and serves every channel of the process.
_compiled: dict[Message | Packed, Check] = {}


class Codec:
    """The messages of one channel as one side receives them. Thread-safe once it is made."""

    __slots__ = ("_checks", "_kinds", "_table", "_us")

    def __init__(self, table: dict[Any, Message], us: Any) -> None:
        """`table` has a message for each kind. Kinds and sides are members of an `IntEnum`."""
        self._table = table
        self._kinds = {int(kind): kind for kind in table}
        self._us = us
        self._checks: dict[int, Check] = {}

    def decode(self, packet: bytes) -> Fields:
        """Return the fields of a message, its kind first. Raises `RemoteProtocolError`."""
        try:
            fields = unpack(packet, strict_map_key=True, max_ext_len=0)
            check = self._checks[fields[0]]
        except Exception as error:
            fields = None  # so that a large message is not in memory twice
            unmet = self._unmet(packet, error)
            if unmet is None:
                raise
            check = unmet
            fields = unpack(packet, strict_map_key=True, max_ext_len=0)
        check(fields)
        return fields  # type: ignore[no-any-return]

    def decode_stored(self, packet: bytes) -> Fields:
        """Decode a packet that lay in memory, and may be large, after a check of how many values it unpacks to."""
        check_items(packet)
        return self.decode(packet)

    def head_of(self, beginning: bytes, count: int) -> Fields:
        """Return the first `count` fields of a message, its kind first, from the message's beginning.

        Only the kind is checked. Raises `RemoteProtocolError`.
        """
        unpacker = msgpack.Unpacker(strict_map_key=True, max_ext_len=0)
        try:
            unpacker.feed(beginning)
            unpacker.read_array_header()
            fields = [unpacker.unpack() for _ in range(count)]
        except Exception as unreadable:  # as above
            raise RemoteProtocolError(f"a message without a head: {unreadable}") from unreadable
        kind = fields[0] if fields else None
        message = self._table.get(kind) if type(kind) is int else None
        if message is None or message.sender is self._us:
            raise RemoteProtocolError(f"a stored message of unknown kind {kind!r:.20}")
        return fields

    def _unmet(self, packet: bytes, error: Exception) -> Check | None:
        """Return the check for a kind that has not come before. Raises `RemoteProtocolError` if the packet is refused.

        Returns None if the kind has come before: then a signal handler has raised `error`.
        """
        try:
            fields = unpack(packet, strict_map_key=True, max_ext_len=0)
        except Exception as unreadable:  # msgpack raises six unrelated classes
            why = str(unreadable) or type(unreadable).__name__
            raise RemoteProtocolError(f"a packet that is not msgpack: {why}") from unreadable
        if type(fields) is not list or not fields or type(fields[0]) is not int:
            raise RemoteProtocolError("a packet that is not an array led by a kind") from error
        message = self._table.get(fields[0])
        if message is None:
            raise RemoteProtocolError(f"a message of unknown kind {fields[0]}") from error
        if message.sender is self._us:
            raise RemoteProtocolError(f"{self._kinds[fields[0]].name} is not the peer's to send")
        if fields[0] in self._checks:
            return None
        self._checks[fields[0]] = check = check_of(self._kinds[fields[0]], message)
        return check


def encode(*message: object) -> bytes:
    """Return the packet of a message. Thread-safe for messages without extension types.

    Raises `LocalProtocolError` for values that msgpack cannot carry: integers over 64 bits,
    text that is no Unicode, objects.
    """
    try:
        return pack(message)  # type: ignore[no-any-return]
    except Exception:  # OverflowError, TypeError, ValueError, UnicodeEncodeError
        error = raised_again(partial(pack, message))
        if error is None:
            raise
        raise LocalProtocolError(f"{message[:1]!r:.60} cannot be sent: {error}") from error


def unpacked(packet: bytes | bytearray) -> Any:
    """Unpack a packet without a check. For packets from forks of this very process only."""
    return unpack(packet, strict_map_key=False)


def check_of(kind: Any, message: Message) -> Check:
    """Return the check of a kind of messages, which is compiled once."""
    check = _compiled.get(message)
    if check is None:
        check = _compiled[message] = compile_check(kind, message)
    return check


def compile_checks(us: Side) -> None:
    """Compile all checks that `us` will need. For a template, whose forks then have them."""
    for table in (WORK, CONTROL, CALLS):
        for kind, message in table.items():
            if message.sender is not us:
                check_of(kind, message)
    _layout_check()


def compile_check(kind: IntEnum, message: Message) -> Check:
    """Return a function that raises `RemoteProtocolError` unless the fields are as the table says."""
    lines = [
        "def check(m):",
        # `decode` found this check by equality, and 7.0, True and the bytes b"\7" lead here too.
        f" if type(m) is not list or type(m[0]) is not int or len(m) != {1 + len(message.fields)}:",
        f"  unled({kind.name!r}, {1 + len(message.fields)})",
    ]
    # The kind itself, under a name that no field has.
    _Writer(lines).fields({"": None, **message.fields}, "m", kind.name, 1)
    return _compile(lines)


def unpack_layout(packed: bytes, most: int = MAX_ITEMS) -> list[list[list[Any]]]:
    """Return the tensors that a layout describes, if it has at most so many values. Raises `RemoteProtocolError`."""
    check_items(packed, most)
    try:
        layout = unpack(packed, strict_map_key=True, max_ext_len=0)
    except Exception as unreadable:  # as above
        raise RemoteProtocolError(f"a layout that is not msgpack: {unreadable}") from unreadable
    _layout_check()(layout)
    return layout  # type: ignore[no-any-return]


def _layout_check() -> Check:
    check = _compiled.get(LAYOUT)
    if check is None:
        lines = ["def check(m):"]
        _Writer(lines).value(LAYOUT.item, "m", "layout", 1)
        check = _compiled[LAYOUT] = _compile(lines)
    return check


def _compile(lines: list[str]) -> Check:
    namespace: dict[str, Any] = {"bad": _bad, "scalars": _check_scalars, "unled": _unled}
    exec("\n".join(lines), namespace)
    return namespace["check"]  # type: ignore[no-any-return]


def _bad(where: str, value: object) -> None:
    shown = repr(value) if isinstance(value, (int, float, bool, type(None))) else type(value).__name__
    raise RemoteProtocolError(f"{where} may not be {shown[:80]}")


def _unled(kind: str, length: int) -> None:
    raise RemoteProtocolError(f"{kind} that is not an array of {length} led by its kind")


def _check_scalars(where: str, table: dict[str, object]) -> None:
    for key, value in table.items():
        if type(key) is not str:
            _bad(f"a key of {where}", key)
        if type(value) not in (str, int, float, bool):
            _bad(where, value)


_TYPES = {Raw: "bytes", Packed: "bytes", Table: "dict", ListOf: "list"}


class _Writer:
    """Writes the comparisons for a value and the values in it."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._names = 0

    def fields(self, fields: Mapping[str, Spec | None], v: str, where: str, depth: int) -> None:
        """Write lines that check the values in a list. A field whose spec is None needs no check."""
        names = [self._name() for _ in fields]
        self._put(depth, f"{', '.join(names)}, = {v}")
        for name, (field, spec) in zip(names, fields.items()):
            if spec is not None:
                self.value(spec, name, f"{where}.{field}", depth)

    def value(self, spec: Spec, v: str, where: str, depth: int) -> None:
        """Write lines that check the value of the variable `v`."""
        if isinstance(spec, Maybe):
            self._put(depth, f"if {v} is not None:")
            self.value(spec.item, v, where, depth + 1)
            return
        if isinstance(spec, OneOf):
            # A single comparison cannot check the values in a list.
            if not all(isinstance(item, (Int, Real, Text, Raw, Flag)) for item in spec.items):
                raise TypeError(f"{where}: OneOf is for scalars")
            conditions = " or ".join(f"({self._condition(item, v)})" for item in spec.items)
            self._put(depth, f"if not ({conditions}): bad({where!r}, {v})")
            return
        self._put(depth, f"if not ({self._condition(spec, v)}): bad({where!r}, {v})")
        if isinstance(spec, Table):
            self._put(depth, f"scalars({where!r}, {v})")
        elif isinstance(spec, ListOf):
            each = self._name()
            self._put(depth, f"for {each} in {v}:")
            self.value(spec.item, each, where, depth + 1)
        elif isinstance(spec, Row):
            self.fields(spec.fields, v, where, depth)

    def _name(self) -> str:
        self._names += 1
        return f"v{self._names}"

    def _condition(self, spec: Spec, v: str) -> str:
        if isinstance(spec, Int):
            return f"type({v}) is int and {spec.low} <= {v} <= {spec.high}"
        if isinstance(spec, Real):
            return f"type({v}) is float"
        if isinstance(spec, Flag):
            return f"type({v}) is bool"
        if isinstance(spec, Row):
            return f"type({v}) is list and len({v}) == {len(spec.fields)}"
        if isinstance(spec, Text):
            # A character takes at most four bytes, so most texts need not be encoded.
            size = f"len({v}) <= {spec.length} and len({v}.encode()) <= {spec.length}"
            return f"type({v}) is str and (len({v}) <= {spec.length // 4} or {size})"
        type_name = _TYPES[type(spec)]
        return f"type({v}) is {type_name} and len({v}) <= {spec.length}"  # type: ignore[union-attr]

    def _put(self, depth: int, line: str) -> None:
        self._lines.append(" " * depth + line)


def work_codec(us: Side) -> Codec:
    """Return the codec for the messages of the work channel that `us` receives."""
    return Codec(WORK, us)


def control_codec(us: Side) -> Codec:
    """Return the codec for the messages of the control channel that `us` receives."""
    return Codec(CONTROL, us)


def calls_codec(us: Side) -> Codec:
    """Return the codec for the messages of the calls channel that `us` receives."""
    return Codec(CALLS, us)


def check_items(packet: bytes, most: int = MAX_ITEMS) -> None:
    """Check that a packet unpacks to at most `most` values, nested ones included. Nothing is unpacked for that.

    Raises `RemoteProtocolError`. Bytes that are no msgpack are left to msgpack, which stops at the same place.
    """
    if len(packet) <= most:  # a value takes a byte at least
        return
    at, left = 0, 1
    while left and at < len(packet):
        form = _FORMS.get(packet[at])
        if form is None:
            return
        width, count, bytes_each, items_each = form
        at += 1
        if width:
            count = int.from_bytes(packet[at : at + width], "big")
        at += width + count * bytes_each
        most -= 1
        left += count * items_each - 1
        if left > most:
            raise RemoteProtocolError("a packet of more values than any message has")


# From https://github.com/msgpack/msgpack/blob/master/spec.md, by the first byte of a value: the number of bytes of the
# count that follows it; the count itself if no such bytes follow; the bytes, and the values, for which each unit of the
# count stands.
_FORMS: dict[int, tuple[int, int, int, int]] = {
    **dict.fromkeys([*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3], (0, 0, 0, 0)),
    **{0x80 + count: (0, count, 0, 2) for count in range(16)},
    **{0x90 + count: (0, count, 0, 1) for count in range(16)},
    **{0xA0 + count: (0, count, 1, 0) for count in range(32)},
    **{0xC4 + size: (1 << size, 0, 1, 0) for size in range(3)},
    **{0xCC + size: (0, 1 << size, 1, 0) for size in range(4)},
    **{0xD0 + size: (0, 1 << size, 1, 0) for size in range(4)},
    **{0xD9 + size: (1 << size, 0, 1, 0) for size in range(3)},
    **{0xDC + size: (2 << size, 0, 0, 1) for size in range(2)},
    **{0xDE + size: (2 << size, 0, 0, 2) for size in range(2)},
    0xCA: (0, 4, 1, 0),
    0xCB: (0, 8, 1, 0),
}


def unpacked_details(row: bytes) -> Details:
    """Return the details of a request that passed the check of their message, from their bytes in it."""
    return Details._make(unpack(row, strict_map_key=True, max_ext_len=0))


def packed_list(values: Sequence[bytes]) -> bytes:
    """Return the packed list of values that are packed already."""
    count = len(values)
    if count < 16:
        head = bytes([0x90 | count])
    elif count < 1 << 16:
        head = b"\xdc" + count.to_bytes(2, "big")
    else:
        head = b"\xdd" + count.to_bytes(4, "big")
    return b"".join([head, *values])
