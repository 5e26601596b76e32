"""Clients that open connections and keep them: other ports go on serving, and models start again."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.server.certificates import self_signed
from tests.server.repositories import write
from tests.server.running import RunningServer, starting
from tests.waiting import wait_until

pytestmark = pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "All ports together take at most half of the descriptors, however many clients connect and "
    "stay, in the middle of a TLS handshake or not; the other ports serve on, and models start "
    "again.",
)

# The server cannot raise this limit of descriptors.
LIMIT = 512
HORDE = 2500
ROW = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
BODY = json.dumps({"inputs": [ROW]}).encode()


@contextlib.contextmanager
def horde(port: int, data: bytes) -> Iterator[None]:
    """Connect this many clients, which send some bytes and stay."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(HORDE * 2, before[1]), before[1]))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(HORDE):
                client = socket.create_connection(("127.0.0.1", port), 30.0)
                stack.enter_context(client)
                with contextlib.suppress(ConnectionError):
                    client.sendall(data)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def pid_of(server: RunningServer) -> int | None:
    _, told = server.get("/v2/moonpool/overview")
    (model,) = told["models"]
    (instance,) = model["instances"]
    return instance["pid"] if instance["state"] == "READY" else None


def has_another(server: RunningServer, pid: int) -> bool:
    return pid_of(server) not in (None, pid)


@pytest.mark.parametrize(("data", "tls"), [(b"", False), (b"\x16\x03\x01", True)])
def test_idle_clients_of_grpc_take_no_descriptor_that_http_or_a_stub_needs(
    tmp_path: Path, data: bytes, tls: bool
) -> None:
    write(tmp_path / "models", "echo")
    flags = []
    if tls:
        key, certificate = self_signed(tmp_path)
        flags = ["--grpc-use-ssl=true", f"--grpc-server-cert={certificate}", f"--grpc-server-key={key}"]
    limited = ("prlimit", f"--nofile={LIMIT}:{LIMIT}")
    with starting(tmp_path / "models", *flags, before=limited) as server:
        server.wait_for("Ready", 60.0)
        with horde(server.ports["grpc"], data):
            held = len(os.listdir(f"/proc/{server.process.pid}/fd"))
            assert held < LIMIT * 3 / 4
            for _ in range(3):
                pid = wait_until(lambda: pid_of(server)) or 0
                assert server.get("/v2/models/echo/infer", "POST", BODY)[0] == 200
                os.kill(pid, signal.SIGKILL)
                wait_until(partial(has_another, server, pid))
        assert server.get("/v2/models/echo/infer", "POST", BODY)[0] == 200
        server.tell(signal.SIGTERM)
        assert server.wait() == 0
        assert "Too many open files" not in server.text()


def test_half_handshakes_with_http_take_no_descriptor_that_grpc_or_a_stub_needs(tmp_path: Path) -> None:
    write(tmp_path / "models", "echo")
    key, certificate = self_signed(tmp_path)
    flags = [f"--http-server-cert={certificate}", f"--http-server-key={key}"]
    limited = ("prlimit", f"--nofile={LIMIT}:{LIMIT}")
    with starting(tmp_path / "models", *flags, before=limited) as server:
        server.wait_for("Ready", 60.0)
        with horde(server.ports["http"], b"\x16\x03\x01"):
            assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < LIMIT * 3 / 4
            with socket.create_connection(("127.0.0.1", server.ports["grpc"]), 30.0) as client:
                # The client sends HTTP/2's preface and empty settings.
                client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
                assert client.recv(9)
        assert "Too many open files" not in server.text()
