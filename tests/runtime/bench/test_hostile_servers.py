"""Whatever a server sends, the generator has an outcome, waits for more or says that it is not the protocol."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.runtime.bench.grpc_wire import GrpcWire
from moonpool.runtime.bench.http_wire import HttpWire
from moonpool.runtime.bench.wire import Wire, WireError

# Kinds that mean something and some that do not; streams of the connection and of requests.
FRAMES = st.builds(
    lambda kind, flags, stream, payload: (
        struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload
    ),
    st.integers(0, 10),
    st.integers(0, 255),
    st.sampled_from([0, 1, 3]),
    st.one_of(
        st.binary(max_size=20),
        # Messages of gRPC.
        st.binary(max_size=20).map(lambda data: struct.pack(">BI", 0, len(data)) + data),
        # Headers that are not in a table.
        st.tuples(st.binary(max_size=9), st.binary(max_size=9)).map(
            lambda pair: b"\0" + b"".join(bytes([len(text)]) + text for text in pair)
        ),
        # A name of the table with another value, as of a status.
        st.binary(max_size=9).map(lambda text: bytes([8, len(text)]) + text),
    ),
)
HEADS = st.sampled_from(
    [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.0 500 No\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: -1\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"\r\n",
        b"3\r\nabc\r\n",
        b"0\r\n\r\n",
        b"-5\r\n",
    ]
)


def fed(wire: Wire, pieces: list[bytes]) -> None:
    """Begin a request, and the next one when one has ended."""
    b"".join(wire.opening())
    wire.begin()
    try:
        for piece in pieces:
            for data in (piece[:3], piece[3:]):
                if data and wire.feed(data) is not None:
                    wire.outgoing()
                    wire.begin()
            assert wire.skip >= 0
    except WireError:
        pass


@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("is_stream", [True, False])
@given(pieces=st.lists(st.one_of(FRAMES, st.binary(max_size=30)), max_size=12))
def test_grpc(is_stream: bool, pieces: list[bytes]) -> None:
    fed(GrpcWire("a", "/b/c", b"x" * 70_000, is_stream=is_stream), pieces)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.one_of(HEADS, st.binary(max_size=30)), max_size=12))
def test_http(pieces: list[bytes]) -> None:
    fed(HttpWire(b"GET / HTTP/1.1\r\n\r\n"), pieces)
