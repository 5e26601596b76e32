"""Clients that do not speak HTTP, lie about lengths, are slow, many, or gone: others are served meanwhile."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.server.hostile.conftest import BODY_BYTES, Target
from tests.waiting import Deadline

from moonpool.runtime.conformance.tensors import GOOD
from moonpool.runtime.conformance.wire import as_bytes

pytestmark = pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "Clients that are slow, come in large numbers, lie about lengths, do not read or go "
    "away do not harm others, and leave no descriptor, thread or memory behind.",
)

BODY = as_bytes(GOOD)
HEAD = b"POST /v2/models/add_sub/infer HTTP/1.1\r\nHost: x\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
ANSWER_S = 60.0


@contextlib.contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), ANSWER_S) as connection:
        yield connection


def _said(port: int, data: bytes) -> bytes:
    """Send these bytes and no more, and return the whole answer."""
    found = b""
    with _connected(port) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(1 << 16):
            found += part
    return found


MANY = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@MANY
@given(
    at=st.integers(0, len(WHOLE)),
    gone=st.integers(0, 40),
    new=st.binary(max_size=20)
    | st.sampled_from([b"\r\n", b"\0", b" ", b"\r\n\r\n", b"Transfer-Encoding: chunked\r\n"]),
)
def test_broken_requests_end(target: Target, at: int, gone: int, new: bytes) -> None:
    said = _said(target.http_port, WHOLE[:at] + new + WHOLE[at + gone :])

    assert said == b"" or said.startswith(b"HTTP/1."), said[:100]


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        (HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", b"400"),
        (HEAD + b"Content-Length: -1\r\n\r\n", b"400"),
        (HEAD + b"Content-Length: x\r\n\r\n", b"400"),
        (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n", b"4"),
        (HEAD + b"Content-Length: %d\r\n\r\n" % (BODY_BYTES + 1), b"413"),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n", b"4"),
        (HEAD + b"Transfer-Encoding: x\r\n\r\n", b"400"),
        (HEAD + b"X: " + b"a" * (128 << 10) + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * (128 << 10) + b" HTTP/1.1\r\n\r\n", b"4"),
        (HEAD + b"".join(b"X%d: y\r\n" % i for i in range(20_000)) + b"\r\n", b"431"),
        (b"garbage\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
    ],
)
def test_lies_are_found_out(target: Target, head: bytes, wanted: bytes) -> None:
    said = _said(target.http_port, head)

    assert said == b"" or said.split(b" ")[1].startswith(wanted), said[:100]


def test_chunks_without_an_end_are_cut_off(target: Target) -> None:
    chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"

    deadline = Deadline(ANSWER_S)
    with _connected(target.http_port) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        # The server sends the refusal at once, and gives a client that does not read it a moment.
        while not deadline.is_over:
            connection.sendall(chunk)

    assert not deadline.is_over


@pytest.mark.parametrize("cut", [1, 20, len(HEAD), len(HEAD) + 25, len(WHOLE) - 1])
def test_requests_that_are_not_finished_harm_nobody(target: Target, cut: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(_connected(target.http_port)).sendall(WHOLE[:cut])
        target.answers()


def test_slow_clients_harm_nobody(target: Target) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(_connected(target.http_port)) for _ in range(100)]
        for byte in WHOLE[:50]:
            for connection in slow:
                connection.send(bytes([byte]))
        target.answers()
        for connection in slow:
            connection.sendall(WHOLE[50:])
        for connection in slow:
            assert connection.recv(12) == b"HTTP/1.1 200"


def test_answers_that_nobody_reads_are_given_up(target: Target) -> None:
    """Clients ask for many large answers, take none, and go."""
    count = 200_000
    head = b'{"inputs":[{"name":"IN_FP32","shape":[%d],"datatype":"FP32",' % count
    head += b'"parameters":{"binary_data_size":%d}}],"parameters":{"binary_data_output":true}}'
    header = head % (count * 4)
    request = (
        b"POST /v2/models/every/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n"
        b"Content-Length: %d\r\n\r\n" % (len(header), len(header) + count * 4)
    )
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(_connected(target.http_port))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(request + header + bytes(count * 4))
        target.answers()


@pytest.mark.parametrize("port", ["http_port", "grpc_port"])
def test_ten_thousand_connections_come_and_go(target: Target, port: str) -> None:
    at = getattr(target, port)
    for batch in range(20):
        opened = [socket.create_connection(("127.0.0.1", at), ANSWER_S) for _ in range(500)]
        for index, connection in enumerate(opened):
            if index % 3 == 0:
                connection.send(WHOLE[: index % len(WHOLE)])
            if index % 2:
                # The connection is reset rather than closed.
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.close()
        if batch % 5 == 0:
            target.answers()


FRAMES = [
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 9,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\xff\xff\xff\0\0\0\0\0\1",
    b"\0" * 100,
    WHOLE,
    b"\x16\x03\x01\x02\x00\x01\x00",
]


@pytest.mark.parametrize("frame", FRAMES, ids=range(len(FRAMES)))
def test_bytes_that_are_not_http2_harm_nobody(target: Target, frame: bytes) -> None:
    for _ in range(50):
        with _connected(target.grpc_port) as connection, contextlib.suppress(ConnectionError):
            connection.sendall(frame)
    target.answers()
