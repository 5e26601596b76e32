"""One bound of connections for all ports: who gets a place, what the others get, and what the log says of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import time
import urllib.request
from collections.abc import Iterator

import grpc
import pytest
from tests.server.grpc.frames import LIVE, PREFACE, RawClient, frame
from tests.server.repositories import write
from tests.server.running import RunningServer, starting
from tests.waiting import wait_until

from moonpool.runtime.server import clients
from moonpool.runtime.server.clients import Admission, AllClients, Clients
from moonpool.runtime.server.meter import Meter

TOGETHER = pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "`--max-connections` bounds the connections of all ports together, and leaves those for metrics their part. A "
    "client beyond it gets 503, over gRPC its connection is closed, and the log has at most one line a second about "
    "them.",
)
TIMEOUT_S = 60.0
# Two of the 18 are for metrics.
MOST = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write(folder, "echo")
    with starting(folder, "--max-connections=18") as started:
        started.wait_for("Ready", TIMEOUT_S)
        yield started


@contextlib.contextmanager
def held(server: RunningServer, protocol: str, count: int) -> Iterator[None]:
    """Hold so many connections, each of which the server has counted."""
    # The server may not have seen yet that the clients of the last test have gone.
    wait_until(lambda: shown(server, "http") == shown(server, "grpc") == 0)
    data = PREFACE + frame(4) if protocol == "grpc" else b"GET /v2 HTTP/1.1\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            place = ("127.0.0.1", server.ports[protocol])
            client = stack.enter_context(socket.create_connection(place, TIMEOUT_S))
            client.sendall(data)
            assert client.recv(9)
        yield
    wait_until(lambda: shown(server, protocol) == 0)


def shown(server: RunningServer, protocol: str) -> int:
    """Return how many connections the metrics show."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=TIMEOUT_S) as found:
        text = found.read().decode()
    number = re.search(rf'moonpool_frontend_open_connections\{{protocol="{protocol}"\}} (\d+)', text)
    assert number is not None
    return int(number[1])


def is_live(server: RunningServer) -> bool:
    with grpc.insecure_channel(server.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        return bool(channel.unary_unary(LIVE)(b"", timeout=TIMEOUT_S))


@TOGETHER
def test_connections_of_http_use_up_those_of_grpc(server: RunningServer) -> None:
    with held(server, "http", MOST):
        assert shown(server, "http") == MOST
        with RawClient(server.ports["grpc"]) as client:
            assert list(client.frames()) == []
        with pytest.raises(grpc.RpcError) as raised:
            is_live(server)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert is_live(server)


@TOGETHER
def test_connections_of_grpc_use_up_those_of_http(server: RunningServer) -> None:
    with held(server, "grpc", MOST):
        assert shown(server, "grpc") == MOST
        assert server.get("/v2") == (503, {"error": "too many connections"})
    assert server.get("/v2")[0] == 200


@TOGETHER
def test_the_log_says_who_was_refused(server: RunningServer) -> None:
    begin_s, before = time.monotonic(), server.text()
    with held(server, "http", MOST):
        for _ in range(5):
            with RawClient(server.ports["grpc"]) as client:
                assert list(client.frames()) == []

        def told() -> list[str]:
            # A line may begin with what HTTP has refused in the same second.
            words = r"too many connections: .*gRPC has refused (\d+), as all ports together have their 16"
            return re.findall(words, server.text().removeprefix(before))

        wait_until(lambda: sum(map(int, told())) >= 5)
    lines = server.text().count("too many connections:") - before.count("too many connections:")
    assert lines <= time.monotonic() - begin_s + 2


@TOGETHER
def test_a_second_of_refusals_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    log_s = 0.01
    monkeypatch.setattr(clients, "_LOG_S", log_s)

    async def refuse() -> None:
        together = AllClients(1)
        ports = [Clients[int](name, 2, together, Meter()) for name in ("HTTP", "gRPC")]
        for number in range(100):
            ports[number % 2].opened(number)
        said = asyncio.Event()
        # Timers of a loop fire in order.
        asyncio.get_running_loop().call_later(2 * log_s, said.set)
        await said.wait()

    with caplog.at_level(logging.WARNING, "moonpool"):
        asyncio.run(asyncio.wait_for(refuse(), TIMEOUT_S))
    assert caplog.messages == [
        "too many connections: gRPC has refused 50, as all ports together have their 1; "
        "HTTP has refused 49, as all ports together have their 1"
    ]


def test_places_are_given_and_given_back() -> None:
    async def connect() -> None:
        together = AllClients(3)
        http = Clients[str]("HTTP", 2, together, Meter(), most_told=1)
        apart = Clients[str]("metrics", 1, together, Meter(), is_apart=True)
        assert [http.opened(each) for each in "abcd"] == [
            Admission.WELCOME,
            Admission.WELCOME,
            Admission.TOLD,
            Admission.NONE,
        ]
        assert apart.begins("m")
        assert not apart.begins("n")
        assert together.count == 2
        for each in "abcd":
            http.closed(each)
        # A handshake holds its place, and the connection behind it has the same one.
        assert http.begins("e")
        assert together.count == 1
        assert http.opened("e") is Admission.WELCOME
        http.gave_up("e")
        assert together.count == 1
        http.closed("e")
        http.gave_up("e")
        assert http.begins("f")
        http.gave_up("f")
        assert (together.count, http.count, len(http.open)) == (0, 0, 0)
        assert http.meter.counts()[:2] == (5, 0)
        assert await http.emptied(0)

    asyncio.run(connect())
