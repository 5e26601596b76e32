"""A stub that gets EXECUTE as the bytes say, nearly right or not at all: both ports make the same of it."""

from __future__ import annotations

from typing import Any
from unittest import mock

from tests.fuzz.choices import Choices
from tests.stub.peers.desk import ANSWERS, LENT, REGION_BYTES, REQUESTS, StubDesk, compiled, in_python

from moonpool.ipc.codec import encode
from moonpool.ipc.messages import NO_CORE, Kind
from moonpool.stub.peers import regions

FP32 = 11


def execute(data: bytes) -> None:
    """Open the batches in a stub with each port. Raises AssertionError if they differ."""
    desks = [StubDesk(form) for form in (in_python, compiled)]
    choices = Choices(data)
    # Nobody waits for a region that does not come.
    patch = mock.patch.object(regions, "_ARRIVAL_S", 0.0)
    try:
        patch.start()
        for number in range(1, 9):
            packet = _packet(choices, number)
            one, other = (desk.opened(packet) for desk in desks)
            assert one == other, packet.hex()
            if not choices:
                break
    finally:
        patch.stop()
        for desk in desks:
            desk.close()


def _packet(choices: Choices, number: int) -> bytes:
    if choices.byte() >= 250:
        return choices.take(choices.byte())
    count = choices.number(1, 1, 2, 3) % 4
    rows = [[_row(choices, index) for index in choices.some(2)] for _ in range(count)]
    fields: list[Any] = [
        Kind.EXECUTE,
        choices.number(number, number, number + 1),
        choices.number(NO_CORE, 0, 1),
        [[choices.number(ANSWERS), choices.number(0, 64)] for _ in choices.some(2)],
        [_block(choices) for _ in range(choices.of([1, 1, 1, 1, 1, 1, 0, 2]))],
        encode(*rows),
        choices.of([None, None, None, None, [None] * count, [["id", 0, 0, 0, 0, None, None, None, 0, 0]] * count]),
        choices.of([None, None, None, None, [], [[0, 0, REQUESTS, 0, 4]], [_target(choices) for _ in choices.some(3)]]),
    ]
    if choices.byte() >= 240:
        fields[choices.byte() % len(fields)] = choices.of([None, True, -1, 2.0, "text", b"", [], {}])
    packet = encode(*fields)
    at = choices.number(0) if choices.byte() >= 240 else 0
    return packet[:at] + choices.take(1) + packet[at + 1 :] if at else packet


def _block(choices: Choices) -> list[int]:
    offset = choices.number(0, 0, 128, REGION_BYTES - 64)
    return [choices.number(REQUESTS, REQUESTS, LENT, ANSWERS), offset, choices.number(64, 64, 16, 0)]


def _target(choices: Choices) -> list[int]:
    index, output = choices.number(0, 0, 1), choices.number(0, 0, 1)
    return [index, output, choices.number(LENT, LENT, LENT, REQUESTS), choices.number(0, 64), choices.number(16, 64, 0)]


def _row(choices: Choices, index: int) -> list[Any]:
    shape = [choices.number(4, 4, 1, 0) for _ in choices.some(2)]
    datatype = choices.number(FP32, FP32, 1, 8, 13, 14)
    return [
        choices.number(index, index, 0, 1, 2),
        datatype,
        shape,
        choices.number(0, 0, 0, 1),
        choices.number(0, 0, 16, 8),
        choices.number(16, 16, 4, 8),
    ]
