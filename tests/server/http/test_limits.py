"""Clients that send too much, too slowly or no HTTP, and the end of a server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.server.certificates import self_signed
from tests.server.http.listening import TIMEOUT_S, Answer, Client, Listening, listening
from tests.waiting import wait_until

from moonpool.runtime.server import clients as clients_module
from moonpool.runtime.server import tls
from moonpool.runtime.server.http import connection

__all__ = ["listening"]


@pytest.fixture
def strict() -> Iterator[Listening]:
    """A port with small limits."""
    made = Listening(head_bytes=2048, body_bytes=100_000, connections=4)
    yield made
    made.close()


def impatient(**limits: Any) -> contextlib.closing[Listening]:
    """Run a port with these limits alone: a test that is slow itself must exceed no other."""
    return contextlib.closing(Listening(**limits))


@pytest.fixture
def _lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a port read what a client sends behind a refusal for as long as the test may take."""
    monkeypatch.setattr(connection, "_LINGER_S", TIMEOUT_S)


def error_of(answer: Answer) -> str:
    error: str = json.loads(answer.body)["error"]
    return error


@pytest.mark.promise(
    "HTTP", "Bytes that are not HTTP, or that can be read in two ways, are refused and end the connection."
)
@pytest.mark.promise(
    "HTTP",
    "A request is refused if it has a header twice that decides where the request ends, "
    "who sent it or how it is read. If it has another header twice, or metadata over "
    "gRPC, all values count. Chunks are accepted over HTTP/1.1 only.",
)
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\n\r\n", 400),
        (b"GET /\x00 HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA : b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\r\n folded\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -3\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 3, 3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nX: y\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nOrigin: null\r\nOrigin: http://a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nAuthorization: a\r\nauthorization: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\nHost: c\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\rHost: c\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\nab\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 5000, 400),
        (b"CONNECT example.org:443 HTTP/1.1\r\n\r\n", 405),
    ],
)
def test_bytes_that_are_not_http_are_refused_and_end_the_connection(
    listening: Listening, data: bytes, status: int
) -> None:
    with listening.client() as client:
        client.send(data)
        answer = client.answer()

        assert answer.status == status
        assert answer.headers["connection"] == "close"
        assert error_of(answer)
        assert client.rest() == b""
    assert listening.handler.handled == []


def test_an_upgrade_is_not_made_and_the_request_answered(listening: Listening) -> None:
    request = b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"

    assert listening.ask(request).status == 200


@pytest.mark.promise(
    "HTTP",
    "Heads, bodies, decompressed bodies and the number of connections have limits, which apply before memory is taken.",
)
@pytest.mark.usefixtures("_lingers")
@pytest.mark.parametrize("pieces", [1, 30])
def test_a_head_that_is_too_long_is_refused(strict: Listening, pieces: int) -> None:
    head = b"GET / HTTP/1.1\r\n" + b"X-Y: " + b"z" * 3000
    step = -(-len(head) // pieces)
    with strict.client() as client:
        client.send(*[head[i : i + step] for i in range(0, len(head), step)])

        assert client.answer().status == 431


@pytest.mark.promise("HTTP", "Heads, bodies, decompressed bodies and the …")
@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 100001\r\n\r\n",
        b"Content-Length: 99999999999999\r\nExpect: 100-continue\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n186A1\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n" + (b"1000\r\n" + b"x" * 4096 + b"\r\n") * 25,
    ],
)
def test_a_body_that_is_too_large_is_refused_before_it_is_read(strict: Listening, head: bytes) -> None:
    with strict.client() as client:
        client.send(b"POST /echo HTTP/1.1\r\n" + head)
        answer = client.answer()

        assert answer.status == 413
        assert "exceeds the maximum of 100000 bytes" in error_of(answer)
    assert strict.handler.handled == []


@pytest.mark.usefixtures("_lingers")
def test_a_client_that_sends_on_after_a_refusal_can_read_it(strict: Listening) -> None:
    with strict.client() as client:
        client.send(b"POST /echo HTTP/1.1\r\nContent-Length: 5000000\r\n\r\n")
        client.send(*[bytes(50_000)] * 20)

        assert client.answer().status == 413


def test_a_body_is_not_asked_for_where_the_request_is_refused(listening: Listening) -> None:
    request = b"POST /refused HTTP/1.1\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    answer = listening.ask(request)

    assert (answer.status, error_of(answer)) == (403, "not this one")


@pytest.mark.promise(
    "HTTP",
    "A client that is too slow to send headers or a body, or to read, is disconnected. A slow model is waited for.",
)
@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"GET / HTTP/1.1\r\nX", "headers"),
        (b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n1234", "body"),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n12", "body"),
    ],
)
def test_a_client_that_dawdles_is_told_so(data: bytes, what: str) -> None:
    with impatient(head_timeout_s=0.2, body_timeout_s=0.2, body_bytes_per_s=1 << 30) as listening:
        answer = listening.ask(data)

    assert (answer.status, error_of(answer)) == (408, f"the {what} of the request took too long")


def test_a_client_that_says_nothing_is_left() -> None:
    with impatient(idle_timeout_s=0.4) as listening, listening.client() as client:
        assert client.rest() == b""


@pytest.mark.promise("HTTP", "A client that is too slow …")
def test_a_client_that_takes_nothing_is_left() -> None:
    with impatient(write_timeout_s=0.3) as listening, listening.client() as client:
        client.send(b"GET /big/64 HTTP/1.1\r\n\r\n")

        wait_until(lambda: listening.handler.handled)
        wait_until(lambda: len(listening.port.clients.open) == 0)


@pytest.mark.promise("HTTP", "A client that is too slow …")
def test_a_model_that_takes_its_time_is_waited_for(listening: Listening) -> None:
    handler, port = listening.handler, listening.port

    def look_much_later() -> None:
        for each in list(port.clients.open):
            each.look(port.now + 10 * port.limits.idle_timeout_s)

    with listening.client() as client:
        client.send(b"GET /held HTTP/1.1\r\n\r\n")
        held = wait_until(lambda: handler.held)[0]
        with listening.client() as other:
            wait_until(lambda: len(port.clients.open) == 2)
            listening.call(look_much_later)
            assert other.rest() == b""  # it was idle for so long that the server closed it
        listening.call(lambda: held.respond(200, (), (b"late",)))

        assert client.answer().body == b"late"


@pytest.mark.promise("HTTP", "Heads, bodies, decompressed bodies and the …")
def test_one_connection_too_many_is_told_so(strict: Listening) -> None:
    clients = [strict.client() for _ in range(4)]
    for client in clients:
        client.send(b"GET / HTTP/1.1\r\n\r\n")
        assert client.answer().status == 200
    with strict.client() as one_more:
        answer = one_more.answer()
        assert (answer.status, error_of(answer)) == (503, "too many connections")
    for client in clients:
        client.close()


@pytest.mark.promise("HTTP", "Heads, bodies, decompressed bodies and the …")
def test_requests_that_lie_in_wait_do_not_take_the_memory(listening: Listening) -> None:
    handler = listening.handler
    with listening.client() as client, ThreadPoolExecutor(1) as sender:
        client.send(b"GET /held HTTP/1.1\r\n\r\n")
        held = wait_until(lambda: handler.held)[0]
        many = b"GET /echo HTTP/1.1\r\n\r\n" * 1_000_000
        client.socket.settimeout(60)
        sending = sender.submit(client.send, many)
        connection = listening.call(lambda: next(iter(listening.port.clients.open)))
        wait_until(lambda: connection._is_paused)
        assert len(connection._waiting) < 1 << 20
        listening.call(lambda: held.respond(200))
        assert client.answer().status == 200
        assert client.answer().status == 200
        client.socket.shutdown(2)
        with pytest.raises(OSError):  # noqa: PT011 - a reset, or a broken pipe
            sending.result(60)


@pytest.mark.promise("HTTP", "A server that ends finishes the requests in flight.")
def test_a_server_that_ends_finishes_what_it_has_begun(listening: Listening) -> None:
    handler = listening.handler
    with listening.client() as idle, listening.client() as busy:
        idle.send(b"GET / HTTP/1.1\r\n\r\n")
        assert idle.answer().status == 200
        busy.send(b"GET /held HTTP/1.1\r\n\r\n")
        held = wait_until(lambda: handler.held)[0]
        with ThreadPoolExecutor(1) as pool:
            draining = pool.submit(listening.run, lambda: listening.port.drain(10))
            assert idle.rest() == b""
            listening.call(lambda: held.respond(200, (), (b"done",)))
            answer = busy.answer()

            assert (answer.body, answer.headers["connection"]) == (b"done", "close")
            assert draining.result(60) is True


@pytest.mark.promise("HTTP", "A server that ends finishes the …")
def test_a_server_that_cannot_wait_cuts_off(listening: Listening) -> None:
    handler = listening.handler
    with listening.client() as client:
        client.send(b"GET /held HTTP/1.1\r\n\r\n")
        wait_until(lambda: handler.held)

        assert listening.run(lambda: listening.port.drain(0.05)) is False
        assert client.rest() == b""
    assert handler.cancelled.is_set()


@pytest.mark.promise(
    "Watching a server", "A client that leaves before its answer is counted as such, over HTTP and over gRPC."
)
def test_a_client_that_leaves_before_its_answer_is_counted(listening: Listening) -> None:
    with listening.client() as client:
        client.send(b"GET / HTTP/1.1\r\n\r\n")
        assert client.answer().status == 200
        client.send(b"GET /held HTTP/1.1\r\n\r\n")
        wait_until(lambda: listening.handler.held)

    wait_until(lambda: listening.port.meter.counts()[2] == {"200": 1, "499": 1})


def test_a_thousand_connections_come_and_go(listening: Listening) -> None:
    for _ in range(10):
        clients = [listening.client() for _ in range(100)]
        for number, client in enumerate(clients):
            client.send(b"GET / HTTP/1.1\r\nX: " if number % 2 else b"GET /held HTTP/1.1\r\n\r\n")
        for client in clients:
            client.close()

    # The kernel hands out connections in their order, so all others have come.
    assert listening.ask(b"GET / HTTP/1.1\r\n\r\n").status == 200
    wait_until(lambda: listening.port.meter.counts()[1] == 0)


def of_tls(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return what a server speaks TLS with, and a client that trusts it."""
    key, certificate = self_signed(folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context, ssl.create_default_context(cafile=str(certificate))


def test_a_port_may_speak_tls(tmp_path: Path) -> None:
    context, trusted = of_tls(tmp_path)
    with impatient(tls=context) as listening, listening.client() as client:
        client.wrap(trusted, "localhost")
        body = bytes(range(256)) * 2000
        for _ in range(2):
            head = f"POST /echo HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
            client.send(head.encode() + body)
            assert client.answer().body == body
        client.send(b"GET / HTTP/2.0\r\n\r\n")
        assert client.answer().status == 505


class Refusing(socket.socket):
    """A socket that accepts nobody, as if the process had no descriptor left."""

    refused = 0

    def accept(self) -> Any:
        self.refused += 1
        raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.promise("HTTP", "If a port with TLS can accept nobody, the log says so at most every 30 seconds.")
def test_a_port_that_can_accept_nobody_says_so_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "_REST_S", 0.001)

    async def serve(times: int) -> None:
        loop = asyncio.get_running_loop()
        place: Any = SimpleNamespace(loop=loop)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        server = tls.TlsServer(place, [refusing], context, 10)
        refusing.setblocking(False)
        await server.start_serving()
        with socket.create_connection(refusing.getsockname()):
            await asyncio.to_thread(wait_until, lambda: refusing.refused >= times)
        server.close()

    for quiet_s in (30.0, 0.0):
        monkeypatch.setattr(tls, "_QUIET_S", quiet_s)
        caplog.clear()
        with Refusing() as refusing:
            refusing.bind(("127.0.0.1", 0))
            asyncio.run(serve(50))
            assert refusing.refused >= 50
        said = [text for text in caplog.messages if "no connection can be accepted" in text]
        assert len(said) == (1 if quiet_s else refusing.refused)
        assert said[0].startswith("no connection can be accepted (tried 1 times): [Errno 24]")


@pytest.mark.promise("HTTP", "A port with TLS disconnects a client that does not finish the handshake in time.")
def test_a_client_that_does_not_come_to_speak_tls_is_left(tmp_path: Path) -> None:
    context, _ = of_tls(tmp_path)
    with impatient(tls=context, head_timeout_s=0.2) as listening:
        with listening.client() as client, contextlib.suppress(ConnectionResetError):
            assert client.rest() == b""
        # It gives its place back.
        wait_until(lambda: listening.call(lambda: listening.port.clients.count) == 0)


@pytest.mark.promise("HTTP", "A client counts as a connection before it speaks TLS.")
def test_half_handshakes_count_as_connections(tmp_path: Path) -> None:
    context, trusted = of_tls(tmp_path)
    with impatient(tls=context, connections=16, head_timeout_s=TIMEOUT_S) as listening, contextlib.ExitStack() as stack:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(200):
            half = stack.enter_context(listening.client())
            with contextlib.suppress(ConnectionError):
                half.send(b"\x16\x03\x01")
        # The server closes all others.
        wait_until(lambda: len(os.listdir("/proc/self/fd")) - before <= 200 + 20)
        wait_until(lambda: listening.call(lambda: listening.port.clients.count) == 18)
        stack.close()
        wait_until(lambda: listening.call(lambda: listening.port.clients.count) == 0)
        with listening.client() as client:
            client.wrap(trusted, "localhost")
            client.send(b"GET / HTTP/1.1\r\n\r\n")
            assert client.answer().status == 200


@pytest.mark.promise("HTTP", "Whatever bytes arrive, they are answered, …")
def test_a_client_that_never_waits_does_not_keep_others_waiting(listening: Listening) -> None:
    number = 10_000
    with listening.client() as greedy, ThreadPoolExecutor(1) as sender:
        greedy.socket.settimeout(60)
        sending = sender.submit(greedy.send, b"GET /echo HTTP/1.1\r\n\r\n" * number)
        with listening.client() as modest:
            for _ in range(20):
                modest.send(b"GET / HTTP/1.1\r\n\r\n")
                assert modest.answer().status == 200
                # The kernel keeps the requests that the client sends in advance, not the server.
                waiting = listening.call(lambda: max(len(each._waiting) for each in listening.port.clients.open))
                assert waiting < 1 << 20
        for _ in range(number):
            assert greedy.answer().status == 200
        sending.result(60)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def announce(client: Client, path: bytes, size_bytes: int) -> None:
    """Announce a body of this size, and wait until there is room for it."""
    head = b"POST %b HTTP/1.1\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n"
    client.send(head % (path, size_bytes))
    assert client.line() == b"HTTP/1.1 100 Continue\r\n"


@pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "The bytes that wait for all clients that do not read are limited. Beyond the limit, "
    "the client for which the most bytes wait is disconnected.",
)
def test_the_client_with_the_most_unread_bytes_is_disconnected(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients_module, "_UNSENT_BYTES", 64 << 20)
    with listening.client() as patient, listening.client() as greedy:
        patient.send(b"GET /big/32 HTTP/1.1\r\n\r\n")
        greedy.send(b"GET /big/64 HTTP/1.1\r\n\r\n")

        wait_until(lambda: len(listening.handler.handled) == 2)
        wait_until(lambda: len(listening.port.clients.open) == 1)

        assert len(patient.answer().body) == 32 << 20


@pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "A client that only announces a large body takes none of the server's memory, and no "
    "more than 256 MiB of shared memory together with all other clients that do so.",
)
def test_an_announced_body_takes_no_memory(listening: Listening) -> None:
    before = resident_bytes()
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            announce(stack.enter_context(listening.client()), b"/echo", 1 << 30)

        assert resident_bytes() - before < 256 << 20


@pytest.mark.promise("What the server bears, and whom it answers like", "A client that only announces a …")
def test_shared_memory_for_what_is_to_come_has_an_end(listening: Listening) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            announce(stack.enter_context(listening.client()), b"/lent", 100 << 20)
        assert len(listening.handler.lent) == 2

    wait_until(lambda: listening.port.awaited_bytes == 0)
    with listening.client() as client:
        announce(client, b"/lent", 100 << 20)
        assert len(listening.handler.lent) == 3
