"""Bytes of requests cut in any place are the same requests, and any bytes are handled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.http.listening import Scripted

from moonpool.runtime.server.http.connection import HttpExchange, HttpPort, HttpProtocol
from moonpool.runtime.server.http.options import HttpLimits


class Recorded(Scripted):
    """Keeps the bodies of requests."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[bytes] = []

    def handle(self, exchange: HttpExchange) -> None:
        self.bodies.append(bytes(exchange.body))
        exchange.respond(200, (), (b"%d" % len(exchange.body),))


class Wire:
    """Stands for a transport."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.is_closed = False

    @property
    def sent(self) -> bytes:
        return b"".join(self.writes)

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.is_closed = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return True

    def get_extra_info(self, _: str) -> None:
        return None

    def pause_reading(self) -> None:
        """Do nothing: the test reads everything."""

    resume_reading = pause_reading


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def fed(
    loop: asyncio.AbstractEventLoop, pieces: list[bytes], made: type[Recorded] = Recorded
) -> tuple[list[bytes], Wire]:
    """Feed a connection, and return the bodies of its requests and the wire with its answers."""
    handler, wire = made(), Wire()
    port = HttpPort(loop, handler, HttpLimits())
    connection = HttpProtocol(port)
    connection.connection_made(wire)  # type: ignore[arg-type]
    for piece in pieces:
        while piece and not wire.is_closed:
            room = connection.get_buffer(-1)
            count = min(len(room), len(piece))
            room[:count] = piece[:count]
            connection.buffer_updated(count)
            piece = piece[count:]
    for _ in range(50):  # deferred requests run now
        loop.run_until_complete(asyncio.sleep(0))
    connection.connection_lost(None)
    return handler.bodies, wire


def request(body: bytes, chunk: int) -> bytes:
    """Return a request whose body has a length, or comes in chunks of so many bytes."""
    if not chunk:
        return b"POST /x HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    chunks = [body[i : i + chunk] for i in range(0, len(body), chunk)]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks)
    return b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + coded + b"0\r\n\r\n"


@pytest.mark.promise("HTTP", "Requests on a connection are answered …")
@settings(max_examples=100, deadline=None)
@given(
    bodies=st.lists(st.tuples(st.binary(max_size=200), st.integers(0, 40)), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 20_000), max_size=30),
)
def test_requests_are_the_same_however_they_are_cut(
    loop: asyncio.AbstractEventLoop, bodies: list[tuple[bytes, int]], cuts: list[int]
) -> None:
    data = b"".join(request(*each) for each in bodies)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    got, wire = fed(loop, [data[a:b] for a, b in pairwise(edges)])

    assert got == [body for body, _ in bodies]
    assert wire.sent.count(b"HTTP/1.1 200 OK") == len(bodies)
    assert not wire.is_closed


class Streamed(Recorded):
    """Answers in three pieces."""

    def handle(self, exchange: HttpExchange) -> None:
        exchange.own_headers = ((b"x-id", b"7"),)
        exchange.begin(200, ((b"x-of", b"all"),))
        for piece in (b"first", b"second"):
            exchange.send(piece)
        exchange.finish(b"last")


@pytest.mark.parametrize(
    ("method", "version", "bodies"),
    [
        (b"GET", b"1.1", [b"5\r\nfirst\r\n", b"6\r\nsecond\r\n", b"4\r\nlast\r\n0\r\n\r\n"]),
        (b"GET", b"1.0", [b"first", b"second", b"last"]),
        (b"HEAD", b"1.1", [b""]),
    ],
)
def test_a_head_goes_with_the_first_piece_and_the_end_with_the_last_one(
    loop: asyncio.AbstractEventLoop, method: bytes, version: bytes, bodies: list[bytes]
) -> None:
    _, wire = fed(loop, [b"%b /x HTTP/%b\r\n\r\n" % (method, version)], Streamed)
    head, end, first = wire.writes[0].partition(b"\r\n\r\n")
    assert end
    assert [first, *wire.writes[1:]] == bodies
    assert b"x-of: all" in head
    assert head.endswith(b"\r\nx-id: 7")


@pytest.mark.promise(
    "HTTP",
    "Whatever bytes arrive, they are answered, refused, or kept until more come. A client "
    "that never waits for answers does not delay others.",
)
@settings(max_examples=200, deadline=None)
@given(
    before=st.integers(0, 3),
    broken=st.one_of(
        st.binary(max_size=300),
        st.tuples(st.binary(max_size=40), st.integers(0, 9), st.integers(0, 120), st.binary(max_size=5)).map(
            lambda each: (lambda whole: whole[: each[2]] + each[3] + whole[each[2] + 1 :])(
                request(each[0], each[1])
            )
        ),
    ),
)  # fmt: skip
def test_any_bytes_leave_an_answer_or_a_wait(loop: asyncio.AbstractEventLoop, before: int, broken: bytes) -> None:
    bodies, wire = fed(loop, [request(b"good", 0)] * before + [broken])

    assert bodies[:before] == [b"good"] * before
    # The bytes were a request, or were refused, or are incomplete.
    answers = wire.sent.count(b"HTTP/1.1 ")
    refused = wire.sent.count(b"Connection: close")
    assert answers - wire.sent.count(b" 100 Continue") == len(bodies) + (
        1 if wire.is_closed and refused and answers > len(bodies) else 0
    )
