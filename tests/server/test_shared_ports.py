"""Two servers that share their ports."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import signal
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from tests.server.asking import Clients
from tests.server.libraries import _grpc_is_there  # noqa: F401
from tests.server.repositories import write
from tests.server.running import RunningServer, running, starting
from tests.waiting import wait_until
from tritonclient.grpc import service_pb2, service_pb2_grpc

import moonpool

PIDS = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        pid = np.array([os.getpid()], np.int64)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("PID", pid)]) for _ in requests]
"""
CONFIG = """
backend: "python"
input [{ name: "IN" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "PID" data_type: TYPE_INT64 dims: [1] }]
"""
BODY = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1]}]}).encode()
SHARED = ("--reuse-http-port=true", "--reuse-grpc-port=true")
# A client connects again after so many requests.
REQUESTS = 5
PATIENCE_S = 60.0


def beside(server: RunningServer) -> tuple[str, ...]:
    """Return the options of another server at the same ports, but for metrics."""
    return (f"--http-port={server.ports['http']}", f"--grpc-port={server.ports['grpc']}")


def over_http(server: RunningServer) -> Callable[[], set[int]]:
    address = server.http

    def ask() -> set[int]:
        pids: set[int] = set()
        connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
        try:
            for _ in range(REQUESTS):
                try:
                    connection.request("POST", "/v2/models/m/infer", BODY)
                    answer = connection.getresponse()
                except ConnectionError:
                    # Closed before it answered: the request is sent again over another connection.
                    return pids
                assert answer.status == 200, answer.read()
                pids.add(json.load(answer)["outputs"][0]["data"][0])
                if answer.will_close:
                    break
        finally:
            connection.close()
        return pids

    return ask


def over_grpc(server: RunningServer) -> Callable[[], set[int]]:
    address = server.grpc
    request = service_pb2.ModelInferRequest(model_name="m")
    given = request.inputs.add(name="IN", datatype="FP32", shape=[1])
    given.contents.fp32_contents.append(1.0)

    def ask() -> set[int]:
        pids: set[int] = set()
        own = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, own) as channel:
            infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
            for _ in range(REQUESTS):
                # At GOAWAY, the library itself connects again.
                answer = infer(request, timeout=PATIENCE_S, wait_for_ready=True)
                pids = {int.from_bytes(answer.raw_output_contents[0], "little")}
        return pids

    return ask


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "Servers with `--reuse-http-port=true --reuse-grpc-port=true` share their ports. Each connection leads to one of "
    "them. When one ends by a signal, clients that connect again get all their answers.",
)
@pytest.mark.parametrize("over", [over_http, over_grpc])
def test_one_of_two_servers_at_a_port_ends_and_no_request_is_lost(
    tmp_path: Path, over: Callable[[RunningServer], Callable[[], set[int]]]
) -> None:
    write(tmp_path, "m", PIDS, CONFIG)
    with running(tmp_path, *SHARED) as first, running(tmp_path, *SHARED, *beside(first)) as second:
        assert second.ports["metrics"] != first.ports["metrics"]
        with Clients(over(second)) as clients:
            wait_until(lambda: len(clients.pids) == 2 or clients.errors, PATIENCE_S)
            first.tell(signal.SIGTERM)
            assert first.wait() == 0
            clients.forget()
            wait_until(lambda: clients.pids or clients.errors, PATIENCE_S)
        assert clients.errors == []
        assert len(clients.pids) == 1


OTHER_VERSION = "0.1.99"


@pytest.fixture(scope="module")
def other_version() -> Iterator[Path]:
    """Make a folder with a moonpool that is the same but for its version. Users of instances may read it."""
    with tempfile.TemporaryDirectory(prefix="moonpool-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        without = shutil.ignore_patterns("__pycache__", "benchmarks")
        shutil.copytree(moonpool.__path__[0], folder / "moonpool", ignore=without)
        (folder / "moonpool" / "runtime" / "version.py").write_text(f'VERSION = "{OTHER_VERSION}"\n')
        yield folder


def version_of(server: RunningServer) -> str:
    with urllib.request.urlopen(f"http://{server.http}/v2", timeout=PATIENCE_S) as answer:
        return str(json.load(answer)["version"])


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "A rolling upgrade loses no request: a server of another version starts at the ports of one that serves, which "
    "then ends.",
)
@pytest.mark.parametrize("over", [over_http, over_grpc])
def test_another_version_takes_over_the_ports_and_no_request_is_lost(
    tmp_path: Path, other_version: Path, over: Callable[[RunningServer], Callable[[], set[int]]]
) -> None:
    write(tmp_path / "models", "m", PIDS, CONFIG)
    # Both use one folder of caches, as two versions of one user do.
    shared = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    old = {**shared, "PYTHONPATH": str(other_version)}
    options = (tmp_path / "models", *SHARED, "--sandbox=strict")
    with contextlib.ExitStack() as servers:
        before = servers.enter_context(running(*options, variables=old))
        assert version_of(before) == OTHER_VERSION
        with Clients(over(before)) as clients:
            wait_until(lambda: clients.pids or clients.errors, PATIENCE_S)
            after = servers.enter_context(running(*options, *beside(before), variables=shared))
            wait_until(lambda: len(clients.pids) == 2 or clients.errors, PATIENCE_S)
            before.tell(signal.SIGTERM)
            assert before.wait() == 0
            clients.forget()
            wait_until(lambda: clients.pids or clients.errors, PATIENCE_S)
            assert version_of(after) == moonpool.__version__
    assert clients.errors == []
    assert len(clients.pids) == 1


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "A server without these options is refused a port that others share, and told of them.",
)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_server_that_does_not_share_is_told_how(tmp_path: Path, protocol: str) -> None:
    write(tmp_path, "m", PIDS, CONFIG)
    with running(tmp_path, *SHARED) as first:
        port = first.ports[protocol]
        with starting(tmp_path, f"--{protocol}-port={port}") as second:
            assert second.wait() == 1
            assert f"port {port} ({protocol}): Address already in use" in second.text()
            assert f"share a port if all of them have --reuse-{protocol}-port=true" in second.text()
