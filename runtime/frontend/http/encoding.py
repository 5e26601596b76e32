"""Bodies that travel compressed: gzip and deflate, both ways."""

from __future__ import annotations

import zlib
from http import HTTPStatus
from typing import TYPE_CHECKING

from moonpool.runtime.frontend.http.head import BadMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moonpool.runtime.frontend.http.exchange import Body, Part

_FED_BYTES = 1 << 16
_STEP_BYTES = 1 << 20
_MOST_PARTS = 1 << 16
ENCODINGS = ("gzip", "deflate")
_ANY, _GZIP, _ZLIB = 47, 31, 15
# On a loopback even this is more work than sending the bytes as they are.
_LEVEL = 1


class TooLong(BadMessage):
    """A body has more bytes than it may have once it is decompressed."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the request body has more than {limit_bytes} bytes once it is decompressed",
        )


def inflate(body: Body, limit_bytes: int) -> bytearray:
    """Decompress gzip or deflate. Raises `TooLong` for more than `limit_bytes`, and `BadMessage` for a broken body.

    Which of the two it was the body says itself. Takes no more memory than the limit. May run on any thread.
    """
    if not len(body):
        raise BadMessage(HTTPStatus.BAD_REQUEST, "nothing to be decompressed")
    out = bytearray()
    try:
        with memoryview(body) as packed:
            begin = 0
            # A gzip file may have several parts.
            for _ in range(_MOST_PARTS):
                begin += _inflate_part(packed, begin, out, limit_bytes)
                if begin == len(packed):
                    return out
        raise zlib.error(f"it has more than {_MOST_PARTS} parts")
    except zlib.error as error:
        raise BadMessage(
            HTTPStatus.BAD_REQUEST, f"the request body cannot be decompressed: {error}"
        ) from None


def _inflate_part(packed: memoryview, begin: int, out: bytearray, limit_bytes: int) -> int:
    """Add what is packed from `begin` on to `out`, up to the end of a part; how many bytes that had."""
    inflater = zlib.decompressobj(_ANY)
    fed = begin
    while not inflater.eof:
        # What a step leaves is copied, so that it gets little of the body at a time.
        given = inflater.unconsumed_tail
        if not given:
            given = bytes(packed[fed : fed + _FED_BYTES])
            fed += len(given)
        piece = inflater.decompress(given, min(_STEP_BYTES, limit_bytes - len(out) + 1))
        out += piece
        if len(out) > limit_bytes:
            raise TooLong(limit_bytes)
        if not piece and not given and not inflater.eof:
            raise zlib.error("it ends too early")
    return fed - len(inflater.unused_data) - begin


def deflate(encoding: str, parts: Sequence[Part]) -> list[bytes]:
    """The parts, compressed. May run on any thread."""
    deflater = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP if encoding == "gzip" else _ZLIB)
    compressed = [deflater.compress(part) for part in parts]
    compressed.append(deflater.flush())
    return [piece for piece in compressed if piece]


def accepted(header: bytes) -> str | None:
    """Which encoding a client wants the most, of those that are spoken here; None for none."""
    best: str | None = None
    most = 0.0
    for item in header.decode("latin-1").split(","):
        name, _, parameter = item.partition(";")
        key, _, value = parameter.strip().partition("=")
        weight = 1.0
        if key == "q":
            try:
                weight = float(value)
            except ValueError:
                weight = 0.0
        if name.strip() in ("gzip", "deflate") and weight > most:
            best, most = name.strip(), weight
    return best
