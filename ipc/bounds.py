"""How much a packet unpacks to, found before it is unpacked: an empty list has one byte there and seventy in memory."""

from __future__ import annotations

from moonpool.ipc.errors import RemoteProtocolError

# No message of an honest peer comes near it: a batch of 65536 requests, with blocks and remarks, has a third of it.
MAX_ITEMS = 1 << 21


def check_items(packet: bytes, most: int = MAX_ITEMS) -> None:
    """Make sure that a packet unpacks to no more values than that, also counting those inside of others.

    Raises `RemoteProtocolError`. What is no msgpack is left for msgpack to refuse, which gets no further than this.
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


# https://github.com/msgpack/msgpack/blob/master/spec.md, by the first byte of a value: how many bytes the count has
# that follows, the count itself where there are none, and what each one of it stands for in bytes and in values.
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
