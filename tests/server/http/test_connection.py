"""One connection: the requests on it, and the order of their answers."""

from __future__ import annotations

import pytest
from tests.server.http.listening import Listening, listening
from tests.waiting import wait_until

__all__ = ["listening"]


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def test_a_request_is_answered(listening: Listening) -> None:
    answer = listening.ask(post("/echo", b"hello"))

    assert (answer.status, answer.body) == (200, b"hello")
    assert answer.headers == {"content-length": "5"}


@pytest.mark.promise("HTTP", "Requests on a connection are answered …")
def test_a_request_may_come_byte_by_byte(listening: Listening) -> None:
    request = post("/echo", b"hello", "X-Y: z")
    with listening.client() as client:
        client.send(*[request[i : i + 1] for i in range(len(request))])

        assert client.answer().body == b"hello"


@pytest.mark.promise(
    "HTTP",
    "Requests on a connection are answered in order, one at a time, however their bytes "
    "arrive. Bodies may have a length or come in chunks.",
)
def test_requests_that_come_at_once_are_answered_in_order(listening: Listening) -> None:
    bodies = [str(number).encode() for number in range(500)]
    with listening.client() as client:
        client.send(b"".join(post("/echo", body) for body in bodies))

        assert [client.answer().body for _ in bodies] == bodies


@pytest.mark.promise("HTTP", "Requests on a connection are answered …")
def test_a_request_waits_for_the_answer_to_the_one_before_it(listening: Listening) -> None:
    handler = listening.handler
    with listening.client() as client:
        client.send(post("/held", b"1") + post("/echo", b"2"))
        held = wait_until(lambda: handler.held)[0]
        assert len(handler.handled) == 1
        listening.call(lambda: held.respond(200, (), (b"1",)))

        assert [client.answer().body, client.answer().body] == [b"1", b"2"]


@pytest.mark.promise("HTTP", "Large bodies are received into the …")
@pytest.mark.parametrize("size_bytes", [0, 1, 1 << 10, 300_000, 5_000_000])
def test_a_body_of_any_size_comes_whole(listening: Listening, size_bytes: int) -> None:
    body = bytes(range(251)) * (size_bytes // 251 + 1)
    with listening.client() as client:
        for _ in range(2):
            client.send(post("/echo", body[:size_bytes]))
            assert client.answer().body == body[:size_bytes]


@pytest.mark.promise("HTTP", "Large bodies are received into the memory that the handler chooses, and arrive complete.")
def test_a_large_body_is_received_where_the_handler_wants_it(listening: Listening) -> None:
    body = bytes(range(256)) * 4096

    assert listening.ask(post("/lent", body)).body == body
    assert bytes(listening.handler.lent[0]) == body


@pytest.mark.promise("HTTP", "Requests on a connection are answered …")
def test_a_body_may_come_in_chunks(listening: Listening) -> None:
    head = b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"3\r\nabc\r\n1F;a=b\r\n" + b"x" * 31 + b"\r\n0\r\nTrailer: 1\r\n\r\n"
    with listening.client() as client:
        client.send(head + body + post("/echo", b"next"))
        assert client.answer().body == b"abc" + b"x" * 31
        assert client.answer().body == b"next"
        client.send(head, *[body[i : i + 1] for i in range(len(body))])
        assert client.answer().body == b"abc" + b"x" * 31


def test_a_response_may_go_in_pieces(listening: Listening) -> None:
    with listening.client() as client:
        client.send(b"GET /stream HTTP/1.1\r\n\r\n" * 2)
        for _ in range(2):
            answer = client.answer()
            assert answer.body == b"onetwo"
            assert answer.headers == {"transfer-encoding": "chunked"}
        client.send(b"GET /stream HTTP/1.0\r\n\r\n")

        assert client.rest().endswith(b"Connection: close\r\n\r\nonetwo")


def test_head_is_answered_without_a_body(listening: Listening) -> None:
    with listening.client() as client:
        client.send(b"HEAD /big/1 HTTP/1.1\r\n\r\n" + post("/echo", b"next"))
        answer = client.answer("HEAD")

        assert (answer.headers["content-length"], answer.body) == (str(1 << 20), b"")
        assert client.answer().body == b"next"


def test_a_client_that_asks_first_is_told_to_go_on(listening: Listening) -> None:
    request = post("/echo", b"hello", "Expect: 100-continue")
    with listening.client() as client:
        client.send(request[:-5])
        assert client.socket.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(b"hello")

        assert client.answer().body == b"hello"


@pytest.mark.parametrize(
    ("request_line", "header", "answered"),
    [
        ("GET / HTTP/1.1", "", None),
        ("GET / HTTP/1.1", "Connection: close", "close"),
        ("GET / HTTP/1.0", "", "close"),
        ("GET / HTTP/1.0", "Connection: keep-alive", "keep-alive"),
    ],
)
def test_a_connection_lasts_as_the_client_wants(
    listening: Listening, request_line: str, header: str, answered: str | None
) -> None:
    lines = [request_line, header, "", ""] if header else [request_line, "", ""]
    with listening.client() as client:
        client.send("\r\n".join(lines).encode())
        assert client.answer().headers.get("connection") == answered

        if answered == "close":
            assert client.rest() == b""
        else:
            client.send(b"GET / HTTP/1.1\r\n\r\n")
            assert client.answer().status == 200


def test_a_large_response_comes_whole(listening: Listening) -> None:
    assert listening.ask(b"GET /big/20 HTTP/1.1\r\n\r\n").body == bytes(20 << 20)


@pytest.mark.promise(
    "HTTP", "If a client goes, at any time and in any way, its request is cancelled, in the model, too."
)
@pytest.mark.parametrize("is_abrupt", [False, True])
def test_a_client_that_goes_cancels_its_request(listening: Listening, is_abrupt: bool) -> None:
    handler = listening.handler
    with listening.client() as client:
        client.send(post("/held", b""))
        wait_until(lambda: handler.held)
        if is_abrupt:
            client.socket.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER 0: a reset
    assert handler.cancelled.wait(60)
    exchange = handler.held[0]

    assert exchange.is_gone
    # An answer that comes too late does no harm.
    listening.call(lambda: exchange.respond(200))
    listening.call(exchange.finish)


def test_a_response_that_breaks_off_shows(listening: Listening) -> None:
    handler = listening.handler
    with listening.client() as client:
        client.send(post("/held", b""))
        held = wait_until(lambda: handler.held)[0]
        listening.call(lambda: held.begin(200, (), 10))
        listening.call(lambda: held.send(b"12345"))
        listening.call(held.finish)

        assert client.rest().endswith(b"Content-Length: 10\r\n\r\n12345")


def test_a_handler_that_breaks_is_an_answer_too(listening: Listening) -> None:
    with listening.client() as client:
        client.send(post("/broken", b"") + post("/echo", b"next"))
        broken = client.answer()

        assert (broken.status, broken.body) == (500, b'{"error":"internal error; see the server\'s log"}')
        assert client.answer().body == b"next"


def test_a_handler_that_breaks_before_the_body_ends_the_connection_with_an_answer(listening: Listening) -> None:
    with listening.client() as client:
        client.send(b"POST /broken HTTP/1.1\r\nContent-Length: 9\r\n\r\n1")

        assert client.answer().status == 500
        assert client.rest() == b""
