"""Two links to peers in the same state, which get the same packets: one reads them with the compiled port, the other
in Python.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
from hypothesis import strategies as st
from tests.runtime.scripted import Pair, y

from moonpool.ipc.errors import PeerGone, RemoteProtocolError
from moonpool.ipc.messages import Kind
from moonpool.runtime.model.request import InferenceRequest, Response, WireTensor
from moonpool.runtime.stubs import allotment

# Wrong values of a field of an answer: beyond each bound of the tables and of the machine's numbers, and of each other
# type.
ODD: list[Any] = [
    *(0, 1, 2, 63, 64, 127, 128, 255, 65535, 65536, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
    *(-1, -128, -(2**63), None, True, False, 0.5, float("nan"), "", "x", b"", b"\x90", [], [[]]),
    *([0], [0, 0], [0, 0, 0], [1000, 0, 0], [1000, 0, 64], [[1000, 0]], [[1001, 0]], {}, {"a": 1}),
]


class Side:
    """One link and its peer."""

    def __init__(self, *, is_compiled: bool, wants_wire: bool = False) -> None:
        # Both sides have regions of the same numbers, so the same bytes mean the same.
        numbers = itertools.count(1000)
        before = allotment._numbers
        allotment._numbers = numbers
        try:
            self.pair = Pair()
        finally:
            allotment._numbers = before
        self.pair.link.port.is_plain = is_compiled
        self._wants_wire = wants_wire
        self.requests: list[InferenceRequest] = []

    def answered(self, packet: bytes) -> tuple[Any, ...]:
        """Receive a packet as the answer to the batch. Returns what the link made of it, and what is left in its
        tables.
        """
        pair = self.pair
        pair.peer.channel.send(packet)
        pair.peer.conversation.turn = pair.peer.conversation.after[Kind.ANSWER]
        pair.link.wait()
        try:
            answers: Any = [
                {name: described(output) for name, output in each.outputs.items()}
                if isinstance(each, Response)
                else repr(each)
                for each in pair.link.finish(self.requests)
            ]
        except (RemoteProtocolError, PeerGone) as error:
            answers = f"{type(error).__name__}: {error}"
        self.requests = []
        blocks = pair.link.borrowed_blocks
        return (
            answers,
            blocks.count,
            blocks.used_bytes,
            sorted(pair.link.released),
            pair.link.replies.batch,
            sorted(pair.link.conversation.allowed),
        )

    def usual(self, rows: int) -> list[Any]:
        """Send a batch, and return the answer of an honest stub to it, as fields."""
        pair = self.pair
        self.requests = pair.execute(*([[1.0, 2.0]] * rows))
        for request in self.requests:
            request.wants_wire = self._wants_wire
        block = pair.peer.place([0.0] * 2 * rows)
        layout = [[y(2, 0, 8 * row)] for row in range(rows)]
        return [int(Kind.ANSWER), pair.peer.batch, 3, [], [], [block], layout, None, None]


def described(output: Any) -> tuple[Any, ...]:
    """Return what there is to compare about an output."""
    if type(output) is WireTensor:
        return (output.datatype, output.shape, *described(output.raw))
    return output.dtype.str, output.shape, output.tobytes()


class Both:
    """Both sides."""

    def __init__(self, *, wants_wire: bool) -> None:
        self.sides = tuple(Side(is_compiled=each, wants_wire=wants_wire) for each in (True, False))

    def usual(self, rows: int) -> list[Any]:
        """Send a batch on both sides. Returns the fields of an honest answer, which is the same for both."""
        one, other = (side.usual(rows) for side in self.sides)
        assert one == other
        return one

    def answered(self, packet: bytes) -> tuple[Any, ...]:
        """Give both sides this packet. Returns what both made of it."""
        one, other = (side.answered(packet) for side in self.sides)
        assert one == other
        return one

    def close(self) -> None:
        for side in self.sides:
            side.pair.close()


@contextmanager
def both(*, wants_wire: bool = False) -> Iterator[Both]:
    """Make two sides, and close them. `wants_wire` is that of their requests."""
    sides = Both(wants_wire=wants_wire)
    try:
        yield sides
    finally:
        sides.close()


def packed(fields: Any) -> bytes:
    """Return the packet of an answer; the layout is packed by itself, if it is a list."""
    if isinstance(fields, list) and len(fields) > 6 and isinstance(fields[6], list):
        fields = [*fields[:6], msgpack.packb(fields[6]), *fields[7:]]
    return msgpack.packb(fields)  # type: ignore[no-any-return]


def paths(fields: Any, at: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Return the places of all values in nested lists."""
    found = [at] if at else []
    if isinstance(fields, list):
        for i, each in enumerate(fields):
            found += paths(each, (*at, i))
    return found


def changed(fields: list[Any], path: tuple[int, ...], value: Any) -> list[Any]:
    """Return the fields with another value at a place."""
    first, *rest = path
    new = changed(fields[first], tuple(rest), value) if rest else value
    return [*fields[:first], new, *fields[first + 1 :]]


def lies(fields: list[Any]) -> Iterator[list[Any]]:
    """Yield the fields with one value replaced, and with one more or less."""
    for path in paths(fields):
        for value in ODD:
            yield changed(fields, path, value)
    for i in range(len(fields)):
        yield [*fields[:i], *fields[i + 1 :]]
        yield [*fields[:i], None, *fields[i:]]


EDITS = st.lists(st.tuples(st.integers(0, 1 << 16), st.sampled_from(ODD) | st.integers(0, 2**64 - 1)), max_size=4)
DAMAGE = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=3)


def edited(fields: list[Any], edits: list[tuple[int, Any]]) -> list[Any]:
    """Return the fields with other values at some places, of `EDITS`."""
    for number, value in edits:
        places = paths(fields)
        fields = changed(fields, places[number % len(places)], value)
    return fields


def damaged(packet: bytes, damage: list[tuple[int, int]], longer: int) -> bytes:
    """Return the packet with other bytes, of `DAMAGE`, and longer or shorter."""
    made = bytearray(packet)
    for at, byte in damage:
        made[at % len(made)] = byte
    return bytes(made[:longer] if longer < 0 else made + b"\xc0" * longer)
