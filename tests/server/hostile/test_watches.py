"""A user without watches of epoll left: some connections are refused, and the server and the others go on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import few_watches
from tests.server.running import RunningServer, running
from tests.waiting import Deadline, wait_until

pytestmark = pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "If the server's user has no watches of epoll left, a connection that gets none ends. The "
    "server, other connections and starting instances go on.",
)

# Descriptors from this number on get no watch. A server without clients has fewer.
FIRST = 160
ANSWER_S = 60.0
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1.5]}]}
MODEL = """
import moonpool
from moonpool import Float32, Outputs

class Same:
    def __call__(self, X: Float32[1]) -> Outputs(Y=Float32[1]):
        return {"Y": X}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    (folder / "same" / "1").mkdir(parents=True)
    (folder / "same" / "1" / "model.py").write_text(MODEL)
    return folder


@contextlib.contextmanager
def short_of_watches(repository: Path) -> Iterator[RunningServer]:
    with running(repository, before=few_watches.command(FIRST)) as server:
        yield server


def is_answered(connection: socket.socket, request: bytes = LIVE) -> bool:
    """Tell if a connection is served. If not, it was ended."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        connection.sendall(request)
        # Both answers end so.
        while not answer.endswith(b"}") and (data := connection.recv(1 << 16)):
            answer += data
    return answer.startswith(b"HTTP/1.1 200")


def is_live(server: RunningServer) -> bool:
    """Tell if a new connection is served."""
    with socket.create_connection(("127.0.0.1", server.ports["http"]), ANSWER_S) as connection:
        return is_answered(connection)


def stub_of(server: RunningServer) -> int:
    """Return the process of its only instance; 0 while there is none."""
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        # A thread or a child may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in (task / "children").read_text().split():
                if b"triton_python_backend_stub" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
    return 0


def filled(held: contextlib.ExitStack, port: int) -> list[socket.socket]:
    """Connect clients until some get no watch, and return those that are served."""
    served: list[socket.socket] = []
    refused = 0
    deadline = Deadline(ANSWER_S)
    while refused < 10:
        connection = socket.create_connection(("127.0.0.1", port), ANSWER_S)
        held.enter_context(connection)
        if is_answered(connection):
            served.append(connection)
        else:
            refused += 1
        assert len(served) < 2 * FIRST + 100, "nobody was refused"
        assert not deadline.is_over
    return served


def test_connections_end_and_the_others_are_served(repository: Path) -> None:
    with short_of_watches(repository) as server:
        with contextlib.ExitStack() as held:
            served = filled(held, server.ports["http"])

            assert len(served) > 10
            assert all(is_answered(each) for each in served)
            assert server.process.poll() is None
        wait_until(lambda: is_live(server), ANSWER_S, "room for another connection")
        status, reply = server.get("/v2/models/same/infer", "POST", json.dumps(BODY).encode())
        assert (status, reply["outputs"][0]["data"]) == (200, [1.5])


def test_an_instance_comes_back_meanwhile(repository: Path) -> None:
    body = json.dumps(BODY).encode()
    head = "POST /v2/models/same/infer HTTP/1.1\r\nHost: localhost\r\n"
    ask = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with short_of_watches(repository) as server, contextlib.ExitStack() as held:
        first, *_ = filled(held, server.ports["http"])
        before = stub_of(server)
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: stub_of(server) not in (0, before), ANSWER_S, "another instance")

        assert wait_until(lambda: is_answered(first, ask), ANSWER_S, "an answer of it")


def test_clients_of_grpc_leave_the_server_alone(repository: Path) -> None:
    grpc = pytest.importorskip("grpc")
    with short_of_watches(repository) as server, contextlib.ExitStack() as held:
        first, *_ = filled(held, server.ports["http"])
        for _ in range(3):
            channel = held.enter_context(grpc.insecure_channel(server.grpc, [("grpc.use_local_subchannel_pool", 1)]))
            with contextlib.suppress(grpc.FutureTimeoutError):
                grpc.channel_ready_future(channel).result(0.5)

        assert is_answered(first)
        assert server.process.poll() is None
        # At its end the server would wait for the clients that it does not see.
        server.process.kill()
        server.wait()
