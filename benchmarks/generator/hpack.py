"""Headers of HTTP/2 (RFC 7541): writes them without compression, and reads them from a peer that keeps no table."""

from __future__ import annotations

from moonpool.benchmarks.generator.engine import WireError

# The static table's names that matter here.
PATH, AUTHORITY, CONTENT_TYPE, USER_AGENT = 4, 1, 31, 58
_STATUSES = {8: b"200", 9: b"204", 10: b"206", 11: b"304", 12: b"400", 13: b"404", 14: b"500"}
_STATUS = b":status"
_STATIC_ENTRIES = 61
_END_OF_STRING = 256

# The length in bits of the code of each byte, and of the end. The codes themselves follow from the lengths.
_CODE_LENGTHS = (
    "13 23 28*7 24 30 28 28 30 28*8 30 28*9 6 10 10 12 13 6 8 11 10 10 8 11 8 6 6 6 5 5 5 6*7 7 8 15 "
    "6 12 10 13 6 7*22 8 7 8 13 19 13 14 6 15 5 6 5 6 5 6 6 6 5 7 7 6 6 6 5 6 7 6 5 5 6 7*5 15 11 14 "
    "13 28 20 22 20 20 22 22 22 23 22 23*5 24 23 24 24 22 23 24 23*4 21 22 23 22 23 23 24 22 21 20 22 "
    "22 23 23 21 23 22 22 24 21 22 23 23 21 21 22 21 23 22 23 23 20 22 22 22 23 22 22 23 26 26 20 19 "
    "22 23 22 25 26 26 26 27 27 26 24 25 19 21 26 27 27 26 27 24 21 21 26 26 28 27 27 27 20 24 20 21 "
    "22 21 21 23 22 22 25 25 24 24 26 23 26 27 26 26 27*5 28 27*5 26 30"
)


def _symbols() -> dict[tuple[int, int], int]:
    """Return bytes by length and value of their codes. Codes of one length are consecutive numbers."""
    lengths: list[int] = []
    for word in _CODE_LENGTHS.split():
        length, _, times = word.partition("*")
        lengths += [int(length)] * int(times or 1)
    found, code, before = {}, 0, 0
    for symbol in sorted(range(len(lengths)), key=lambda symbol: (lengths[symbol], symbol)):
        code <<= lengths[symbol] - before
        before = lengths[symbol]
        found[before, code] = symbol
        code += 1
    return found


_SYMBOLS: dict[tuple[int, int], int] = {}


def text_of(data: bytes) -> bytes:
    """Decode a string in Huffman's code. Raises `WireError`."""
    if not _SYMBOLS:
        _SYMBOLS.update(_symbols())
    text, code, length = bytearray(), 0, 0
    for byte in data:
        for bit in range(7, -1, -1):
            code, length = code << 1 | byte >> bit & 1, length + 1
            symbol = _SYMBOLS.get((length, code))
            if symbol == _END_OF_STRING or length > 30:
                raise WireError("a header is no text in Huffman's code")
            if symbol is not None:
                text.append(symbol)
                code = length = 0
    # The rest of the last byte is filled with ones.
    if length > 7 or code != (1 << length) - 1:
        raise WireError("a header is no text in Huffman's code")
    return bytes(text)


def literal(name: int | bytes, value: bytes) -> bytes:
    """Write a header without compression; `name` may be its number in the static table."""
    if isinstance(name, int):
        return _integer(name, 4) + _string(value)
    return b"\0" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    return _integer(len(text), 7) + text


def _integer(value: int, bits: int) -> bytes:
    limit = (1 << bits) - 1
    if value < limit:
        return bytes([value])
    encoded, value = bytearray([limit]), value - limit
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def headers_of(block: bytes) -> dict[bytes, bytes]:
    """Return the headers that are written with their names, and `:status`. Raises `WireError`.

    The peer must have got a setting that allows it no table.
    """
    reader = _Reader(block)
    found = {}
    while reader.at < len(block):
        first = block[reader.at]
        if first & 0x80:
            index = reader.integer(7)
            if index in _STATUSES:
                found[_STATUS] = _STATUSES[index]
            if not 0 < index <= _STATIC_ENTRIES:
                raise WireError("a header refers to a table that the client does not allow")
        elif first & 0xE0 == 0x20:
            reader.integer(5)
        else:
            index = reader.integer(6 if first & 0x40 else 4)
            name = reader.string() if index == 0 else _STATUS if index in _STATUSES else b""
            value = reader.string()
            if name:
                found[name] = value
    return found


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def integer(self, bits: int) -> int:
        limit = (1 << bits) - 1
        value = self._byte() & limit
        if value < limit:
            return value
        shift = 0
        while True:
            byte = self._byte()
            value += (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 28:
                raise WireError("a number in a header is too large")

    def string(self) -> bytes:
        is_coded = self.at < len(self._data) and self._data[self.at] & 0x80
        size = self.integer(7)
        text = self._data[self.at : self.at + size]
        if len(text) < size:
            raise WireError("a header is cut off")
        self.at += size
        return text_of(text) if is_coded else text

    def _byte(self) -> int:
        if self.at >= len(self._data):
            raise WireError("a header is cut off")
        self.at += 1
        return self._data[self.at - 1]
