"""gRPC from the client's side, for messages that are serialized already, over the nghttp2 of the server's port.

grpcio, gRPC's own library for Python, spends more time on a small request than a server does. This one spends a few
microseconds. It keeps one request at a time on a connection, like a caller that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from moonpool.benchmarks.generator.engine import ANSWERED, WireError
from moonpool.runtime.model.protobuf import BadProtobuf, read_varint, varint
from moonpool.runtime.server.grpc import open_nghttp2

if TYPE_CHECKING:
    from moonpool.runtime.server.grpc import _http2

_HEAD, _MESSAGE, _END, _CLOSED, _REFUSED = range(5)
# The session gives so much at once, at most.
_PART_BYTES = 256 << 10
# In place of the compression of a large message.
_IS_COMING = 2
_NO_MESSAGE = "a server sent a response that is compressed, or no message of gRPC"
_LARGEST_MESSAGE = (1 << 31) - 1
# An entry of the map `parameters` in a response: the key, and a value that is true.
_FINAL = b"\x0a\x15triton_final_response\x12\x02\x08\x01"
# The first field of ModelStreamInferResponse: a string, never sent where it is empty.
_STREAM_ERROR = 0x0A


@cache
def session_maker() -> Callable[..., _http2.Session]:
    """Return the maker of sessions. Raises `MissingHttp2`."""
    return open_nghttp2()[0]


class GrpcWire:
    """Sends messages that were prepared, each on a stream of its own, or all on one.

    A message that is part of a sequence has two parts, and the id of the sequence goes between them. On one stream
    (ModelStreamInfer) a request ends with the response that carries the final flag.
    """

    def __init__(
        self,
        authority: str,
        method: str,
        *messages: bytes | Sequence[bytes],
        is_stream: bool = False,
        metadata: Sequence[tuple[str, str]] = (),
        is_tls: bool = False,
    ) -> None:
        """Raises `MissingHttp2`."""
        # Nothing is dropped unread.
        self.skip = 0
        self.closes = False
        self.responses = 0
        self._is_stream = is_stream
        self._messages = [(each,) if isinstance(each, bytes) else tuple(each) for each in messages]
        self._headers = (
            (b":method", b"POST"),
            (b":scheme", b"https" if is_tls else b"http"),
            (b":path", method.encode()),
            (b":authority", authority.encode()),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            (b"user-agent", b"moonpool-bench"),
            *((key.lower().encode(), text.encode()) for key, text in metadata),
        )
        self._session = session_maker()(_LARGEST_MESSAGE, False, True)
        # The stream of the request in flight, or of all of them; 0 if there is none.
        self._stream = 0
        # The headers and the trailers of its answer so far; None in place of those that are too large.
        self._heads: list[bytes | None] = []
        self._good_trailers: bytes | None = b""

    def opening(self) -> Sequence[bytes | memoryview]:
        return self.outgoing()

    def outgoing(self) -> Sequence[bytes | memoryview]:
        found: list[bytes | memoryview] = []
        while True:
            parts, size, _, is_over = self._session.out()
            if isinstance(parts, list):
                found += parts
            elif size:
                found.append(parts)
            if size < _PART_BYTES:
                break
        if is_over:
            self.closes = True
            if self._stream:
                raise ConnectionError("the server broke the rules of HTTP/2, or has gone away")
        return found

    def begin(self, kind: int, sequence: int) -> Sequence[bytes | memoryview]:
        parts = self._messages[kind]
        message = parts[0] if len(parts) == 1 else varint(sequence).join(parts)
        self._heads.clear()
        if self._stream:
            self._session.send(self._stream, message, False, False, -1, None)
        else:
            self._stream = self._session.request(self._headers, message, not self._is_stream, self._is_stream)
        return self.outgoing()

    def cancel(self) -> Sequence[bytes | memoryview] | None:
        if self._stream:
            self._session.cancel(self._stream)
            self._stream = 0
        return self.outgoing()

    def feed(self, data: bytes) -> str | None:
        outcome, has_all = None, False
        while not has_all:
            try:
                events, has_all = self._session.feed(data, len(data))
            except ConnectionError as error:
                raise WireError(f"a server broke the rules of HTTP/2: {error}") from error
            for event in events:
                kind = event[0]
                if kind > _REFUSED or not self._stream or event[1] != self._stream:
                    continue
                if kind == _HEAD:
                    self._heads.append(event[2])
                elif (found := self._take(*event)) is not None:
                    outcome = found
        return outcome

    def _take(self, kind: int, _: int, what: Any = None, more: int = 0) -> str | None:
        if kind == _MESSAGE:
            return self._responses(what, more)
        if kind == _REFUSED:
            raise WireError(_NO_MESSAGE)
        if kind == _END:
            return self._ended(self._status())
        return self._ended(f"the server reset the stream, error {what}")

    def _status(self) -> str:
        """Return the outcome of a stream that the server has ended."""
        if self._heads and self._heads[-1] == self._good_trailers:
            return ANSWERED
        words = b"".join(each or b"" for each in self._heads).split(b"\0")
        head = dict(zip(words[::2], words[1::2], strict=False))
        status = head.get(b"grpc-status")
        if status is None:
            code = head.get(b":status", b"?").decode(errors="replace")
            return f"HTTP {code}: no grpc-status"
        if status == b"0" and not self._is_stream:
            self._good_trailers = self._heads[-1]
            return ANSWERED
        text = unquote(head.get(b"grpc-message", b"").decode(errors="replace"))
        return f"gRPC {status.decode(errors='replace')}: {text}"

    def _ended(self, outcome: str) -> str:
        # A server that does not want the rest of the message must not wait for it.
        self._session.cancel(self._stream)
        self._stream = 0
        self.responses += outcome == ANSWERED
        return outcome

    def _responses(self, message: bytes | None, is_compressed: int) -> str | None:
        """Read a response of a stream, and those that have come behind it."""
        outcome = None
        while True:
            if message is None or is_compressed == 1:
                raise WireError(_NO_MESSAGE)
            if is_compressed != _IS_COMING:
                try:
                    found = self._response(message)
                except (BadProtobuf, IndexError):
                    raise WireError("a response is not a message of the protocol") from None
                outcome = outcome if found is None else found
            taken = self._session.take(self._stream) if self._stream else None
            if taken is None:
                return outcome
            message, is_compressed, _size = taken

    def _response(self, message: bytes) -> str | None:
        """Read a response of a stream. The final one ends the request."""
        if message[:1] == bytes([_STREAM_ERROR]):
            # More responses may come or not, so the stream is reset.
            size, at = read_varint(message, 1)
            return self._ended(message[at : at + size].decode(errors="replace"))
        is_final = _FINAL in message
        # A final response without outputs only marks the end, and does not count.
        self.responses += not is_final or _has_outputs(message)
        return ANSWERED if is_final else None


def _has_outputs(message: bytes) -> bool:
    """Return True if a ModelStreamInferResponse has an output: field 5 of the ModelInferResponse in its field 2."""
    if message[:1] != b"\x12":
        return False
    _, at = read_varint(message, 1)
    while at < len(message):
        key, at = read_varint(message, at)
        if key >> 3 == 5:
            return True
        if key & 7 != 2:
            raise BadProtobuf("a field of another type")
        size, at = read_varint(message, at)
        at += size
    return False
