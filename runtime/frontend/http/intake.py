"""The body of a message while it comes in, in whichever form it comes."""

from __future__ import annotations

import mmap
from http import HTTPStatus
from typing import TYPE_CHECKING

from moonpool.runtime.frontend.http.head import BadMessage

if TYPE_CHECKING:
    from collections.abc import Callable

_SMALL_BYTES = 256 << 10
_LINE_BYTES = 4096
_TRAILER_BYTES = 16 << 10
_HEX = frozenset(b"0123456789abcdefABCDEF")


def too_large(size: str, limit_bytes: int) -> BadMessage:
    """The answer to a body over the limit."""
    return BadMessage(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"request body of {size} bytes exceeds the maximum of {limit_bytes} bytes",
    )


def over_input_size(size: str, limit_bytes: int, *, is_json: bool) -> BadMessage:
    """The answer to a request over `--http-max-input-size`, in Triton's words."""
    what = "Request JSON" if is_json else "Request"
    return BadMessage(
        HTTPStatus.BAD_REQUEST,
        f"{what} size of {size} bytes exceeds the maximum allowed value of {limit_bytes} bytes. Use "
        "--http-max-input-size to increase the limit.",
    )


def memory_of(size_bytes: int) -> memoryview:
    """Memory for a body: of a large one the kernel gives only as much as has come. Raises `BadMessage` for none."""
    if size_bytes <= _SMALL_BYTES:
        return memoryview(bytearray(size_bytes))
    try:
        return memoryview(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except OSError:
        text = f"there is no memory for a request body of {size_bytes} bytes"
        raise BadMessage(HTTPStatus.SERVICE_UNAVAILABLE, text) from None


class Fixed:
    """A body whose length was announced, in memory that was set aside for it."""

    __slots__ = ("body", "received_bytes", "size_bytes")

    def __init__(self, body: memoryview) -> None:
        self.body = body
        self.size_bytes = len(body)
        self.received_bytes = 0

    def take(self, data: bytes) -> bytes | None:
        """Returns what lies behind the body once that is complete, else None."""
        begin = self.received_bytes
        end = begin + len(data)
        if end <= self.size_bytes:
            self.body[begin:end] = data
            self.received_bytes = end
            return b"" if end == self.size_bytes else None
        missing = self.size_bytes - begin
        self.body[begin:] = data[:missing]
        self.received_bytes = self.size_bytes
        return data[missing:]

    def room(self) -> memoryview | None:
        """Where the rest of the body may be received without a copy."""
        return self.body[self.received_bytes :]

    def received(self, size_bytes: int) -> bool:
        """So much was written into `room`; whether that was the rest."""
        self.received_bytes += size_bytes
        return self.received_bytes == self.size_bytes


class Chunked:
    """A body in chunks. Stricter than it would have to be: nothing but what clients send."""

    __slots__ = (
        "_left",
        "_limit_bytes",
        "_line",
        "_refusal",
        "_state",
        "_trailer_bytes",
        "body",
        "received_bytes",
    )

    def __init__(
        self, limit_bytes: int, refusal: Callable[[str, int], BadMessage] = too_large
    ) -> None:
        """`refusal` makes the answer to more than the limit, of a size and the limit."""
        self._limit_bytes = limit_bytes
        self._refusal = refusal
        self.body = bytearray()
        self._line = b""
        self._state = self._size
        self._left = 0
        self._trailer_bytes = 0
        self.received_bytes = 0

    def room(self) -> memoryview | None:
        """Chunks are received where everything else is."""
        return None

    def take(self, data: bytes) -> bytes | None:
        """Returns what lies behind the body once that is complete, else None. Raises `BadMessage`."""
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
            raise _malformed(f"{digits[:20]!r} is no size of a chunk")
        size = int(digits, 16)
        if self.received_bytes + size > self._limit_bytes:
            raise self._refusal(f"at least {self.received_bytes + size}", self._limit_bytes)
        self._left = size
        self._state = self._end_of_chunk if size else self._trailer
        return False

    def _end_of_chunk(self, line: bytes) -> bool:
        if line:
            raise _malformed("a chunk that is longer than it says")
        self._state = self._size
        return False

    def _trailer(self, line: bytes) -> bool:
        self._trailer_bytes += len(line)
        if self._trailer_bytes > _TRAILER_BYTES:
            raise BadMessage(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the trailers are too long"
            )
        return not line


def _malformed(what: str) -> BadMessage:
    return BadMessage(HTTPStatus.BAD_REQUEST, f"malformed chunked body: {what}")
