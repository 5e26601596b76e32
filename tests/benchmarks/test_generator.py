"""The load generator against a server that is not moonpool's, over real sockets."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from tests.benchmarks.conftest import Kserve, needs_nghttp2

from moonpool.benchmarks.generator.engine import (
    CANCELLED,
    COLUMNS,
    OUTCOME,
    SUCCEEDED,
    Cancellation,
    Generator,
    Tally,
    Wire,
)
from moonpool.benchmarks.generator.grpc import GrpcWire
from moonpool.benchmarks.generator.http import HttpWire
from moonpool.benchmarks.loads import Rate
from moonpool.benchmarks.windows import Log
from moonpool.runtime.client.request import METHOD, STREAM_METHOD, Question, QuestionTensor, Unreachable

PATIENCE_S = 60.0
SECONDS = 0.1
# So long may the thread of a server be late with an answer.
DEADLINE_S = 1.0


def question(model: str, elements: int = 4) -> Question:
    array = np.arange(elements, dtype=np.float32).reshape(1, -1)
    return Question(model, "", [QuestionTensor.of(f"INPUT{i}", "FP32", array) for i in range(2)])


def log_of(tally: Tally) -> Log:
    return Log(np.array(tally.log, np.int64).reshape(-1, len(COLUMNS)))


def generator(kserve: Kserve, scheme: str, asked: Question) -> Generator:
    endpoint = kserve.endpoint(scheme)

    def wire() -> Wire:
        if scheme == "http":
            return HttpWire(asked.as_http(endpoint))
        return GrpcWire(endpoint.authority, METHOD, asked.as_grpc())

    return Generator((endpoint.host, endpoint.port), [wire], timeout_s=PATIENCE_S)


@pytest.fixture(params=["http", pytest.param("grpc", marks=needs_nghttp2)])
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_a_small_share_is_cancelled_over_several_windows(kserve: Kserve) -> None:
    endpoint = kserve.endpoint("http")
    asked = question("add_sub").as_http(endpoint)
    pressed = Generator(
        (endpoint.host, endpoint.port), [lambda: HttpWire(asked)], timeout_s=PATIENCE_S,
        cancellation=Cancellation(1 / 3, 0),
    )  # fmt: skip
    try:
        # One request each, however late it is.
        tallies = [pressed.closed_loop(1, 0.0, time.perf_counter_ns()) for _ in range(3)]
    finally:
        pressed.close()

    assert [tally.log[OUTCOME] for tally in tallies] == [SUCCEEDED, SUCCEEDED, CANCELLED]


@pytest.mark.parametrize("elements", [4, 300_000])
def test_a_closed_loop_counts_what_was_answered(kserve: Kserve, scheme: str, elements: int) -> None:
    pressed = generator(kserve, scheme, question("add_sub", elements))
    try:
        first = pressed.closed_loop(3, SECONDS, time.perf_counter_ns())
        # The connections are still there.
        second = pressed.closed_loop(1, SECONDS, time.perf_counter_ns())
    finally:
        pressed.close()

    for tally in (first, second):
        assert tally.errors == {}
        assert len(log_of(tally).latencies_ns) > 0
        assert tally.seconds >= SECONDS
        assert 0 < min(log_of(tally).latencies_ns) <= tally.seconds * 1e9


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "Requests that a server refuses, hangs up on or never answers are counted by reason, and each of them ends.",
)
def test_refusals_of_a_server_are_counted_by_their_text(kserve: Kserve, scheme: str) -> None:
    pressed = generator(kserve, scheme, question("fails"))
    try:
        tally = pressed.closed_loop(2, SECONDS, time.perf_counter_ns())
    finally:
        pressed.close()

    words = {"http": "HTTP 500: no luck today", "grpc": "gRPC 13: no luck today: 100 % µ"}
    assert list(tally.errors) == [words[scheme]]
    assert len(log_of(tally).latencies_ns) == 0


def test_answers_in_chunks_are_answers(kserve: Kserve) -> None:
    pressed = generator(kserve, "http", question("chunks"))
    try:
        tally = pressed.closed_loop(1, SECONDS, time.perf_counter_ns())
    finally:
        pressed.close()

    assert tally.errors == {}
    assert len(log_of(tally).latencies_ns) > 0


@pytest.mark.promise("Measuring (`moonpool bench`)", "Requests that a server refuses …")
def test_a_connection_that_is_closed_is_an_error_and_opened_anew(kserve: Kserve) -> None:
    pressed = generator(kserve, "http", question("closes"))
    try:
        # On a busy machine a window may be over with its first request.
        tallies = [pressed.closed_loop(1, SECONDS, time.perf_counter_ns()) for _ in range(2)]
    finally:
        pressed.close()

    for tally in tallies:
        assert list(tally.errors) == ["the server closed the connection"]


@pytest.mark.parametrize("distribution", ["poisson", "constant"])
def test_an_open_loop_sends_when_the_time_has_come(kserve: Kserve, scheme: str, distribution: str) -> None:
    due_ns = Rate(200, distribution).due_ns(0.2, seed=1)
    pressed = generator(kserve, scheme, question("add_sub"))
    try:
        tally = pressed.open_loop(due_ns.tolist(), 8, time.perf_counter_ns())
    finally:
        pressed.close()

    assert tally.errors == {}
    assert len(log_of(tally).latencies_ns) + tally.unsent == len(due_ns)
    assert len(tally.late_ns) == len(log_of(tally).latencies_ns)
    assert min(tally.late_ns) >= 0


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "The latency of a planned request counts from the moment when it was due. Requests that "
    "were late or never sent are counted, and the report says so.",
)
def test_an_open_loop_counts_from_when_a_request_was_due(silent: tuple[str, int]) -> None:
    pressed = Generator(silent, [lambda: HttpWire(b"GET / HTTP/1.1\r\n\r\n")], timeout_s=0.6)
    try:
        # The second request has no connection until the first one is given up, and then it is too late for it.
        tally = pressed.open_loop([0, 1_000_000], 1, time.perf_counter_ns())
    finally:
        pressed.close()

    assert tally.errors == {"no answer within 0.6 s": 1}
    assert tally.unsent == 1


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield "127.0.0.1", server.getsockname()[1]


@pytest.mark.promise("Measuring (`moonpool bench`)", "Requests that a server refuses …")
def test_an_answer_that_does_not_come_is_an_error(silent: tuple[str, int]) -> None:
    pressed = Generator(silent, [lambda: HttpWire(b"GET / HTTP/1.1\r\n\r\n")], timeout_s=0.1)
    try:
        tally = pressed.closed_loop(2, 0.05, time.perf_counter_ns())
    finally:
        pressed.close()

    assert tally.errors == {"no answer within 0.1 s": 2}


def read_request(connection: socket.socket) -> bool:
    """Read one request without a body; false where the client has closed the connection."""
    received = b""
    while not received.endswith(b"\r\n\r\n"):
        data = connection.recv(4096)
        if not data:
            return False
        received += data
    return True


@contextlib.contextmanager
def half_silent(listener: socket.socket) -> Iterator[None]:
    """Answer on every other connection, and read what comes on the others."""

    def serve(connection: socket.socket, answers: bool) -> None:
        with connection, contextlib.suppress(OSError):
            while read_request(connection):
                if answers:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    def accept() -> None:
        with contextlib.suppress(OSError):
            for number in itertools.count():
                connection, _ = listener.accept()
                threads.append(threading.Thread(target=serve, args=(connection, number % 2)))
                threads[-1].start()

    threads = [threading.Thread(target=accept)]
    threads[0].start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


@pytest.mark.promise("Measuring (`moonpool bench`)", "Each request has its own deadline, whatever others do.")
def test_a_request_fails_at_its_deadline_while_others_are_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, half_silent(listener):
        wire = [lambda: HttpWire(b"GET / HTTP/1.1\r\n\r\n")]
        pressed = Generator(listener.getsockname(), wire, timeout_s=DEADLINE_S)
        try:
            tally = pressed.closed_loop(2, 2.0 * DEADLINE_S, time.perf_counter_ns())
        finally:
            pressed.close()

    assert list(tally.errors) == ["no answer within 1 s"]
    assert tally.errors["no answer within 1 s"] >= 2
    assert len(log_of(tally).latencies_ns)


def test_a_connection_that_cannot_be_made_holds_up_no_other() -> None:
    is_full = threading.Event()

    class LateWire(HttpWire):
        def opening(self) -> Sequence[bytes | memoryview]:
            # Before the window, so no deadline passes meanwhile.
            assert is_full.wait(PATIENCE_S)
            return super().opening()

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1))

        def serve() -> None:
            with listener.accept()[0] as kept, listener.accept()[0] as dropped:
                # Nobody accepts any more. When the backlog is full, the kernel lets connections wait.
                for _ in range(4):
                    filler = stack.enter_context(socket.socket())
                    filler.setblocking(False)
                    filler.connect_ex(listener.getsockname())
                is_full.set()
                read_request(dropped)
                dropped.close()
                while read_request(kept):
                    kept.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        server = threading.Thread(target=serve)
        server.start()
        wires: list[Callable[[], Wire]] = [
            lambda: HttpWire(b"GET / HTTP/1.1\r\n\r\n"),
            lambda: LateWire(b"GET / HTTP/1.1\r\n\r\n"),
        ]
        pressed = Generator(listener.getsockname(), wires, timeout_s=DEADLINE_S)
        try:
            tally = pressed.closed_loop(2, 2.0 * DEADLINE_S, time.perf_counter_ns())
        finally:
            pressed.close()
            server.join()

    assert tally.errors["the server closed the connection"] == 1
    assert tally.errors["no answer within 1 s"] >= 2
    assert len(log_of(tally).latencies_ns)


def test_where_nobody_listens_the_window_ends() -> None:
    # Bound, so that no other program listens there meanwhile.
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = held.getsockname()
        pressed = Generator(address, [lambda: HttpWire(b"GET / HTTP/1.1\r\n\r\n")], timeout_s=1)
        try:
            with pytest.raises(Unreachable, match=f"no server answers at 127.0.0.1:{address[1]}"):
                pressed.closed_loop(1, SECONDS, time.perf_counter_ns())
        finally:
            pressed.close()


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"SSH-2.0-server\r\n\r\n", "the server's answer is not HTTP: b'ssh-2.0-server'"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "an answer HTTP 200 has neither a Content-Length nor chunks"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab", "a server sent more than the Content-Length of its answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "b'zz' is not the size of a chunk"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-99\r\n", "b'-99' is not the size of a chunk"),
    ],
)
def test_a_malformed_answer_is_an_error_of_its_request(said: bytes, error: str) -> None:
    assert set(pressed_where(said).errors) == {error}


def test_a_server_may_close_after_each_answer() -> None:
    tally = pressed_where(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab")

    assert tally.errors == {}
    assert len(log_of(tally).latencies_ns) > 0


def pressed_where(said: bytes) -> Tally:
    """A window against a server that says this on each connection, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        over = threading.Event()

        def say() -> None:
            while not over.is_set():
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    continue
                with peer:
                    peer.recv(1000)
                    peer.sendall(said)

        thread = threading.Thread(target=say)
        thread.start()
        wire = HttpWire(b"GET / HTTP/1.1\r\n\r\n")
        pressed = Generator(server.getsockname(), [lambda: wire], timeout_s=PATIENCE_S)
        try:
            return pressed.closed_loop(1, 0.02, time.perf_counter_ns())
        finally:
            pressed.close()
            over.set()
            thread.join()


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "The responses of a stream are counted and timed. A message that only marks the end does not count.",
)
@needs_nghttp2
@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_responses_of_a_stream_are_counted_and_timed(kserve: Kserve, count: int) -> None:
    endpoint = kserve.grpc
    tensor = QuestionTensor.of("COUNT", "INT32", np.array([count], np.int32))
    message = Question("repeat", "", [tensor]).as_grpc(is_stream=True)

    def wire() -> Wire:
        return GrpcWire(endpoint.authority, STREAM_METHOD, message, is_stream=True)

    pressed = Generator((endpoint.host, endpoint.port), [wire], timeout_s=PATIENCE_S, is_stream=True)
    try:
        tally = pressed.closed_loop(2, SECONDS, time.perf_counter_ns())
    finally:
        pressed.close()

    requests = len(log_of(tally).latencies_ns)
    assert tally.errors == {}
    assert requests > 0
    # A final message without outputs does not count as a response.
    assert len(log_of(tally).first_ns) == (requests if count else 0)
    assert len(tally.between_ns) == requests * max(0, count - 1)


@needs_nghttp2
def test_an_error_in_a_stream_ends_its_request(kserve: Kserve) -> None:
    endpoint = kserve.grpc
    message = question("fails").as_grpc(is_stream=True)
    pressed = Generator(
        (endpoint.host, endpoint.port),
        [lambda: GrpcWire(endpoint.authority, STREAM_METHOD, message, is_stream=True)],
        timeout_s=PATIENCE_S,
        is_stream=True,
    )
    try:
        # On a busy machine a window may be over with its first request.
        tallies = [pressed.closed_loop(1, SECONDS, time.perf_counter_ns()) for _ in range(2)]
    finally:
        pressed.close()

    for tally in tallies:
        assert list(tally.errors) == ["no luck in a stream"]
