"""The native codec and Python's agree on every packet."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgpack
from tests.runtime.triton.codec_program import Asked, Told, asked_of
from tests.vectors.make import CHANNELS, FOLDER

from moonpool.ipc.codec import Codec, encode, unpack_layout
from moonpool.ipc.errors import RemoteProtocolError

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


def vectors(channel: str) -> list[tuple[Asked, dict[str, object]]]:
    _, sides = CHANNELS[channel]
    read = json.loads((FOLDER / f"{channel}.json").read_text(encoding="utf-8"))
    return [
        (Asked(channel, sides[vector["from"]], bytes.fromhex(vector["packet"])), vector)
        for vector in read
    ]


def corpus() -> list[Asked]:
    return [asked_of(path.read_bytes()) for path in sorted(CORPUS.iterdir())]


def agree(asked: Asked, told: Told) -> bool:
    """Return true if both codecs accept the packet. Raises AssertionError if they do not agree on it."""
    fields, theirs = python_reads(asked)
    if not told.refused:
        assert not theirs, (asked, theirs)
        if asked.channel == "layout" or not has_a_name_twice(asked.packet):
            assert told.again == encode(*fields), asked
        return True
    assert theirs or has_a_name_twice(asked.packet), (asked, told.refused)
    return False


def python_reads(asked: Asked) -> tuple[Sequence[object], str]:
    """Return the fields that Python's codec reads, and the reason if it refuses the packet."""
    try:
        if asked.channel == "layout":
            return unpack_layout(asked.packet, asked.sender or _MOST_VALUES), ""
        table, sides = CHANNELS[asked.channel]
        (us,) = set(sides) - {asked.sender}
        return Codec(table, us).decode(asked.packet), ""
    except RemoteProtocolError as error:
        return [], str(error)


def has_a_name_twice(packet: bytes) -> bool:
    """Return true if a map has two entries of one name. Python's codec keeps one of them, and counts one."""
    twice = []

    def entries(pairs: list[tuple[str, object]]) -> dict[str, object]:
        twice.append(len(dict(pairs)) < len(pairs))
        return dict(pairs)

    msgpack.unpackb(packet, object_pairs_hook=entries)
    return any(twice)
