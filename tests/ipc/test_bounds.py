"""The number of values in a packet is known before it is unpacked."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.ipc.codec import MAX_ITEMS, check_items
from moonpool.ipc.errors import RemoteProtocolError

pytestmark = pytest.mark.promise(
    "What a stub says",
    "A message that would unpack to more values than any message has is refused before it "
    "is unpacked, however it is nested.",
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=300),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=40,
)


def count(value: Any) -> int:
    """The value, and those inside of it."""
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count, value.values()))
    return 1


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_values_are_counted_as_they_are(value: Any) -> None:
    packet, values = msgpack.packb(value), count(value)

    check_items(packet, values)
    if len(packet) >= values > 1:
        with pytest.raises(RemoteProtocolError, match="more values than any message has"):
            check_items(packet, values - 1)


@pytest.mark.parametrize("size", [100, 70_000])
@pytest.mark.parametrize("kind", [bytes, str, list, dict])
def test_long_values_are_counted_too(kind: type, size: int) -> None:
    made: dict[type, Any] = {
        bytes: bytes(size),
        str: "x" * size,
        list: [None] * size,
        dict: {str(number): 1 for number in range(size)},
    }
    value = [made[kind], [1, 2]]
    packet = msgpack.packb(value)

    check_items(packet, count(value))
    with pytest.raises(RemoteProtocolError):
        check_items(packet, count(value) - 1)


@pytest.mark.parametrize(
    "packet",
    [
        b"\xdd\xff\xff\xff\xff" + bytes(MAX_ITEMS),
        b"\xdf\xff\xff\xff\xff" + bytes(MAX_ITEMS),
        b"\xdd\x7f\xff\xff\xff" * (MAX_ITEMS // 4),
        b"\xdd\x00\x30\x00\x00" + b"\x90" * 0x300000,
        b"\x91" * (MAX_ITEMS + 1),
    ],
    ids=["an array", "a map", "arrays in arrays", "empty arrays", "no end of arrays"],
)
def test_announced_values_count_before_they_arrive(packet: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="more values than any message has"):
        check_items(packet)


@pytest.mark.parametrize("packet", [b"\xc1" * 10, b"\x92\xc7\x00\x05" * 5, b"\xdb\xff\xff", b""])
def test_bytes_that_are_not_a_message_are_left_to_msgpack(packet: bytes) -> None:
    check_items(packet, 5)
