"""Servers that load models on demand: over both protocols, for ensembles and models that ask models."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from tests.server.libraries import _gevent_is_there, _grpc_is_there  # noqa: F401
from tests.server.repositories import write
from tests.server.running import RunningServer, command, environment, running
from tests.waiting import wait_until

ASKS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            asked = pb_utils.InferenceRequest(
                model_name="a", requested_output_names=["OUT"], inputs=request.inputs()
            )
            answer = asked.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            responses.append(pb_utils.InferenceResponse(answer.output_tensors()))
        return responses
"""
BROKEN = """
class TritonPythonModel:
    def initialize(self, args):
        raise ValueError("no weights")
"""
DIES = """
import os


class TritonPythonModel:
    def initialize(self, args):
        os._exit(3)
"""
INCOMPLETE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(4)
        config.add_input({"name": "IN", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]})
        return config

    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each)]) for each in values]
"""
BOTH = """
platform: "ensemble"
max_batch_size: 4
input [{ name: "IN" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "OUT" data_type: TYPE_FP32 dims: [4] }]
ensemble_scheduling { step [
  { model_name: "a" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "between" } },
  { model_name: "b" model_version: -1 input_map { key: "IN" value: "between" } output_map { key: "OUT" value: "OUT" } }
] }
"""
NAMES = ("a", "asks", "b", "both", "broken", "c", "dies", "incomplete", "writer")
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Serve models of all kinds, of which one may be in memory."""
    repository = tmp_path_factory.mktemp("models")
    for name in ("a", "b", "c"):
        write(repository, name)
    write(repository, "asks", ASKS)
    write(repository, "broken", BROKEN)
    write(repository, "dies", DIES)
    write(repository, "incomplete", INCOMPLETE, 'backend: "python"')
    write(repository, "both", "", BOTH)
    write(repository, "writer", (Path(__file__).parents[1] / "models" / "writer.py").read_text(), "max_batch_size: 8")
    on_demand = ("--model-control-mode=demand", "--resident-models=1", "--resident-memory=1T")
    patient = [f"--model-option={name}:MOONPOOL_RESTART_BACKOFF_S=30" for name in ("broken", "dies")]
    with running(repository, *on_demand, *patient) as server:
        yield server


def ask(server: RunningServer, name: str, value: float = 1.0) -> list[float]:
    """Ask a model over HTTP."""
    given = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [value] * 4}
    status, said = server.get(f"/v2/models/{name}/infer", "POST", json.dumps({"inputs": [given]}).encode())
    assert status == 200, said
    data: list[float] = said["outputs"][0]["data"]
    return data


def gauges(server: RunningServer, family: str) -> dict[str, float]:
    """Return the values of a family by model."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith(family + "{"):
            name = line.partition('model="')[2].partition('"')[0]
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "With `--model-control-mode=demand` the server is ready when all models are known. Each is ready, its metadata and "
    "its index entry are there, and its first request over any protocol starts it.",
)
def test_models_are_known_and_ready_before_anybody_asks(server: RunningServer) -> None:
    assert server.get("/v2/health/ready")[0] == 200
    status, index = server.get("/v2/repository/index", "POST", b"{}")
    assert status == 200
    assert [entry["name"] for entry in index] == list(NAMES)
    assert {entry["state"] for entry in index} == {"READY"}
    assert server.get("/v2/models/c/ready")[0] == 200
    assert server.get("/v2/models/incomplete")[1]["inputs"][0]["name"] == "IN"
    assert gauges(server, "moonpool_model_wakes_total")["c"] == 0


def test_a_request_over_each_protocol_starts_a_model(server: RunningServer) -> None:
    assert ask(server, "a", 2) == [2] * 4
    given = tritonclient.grpc.InferInput("IN", [1, 4], "FP32")
    given.set_data_from_numpy(np.full((1, 4), 3, np.float32))
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        answer = client.infer("incomplete", [given], client_timeout=PATIENCE_S)
        assert answer.as_numpy("OUT").tolist() == [[3] * 4]
    generated = server.get("/v2/models/b/generate", "POST", b'{"IN": [4, 4, 4, 4]}')
    assert generated[1]["OUT"] == [4] * 4
    # One of them is in memory.
    assert wait_until(lambda: sum(gauges(server, "moonpool_model_awake").values()) == 1, PATIENCE_S)


@pytest.mark.promise("OpenAI", "The first request wakes a model that sleeps.")
def test_a_request_of_openai_s_api_starts_a_model(server: RunningServer) -> None:
    asked = {"model": "writer", "input": ["a"], "encoding_format": "float"}
    for _ in range(2):
        assert gauges(server, "moonpool_model_awake")["writer"] == 0
        status, said = server.get("/v1/embeddings", "POST", json.dumps(asked).encode())
        assert (status, said["data"][0]["embedding"][0]) == (200, 1)
        assert ask(server, "a", 2) == [2] * 4


@pytest.mark.promise(
    "Lifecycle",
    "The members of an ensemble, and models that a model asks, are started for its requests, and count with it as one "
    "if nothing else can go.",
)
@pytest.mark.parametrize("name", ["both", "asks"])
def test_ensembles_and_models_that_ask_models_get_their_members(server: RunningServer, name: str) -> None:
    assert ask(server, name, 5) == [5] * 4


def test_many_callers_of_many_models_lose_no_request(server: RunningServer) -> None:
    def work(caller: int) -> None:
        for number in range(6):
            name = NAMES[(caller + number) % 4]
            assert ask(server, name, number) == [number] * 4

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


@pytest.mark.promise(
    "The server (`moonpool serve`)",
    "A request to a model that cannot be started on demand gets status 503 with the reason and `Retry-After`, and over "
    "gRPC UNAVAILABLE.",
)
@pytest.mark.parametrize(("name", "why"), [("broken", "no weights"), ("dies", "dies_0_0")])
def test_a_model_that_cannot_be_started_is_refused_with_the_reason(server: RunningServer, name: str, why: str) -> None:
    body = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1] * 4}]}).encode()
    for _ in range(2):  # the first one waits for the start, the second comes in the pause after it
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(f"http://{server.http}/v2/models/{name}/infer", body, timeout=60)
        with raised.value as answer:
            assert answer.code == 503
            assert answer.headers["Retry-After"] == "30"
            assert re.search(why, json.load(answer)["error"])
    assert server.get(f"/v2/models/{name}/ready")[0] == 400
    given = tritonclient.grpc.InferInput("IN", [1, 4], "FP32")
    given.set_data_from_numpy(np.zeros((1, 4), np.float32))
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        with pytest.raises(tritonclient.grpc.InferenceServerException, match=why) as said:
            client.infer(name, [given])
        assert "UNAVAILABLE" in str(said.value.status())


def test_memory_is_measured_where_it_is_limited(server: RunningServer) -> None:
    ask(server, "c")

    def measured() -> dict[str, float]:
        return gauges(server, "moonpool_model_measured_memory_bytes")

    # An interpreter with numpy.
    assert wait_until(lambda: 1 << 20 < measured().get("c", 0) < 1 << 30, PATIENCE_S)


@pytest.mark.parametrize("flag", ["models=2", "memory=1G", "gpu-memory=1G"])
def test_limits_without_load_on_demand_are_refused(tmp_path: Path, flag: str) -> None:
    ended = subprocess.run(
        command(f"--model-repository={tmp_path}", f"--resident-{flag}"),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode != 0
    assert "needs --model-control-mode=demand" in ended.stdout + ended.stderr
