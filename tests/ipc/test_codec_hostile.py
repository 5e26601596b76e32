"""Packets of a peer that means harm: one kind of error, in bounded time, whatever comes."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.ipc.described import EVERY_ROW, ROWS, TABLES, accepts, messages, receiver, refused

from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.codec import Codec, encode
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import Kind, Side

pytestmark = [
    pytest.mark.usefixtures("_either_msgpack"),
    pytest.mark.promise(
        "Containment",
        "Only packets that the tables describe are accepted. Any other packet causes an error, and nothing else.",
    ),
]


def test_a_kind_must_be_a_whole_number() -> None:
    for channel, kind in ROWS:
        codec = receiver(channel, kind)
        arity = len(TABLES[channel][kind].fields)

        for junk in (True, float(kind), "1", b"\x01", None, [1]):
            refused(codec, msgpack.packb([junk] + [1] * arity))


@EVERY_ROW
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_a_packet_cut_short_or_with_something_behind_it_is_refused(
    channel: str, kind: Kind, data: st.DataObject
) -> None:
    packet = encode(*data.draw(messages(channel, kind)))
    codec = receiver(channel, kind)
    codec.decode(packet)

    for length in range(len(packet)):
        assert "not msgpack" in refused(codec, packet[:length])
    assert "not msgpack" in refused(codec, packet + b"\xc0")
    assert "not msgpack" in refused(codec, packet * 2)


@EVERY_ROW
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_packet_with_one_byte_changed_is_refused_or_another_message(
    channel: str, kind: Kind, data: st.DataObject
) -> None:
    packet = bytearray(encode(*data.draw(messages(channel, kind))))
    codec = receiver(channel, kind)
    codec.decode(bytes(packet))
    packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))

    _decode_or_refuse(codec, bytes(packet))


def _decode_or_refuse(codec: Codec, packet: bytes) -> None:
    try:
        fields = codec.decode(packet)
    except RemoteProtocolError:
        return
    assert accepts(codec, fields)


@pytest.mark.parametrize("channel", TABLES)
@settings(max_examples=300, deadline=None)
@given(packet=st.binary(max_size=60))
@example(b"")
@example(b"\xc1")
@example(b"\x91\x00")
@example(b"\x90")
@example(b"\x80")
@example(b"\xc0")
@example(b"\x91\xc7\x00\x05")
@example(b"\xc7\x00\x05")
@example(b"\xd6\xff\x00\x00\x00\x00")
@example(b"\xc7\x0c\xff" + b"\xff" * 12)
@example(b"\x91\x90")
@example(b"\x91\x80")
@example(b"\x92\x02\xa2\xff\xfe")
@example(b"\x92\x02\xa3\xed\xa0\x80")
def test_any_bytes_cause_one_error_only(channel: str, packet: bytes) -> None:
    for us in Side:
        codec = Codec(TABLES[channel], us)
        _decode_or_refuse(codec, packet)
        _decode_or_refuse(codec, packet)


def _nested(opening: bytes, size_bytes: int = MAX_PACKET_BYTES) -> bytes:
    return (opening * size_bytes)[:size_bytes]


@pytest.mark.parametrize(
    "packet",
    [
        b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xde\xff\xff",
        b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x05",
        b"\xc9\x7f\xff\xff\xff\xff", b"\x92\x02\xdb\x7f\xff\xff\xff",
        b"\x92\x05\xdd\x00\x00\x7f\xf0" + bytes(0x7FF0 - 5),
        b"\xdd\x00\x00\x7f\xf0" + b"\xdd\x00\x00\x7f\xf0" * 6550,
        b"\xde\x3f\xff" + b"\xc0\xc0" * 0x3FFF, b"\xde\x3f\xff" + b"\x01\x01" * 0x3FFF,
        _nested(b"\x91"), _nested(b"\x81"), _nested(b"\x81\xa1a"), _nested(b"\x92\x05"),
        b"\x91" * 400 + b"\x05", b"\x91" * 900 + b"\x05", b"\x91" * 1023 + b"\x05",
        b"\x95" + b"\x05" + b"\x91" * 500 + b"\xc0" * 4,
        _nested(b"\xdf\x00\x00\x00\x01"), _nested(b"\xd4\x05"), _nested(b"\xc7\x00\x05"),
    ],
    ids=lambda packet: f"{packet[:9].hex(' ')} of {len(packet)}",
)  # fmt: skip
@pytest.mark.parametrize("channel", TABLES)
def test_a_packet_made_to_burst_is_refused(channel: str, packet: bytes) -> None:
    for us in Side:
        refused(Codec(TABLES[channel], us), packet)


@pytest.mark.parametrize("channel", TABLES)
def test_a_kind_that_the_channel_does_not_have_is_refused(channel: str) -> None:
    for number in {*range(-3, 40), 2**40, 2**64 - 1} - {int(kind) for kind in TABLES[channel]}:
        for us in Side:
            reason = refused(Codec(TABLES[channel], us), encode(number, 1))
            assert reason == f"a message of unknown kind {number}"
