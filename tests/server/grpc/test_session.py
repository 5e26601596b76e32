"""HTTP/2 without I/O: frames of a client become events, and messages become frames."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.server.grpc.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RESET,
    SETTINGS,
    WINDOW_UPDATE,
    Frame,
    call,
    frame,
    frames,
    head,
    literal,
    message,
)

from moonpool.runtime.server.grpc import open_nghttp2

new_session, _ = open_nghttp2()

HEAD, MESSAGE, END, CLOSED, REFUSED, SENT, PINGED, GREETED, COMING = range(9)
ENHANCE_YOUR_CALM = 11
STREAM_WINDOW = 4 << 20


class Talk:
    """A session and its client, which has greeted it."""

    def __init__(self, most: int = 1 << 30, *, packs: bool = False) -> None:
        self.session = new_session(most, packs)
        assert self.feed(PREFACE + frame(SETTINGS)) == [(GREETED,)]
        self.out()
        self.feed(frame(SETTINGS, ACK))

    def feed(self, data: bytes) -> list[tuple[Any, ...]]:
        """Feed bytes without choosing memory for large messages."""
        events, has_all = self.session.feed(data, len(data))
        while not has_all:
            more, has_all = self.session.feed(data, len(data))
            events += more
        return events

    def begin(self, stream: int = 1) -> None:
        assert self.feed(call(stream))[0][:2] == (HEAD, stream)

    def out(self) -> tuple[list[Frame], list[tuple[Any, ...]]]:
        data, size_bytes, events, _ = self.session.out()
        whole = b"".join(data) if isinstance(data, list) else data
        assert len(whole) == size_bytes
        return list(frames(whole)), events

    @property
    def goodbye(self) -> int | None:
        """The code of a GOAWAY."""
        data, _, _, is_over = self.session.out()
        assert isinstance(data, bytes)
        found = [each for each in frames(data) if each.kind == GOAWAY]
        assert is_over == bool(found)
        return int.from_bytes(found[0].body[4:8], "big") if found else None


@pytest.fixture
def talk() -> Talk:
    return Talk()


def test_a_call_is_its_headers_its_message_and_its_end(talk: Talk) -> None:
    kind, stream, raw, timeout_ns = talk.feed(call(1, grpc_timeout="2S"))[0]
    assert (kind, stream, timeout_ns) == (HEAD, 1, 2_000_000_000)
    assert b":path\0/inference.GRPCInferenceService/ModelInfer\0" in raw
    assert b"grpc-timeout" not in raw

    assert talk.feed(frame(DATA, END_STREAM, 1, message(b"hello"))) == [(MESSAGE, 1, b"hello", 0), (END, 1)]
    assert talk.session.send(1, b"answer", False, True, 0, None)
    sent, events = talk.out()

    assert [(each.kind, each.flags & END_STREAM) for each in sent if each.stream] == [
        (HEADERS, 0),
        (DATA, 0),
        (HEADERS, 1),
    ]
    assert [each.body for each in sent if each.kind == DATA] == [message(b"answer")]
    assert events == [(SENT, 1), (CLOSED, 1, 0)]
    assert not talk.session.send(1, b"late", False, False, 0, None)


def test_a_message_in_pieces_is_one_message(talk: Talk) -> None:
    talk.begin()
    events = []
    for byte in message(b"hello") + message() + message(b"x", is_compressed=True):
        events += talk.feed(frame(DATA, 0, 1, bytes([byte])))
    assert events == [(MESSAGE, 1, b"hello", 0)]
    # What follows is held until it is asked for.
    assert talk.session.take(1) == (b"", 0, 0)
    assert talk.session.take(1) == (b"x", 1, 1)
    assert talk.session.take(1) is None


@pytest.mark.promise(
    "gRPC", "A client that sends a stream faster than its requests are taken is stopped by its window."
)
def test_the_window_of_a_stream_ends_while_its_messages_are_not_taken(talk: Talk) -> None:
    talk.begin()
    part = message(bytes(995)) * 10
    credited = 0
    for _ in range(300):
        talk.feed(frame(DATA, 0, 1, part))
        credited += _credit(talk, 1)
    # Only the first message was taken.
    assert credited == 0

    taken = 1
    while talk.session.take(1) is not None:
        taken += 1
        credited += _credit(talk, 1)

    assert taken == 3000
    assert credited > STREAM_WINDOW // 2


def _credit(talk: Talk, stream: int) -> int:
    return sum(
        int.from_bytes(each.body, "big")
        for each in talk.out()[0]
        if each.kind == WINDOW_UPDATE and each.stream == stream
    )


def test_a_client_that_ignores_its_window_ends_the_call(talk: Talk) -> None:
    talk.begin()
    talk.feed(frame(DATA, 0, 1, message(b"first")))
    events = []
    for _ in range(80):
        events += talk.feed(frame(DATA, 0, 1, bytes(1 << 16)))
    sent, more = talk.out()

    assert any(each.kind in (RESET, GOAWAY) for each in sent)
    assert [each[0] for each in events + more if each[0] != PINGED] in ([CLOSED], [])


@pytest.mark.promise("gRPC", "A message over the limit is refused before memory is taken for it.")
def test_a_message_over_the_limit_is_refused_by_its_prefix() -> None:
    talk = Talk(most=1000)
    talk.begin()
    assert talk.feed(frame(DATA, 0, 1, struct.pack("!BI", 0, 1001))) == [(REFUSED, 1, 8, 1001)]
    assert talk.feed(frame(DATA, 0, 1, bytes(1001))) == []
    talk.begin(3)
    assert talk.feed(frame(DATA, 0, 3, struct.pack("!BI", 7, 1))) == [(REFUSED, 3, 13, 1)]
    talk.begin(5)
    assert talk.feed(frame(DATA, 0, 5, message(b"x") + struct.pack("!BI", 0, 2000)))
    assert talk.session.take(5) == (None, 8, 2000)


def test_headers_over_the_limit_are_no_headers(talk: Talk) -> None:
    block = head(x="y" * 9000, z="y" * 9000)
    data = frame(HEADERS, 0, 1, block[:9000]) + frame(CONTINUATION, END_HEADERS, 1, block[9000:])
    assert talk.feed(data) == [(HEAD, 1, None, -1)]


@pytest.mark.parametrize("text", ["", "1", "S", "123456789S", "1x", "-1S", "1 S"])
def test_a_deadline_that_is_none_is_noticed(talk: Talk, text: str) -> None:
    assert talk.feed(call(1, grpc_timeout=text))[0][3] == -2


def test_an_error_without_messages_is_one_frame(talk: Talk) -> None:
    talk.begin()
    talk.session.send(1, None, False, False, 5, b"not there")
    sent, _ = talk.out()

    assert [(each.kind, each.flags & END_STREAM) for each in sent if each.stream] == [
        (HEADERS, 1),
        # The client need not send the rest.
        (RESET, 0),
    ]


def test_a_client_that_takes_nothing_gets_no_more_than_its_window(talk: Talk) -> None:
    talk.begin()
    talk.session.send(1, bytes(1 << 20), False, True, -1, None)
    sent, events = talk.out()

    assert sum(len(each.body) for each in sent if each.kind == DATA) == (1 << 16) - 1
    assert not events
    assert talk.session.replenish() == ((1 << 20) + 5 - (1 << 16) + 1, (1 << 16) - 1)
    talk.feed(frame(WINDOW_UPDATE, 0, 0, struct.pack("!I", 2 << 20)))
    talk.feed(frame(WINDOW_UPDATE, 0, 1, struct.pack("!I", 2 << 20)))
    parts, events = [], []
    while not events:
        _, size_bytes, events, _ = talk.session.out()
        parts.append(size_bytes)
    assert events == [(SENT, 1)]
    # Other clients have their turn between the parts.
    assert max(parts) < 512 << 10


FLOODS = {
    "pings": frame(PING, 0, 0, bytes(8)) * 11_000,
    "settings": frame(SETTINGS) * 11_000,
    "priorities": frame(PRIORITY, 0, 1, b"\0\0\0\3\1") * 11_000,
    "data without a byte": call(1) + frame(DATA, 0, 1) * 11_000,
    "headers that go on": frame(HEADERS, 0, 1, head()) + frame(CONTINUATION, 0, 1) * 11_000,
    "streams that are reset": b"".join(
        call(number) + frame(RESET, 0, number, b"\0\0\0\x08") for number in range(1, 2400, 2)
    ),
    "whole calls that are reset": b"".join(
        call(number) + frame(DATA, END_STREAM, number, message(b"x")) + frame(RESET, 0, number, b"\0\0\0\x08")
        for number in range(1, 2400, 2)
    ),
    "streams that the server must reset": b"".join(
        call(number) + frame(WINDOW_UPDATE, 0, number, bytes(4)) for number in range(1, 2400, 2)
    ),
}


@pytest.mark.promise(
    "gRPC",
    "A connection that floods the server with frames that ask for nothing, or with calls that it resets, is closed.",
)
@pytest.mark.parametrize("what", FLOODS)
def test_a_flood_ends_the_connection(talk: Talk, what: str) -> None:
    data, goodbye, is_over = FLOODS[what], None, False
    for start in range(0, len(data), 1 << 16):
        try:
            talk.feed(data[start : start + (1 << 16)])
            sent, _, _, is_over = talk.session.out()
            assert isinstance(sent, bytes)
        except ConnectionError:
            return
        goodbye = next((each for each in frames(sent) if each.kind == GOAWAY), goodbye)
        if is_over:
            break

    assert is_over
    assert goodbye is not None
    # Nothing is read any more.
    assert talk.feed(call(100_001)) == []


def test_floods_have_a_budget_that_comes_back(talk: Talk) -> None:
    for _ in range(10):
        talk.feed(FLOODS["priorities"][: 14 * 9_000])
        assert talk.goodbye is None
        talk.session.replenish()


def test_more_streams_than_the_server_allows_are_refused(talk: Talk) -> None:
    events = talk.feed(b"".join(call(number) for number in range(1, 4001, 2)))

    assert len([each for each in events if each[0] == HEAD]) == 1024


def test_headers_that_grow_when_they_are_unpacked_are_dropped(talk: Talk) -> None:
    # One entry of 4,000 bytes in the table of the connection, then a byte for each time that it is meant.
    block = head() + b"\x40" + literal("bomb", "x" * 4000)[1:]
    assert talk.feed(frame(HEADERS, END_HEADERS, 1, block))[0][:2] == (HEAD, 1)
    events = []
    for number in range(3, 203, 2):
        events += talk.feed(frame(HEADERS, END_HEADERS, number, head() + b"\xbe" * 4000))

    # Refused as too large, or, by nghttp2's own limit, reset.
    assert all(each[0] == CLOSED or each[2] is None for each in events)


def test_what_is_no_http_2_is_an_error() -> None:
    session = new_session(1 << 20, False)
    with pytest.raises(ConnectionError):
        session.feed(b"GET / HTTP/1.1\r\n\r\n", 18)


def test_arguments_of_a_wrong_kind_are_errors(talk: Talk) -> None:
    session: Any = talk.session
    talk.begin()
    for arguments in ((1,), (1, 2, 3, 4, 5, 6), ("a", b"", 0, 0, 0, None), (1, b"", 0, 0, 0, 7)):
        with pytest.raises(TypeError):
            session.send(*arguments)
    for size in (4, -1):
        with pytest.raises(ValueError, match="the buffer has 3 bytes"):
            session.feed(b"abc", size)
    with pytest.raises(ValueError, match="made once"):
        session.__init__(1, False)
    assert session.take(10**30 % 2**31) is None
    assert session.send(-5, b"", 0, 0, 0, None) is False


def test_a_library_that_is_none_is_an_error_that_says_so() -> None:
    code = (
        "import sys; sys.path.insert(0, 'src')\n"
        "from moonpool.runtime.server.grpc import _http2\n"
        "for name in ('libnothing.so.1', 'libm.so.6'):\n"
        "    try: _http2.open_library(name)\n"
        "    except OSError as error: print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    first, second = ended.stdout.splitlines()
    assert "libnothing.so.1" in first
    assert "nghttp2_" in second


class Switching:
    """Memory whose end lets other threads run, as that of a lease may, which has a destructor."""

    def __del__(self) -> None:
        time.sleep(0)


def of_switching(data: bytes) -> np.ndarray:
    """Return an array of these bytes whose memory is a `Switching`."""
    memory = Switching()
    memory.__array_interface__ = {  # type: ignore[attr-defined]
        "shape": (len(data),),
        "typestr": "|u1",
        "data": (np.frombuffer(data, np.uint8).__array_interface__["data"][0], True),
        "version": 3,
    }
    memory.data = data  # type: ignore[attr-defined]
    return np.asarray(memory)


def test_sessions_of_several_threads_keep_their_output_apart() -> None:
    wrong: list[tuple[str, int]] = []

    def talk(letter: str) -> None:
        for _ in range(40):
            session = Talk()
            session.begin()
            data = letter.encode() * 2000
            # The first piece is copied into the output, and ends with that.
            pieces: Any = (of_switching(data), data)
            session.session.send(1, pieces, False, False, 0, None)
            found, size_bytes, _, _ = session.session.out()
            sent = b"".join(found) if isinstance(found, list) else found
            assert len(sent) == size_bytes
            body = sent.count(letter.encode() * 1000)
            other = {"A": b"B", "B": b"A"}[letter]
            if body < 4 or other * 50 in sent:
                wrong.append((letter, body))

    threads = [threading.Thread(target=talk, args=(letter,)) for letter in "AB"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert wrong == []


def exchange(client: Any, server: Any) -> list[tuple[Any, ...]]:
    """Give each session what the other one has to say, until both are silent; return the events of both."""
    events: list[tuple[Any, ...]] = []
    said = True
    while said:
        said = False
        for ours, theirs in ((client, server), (server, client)):
            data, size_bytes, _, _ = ours.out()
            whole = b"".join(data) if isinstance(data, list) else data
            if size_bytes:
                said, has_all = True, False
                while not has_all:
                    more, has_all = theirs.feed(whole, len(whole))
                    events += more
    return events


REQUEST = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a/b"),
    (b":authority", b"x"),
    (b"te", b"trailers"),
)


@pytest.mark.parametrize("size_bytes", [3, 1 << 20])
@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_client_sends_a_request_and_learns_the_status(size_bytes: int, is_wanted: bool) -> None:
    client, server = new_session(1 << 30, False, True), new_session(1 << 30, False)
    stream = client.request(REQUEST, b"x" * size_bytes, True, is_wanted)
    events = exchange(client, server)
    assert (MESSAGE, stream, b"x" * size_bytes, 0) in events
    assert (END, stream) in events

    server.send(stream, b"y" * size_bytes, False, False, 13, b"no luck")
    events = exchange(client, server)

    heads = [each[2] for each in events if each[0] == HEAD]
    assert heads[0].startswith(b":status\x00200\x00")
    assert heads[-1] == b"grpc-status\x0013\x00grpc-message\x00no luck\x00"
    assert ((MESSAGE, stream, b"y" * size_bytes, 0) in events) == is_wanted
    assert (END, stream) in events
    assert events[-1] == (CLOSED, stream, 0)


def test_a_client_cancels_a_request() -> None:
    client, server = new_session(1 << 30, False, True), new_session(1 << 30, False)
    stream = client.request(REQUEST, b"x", False, True)
    exchange(client, server)
    client.cancel(stream)

    assert (CLOSED, stream, 8) in exchange(client, server)
    # It is gone, and another one may come.
    client.cancel(stream)
    assert client.request(REQUEST, b"x", True, True) == stream + 2
    with pytest.raises(ValueError, match="a server sends no requests"):
        server.request(REQUEST, b"x", True, True)
