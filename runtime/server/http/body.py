"""Bodies of messages: received by their length or in chunks, compressed and decompressed."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Sequence
from http import HTTPStatus

from moonpool.runtime.server.http.head import BadHttpMessage, Body, Part

_SMALL_BYTES = 256 << 10
_LINE_BYTES = 4096
_TRAILER_BYTES = 16 << 10
_HEX = frozenset(b"0123456789abcdefABCDEF")
_FED_BYTES = 1 << 16
_STEP_BYTES = 1 << 20
_MOST_PARTS = 1 << 16
ENCODINGS = ("gzip", "deflate")
_ANY, _GZIP, _ZLIB = 47, 31, 15
# The fastest level. On a loopback even this is more work than sending the bytes as they are.
_LEVEL = 1


def too_large(size: str, limit_bytes: int) -> BadHttpMessage:
    """Return the answer to a body over the limit."""
    return BadHttpMessage(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"request body of {size} bytes exceeds the maximum of {limit_bytes} bytes"
    )


def over_input_size(size: str, limit_bytes: int, *, is_json: bool) -> BadHttpMessage:
    """Return the answer to a request over `--http-max-input-size`, with Triton's text."""
    what = "Request JSON" if is_json else "Request"
    return BadHttpMessage(
        HTTPStatus.BAD_REQUEST,
        f"{what} size of {size} bytes exceeds the maximum allowed value of {limit_bytes} bytes. Use "
        "--http-max-input-size to increase the limit.",
    )


def over_openai_size(size: str, limit_bytes: int) -> BadHttpMessage:
    """Return the answer to a request of OpenAI's API over the limit, with the text of Triton's front end for it."""
    return BadHttpMessage(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"Request size of {size.removeprefix('at least ')} bytes exceeds the maximum allowed input size of "
        f"{limit_bytes} bytes. Use --http-max-input-size to increase the limit.",
    )


def memory_of(size_bytes: int) -> memoryview:
    """Return memory for a body. Large memory is mapped, so the kernel gives pages only as bytes come.

    Raises `BadHttpMessage` if there is no memory.
    """
    if size_bytes <= _SMALL_BYTES:
        return memoryview(bytearray(size_bytes))
    try:
        return memoryview(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError:
        text = f"there is no memory for a request body of {size_bytes} bytes"
        raise BadHttpMessage(HTTPStatus.SERVICE_UNAVAILABLE, text) from None


class Fixed:
    """A body whose length was announced, received into memory of its own.

    What comes before the part that fits into this memory is received apart, as `text`.
    """

    __slots__ = ("_parts", "body", "received_bytes", "size_bytes", "text")

    def __init__(self, body: memoryview, size_bytes: int) -> None:
        self.body = body
        self.size_bytes = size_bytes
        self.received_bytes = 0
        apart = size_bytes - len(body)
        self.text = memory_of(apart) if apart else None
        # Where the next bytes go.
        self._parts = [part for part in (self.text, body) if part is not None]

    def take(self, data: bytes) -> bytes | None:
        """Take received bytes. Returns those behind the body once it is complete, else None."""
        taken = 0
        # Slices of bytes would be copies.
        with memoryview(data) as view:
            while taken < len(data) and self.received_bytes < self.size_bytes:
                room = self.room()
                part = view[taken : taken + len(room)]
                room[: len(part)] = part
                taken += len(part)
                self.received(len(part))
        return data[taken:] if self.received_bytes == self.size_bytes else None

    def room(self) -> memoryview:
        """Return memory that the next bytes can be received into without a copy."""
        return self._parts[0]

    def received(self, size_bytes: int) -> bool:
        """Count bytes that were received into `room`. Returns whether the body is complete."""
        self.received_bytes += size_bytes
        self._parts[0] = self._parts[0][size_bytes:]
        if not len(self._parts[0]) and len(self._parts) > 1:
            del self._parts[0]
        return self.received_bytes == self.size_bytes


class Chunked:
    """A body in chunks. Takes no form of them but the one that clients send, as lenient servers read requests that
    proxies do not.
    """

    __slots__ = ("_left", "_limit_bytes", "_line", "_refusal", "_state", "_trailer_bytes", "body", "received_bytes")

    def __init__(self, limit_bytes: int, refusal: Callable[[str, int], BadHttpMessage] = too_large) -> None:
        """Start with an empty body. `refusal` makes the answer to a larger one, from its size and the limit."""
        self._limit_bytes = limit_bytes
        self._refusal = refusal
        self.body = bytearray()
        self._line = b""
        self._state = self._size
        self._left = 0
        self._trailer_bytes = 0
        self.received_bytes = 0

    def room(self) -> memoryview | None:
        """Return None: chunks are received into the port's buffer."""
        return None

    def take(self, data: bytes) -> bytes | None:
        """Take received bytes. Returns those behind the body once it is complete, else None. Raises
        `BadHttpMessage`.
        """
        at = 0
        while at < len(data):
            if self._left:
                piece = data[at : at + self._left]
                self.body += piece
                self.received_bytes += len(piece)
                self._left -= len(piece)
                at += len(piece)
                continue
            end = data.find(b"\n", at)
            line = self._line + data[at : end + 1 or len(data)]
            if len(line) > _LINE_BYTES:
                raise _malformed("a line of more than 4096 bytes")
            if end < 0:
                self._line = line
                return None
            self._line = b""
            at = end + 1
            if not line.endswith(b"\r\n"):
                raise _malformed("a line without CR")
            if self._state(line[:-2]):
                return data[at:]
        return None

    def _size(self, line: bytes) -> bool:
        digits = line.partition(b";")[0].rstrip(b" \t")
        if not 0 < len(digits) <= 16 or not _HEX.issuperset(digits):
            raise _malformed(f"{digits[:20]!r} is not the size of a chunk")
        size = int(digits, 16)
        if self.received_bytes + size > self._limit_bytes:
            raise self._refusal(f"at least {self.received_bytes + size}", self._limit_bytes)
        self._left = size
        self._state = self._end_of_chunk if size else self._trailer
        return False

    def _end_of_chunk(self, line: bytes) -> bool:
        if line:
            raise _malformed("a chunk that is longer than its size")
        self._state = self._size
        return False

    def _trailer(self, line: bytes) -> bool:
        self._trailer_bytes += len(line)
        if self._trailer_bytes > _TRAILER_BYTES:
            raise BadHttpMessage(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the trailers are too long")
        return not line


def _malformed(what: str) -> BadHttpMessage:
    return BadHttpMessage(HTTPStatus.BAD_REQUEST, f"malformed chunked body: {what}")


class TooLong(BadHttpMessage):
    """A body has more bytes than it may have once it is decompressed."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the request body has more than {limit_bytes} bytes once it is decompressed",
        )


def inflate(body: Body, limit_bytes: int) -> bytearray:
    """Decompress gzip or deflate. Raises `TooLong` for more than `limit_bytes`, and `BadHttpMessage` for a broken body.

    The body itself says which of the two it is. Takes no more memory than the limit. May run on any thread.
    """
    if not len(body):
        raise BadHttpMessage(HTTPStatus.BAD_REQUEST, "nothing to be decompressed")
    out = bytearray()
    try:
        with memoryview(body) as packed:
            begin = 0
            # A gzip file may have several parts. Each takes a decompressor, so their number is bounded.
            for _ in range(_MOST_PARTS):
                begin += _inflate_part(packed, begin, out, limit_bytes)
                if begin == len(packed):
                    return out
        raise zlib.error(f"it has more than {_MOST_PARTS} parts")
    except zlib.error as error:
        raise BadHttpMessage(HTTPStatus.BAD_REQUEST, f"the request body cannot be decompressed: {error}") from None


def _inflate_part(packed: memoryview, begin: int, out: bytearray, limit_bytes: int) -> int:
    """Decompress the part of `packed` that begins at `begin` into `out`, and return how many bytes the part has."""
    inflater = zlib.decompressobj(_ANY)
    fed = begin
    while not inflater.eof:
        # zlib copies what a step does not use, so it gets little of the body at a time.
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
    """Return the parts, compressed. May run on any thread."""
    deflater = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP if encoding == "gzip" else _ZLIB)
    compressed = [deflater.compress(part) for part in parts]
    compressed.append(deflater.flush())
    return [piece for piece in compressed if piece]


def accepted(header: bytes) -> str | None:
    """Return the encoding of ours that a client prefers, or None if it wants none."""
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
