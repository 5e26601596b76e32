"""Both servers over one repository, once for a run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from tests.server.running import running as serving
from tests.triton.protocol.control_cases import KEY
from tests.triton.server import interpreter, running

MODELS = Path(__file__).parent / "models"
LOADED = ("add_sub", "batched", "every", "fails", "repeat", "says", "sums", "told")


class Server(NamedTuple):
    """The addresses of one of the two servers."""

    http_port: int
    channel: grpc.Channel


class Servers(NamedTuple):
    triton: Server
    moonpool: Server


def pytest_itemcollected(item: pytest.Item) -> None:
    """The first test waits until both servers have loaded all models."""
    if item.path.parent == MODELS.parent:
        item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A tritonserver of its own: what these tests do to it, no other test has to bear."""
    repository = Path(shutil.copytree(MODELS, tmp_path_factory.mktemp("protocol") / "repository"))
    flags = [f"--load-model={name}" for name in LOADED]
    flags += ["--model-control-mode=explicit", "--strict-readiness=false"]
    folder = tmp_path_factory.mktemp("server")
    with (
        running(interpreter(), repository, folder, LOADED) as theirs,
        serving(repository, *flags) as ours,
        _channel(theirs.grpc_port) as first,
        _channel(ours.ports["grpc"]) as second,
    ):
        # A channel opens its sockets when it is first used.
        for channel in (first, second):
            grpc.channel_ready_future(channel).result(60)
        yield Servers(
            Server(theirs.http_port, first),
            Server(ours.ports["http"], second),
        )


def _channel(port: int) -> grpc.Channel:
    return grpc.insecure_channel(f"127.0.0.1:{port}")


@pytest.fixture(scope="session")
def region() -> Iterator[None]:
    """The shared memory that the cases speak of."""
    path = Path("/dev/shm") / KEY.lstrip("/")
    path.write_bytes(bytes(64))
    try:
        yield
    finally:
        path.unlink()
