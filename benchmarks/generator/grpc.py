"""gRPC over HTTP/2 from the client's side, for messages that are serialized already.

grpc's own Python client spends more time on a small request than a server does. This one spends a few microseconds. It keeps
one request at a time on a connection, like a caller that waits.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from urllib.parse import unquote

from moonpool.benchmarks.generator import hpack
from moonpool.benchmarks.generator.engine import ANSWERED, WireError

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 1, 1, 4, 8, 32
_TABLE_SIZE, _ENABLE_PUSH, _INITIAL_WINDOW, _MAX_FRAME = 1, 2, 4, 5
_CANCEL = 8

_FRAME = struct.Struct(">BHBBI")
_WORD = struct.Struct(">I")
_SETTING = struct.Struct(">HI")
_MESSAGE = struct.Struct(">BI")

_LARGEST_WINDOW = (1 << 31) - 1
_LARGEST_FRAME = (1 << 24) - 1
_DEFAULT_WINDOW, _DEFAULT_FRAME = (1 << 16) - 1, 1 << 14
# The most bytes of a frame that is read as a whole.
_COLLECTED_LIMIT_BYTES = 1 << 20
# After this many bytes the peer gets new credit.
_CREDIT_STEP = 1 << 29

# An entry of the map `parameters` in a response: the key, and a value that is true.
_FINAL = b"\x0a\x15triton_final_response\x12\x02\x08\x01"
# The first field of ModelStreamInferResponse: a string, never sent where it is empty.
_STREAM_ERROR = 0x0A


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _frame_head(len(payload), kind, flags, stream) + payload


def _frame_head(length: int, kind: int, flags: int, stream: int) -> bytes:
    return _FRAME.pack(length >> 16, length & 0xFFFF, kind, flags, stream)


class GrpcWire:
    """Sends messages that were prepared, each on a stream of its own, or all on one.

    A message that is part of a sequence has two parts, and the id of the sequence goes between them. On one stream (ModelStreamInfer) a request ends with the response that carries the final flag.
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
        self.skip = 0
        self.closes = False
        self.responses = 0
        self._is_stream = is_stream
        self._messages = [
            tuple(each) if not isinstance(each, bytes) else (_whole(each),) for each in messages
        ]
        self._message = memoryview(b"")
        # :method POST and :scheme http or https are whole entries of the static table.
        self._headers = (b"\x83\x87" if is_tls else b"\x83\x86") + b"".join(
            (
                hpack.literal(hpack.PATH, method.encode()),
                hpack.literal(hpack.AUTHORITY, authority.encode()),
                hpack.literal(hpack.CONTENT_TYPE, b"application/grpc"),
                hpack.literal(b"te", b"trailers"),
                hpack.literal(hpack.USER_AGENT, b"moonpool-bench"),
                *(hpack.literal(key.lower().encode(), text.encode()) for key, text in metadata),
            )
        )
        self._stream, self._is_open = -1, False
        self._buffer = b""
        self._block = b""
        self._ends_stream = False
        self._reply = b""
        self._good_trailers: bytes | None = None
        self._out: list[bytes | memoryview] = []
        self._left = memoryview(b"")
        self._credit_used = 0
        self._peer_window, self._peer_frame = _DEFAULT_WINDOW, _DEFAULT_FRAME
        self._connection_window, self._stream_window = _DEFAULT_WINDOW, _DEFAULT_WINDOW

    def opening(self) -> Sequence[bytes | memoryview]:
        settings = {
            # Without a table every block of headers can be read by itself.
            _TABLE_SIZE: 0,
            _ENABLE_PUSH: 0,
            _INITIAL_WINDOW: _LARGEST_WINDOW,
            # Frames of a stream are read as a whole, so they have to be small; others are dropped as they come.
            _MAX_FRAME: _DEFAULT_FRAME if self._is_stream else _LARGEST_FRAME,
        }
        payload = b"".join(_SETTING.pack(key, value) for key, value in settings.items())
        more = _WORD.pack(_LARGEST_WINDOW - _DEFAULT_WINDOW)
        return [_PREFACE + _frame(_SETTINGS, 0, 0, payload) + _frame(_WINDOW, 0, 0, more)]

    def outgoing(self) -> Sequence[bytes | memoryview]:
        out, self._out = self._out, []
        return out

    def begin(self, kind: int, sequence: int) -> Sequence[bytes | memoryview]:
        parts = self._messages[kind]
        whole = parts[0] if len(parts) == 1 else _whole(varint(sequence).join(parts))
        self._message = memoryview(whole)
        if not self._is_open:
            self._stream += 2
            self._stream_window = self._peer_window
            self._is_open = True
            self._reply = b""
            self._out.append(_frame(_HEADERS, _END_HEADERS, self._stream, self._headers))
        self._left = self._message
        self._pump()
        out, self._out = self._out, []
        # Small messages go as one piece, because a system call with several buffers is slower.
        return [b"".join(out)] if len(self._message) < _DEFAULT_FRAME else out

    def cancel(self) -> Sequence[bytes | memoryview] | None:
        if not self._is_open:
            return ()
        self._left = memoryview(b"")
        self._is_open = False
        # Frames of this stream that come later are those of no request.
        return [_frame(_RESET, 0, self._stream, _WORD.pack(_CANCEL))]

    def _pump(self) -> None:
        """Make frames of the message, as far as the peer's windows allow."""
        while self._left:
            size = min(
                len(self._left), self._peer_frame, self._connection_window, self._stream_window
            )
            if size <= 0:
                return
            chunk, self._left = self._left[:size], self._left[size:]
            self._connection_window -= size
            self._stream_window -= size
            flags = 0 if self._left or self._is_stream else _END_STREAM
            self._out += (_frame_head(size, _DATA, flags, self._stream), chunk)

    def feed(self, data: bytes) -> str | None:
        if self.skip:
            dropped = min(self.skip, len(data))
            self.skip -= dropped
            data = data[dropped:]
        buffer = self._buffer + data if self._buffer else data
        at, end, outcome = 0, len(buffer), None
        while end - at >= 9:
            high, low, kind, flags, stream = _FRAME.unpack_from(buffer, at)
            length = high << 16 | low
            if kind == _DATA:
                self._credit_used += length
                if self._credit_used > _CREDIT_STEP:
                    self._credit()
                if not (self._is_stream or flags & _END_STREAM):
                    # The contents of the answer were checked once, before the window.
                    at += 9 + length
                    if at > end:
                        self.skip, at = at - end, end
                    continue
            elif length > _COLLECTED_LIMIT_BYTES:
                raise WireError(f"a server sent a frame of {length} bytes that is no data")
            if end - at - 9 < length:
                break
            payload = buffer[at + 9 : at + 9 + length]
            at += 9 + length
            found = self._take(kind, flags, stream & _LARGEST_WINDOW, payload)
            if found is not None:
                outcome = found
        self._buffer = buffer[at:]
        return outcome

    def _credit(self) -> None:
        """Give the peer credit for more data."""
        more = _WORD.pack(self._credit_used)
        self._out.append(_frame(_WINDOW, 0, 0, more))
        if self._is_stream and self._is_open:
            self._out.append(_frame(_WINDOW, 0, self._stream, more))
        self._credit_used = 0

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> str | None:
        is_ours = self._is_open and stream == self._stream
        if kind == _WINDOW and len(payload) == 4:
            if stream == 0:
                self._connection_window += _WORD.unpack(payload)[0]
            elif is_ours:
                self._stream_window += _WORD.unpack(payload)[0]
            self._pump()
        elif kind == _SETTINGS and not flags & _ACK:
            self._settings(payload)
        elif kind == _PING and not flags & _ACK:
            self._out.append(_frame(_PING, _ACK, 0, payload))
        elif kind == _GOAWAY:
            self.closes = True
        elif is_ours and kind == _HEADERS:
            self._block = _unpadded(flags, payload)
            # END_STREAM is a flag of the first frame of a block, END_HEADERS of the last.
            self._ends_stream = bool(flags & _END_STREAM)
            return self._block_came(flags)
        elif is_ours and kind == _CONTINUATION:
            self._block += payload
            if len(self._block) > _COLLECTED_LIMIT_BYTES:
                raise WireError("a server sent more than 1 MiB of headers")
            return self._block_came(flags)
        elif is_ours and kind == _RESET and len(payload) == 4:
            return self._ended(f"the server reset the stream, error {_WORD.unpack(payload)[0]}")
        elif is_ours and kind == _DATA:
            if flags & _END_STREAM:
                return self._ended("the server ended the stream without a status")
            return self._data(payload)
        return None

    def _settings(self, payload: bytes) -> None:
        if len(payload) % _SETTING.size:
            raise WireError("a server sent settings that are cut off")
        for key, value in _SETTING.iter_unpack(payload):
            if key == _INITIAL_WINDOW:
                self._stream_window += value - self._peer_window
                self._peer_window = value
            elif key == _MAX_FRAME:
                self._peer_frame = value
        self._out.append(_frame(_SETTINGS, _ACK, 0, b""))
        self._pump()

    def _block_came(self, flags: int) -> str | None:
        if not (flags & _END_HEADERS and self._ends_stream):
            return None
        if self._block == self._good_trailers:
            return self._ended(ANSWERED)
        headers = hpack.headers_of(self._block)
        status = headers.get(b"grpc-status")
        if status == b"0" and not self._is_stream:
            self._good_trailers = self._block
            return self._ended(ANSWERED)
        if status is None:
            code = headers.get(b":status", b"?").decode(errors="replace")
            return self._ended(f"HTTP {code}: no grpc-status")
        text = unquote(headers.get(b"grpc-message", b"").decode(errors="replace"))
        return self._ended(f"gRPC {status.decode(errors='replace')}: {text}")

    def _ended(self, outcome: str) -> str:
        if self._left:
            # The peer does not want the rest of the message, and must not wait for it.
            self._out.append(_frame(_RESET, 0, self._stream, _WORD.pack(_CANCEL)))
            self._left = memoryview(b"")
        self._is_open = False
        if outcome == ANSWERED:
            self.responses += 1
        return outcome

    def _data(self, payload: bytes) -> str | None:
        """Read responses of a stream. The final one ends the request."""
        self._reply += payload
        while len(self._reply) >= _MESSAGE.size:
            is_compressed, length = _MESSAGE.unpack_from(self._reply)
            end = _MESSAGE.size + length
            if is_compressed:
                raise WireError("a server sent a compressed response that was not asked for")
            if len(self._reply) < end:
                return None
            message, self._reply = self._reply[_MESSAGE.size : end], self._reply[end:]
            if message[:1] == bytes([_STREAM_ERROR]):
                return self._stream_failed(message)
            is_final = _FINAL in message
            # A final response without outputs only marks the end, and does not count.
            self.responses += not is_final or _has_outputs(message)
            if is_final:
                return ANSWERED
        return None

    def _stream_failed(self, message: bytes) -> str:
        """End the request with an error. More responses may come or not, so the stream is reset."""
        self._out.append(_frame(_RESET, 0, self._stream, _WORD.pack(_CANCEL)))
        self._left = memoryview(b"")
        size, at = _varint(message, 1)
        return self._ended(message[at : at + size].decode(errors="replace"))


def _whole(message: bytes) -> bytes:
    """Put the head of gRPC before a message."""
    return _MESSAGE.pack(0, len(message)) + message


def varint(value: int) -> bytes:
    """Write a varint of protobuf."""
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _unpadded(flags: int, payload: bytes) -> bytes:
    if flags & _PADDED:
        payload = payload[1 : len(payload) - payload[0]] if payload else b""
    return payload[5:] if flags & _PRIORITY else payload


def _has_outputs(message: bytes) -> bool:
    """Return True if a ModelStreamInferResponse has an output: field 5 of the ModelInferResponse in its field 2."""
    if message[:1] != b"\x12":
        return False
    _, at = _varint(message, 1)
    while at < len(message):
        key, at = _varint(message, at)
        if key >> 3 == 5:
            return True
        if key & 7 != 2:
            raise WireError("a response is not a message of the protocol")
        size, at = _varint(message, at)
        at += size
    return False


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Read a varint of protobuf; return it and the place behind it."""
    value, shift = 0, 0
    while at < len(message) and shift < 64:
        value |= (message[at] & 127) << shift
        at += 1
        if message[at - 1] < 128:
            return value, at
        shift += 7
    raise WireError("a response is not a message of the protocol")
