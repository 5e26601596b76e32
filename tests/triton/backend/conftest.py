"""One such server for a run, with all models but those that do not load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.triton.backend import zoo
from tests.triton.backend.hosting import Client, HostingServer
from tests.triton.server import interpreter


def pytest_itemcollected(item: pytest.Item) -> None:
    """The first test waits until the server has loaded all models."""
    if item.path.parent == Path(__file__).parent:
        item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    zoo.write(folder)
    return folder


@pytest.fixture(scope="session")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostingServer]:
    loaded = [name for name in zoo.MODELS if name != "broken"]
    server = HostingServer(interpreter(), repository, tmp_path_factory.mktemp("server"), loaded)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: HostingServer) -> Iterator[Client]:
    client = Client(server)
    yield client
    client.close()
