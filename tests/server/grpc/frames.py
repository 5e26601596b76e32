"""HTTP/2 frame by frame: what clients send that no library would."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from tests.server.grpc.serving import TIMEOUT_S

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RESET, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (*range(5), *range(6, 10))
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"


class Frame(NamedTuple):
    """One frame of the server."""

    kind: int
    flags: int
    stream: int
    body: bytes


def frame(kind: int, flags: int = 0, stream: int = 0, body: bytes = b"") -> bytes:
    """Return a frame as it travels."""
    return struct.pack("!I", len(body))[1:] + struct.pack("!BBI", kind, flags, stream) + body


def literal(name: str, value: str) -> bytes:
    """Return a header as HPACK has it, without an index and without Huffman's code."""
    return b"\0" + _string(name.encode()) + _string(value.encode())


def _string(text: bytes) -> bytes:
    size = len(text)
    if size < 127:
        return bytes([size]) + text
    size -= 127
    head = bytearray(b"\x7f")
    while size >= 128:
        head.append(size % 128 | 128)
        size //= 128
    head.append(size)
    return bytes(head) + text


def head(path: str = INFER, **more: str) -> bytes:
    """Return the headers of a call; further ones have `_` for `-`."""
    plain = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}  # fmt: skip
    plain["content-type"] = "application/grpc"
    plain |= {name.replace("_", "-"): value for name, value in more.items()}
    return b"".join(literal(name, value) for name, value in plain.items())


def call(stream: int, path: str = INFER, **more: str) -> bytes:
    """Return the frame that begins a call."""
    return frame(HEADERS, END_HEADERS, stream, head(path, **more))


def message(data: bytes = b"", *, is_compressed: bool = False) -> bytes:
    """Return a message with its prefix."""
    return struct.pack("!BI", is_compressed, len(data)) + data


def frames(data: bytes) -> Iterator[Frame]:
    """Take bytes of a server apart."""
    while data:
        size = int.from_bytes(data[:3], "big")
        kind, flags, stream = struct.unpack("!BBI", data[3:9])
        yield Frame(kind, flags, stream, data[9 : 9 + size])
        data = data[9 + size :]


class RawClient:
    """A connection whose frames the test writes."""

    def __init__(self, port: int, greeting: bytes = PREFACE + frame(SETTINGS)) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
        self._received = b""
        self.send(greeting)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """Send bytes; False if the server has closed the connection."""
        try:
            self.socket.sendall(data)
        except ConnectionError:
            return False
        return True

    def frames(self) -> Iterator[Frame]:
        """Yield frames of the server until it closes the connection."""
        while True:
            while len(self._received) < 9 or len(self._received) < 9 + self._size():
                try:
                    more = self.socket.recv(1 << 16)
                except ConnectionError:
                    return
                if not more:
                    return
                self._received += more
            size = 9 + self._size()
            (first,) = frames(self._received[:size])
            self._received = self._received[size:]
            yield first

    def _size(self) -> int:
        return int.from_bytes(self._received[:3], "big")

    def next(self, kind: int) -> Frame:
        """Return the next frame of a kind."""
        for each in self.frames():
            if each.kind == kind:
                return each
        raise AssertionError(f"the server closed the connection without a frame of kind {kind}")

    def goodbye(self) -> tuple[int, bytes]:
        """Return code and text of the last GOAWAY before the server closes the connection."""
        last = [each.body for each in self.frames() if each.kind == GOAWAY][-1]
        return int.from_bytes(last[4:8], "big"), last[8:]
