"""`moonpool bench` and `moonpool serve`: every way to ask, and nothing left behind at the server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.cli.shell import MODELS, CommandLine, write_model
from tests.server.running import RunningServer, running

QUICK = ("--seconds", "0.05", "--warm-up", "0", "--windows", "3")
COUNTS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for index in range(int(request.inputs()[0].as_numpy()[0])):
                output = pb_utils.Tensor("INDEX", np.array([index], np.int32))
                sender.send(pb_utils.InferenceResponse([output]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNTS_CONFIG = """
backend: "python"
input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "INDEX" data_type: TYPE_INT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    shutil.copytree(Path(MODELS) / "add_sub", repository / "add_sub", ignore=shutil.ignore_patterns("*.pyc"))
    write_model(repository, "counts", COUNTS, COUNTS_CONFIG)
    with running("--model-repository", repository) as started:
        yield started


@pytest.mark.promise("Measuring (`moonpool bench`)", "The processes of the load …")
@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("memory", ["none", "system"])
def test_requests_of_every_kind_are_answered(cli: CommandLine, server: RunningServer, scheme: str, memory: str) -> None:
    url = f"{scheme}://127.0.0.1:{server.ports[scheme]}"
    ended = cli(
        "bench", "add_sub", "--url", url, "--concurrency", "3", *QUICK,
        "--shared-memory", memory, "--save", ".",
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    [point] = json.loads((cli.folder / "add_sub.json").read_text())["series"]
    assert point["failed"] == 0
    assert point["requests"] == point["server"]["requests"] > 0
    assert server.get("/v2/systemsharedmemory/status") == (200, [])


@pytest.mark.promise("Measuring (`moonpool bench`)", "Results of different requests are not …")
def test_one_server_over_two_protocols_has_one_configuration(cli: CommandLine, server: RunningServer) -> None:
    ended = cli(
        "bench", "add_sub", "--url", f"http://{server.http}", "--against", f"grpc://{server.grpc}",
        "--concurrency", "1", *QUICK, "--save", ".",
    )  # fmt: skip

    assert "the two differ" not in ended.stderr
    report = json.loads((cli.folder / "add_sub.json").read_text())
    assert "input" in report["configuration_fields"]
    assert report["configuration_digest"] == report["against"]["configuration_digest"]


def test_tensors_may_travel_as_json(cli: CommandLine, server: RunningServer) -> None:
    ended = cli(
        "bench", "add_sub", "--url", f"http://{server.http}", "--concurrency", "1", *QUICK,
        "--json-tensors", "--save", ".",
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    report = json.loads((cli.folder / "add_sub.json").read_text())
    assert report["json_tensors"]
    assert report["series"][0]["requests"] == report["series"][0]["server"]["requests"] > 0


def test_the_responses_of_a_decoupled_model_are_counted(cli: CommandLine, server: RunningServer) -> None:
    url = f"grpc://{server.grpc}"
    refused = cli("bench", "counts", "--url", url, *QUICK)
    assert "is decoupled: measure it with --streaming" in refused.stderr

    ended = cli(
        "bench", "counts", "--url", url, "--streaming", "--input", "COUNT=[3]",
        "--concurrency", "2", *QUICK, "--save", ".",
    )  # fmt: skip

    assert ended.returncode == 0, ended.stderr
    [point] = json.loads((cli.folder / "counts.json").read_text())["series"]
    assert point["responses"] == 3 * point["requests"] > 0
