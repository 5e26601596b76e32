"""A local cluster of Ray with two nodes, one for all tests of this folder.

Ray keeps threads, sockets and files in this process while it runs, so single tests are not asked what they leave.
`cluster` looks at the end whether processes are left.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.ray.repository import write_models
from tests.waiting import wait_until


class Nodes(NamedTuple):
    """The cluster, with the ports of Serve's proxy on its first node."""

    cluster: Any
    http: int
    grpc: int


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> None:
    """Take the place of the fixture of the whole suite."""


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with all models."""
    return write_models(tmp_path_factory.mktemp("models"))


def reserved() -> socket.socket:
    """Take a port that Ray can listen on, too, but no other program."""
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    taken.bind(("127.0.0.1", 0))
    return taken


def processes_with(text: str) -> list[int]:
    """Return the processes whose environment has a text."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and text.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Start two nodes and Serve, and end them."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    # Paths of sockets are short, and pytest's folders are not.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    # All processes of the cluster inherit it.
    settings = pytest.MonkeyPatch()
    settings.setenv("RAY_TMPDIR", folder)
    # Everything is on this machine, and no token is written into the home of its user.
    settings.setenv("RAY_AUTH_MODE", "disabled")
    # Without these, workers of Ray have the niceness 15, and stand still on a busy machine.
    settings.setenv("RAY_worker_niceness", "0")
    # Ray gives its proxy five seconds to start, which is little on a busy machine, and kills it then.
    for name in ("READY_CHECK", "HEALTH_CHECK"):
        settings.setenv(f"RAY_SERVE_PROXY_{name}_TIMEOUT_S", "120")
    Path(folder, "ray").mkdir()
    cluster = None
    with closing(reserved()) as http, closing(reserved()) as grpc:
        try:
            memory = {"object_store_memory": 128 << 20}
            head = {"num_cpus": 8, "include_dashboard": False, **memory}
            cluster = Cluster(initialize_head=True, head_node_args=head)
            cluster.add_node(num_cpus=8, resources={"second": 8}, **memory)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            ports = http.getsockname()[1], grpc.getsockname()[1]
            functions = ["moonpool.ray.add_servicer"]
            serve.start(
                proxy_location="HeadOnly",
                http_options={"port": ports[0]},
                grpc_options={"port": ports[1], "grpc_servicer_functions": functions},
            )
            yield Nodes(cluster, *ports)
            serve.shutdown()
        finally:
            ray.shutdown()
            if cluster is not None:
                cluster.shutdown()
            settings.undo()
            try:
                what = "the end of all processes of the cluster"
                wait_until(lambda: not processes_with(folder), 60, what)
            finally:
                for pid in processes_with(folder):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                shutil.rmtree(folder, ignore_errors=True)
