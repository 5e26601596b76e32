"""The native codec and Python's agree on every packet, and both ends of a stub on the layouts of batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from tests.runtime.triton.codec_program import Asked, Told, asked_of
from tests.vectors.make import CHANNELS, FOLDER

from moonpool.ipc.codec import Codec, encode, unpack_layout
from moonpool.ipc.errors import BadTensor, LocalProtocolError, RemoteProtocolError
from moonpool.ipc.port import RequestTensor, Shapes
from moonpool.ipc.tensors import check_bytes
from moonpool.runtime.stubs.answers import AnswerReader
from moonpool.runtime.stubs.layout import lay_out, read_answer

# These packets reach code of the native codec that no vector reaches.
CORPUS = Path(__file__).parents[2] / "fuzz" / "native" / "corpus"
_MOST_VALUES = 1 << 21
_LAYOUTS = [
    [],
    [[]],
    [[[0, 11, [1, 3], 0, 0, 12]], []],
    [[[65535, 14, [2**63 - 1] * 32, 131072, 2**63 - 1, 2**63 - 1], [0, 1, [], 0, 0, 0]]] * 3,
]
LAYOUTS = [msgpack.packb(layout) for layout in _LAYOUTS]
# The outputs of the model that answers, as in `codec_telling.h`.
NAMES = ["Y", "Z", "STRINGS"]
_ROWS: list[list[Any]] = [
    [0, 11, [4], 0, 0, 16],
    [1, 14, [2, 3], 1, 64, 12],
    [2, 13, [2], 0, 16, 11],
    [1, 6, [0, 5], 2, 0, 0],
]


def layouts_of_batches() -> list[Asked]:
    """Questions about layouts, from which others are made."""
    several = [[_ROWS[:1]], [_ROWS[:3]], [[_ROWS[0], _ROWS[3]], _ROWS[1:3], []], [_ROWS[:2]] * 4]
    asked = []
    for rows in several:
        packed = encode(*rows)
        asked += [Asked("place", 0, packed), Asked("answer", len(rows), b"\2\xff\xff" + packed)]
        asked.append(Asked("answer", 0, b"\3\x40\x50\0" + packed))
    for count, raw in enumerate([b"", b"\1\0\0\0a", b"\0\0\0\0\3\0\0\0abc"]):
        asked.append(Asked("strings", count, raw))
    return asked


def vectors(channel: str) -> list[tuple[Asked, dict[str, object]]]:
    _, sides = CHANNELS[channel]
    read = json.loads((FOLDER / f"{channel}.json").read_text(encoding="utf-8"))
    return [(Asked(channel, sides[vector["from"]], bytes.fromhex(vector["packet"])), vector) for vector in read]


def corpus() -> list[Asked]:
    return [asked_of(path.read_bytes()) for path in sorted(CORPUS.iterdir())]


def agree(asked: Asked, told: Told) -> bool:
    """Return true if both codecs accept the packet. Raises AssertionError if they do not agree on it."""
    fields, theirs = python_reads(asked)
    is_message = asked.channel in CHANNELS
    if not told.refused:
        assert not theirs, (asked, theirs)
        if not (is_message and has_a_name_twice(asked.packet)):
            assert told.again == encode(*fields), asked
        return True
    assert theirs or (is_message and has_a_name_twice(asked.packet)), (asked, told.refused)
    if asked.channel == "answer" and "not msgpack" not in theirs:
        # Numbers are not always shown alike.
        assert told.refused.split(" may not be ")[0] == theirs.split(" may not be ")[0], asked
    return False


def python_reads(asked: Asked) -> tuple[Sequence[object], str]:
    """Return the fields that Python's codec reads, and the reason if it refuses the packet."""
    try:
        if asked.channel == "layout":
            return unpack_layout(asked.packet, asked.sender or _MOST_VALUES), ""
        if asked.channel in _LAYOUTS_IN:
            return _LAYOUTS_IN[asked.channel](asked), ""
        table, sides = CHANNELS[asked.channel]
        (us,) = set(sides) - {asked.sender}
        return Codec(table, us).decode(asked.packet), ""
    except (BadTensor, LocalProtocolError, RemoteProtocolError) as error:
        return [], str(error)


class Block(NamedTuple):
    """Has as much of a lease as the check of an answer needs."""

    size: int


def _answer(asked: Asked) -> list[object]:
    """Read an answer as `Link` does: the number of its blocks, the size of each, both in one byte, and the layout."""
    sizes = asked.packet[1 : 1 + (asked.packet[:1] or b"\0")[0] % 16]
    layout = read_answer(asked.packet[1 + len(sizes) :], NAMES, asked.sender or 1)
    count = len(layout.responses)
    if not asked.sender and count != 1:
        raise RemoteProtocolError(f"{count} responses in the place of one")
    if asked.sender and count != asked.sender:
        raise RemoteProtocolError(f"an answer to batch 1 with {count} responses; batch 1 has {asked.sender} requests")
    leases: list[Any] = [Block(size) for size in sizes]
    AnswerReader.check_blocks(layout, leases)
    AnswerReader.check(layout, leases)
    return [
        [
            [[each.name, each.datatype, each.shape, each.block, each.offset, each.size_bytes], prod(each.shape)]
            for each in outputs
        ]
        for outputs in layout.responses
    ]


def _place(asked: Asked) -> list[object]:
    """Lay out a batch that is given as its layout, but for the offsets in the first block."""
    batch, elsewhere = [], {}
    for i, rows in enumerate(unpack_layout(asked.packet)):
        batch.append(Shapes([RequestTensor(row[0], row[1], row[2], row[5]) for row in rows], 1, None, is_shared=True))
        places = {(i, number): (row[3], row[4]) for number, row in enumerate(rows) if row[3]}
        elsewhere.update(places)
    if not batch:  # there is no such batch
        return [0, encode()]
    layout = lay_out(batch, elsewhere)
    if layout.size_bytes >= 2**63:
        raise LocalProtocolError("no message has such a number")
    return [layout.size_bytes, layout.packed]


def _strings(asked: Asked) -> list[object]:
    check_bytes(asked.packet, [asked.sender])
    return []


_LAYOUTS_IN = {"answer": _answer, "place": _place, "strings": _strings}


def has_a_name_twice(packet: bytes) -> bool:
    """Return true if a map has two entries of one name. Python's codec keeps one of them, and counts one."""
    twice = []

    def entries(pairs: list[tuple[str, object]]) -> dict[str, object]:
        twice.append(len(dict(pairs)) < len(pairs))
        return dict(pairs)

    msgpack.unpackb(packet, object_pairs_hook=entries)
    return any(twice)
