"""Both servers over one repository, once for a run."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from tests.server.running import RunningServer
from tests.server.running import running as serving
from tests.triton.protocol.control_cases import KEY
from tests.triton.server import TritonServer, interpreter, running

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
def _running(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[TritonServer, RunningServer]]:
    """A tritonserver of its own: what these tests do to it, no other test has to bear."""
    repository = Path(shutil.copytree(MODELS, tmp_path_factory.mktemp("protocol") / "repository"))
    flags = [f"--load-model={name}" for name in LOADED]
    flags += ["--model-control-mode=explicit", "--strict-readiness=false"]
    folder = tmp_path_factory.mktemp("server")
    with (
        running(interpreter(), repository, folder, LOADED) as theirs,
        serving(repository, *flags) as ours,
    ):
        yield theirs, ours


@pytest.fixture(scope="session")
def _channels(
    _running: tuple[TritonServer, RunningServer],
) -> Iterator[dict[int, grpc.Channel]]:
    """The channels to the ports that were asked. What the first ones open, no test is charged for."""
    theirs, ours = _running
    with contextlib.ExitStack() as stack:
        channels = _Channels(stack)
        for port in (theirs.grpc_port, ours.ports["grpc"]):
            assert channels[port]
        yield channels


class _Channels(dict[int, grpc.Channel]):
    def __init__(self, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, port: int) -> grpc.Channel:
        channel = self[port] = self._stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
        # A channel opens its sockets when it is first used.
        grpc.channel_ready_future(channel).result(60)
        return channel


@pytest.fixture
def servers(
    _running: tuple[TritonServer, RunningServer], _channels: dict[int, grpc.Channel]
) -> Servers:
    """Both servers.

    A tritonserver that a case has ended, as one in many loads does, is started again for the next case.
    """
    theirs, ours = _running
    if theirs.has_died:
        theirs.stop()
        theirs.start()
    return Servers(
        Server(theirs.http_port, _channels[theirs.grpc_port]),
        Server(ours.ports["http"], _channels[ours.ports["grpc"]]),
    )


@pytest.fixture(scope="session")
def region() -> Iterator[None]:
    """The shared memory that the cases speak of."""
    path = Path("/dev/shm") / KEY.lstrip("/")
    path.write_bytes(bytes(64))
    try:
        yield
    finally:
        path.unlink()
