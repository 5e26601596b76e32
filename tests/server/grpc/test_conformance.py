"""HTTP/2 by the book: each violation that RFC 9113 and RFC 7541 name gets the error that they name, and what they allow
is taken.

The cases are those of h2spec, a program for this that is in no registry which this project uses; the numbers are
sections of the RFCs.

nghttp2 is milder than the RFC in two places, on purpose. Headers with the number of a stream that is closed or was left
out are dropped, as they may be trailers that crossed a reset on their way. And a setting that makes the window of a
stream too large resets that stream alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from tests.server.grpc.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    LIVE,
    PING,
    PREFACE,
    PRIORITY,
    RESET,
    SETTINGS,
    STREAM,
    WINDOW_UPDATE,
    Frame,
    RawClient,
    call,
    frame,
    head,
    literal,
    message,
)
from tests.server.grpc.serving import Served
from tests.waiting import wait_until

from moonpool.runtime.server.grpc.options import GrpcOptions

pytestmark = pytest.mark.promise(
    "gRPC",
    "HTTP/2 is as RFC 9113 has it: each violation gets the error of its section, on its stream or for the connection, "
    "or is dropped where it may have crossed a reset; what is allowed is taken.",
)
NO_ERROR, PROTOCOL, INTERNAL, FLOW_CONTROL, _, STREAM_CLOSED, FRAME_SIZE, REFUSED, CANCEL, COMPRESSION = range(10)  # fmt: skip
PADDED, WITH_PRIORITY, PUSH_PROMISE = 8, 32, 5
MOST = 2**31 - 1
MARK = b"conforms"
EMPTY = message()


class Connection(NamedTuple):
    """The connection ends with GOAWAY and this code."""

    code: int


class Stream(NamedTuple):
    """A stream is reset with this code, and the connection goes on."""

    code: int
    stream: int = 1


class Taken(NamedTuple):
    """The connection goes on, and no stream is reset but for a reason of gRPC's."""

    answers: tuple[int, ...] = ()
    """The streams that are answered to the end."""


Expected = Connection | Stream | Taken


def setting(name: int, value: int) -> bytes:
    return struct.pack("!HI", name, value)


def number(value: int) -> bytes:
    return struct.pack("!I", value)


def opened(stream: int = 1, **more: str) -> bytes:
    """Return the head of a call that stays open."""
    return call(stream, STREAM, **more)


def asked(stream: int = 1) -> bytes:
    """Return a whole call that is answered at once."""
    return call(stream, LIVE) + frame(DATA, END_STREAM, stream, EMPTY)


def headers(block: bytes, flags: int = END_HEADERS | END_STREAM, stream: int = 1) -> bytes:
    return frame(HEADERS, flags, stream, block)


def without(name: str) -> bytes:
    """Return a head without one of its headers."""
    plain = {":method": "POST", ":scheme": "http", ":path": LIVE, "content-type": "application/grpc"}  # fmt: skip
    return b"".join(literal(*each) for each in plain.items() if each[0] != name)


BLOCK = head(LIVE)
CLOSED = opened() + frame(RESET, 0, 1, number(CANCEL))
HALF_CLOSED = opened() + frame(DATA, END_STREAM, 1)
# By section: what the client sends behind its preface and settings, and what comes of it.
FRAMES: dict[str, tuple[bytes, Expected]] = {
    "4.1 a frame of an unknown type": (frame(0xF0, 0, 0, b"x" * 8), Taken()),
    "4.1 a ping with unknown flags": (frame(PING, 0xF6, 0, MARK), Taken()),
    "4.1 a reserved bit": (frame(PING, 0, 1 << 31, MARK), Taken()),
    "4.2 data of 2^14 bytes": (
        call(1, LIVE) + frame(DATA, 0, 1, message(bytes((1 << 14) - 5))) + frame(DATA, END_STREAM, 1),
        Taken((1,)),
    ),
    "4.2 a frame beyond the limit": (opened() + b"\x10\0\1\0\0\0\0\0\1" + bytes(9), Connection(FRAME_SIZE)),
    "4.2 headers beyond the limit": (b"\x10\0\1\1\4\0\0\0\1" + bytes(9), Connection(FRAME_SIZE)),
    "4.3 headers that cannot be decoded": (headers(b"\x40\x85\xff"), Connection(COMPRESSION)),
    "4.3 a priority within a block": (
        frame(HEADERS, 0, 1, BLOCK) + frame(PRIORITY, 0, 1, bytes(5)),
        Connection(PROTOCOL),
    ),
    "4.3 other headers within a block": (frame(HEADERS, 0, 1, BLOCK) + headers(BLOCK, stream=3), Connection(PROTOCOL)),
    "5.5 an unknown frame within a block": (
        frame(HEADERS, 0, 1, BLOCK) + frame(0xF0, 0, 0, b"x"),
        Connection(PROTOCOL),
    ),
    "6.1 data without a stream": (opened() + frame(DATA, 0, 0, b"x"), Connection(PROTOCOL)),
    "6.1 padding beyond the frame": (opened() + frame(DATA, PADDED, 1, b"\x05x"), Connection(PROTOCOL)),
    "6.1 padded data": (call(1, LIVE) + frame(DATA, PADDED | END_STREAM, 1, b"\x03" + EMPTY + bytes(3)), Taken((1,))),
    "6.2 headers without a stream": (headers(BLOCK, stream=0), Connection(PROTOCOL)),
    "6.2 padding beyond the frame": (headers(b"\xff" + BLOCK[:99], END_HEADERS | PADDED), Connection(PROTOCOL)),
    "6.2 padded headers with a priority": (
        headers(b"\x02" + bytes(5) + BLOCK + bytes(2), END_HEADERS | PADDED | WITH_PRIORITY)
        + frame(DATA, END_STREAM, 1, EMPTY),
        Taken((1,)),
    ),
    "6.3 a priority": (frame(PRIORITY, 0, 1, number(0) + b"\x10"), Taken()),
    "6.3 a priority without a stream": (frame(PRIORITY, 0, 0, number(1) + b"\x10"), Connection(PROTOCOL)),
    "6.3 a priority of a wrong size": (opened() + frame(PRIORITY, 0, 1, bytes(4)), Connection(FRAME_SIZE)),
    "6.4 a reset without a stream": (frame(RESET, 0, 0, number(CANCEL)), Connection(PROTOCOL)),
    "6.4 a reset of an idle stream": (frame(RESET, 0, 1, number(CANCEL)), Connection(PROTOCOL)),
    "6.4 a reset of a wrong size": (opened() + frame(RESET, 0, 1, b"x"), Connection(FRAME_SIZE)),
    "6.5 settings with an acknowledgement": (frame(SETTINGS, ACK, 0, setting(1, 1)), Connection(FRAME_SIZE)),
    "6.5 settings of a stream": (frame(SETTINGS, 0, 1), Connection(PROTOCOL)),
    "6.5 settings of a wrong size": (frame(SETTINGS, 0, 0, b"xxx"), Connection(FRAME_SIZE)),
    "6.5.2 a push of 2": (frame(SETTINGS, 0, 0, setting(2, 2)), Connection(PROTOCOL)),
    "6.5.2 a window beyond 2^31": (frame(SETTINGS, 0, 0, setting(4, 1 << 31)), Connection(FLOW_CONTROL)),
    "6.5.2 small frames": (frame(SETTINGS, 0, 0, setting(5, (1 << 14) - 1)), Connection(PROTOCOL)),
    "6.5.2 large frames": (frame(SETTINGS, 0, 0, setting(5, 1 << 24)), Connection(PROTOCOL)),
    "6.5.2 an unknown setting": (frame(SETTINGS, 0, 0, setting(0xFF, 1)), Taken()),
    "6.5.3 a setting twice": (frame(SETTINGS, 0, 0, setting(4, 1) + setting(4, 99)) + asked(), Taken((1,))),
    "6.7 a ping of a stream": (frame(PING, 0, 1, MARK), Connection(PROTOCOL)),
    "6.7 a ping of a wrong size": (frame(PING, 0, 0, b"x" * 6), Connection(FRAME_SIZE)),
    "6.8 a farewell of a stream": (frame(GOAWAY, 0, 1, bytes(8)), Connection(PROTOCOL)),
    "6.9 nothing more for the connection": (frame(WINDOW_UPDATE, 0, 0, number(0)), Connection(PROTOCOL)),
    "6.9 nothing more for a stream": (opened() + frame(WINDOW_UPDATE, 0, 1, number(0)), Connection(PROTOCOL)),
    "6.9 a window of a wrong size": (frame(WINDOW_UPDATE, 0, 0, b"xxx"), Connection(FRAME_SIZE)),
    "6.9.1 the connection's window beyond 2^31": (
        frame(WINDOW_UPDATE, 0, 0, number(MOST)) * 2,
        Connection(FLOW_CONTROL),
    ),
    "6.9.1 a stream's window beyond 2^31": (
        opened() + frame(WINDOW_UPDATE, 0, 1, number(MOST)) * 2,
        Stream(FLOW_CONTROL),
    ),
    "6.9.2 a stream's window beyond 2^31 by a setting": (
        opened() + frame(WINDOW_UPDATE, 0, 1, number(MOST - 65535)) + frame(SETTINGS, 0, 0, setting(4, 65536)),
        Stream(FLOW_CONTROL),
    ),
    "6.10 a continuation": (
        frame(HEADERS, 0, 1, BLOCK[:9])
        + frame(CONTINUATION, 0, 1, BLOCK[9:20])
        + frame(CONTINUATION, END_HEADERS, 1, BLOCK[20:])
        + frame(DATA, END_STREAM, 1, EMPTY),
        Taken((1,)),
    ),
    "6.10 data within a block": (frame(HEADERS, 0, 1, BLOCK) + frame(DATA, 0, 1, b"x"), Connection(PROTOCOL)),
    "6.10 a continuation without a stream": (
        frame(HEADERS, 0, 1, BLOCK) + frame(CONTINUATION, END_HEADERS, 0),
        Connection(PROTOCOL),
    ),
    "6.10 a continuation behind a block": (
        opened() + frame(CONTINUATION, END_HEADERS, 1, literal("x", "y")),
        Connection(PROTOCOL),
    ),
    "6.10 a continuation behind data": (
        opened() + frame(DATA, 0, 1, b"x") + frame(CONTINUATION, END_HEADERS, 1),
        Connection(PROTOCOL),
    ),
    "7 a reset with an unknown code": (opened() + frame(RESET, 0, 1, number(0xFF)), Taken()),
    "8.4 a promise of the client": (frame(PUSH_PROMISE, END_HEADERS, 1, number(2) + BLOCK), Connection(PROTOCOL)),
}
STATES: dict[str, tuple[bytes, Expected]] = {
    "5.1 idle: data": (frame(DATA, 0, 1, b"x"), Connection(PROTOCOL)),
    "5.1 idle: a window": (frame(WINDOW_UPDATE, 0, 1, number(9)), Connection(PROTOCOL)),
    "5.1 idle: a continuation": (frame(CONTINUATION, END_HEADERS, 1, BLOCK), Connection(PROTOCOL)),
    "5.1 half closed: data": (HALF_CLOSED + frame(DATA, 0, 1, b"x"), Connection(STREAM_CLOSED)),
    "5.1 half closed: headers": (HALF_CLOSED + headers(BLOCK), Connection(STREAM_CLOSED)),
    "5.1 half closed: a continuation": (HALF_CLOSED + frame(CONTINUATION, END_HEADERS, 1), Connection(PROTOCOL)),
    "5.1 closed: data behind a reset": (CLOSED + frame(DATA, 0, 1, b"x"), Taken()),
    "5.1 closed: headers behind a reset": (CLOSED + headers(BLOCK), Taken()),
    "5.1 closed: a window behind a reset": (CLOSED + frame(WINDOW_UPDATE, 0, 1, number(9)), Taken()),
    "5.1 closed: a reset behind a reset": (CLOSED + frame(RESET, 0, 1, number(CANCEL)), Taken()),
    "5.1.1 an even number": (call(2, STREAM), Connection(PROTOCOL)),
    "5.1.1 a number that is no larger": (opened(5) + opened(3), Taken()),
    "5.1.2 one stream too many": (
        b"".join(opened(each) for each in range(1, 2 * 1024 + 3, 2)),
        Stream(REFUSED, 2 * 1024 + 1),
    ),
    "8.1 headers that are no trailers": (opened() + headers(BLOCK, END_HEADERS), Stream(PROTOCOL)),
    "8.1 trailers": (call(1, LIVE) + frame(DATA, 0, 1, EMPTY) + headers(literal("x-trailer", "y")), Taken((1,))),
}
HEADS: dict[str, tuple[bytes, Expected]] = {
    "8.2.1 a capital letter": (headers(BLOCK + literal("X-Large", "y")), Stream(PROTOCOL)),
    "8.2.1 a line break in a value": (headers(BLOCK + literal("x", "a\nb")), Stream(PROTOCOL)),
    "8.2.2 a header about the connection": (headers(BLOCK + literal("connection", "keep-alive")), Stream(PROTOCOL)),
    "8.2.2 te with another value": (headers(BLOCK + literal("te", "gzip")), Stream(PROTOCOL)),
    "8.3 an unknown pseudo header": (headers(literal(":nope", "y") + BLOCK), Stream(PROTOCOL)),
    "8.3 one of responses": (headers(literal(":status", "200") + BLOCK), Stream(PROTOCOL)),
    "8.3 one behind the others": (headers(without(":path") + literal(":path", LIVE)), Stream(PROTOCOL)),
    "8.3 one in trailers": (opened() + headers(literal(":method", "POST")), Stream(PROTOCOL)),
    "8.3.1 an empty path": (headers(literal(":path", "") + without(":path")), Stream(PROTOCOL)),
    **{f"8.3.1 no {name}": (headers(without(name)), Stream(PROTOCOL)) for name in (":method", ":scheme", ":path")},
    **{
        f"8.3.1 {name} twice": (headers(literal(name, value) + BLOCK), Stream(PROTOCOL))
        for name, value in ((":method", "POST"), (":scheme", "http"), (":path", LIVE))
    },
    "8.1.1 a length that is not that of the data": (
        call(1, LIVE, content_length="1") + frame(DATA, END_STREAM, 1, EMPTY),
        Stream(PROTOCOL),
    ),
    "HPACK 2.3.3 an index that is not there": (headers(b"\xff\x80\x01"), Connection(COMPRESSION)),
    "HPACK 4.2 a new size at the end of a block": (headers(BLOCK + b"\x21"), Connection(COMPRESSION)),
    "HPACK 5.2 padding of more than 7 bits": (headers(BLOCK + b"\0\x01x\x82\x1f\xff"), Connection(COMPRESSION)),
    "HPACK 5.2 padding of zeros": (headers(BLOCK + b"\0\x01x\x81\x18"), Connection(COMPRESSION)),
    "HPACK 5.2 the end of a string": (headers(BLOCK + b"\0\x01x\x84\xff\xff\xff\xff"), Connection(COMPRESSION)),
    "HPACK 6.1 the index 0": (headers(b"\x80"), Connection(COMPRESSION)),
    "HPACK 6.3 a size beyond the limit": (headers(b"\x3f\xe2\x1f" + BLOCK), Connection(COMPRESSION)),
}
CASES = FRAMES | STATES | HEADS


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served([], GrpcOptions(port=0, http2_max_ping_strikes=0))
    yield made
    made.close()


def until_mark(client: RawClient) -> list[Frame]:
    """Return the frames until the answer to a second ping, or the end of the connection. Answers to pings overtake
    other frames.
    """
    found = []
    for mark in (b"mark one", b"mark two"):
        client.send(frame(PING, 0, 0, mark))
        for each in client.frames():
            found.append(each)
            if (each.kind, each.flags, each.body) == (PING, ACK, mark):
                break
    return found


def outcome(found: list[Frame]) -> tuple[list[int], dict[int, int]]:
    """Return the codes of GOAWAY, and those of resets by stream."""
    farewells = [int.from_bytes(each.body[4:8], "big") for each in found if each.kind == GOAWAY]
    resets = {each.stream: int.from_bytes(each.body, "big") for each in found if each.kind == RESET}
    return farewells, resets


@pytest.mark.parametrize("case", CASES)
def test_what_the_client_sends_gets_what_the_section_says(served: Served, case: str) -> None:
    sent, expected = CASES[case]
    with RawClient(served.server.port) as client:
        client.send(sent)
        found = until_mark(client)
        farewells, resets = outcome(found)
        is_alive = found[-1].kind == PING
        if isinstance(expected, Connection):
            assert (farewells[-1:], is_alive) == ([expected.code], False)
        elif isinstance(expected, Stream):
            assert (resets.get(expected.stream), farewells, is_alive) == (expected.code, [], True)
        else:
            assert (farewells, is_alive) == ([], True)
            assert set(resets.values()) <= {NO_ERROR}
            found += [] if not expected.answers else _until_ends(client, found, expected.answers)
            ends = {each.stream for each in found if each.kind == HEADERS and each.flags & END_STREAM}
            assert ends == set(expected.answers)
    wait_until(lambda: not served.server.calls)


def _until_ends(client: RawClient, found: list[Frame], streams: tuple[int, ...]) -> Iterator[Frame]:
    left = set(streams) - {each.stream for each in found if each.kind == HEADERS and each.flags & END_STREAM}  # fmt: skip
    while left:
        each = client.next(HEADERS)
        if each.flags & END_STREAM:
            left.discard(each.stream)
            yield each


@pytest.mark.parametrize("data", [b"INVALID PREFACE\r\n\r\n" * 2, PREFACE + frame(PING, 0, 0, MARK)])
def test_a_client_that_does_not_begin_by_the_book_is_sent_away(served: Served, data: bytes) -> None:
    with RawClient(served.server.port, b"") as client:
        client.send(data)
        assert set(outcome(list(client.frames()))[0]) <= {PROTOCOL}


def test_a_ping_is_answered_and_an_answer_is_not(served: Served) -> None:
    with RawClient(served.server.port) as client:
        client.send(frame(PING, ACK, 0, b"answered") + frame(PING, 0, 0, MARK))
        pings = [(each.flags, each.body) for each in until_mark(client) if each.kind == PING]
    assert pings == [(ACK, MARK), (ACK, b"mark one"), (ACK, b"mark two")]


def test_settings_are_acknowledged(served: Served) -> None:
    with RawClient(served.server.port) as client:
        client.send(frame(SETTINGS, 0, 0, setting(3, 9)))
        found = [each for each in until_mark(client) if each.kind == SETTINGS]
    assert [each.flags & ACK for each in found].count(ACK) == 2


def test_a_farewell_with_an_unknown_code_ends_the_connection_in_order(served: Served) -> None:
    with RawClient(served.server.port) as client:
        client.send(asked() + frame(GOAWAY, 0, 0, number(0) + number(0xFF)))
        # The call that has begun is answered.
        assert client.next(HEADERS).stream == 1


@pytest.mark.parametrize("window", [0, 1, 3])
def test_the_server_sends_no_more_than_the_window(served: Served, window: int) -> None:
    """6.9.1, 6.9.2: a window by a setting, and one that becomes negative."""
    with RawClient(served.server.port) as client:
        client.send(frame(SETTINGS, 0, 0, setting(4, window)) + asked())
        sizes = [len(each.body) for each in until_mark(client) if each.kind == DATA]
        assert sum(sizes) == window
        # The client takes back what it gave, so the window is below zero: nothing comes until it is above.
        client.send(frame(SETTINGS, 0, 0, setting(4, 0)))
        assert DATA not in [each.kind for each in until_mark(client)]
        client.send(frame(WINDOW_UPDATE, 0, 1, number(window + 2)))
        data = client.next(DATA)
        assert len(data.body) == 2
        client.send(frame(WINDOW_UPDATE, 0, 1, number(1000)))
        assert client.next(HEADERS).flags & END_STREAM


def test_others_are_served_all_the_time(served: Served) -> None:
    with RawClient(served.server.port) as other:
        for number, (sent, _) in enumerate(CASES.values()):
            with RawClient(served.server.port) as client:
                client.send(sent)
            other.send(asked(2 * number + 1))
            assert other.next(DATA).stream == 2 * number + 1
