"""Shared memory that a model in a tritonserver is given counts for as long as its process may have it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.hosting import MODELS
from tests.triton.backend.hosting import Client, HostingServer
from tests.triton.backend.test_together import EVALUATES, OPTION, evaluate, write
from tests.waiting import wait_until

MiB = 1 << 20
OPTIONS = {
    "MOONPOOL_SANDBOX": "strict",
    "MOONPOOL_REGION_LIMIT_BYTES": str(16 * MiB),
    "MOONPOOL_RESTART_WINDOW_S": "0.001",
}


@pytest.fixture(scope="module", autouse=True)
def hoarder(repository: Path, server: HostingServer) -> Iterator[None]:
    options = "\n".join(OPTION.format(key=key, value=value) for key, value in OPTIONS.items())
    write(repository, "hoarder", EVALUATES + "\nimport json, tries_protocol\n", options)
    for path in (MODELS / "attacker").glob("tries_*.py"):
        shutil.copy(path, repository / "hoarder" / "1")
    client = Client(server)
    client.load("hoarder")
    yield
    client.unload("hoarder")
    client.close()


@pytest.mark.promise("The sandbox: `strict`", "Shared memory that …")
@pytest.mark.promise("Containment", "All shared memory that a contained …")
def test_shared_memory_that_was_given_back_and_kept_is_counted(client: Client, server: HostingServer) -> None:
    files = server.facts()["files"]
    pid = server.stub_of("hoarder")

    text = f"json.dumps(tries_protocol.keep_and_retire(rounds=200, size={MiB}))"
    found = json.loads(evaluate(client, "hoarder", text))

    assert found["held"] <= 16 * MiB
    assert found["refused"] > 0
    wait_until(lambda: server.facts()["files"] <= files + 8)
    # The instance is restarted, because an honest model would need more.
    wait_until(lambda: evaluate(client, "hoarder", "os.getpid()") != str(pid))
