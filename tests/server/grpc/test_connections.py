"""Connections over HTTP/2: who may stay, and for how long."""

from __future__ import annotations

import gzip
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.e2e.hosting import ECHO, MODELS
from tests.server.certificates import self_signed
from tests.server.grpc.asking import add_sub, refused
from tests.server.grpc.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    INFER,
    LIVE,
    PING,
    PREFACE,
    STREAM,
    RawClient,
    call,
    frame,
    message,
)
from tests.server.grpc.serving import TIMEOUT_S, Served, messages
from tests.waiting import wait_until

from moonpool.runtime.server import clients
from moonpool.runtime.server.grpc import connection

Serve = Callable[..., Served]
NO_ERROR, ENHANCE_YOUR_CALM = 0, 11
ping = frame(PING, 0, 0, bytes(8))


def test_a_client_that_pings_too_often_is_sent_away(serve: Serve) -> None:
    port = serve(http2_max_ping_strikes=2, keepalive_permit_without_calls=True).server.port
    with RawClient(port) as client:
        client.send(ping * 4)
        assert client.goodbye() == (ENHANCE_YOUR_CALM, b"too_many_pings")


def test_pings_after_answers_are_no_strikes(serve: Serve) -> None:
    with RawClient(serve(http2_max_ping_strikes=1).server.port) as client:
        for number in range(1, 21, 2):
            client.send(call(number, LIVE) + frame(DATA, END_STREAM, number, message()))
            while client.next(HEADERS).flags & END_STREAM == 0:
                continue
            client.send(ping)
            assert client.next(PING).flags == 1


def test_a_client_that_does_not_answer_pings_is_left(serve: Serve) -> None:
    served = serve(keepalive_time_ms=50, keepalive_timeout_ms=50, keepalive_permit_without_calls=True)
    with RawClient(served.server.port) as client:
        assert client.next(PING).flags == 0
        assert list(client.frames()) == []


def test_a_client_without_calls_is_pinged_only_if_it_may_be(serve: Serve) -> None:
    served = serve(keepalive_time_ms=50, keepalive_timeout_ms=50)
    with RawClient(served.server.port) as client:
        client.send(call(1, STREAM))
        assert client.next(PING).flags == 0


# Longer than a test takes.
AGE_MS = 600_000


def look_after(served: Served, passed_ms: int) -> None:
    """Have the port look at its connection as if so much time had passed."""

    async def look() -> None:
        [found] = served.port.clients.open
        found.look(found.loop.time() + passed_ms / 1000)

    served.server.run(look())


@pytest.mark.promise(
    "gRPC",
    "A connection that reaches its age gets GOAWAY, and closes when its calls have ended, or at the end of the grace.",
)
def test_an_old_connection_ends_after_its_calls(serve: Serve) -> None:
    served = serve(max_connection_age_ms=AGE_MS)
    with RawClient(served.server.port) as client:
        client.send(call(1, STREAM))
        wait_until(lambda: served.server.calls)
        look_after(served, 2 * AGE_MS)
        assert client.next(GOAWAY).body[4:8] == bytes(4)
        # It is too late for this one.
        client.send(call(3, LIVE) + frame(DATA, END_STREAM, 3, message()))
        client.send(frame(DATA, END_STREAM, 1))
        assert {each.stream for each in client.frames() if each.stream} == {1}
    wait_until(lambda: not served.server.calls)


def test_the_grace_of_an_old_connection_ends(serve: Serve) -> None:
    served = serve(max_connection_age_ms=AGE_MS, max_connection_age_grace_ms=AGE_MS)
    with RawClient(served.server.port) as client:
        client.send(call(1, STREAM))
        wait_until(lambda: served.server.calls)
        look_after(served, 2 * AGE_MS)
        assert client.next(GOAWAY).body[4:8] == bytes(4)
        look_after(served, 4 * AGE_MS)
        assert not [each for each in client.frames() if each.kind == DATA]
    wait_until(lambda: not served.server.calls)


def test_a_client_that_says_nothing_is_left(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_GREETING_S", 0.1)
    # The port looks at its clients more often than the age says.
    served = serve(max_connection_age_ms=400, max_connection_age_grace_ms=10**9)
    for data in (b"", PREFACE[:10]):
        with socket.create_connection(("127.0.0.1", served.server.port), TIMEOUT_S) as client:
            client.sendall(data)
            assert b"" in iter(lambda client=client: client.recv(1 << 16), None)  # type: ignore[misc]


def test_a_drain_says_goodbye_and_waits_for_calls(serve: Serve) -> None:
    served = serve()
    with RawClient(served.server.port) as client:
        client.send(call(1, STREAM))
        wait_until(lambda: served.server.calls)
        assert served.server.drain(TIMEOUT_S)
        said = list(client.frames())
    assert GOAWAY in [each.kind for each in said]
    assert [each.stream for each in said if each.flags & END_STREAM and each.kind == HEADERS] == [1]


@pytest.mark.promise("gRPC", "Messages may be compressed with gzip or deflate, both ways.")
@pytest.mark.parametrize("size", [4, 1 << 20])
@pytest.mark.parametrize("level", ["none", "low", "medium", "high"])
def test_messages_are_unpacked_and_packed(serve: Serve, size: int, level: str) -> None:
    served = serve(infer_response_compression_level=level)
    served.runtime.load("echo", MODELS / "echo.py", config=ECHO)
    client = served.client()
    given = triton.InferInput("X", [size], "FP32")
    given.set_data_from_numpy(np.full(size, 7, np.float32))
    for packing in (None, "gzip", "deflate"):
        answer = client.infer("echo", [given], compression_algorithm=packing)
        assert (answer.as_numpy("OUT_X") == 7).all()


def test_answers_are_packed_for_clients_that_take_that(serve: Serve) -> None:
    port = serve("add_sub", infer_response_compression_level="high").server.port
    asked = add_sub(request_id="x" * 1000).SerializeToString()
    with RawClient(port) as client:
        for stream, accepted in ((1, "identity"), (3, "identity, gzip")):
            client.send(call(stream, INFER, grpc_accept_encoding=accepted))
            client.send(frame(DATA, END_STREAM, stream, message(asked)))
            body = client.next(DATA).body
            assert body[0] == (stream == 3)
            if body[0]:
                answer = messages.ModelInferResponse.FromString(gzip.decompress(body[5:]))
                assert answer.id == "x" * 1000


@pytest.mark.promise("gRPC", "A message over the limit is refused before …")
def test_a_message_that_unpacks_to_too_much_is_refused(serve: Serve) -> None:
    served = serve("add_sub", max_message_bytes=1 << 20)
    asked = add_sub(bytes(2 << 20)).SerializeToString()
    ask = served.channel().unary_unary(INFER)
    with pytest.raises(grpc.RpcError) as raised:
        ask(asked, compression=grpc.Compression.Gzip, timeout=TIMEOUT_S)
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1048576 is the most" in raised.value.details()


BAD: dict[str, tuple[dict[str, str], bytes, str]] = {
    "an unknown encoding": ({"grpc_encoding": "br"}, b"\1\0\0\0\1x", "12"),
    "not gzip": ({"grpc_encoding": "gzip"}, b"\1\0\0\0\1x", "13"),
    "half of it": ({"grpc_encoding": "gzip"}, message(gzip.compress(bytes(99))[:-9], is_compressed=True), "13"),
    "an unknown flag": ({}, b"\2\0\0\0\1x", "13"),
    "no type of content": ({"content_type": "text/html"}, message(b"x"), "13"),
    "a wrong deadline": ({"grpc_timeout": "soon"}, message(b"x"), "13"),
    "metadata that is no base64": ({"x_bin": "#"}, message(b"x"), "13"),
    "too many headers": ({"x": "y" * 10_000, "z": "y" * 10_000}, message(b"x"), "8"),
    "no message": ({}, b"", "13"),
}


@pytest.mark.promise("gRPC", "Whatever bytes a client sends, as …")
@pytest.mark.parametrize("what", BAD)
def test_a_call_that_breaks_a_rule_gets_a_status(serve: Serve, what: str) -> None:
    headers, data, status = BAD[what]
    served = serve()
    with RawClient(served.server.port) as client:
        block = call(1, LIVE, **headers)[9:]
        client.send(frame(HEADERS, 0, 1, block[:9000]))
        client.send(frame(9, END_HEADERS, 1, block[9000:]) + frame(DATA, END_STREAM, 1, data))
        said = _until_end(client)
        # nghttp2 writes digits as they are, as Huffman's code would not make them shorter.
        assert any(bytes([len(status)]) + status.encode() in each.body for each in said if each.kind == HEADERS)
    wait_until(lambda: not served.server.calls)


def _until_end(client: RawClient) -> list[Any]:
    found = []
    for each in client.frames():
        found.append(each)
        if each.kind == HEADERS and each.flags & END_STREAM:
            break
    return found


def test_metadata_of_bytes_and_of_text_come_as_they_are() -> None:
    pairs = (
        (b":method", b"POST"),
        (b":path", b"/a/b"),
        (b"content-type", b"application/grpc+proto"),
        (b"te", b"trailers"),
        (b"x-bin", b"AAE,Ag"),
        (b"name", "ü".encode()),
        (b"grpc-encoding", b"gzip"),
        (b"grpc-accept-encoding", b"deflate,gzip"),
    )
    head = connection.read_head(b"".join(name + b"\0" + value + b"\0" for name, value in pairs))

    assert head == (b"/a/b", (("x-bin", b"\0\1"), ("x-bin", b"\2"), ("name", "ü")), "gzip", True, None)


def test_a_client_of_tls_may_ask_for_http_2_only(serve: Serve, tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path)
    served = serve(use_ssl=True, server_key=str(key), server_cert=str(certificate))
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    for offered, chosen in ((["h2", "http/1.1"], "h2"), (["http/1.1"], None)):
        context.set_alpn_protocols(offered)
        with (
            socket.create_connection(("127.0.0.1", served.server.port), TIMEOUT_S) as plain,
            context.wrap_socket(plain) as client,
        ):
            assert client.selected_alpn_protocol() == chosen


def test_a_certificate_that_cannot_be_used_is_an_error_that_names_it(serve: Serve, tmp_path: Path) -> None:
    key, _ = self_signed(tmp_path)
    with pytest.raises(Exception, match=r"gRPC with TLS cannot use /nope\.pem and .*No such file"):
        serve(use_ssl=True, server_key=str(key), server_cert="/nope.pem")


SIZE = 4 << 20


def ask_much(client: RawClient, window: int = 1 << 30) -> None:
    """Send a request of 16 MiB to `echo`, and let the server send so much more than 64 KiB."""
    asked = messages.ModelInferRequest(model_name="echo")
    asked.inputs.add(name="X", datatype="FP32", shape=[SIZE])
    asked.raw_input_contents.append(bytes(4 * SIZE))
    data = message(asked.SerializeToString())
    more = window.to_bytes(4, "big")
    client.send(call(1))
    if window:
        client.send(frame(8, 0, 0, more) + frame(8, 0, 1, more))
    client.next(4)
    client.send(frame(4, 1))
    for start in range(0, len(data), 16384):
        flags = END_STREAM if start + 16384 >= len(data) else 0
        client.send(frame(DATA, flags, 1, data[start : start + 16384]))


def test_a_large_answer_is_taken_by_a_client_that_reads_late(serve: Serve) -> None:
    served = serve("add_sub")
    served.runtime.load("echo", MODELS / "echo.py", config=ECHO)
    with RawClient(served.server.port) as client:
        ask_much(client)
        # Others are served meanwhile.
        assert served.stub().ModelInfer(add_sub(), timeout=TIMEOUT_S).model_name == "add_sub"
        got = sum(len(each.body) for each in _until_end(client) if each.kind == DATA)
    assert got > 4 * SIZE


@pytest.mark.promise("gRPC", "A drain finishes the requests in …")
def test_a_drain_sends_the_whole_of_an_answer(serve: Serve) -> None:
    served = serve()
    served.runtime.load("echo", MODELS / "echo.py", config=ECHO)
    with RawClient(served.server.port) as client:
        ask_much(client)
        wait_until(lambda: served.runtime.statistics("echo")["execution_count"] == 1)
        drained: list[bool] = []
        drain = threading.Thread(target=lambda: drained.append(served.server.drain(TIMEOUT_S)))
        drain.start()
        client.next(GOAWAY)
        said = list(client.frames())
        drain.join()
    assert drained == [True]
    assert said[-1].kind == HEADERS
    assert sum(len(each.body) for each in said if each.kind == DATA) > SIZE


def test_calls_beyond_the_limit_of_all_connections_are_refused(serve: Serve) -> None:
    served = serve(max_calls=1)
    with RawClient(served.server.port) as client:
        client.send(call(1, STREAM))
        wait_until(lambda: served.server.calls)
        code, _ = refused(served.channel().unary_unary(LIVE), b"")
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.promise(
    "gRPC",
    "A connection whose client takes nothing of what waits for it ends after a time, also if it pings meanwhile.",
)
@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_takes_nothing_is_left(serve: Serve, reads: bool) -> None:
    served = serve(write_timeout_ms=200, http2_max_ping_strikes=0)
    served.runtime.load("echo", MODELS / "echo.py", config=ECHO)
    with RawClient(served.server.port) as client:
        # The client that reads closes its window behind the first 64 KiB.
        ask_much(client, window=0 if reads else 1 << 30)
        wait_until(lambda: served.runtime.statistics("echo")["execution_count"] == 1)

        def is_left() -> bool:
            if reads:
                client.send(ping)
            return not served.server.calls

        wait_until(is_left)


@pytest.mark.promise(
    "gRPC",
    "Unread answers of all clients have a bound, beyond which the connection with the most unread bytes is closed.",
)
def test_the_connection_with_the_most_unread_bytes_is_closed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_UNSENT_BYTES", 1 << 20)
    served = serve()
    served.runtime.load("echo", MODELS / "echo.py", config=ECHO)
    with RawClient(served.server.port) as patient, RawClient(served.server.port) as greedy:
        patient.send(call(1, STREAM))
        ask_much(greedy, window=0)
        # Its window is closed behind the first 64 KiB, so it ends without the end of its answer.
        got = list(greedy.frames())

        assert sum(len(each.body) for each in got if each.kind == DATA) <= 64 << 10
        assert not any(each.flags & END_STREAM for each in got if each.kind in (DATA, HEADERS))
        patient.send(ping)
        assert patient.next(PING).flags == 1


def test_a_client_that_takes_a_little_now_and_then_is_not_stalled() -> None:
    stall = connection.Stall()
    looks = [
        # Something begins to wait, the client takes some, and takes no more.
        (10, 0, 0, 0),
        (20, 9, 0, 0),
        (30, 9, 0, 10),
        (40, 8, 1, 0),
        (50, 8, 1, 10),
        # Frames that are no messages pass, which is nothing that the client has asked for.
        (60, 8, -4, 20),
        (70, 8, 1, 30),
        # It has taken everything, and later something waits again.
        (80, 0, 9, 0),
        (90, 5, 9, 0),
        (100, 5, 9, 10),
    ]
    for now, waits, taken, stalled_s in looks:
        assert stall.look(now, waits, taken) == stalled_s, now


def test_a_call_for_which_nothing_waits_may_stay(serve: Serve) -> None:
    served = serve(write_timeout_ms=50)
    with RawClient(served.server.port) as client:
        client.send(call(1, STREAM))
        wait_until(lambda: served.server.calls)
        port = served.port
        opened = port.loop.time()
        wait_until(lambda: port.now - opened > 0.2)
        assert served.server.calls
