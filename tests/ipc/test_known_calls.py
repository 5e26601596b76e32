"""Calls that are known by their bytes: they read as the codec reads them, and other packets are left to the codec."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ipc.described import messages

from moonpool.ipc.codec import KnownCalls, calls_codec, encode
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import CALLS, Kind, Side

KINDS = {Kind.INFER: Side.RUNTIME, Kind.REPLY: Side.STUB}
EITHER = pytest.mark.parametrize("kind", KINDS)
NUMBERS = st.sampled_from([0, 1, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**63 - 1])
PLACES = st.lists(st.lists(st.integers(0, 2**40), min_size=2, max_size=2), max_size=3)
BLOCKS = st.lists(st.lists(st.integers(0, 2**40), min_size=3, max_size=3), max_size=3)
ROWS = [["A", 11, [4], 0, 0, 16]]
MESSAGE = {
    Kind.INFER: [Kind.INFER, 5, "sums", -1, False, 0, [], [[1, 64, 16]], ROWS, ["Y"], None],
    Kind.REPLY: [Kind.REPLY, 5, True, [], [[1, 64, 16]], ROWS, None, None],
}


def at(kind: Kind, field: str) -> int:
    """Return the place of a field in the message."""
    return 1 + list(CALLS[kind].fields).index(field)


def knowing(kind: Kind, fields: list[Any]) -> KnownCalls[str]:
    known: KnownCalls[str] = KnownCalls(kind)
    known.learn(encode(*fields), fields, "met")
    return known


@EITHER
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_call_that_differs_in_number_and_blocks_alone_is_known(
    kind: Kind, data: st.DataObject
) -> None:
    met = data.draw(messages("calls", kind))
    known = knowing(kind, met)
    again = list(met)
    again[1] = data.draw(NUMBERS)
    released, blocks = at(kind, "released"), at(kind, "blocks")
    again[released], again[blocks] = data.draw(PLACES), data.draw(BLOCKS)
    packet = encode(*again)

    found = known.find(packet)

    decoded = calls_codec(KINDS[kind]).decode(packet)
    if found is None:
        # Only long messages are not remembered.
        assert len(packet) > 2048
    else:
        assert found == (decoded[1], decoded[released], decoded[blocks], "met")


@EITHER
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_packet_that_is_known_is_that_message(kind: Kind, data: st.DataObject) -> None:
    message = MESSAGE[kind]
    known = knowing(kind, message)
    packet = bytearray(encode(*message))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(packet)))
        end = data.draw(st.integers(start, min(start + 4, len(packet))))
        packet[start:end] = data.draw(st.binary(max_size=4))
    try:
        found = known.find(bytes(packet))
    except RemoteProtocolError:
        with pytest.raises(RemoteProtocolError):
            calls_codec(KINDS[kind]).decode(bytes(packet))
        return
    if found is not None:
        # The codec reads the same of it.
        number, released, blocks, _ = found
        again = list(message)
        again[1], again[at(kind, "released")], again[at(kind, "blocks")] = number, released, blocks
        assert calls_codec(KINDS[kind]).decode(bytes(packet)) == again


@EITHER
@pytest.mark.parametrize(
    ("field", "value"),
    [("call", -1), ("call", "5"), ("released", [[1]]), ("blocks", [[1, 2, -3]]), ("blocks", None)],
)
def test_what_differs_passes_the_checks_of_the_table(kind: Kind, field: str, value: object) -> None:
    known = knowing(kind, MESSAGE[kind])
    packet = MESSAGE[kind].copy()
    packet[at(kind, field)] = value
    try:
        found = known.find(encode(*packet))
    except RemoteProtocolError as error:
        assert field in str(error)  # noqa: PT017 - either is right
    else:
        assert found is None


@EITHER
def test_head_and_tail_may_not_overlap_or_leave_the_number_out(kind: Kind) -> None:
    message = MESSAGE[kind]
    known = knowing(kind, message)
    released = at(kind, "released")
    begin = encode(*message)[:2]
    head, tail = (encode(*part)[1:] for part in (message[2:released], message[released + 2 :]))
    moved = b"".join(map(msgpack.packb, (5, [], [])))

    assert known.find(begin + encode(5)[1:] + moved[1:] + tail) is None
    assert known.find(begin + head + moved + tail) is None
    assert known.find(begin + b"\x05" + head[: -len(tail)] + tail) is None
    assert known.find(begin) is None
    assert known.find(b"") is None


@EITHER
def test_calls_of_other_shapes_push_the_oldest_out(kind: Kind) -> None:
    message = MESSAGE[kind]
    known = knowing(kind, message)
    place = at(kind, "inputs" if kind is Kind.INFER else "outputs")
    for count in range(2, 18):
        other = message.copy()
        other[place] = ROWS * count
        known.learn(encode(*other), other, str(count))
        found = known.find(encode(*other))
        assert found is not None
        assert found[3] == str(count)
    assert known.find(encode(*message)) is None
