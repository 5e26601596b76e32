"""Models as deployments of Ray Serve, from handles and from clients of KServe v2."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import yaml
from tests.ray.cluster.conftest import Nodes
from tests.waiting import wait_until

pytest.importorskip("ray", reason="Ray is not installed here; bash .ci/run ray installs it apart")

import ray
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from tritonclient.utils import InferenceServerException

import moonpool.ray as mr
from moonpool import InvalidRequest, ModelError, ModelNotFound, RequestTimedOut, StubDied

T = TypeVar("T")
X = np.array([[1.0, 2.0]], np.float32)
# Nothing here is about speed, and the machine may be busy.
LONG_S = 120.0
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def placed(nodes: Nodes, repository: Path) -> Iterator[Nodes]:
    """Serve each model as a deployment."""
    two = mr.Options(replicas=2, num_cpus=0.1)
    one = mr.Options(num_cpus=0.1)
    app = mr.application(
        repository,
        models={
            "double": two,
            "once": one,
            "asks": mr.Options(num_cpus=0.1, with_models=["double"], options={"MOONPOOL_SANDBOX_MODELS": "double"}),
            "repeats": one,
            "speaks": one,
            "sums": two,
        },
        sandbox="strict",
    )
    serve.run(app, name="models")
    yield nodes
    serve.delete("models")


def run(asking: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine under a deadline."""
    return asyncio.run(asyncio.wait_for(asking, LONG_S))


def infer(model: str, x: Any = X, **options: Any) -> dict[str, Any]:
    """Ask a model by a handle."""
    return run(mr.get("models", model).infer({"X": x}, timeout_s=LONG_S, **options))


def replicas_of(deployment: str) -> dict[str, int]:
    """Count the replicas of a deployment by their states."""
    found = serve.status().applications["models"].deployments[deployment].replica_states
    return {str(getattr(state, "value", state)): count for state, count in found.items()}


@pytest.mark.promise("Ray Serve", "A handle takes arrays and returns arrays, from any process of the cluster.")
def test_a_handle_infers(placed: Nodes) -> None:  # noqa: ARG001
    assert infer("double")["Y"].tolist() == [[2.0, 4.0]]


@pytest.mark.promise("Ray Serve", "A handle raises the errors of `Runtime`, with their texts and codes.")
def test_a_handle_raises_the_errors_of_a_runtime(placed: Nodes) -> None:  # noqa: ARG001
    with pytest.raises(ModelNotFound, match="unknown model: 'nobody'"):
        infer("nobody")
    with pytest.raises(ModelNotFound, match="no application 'others'"):
        run(mr.get("others", "double").infer({"X": X}))
    with pytest.raises(InvalidRequest, match="unexpected inference input 'Z'"):
        run(mr.get("models", "double").infer({"Z": X}))
    with pytest.raises(ModelError, match="no infinity"):
        infer("double", X * np.inf)


def test_the_time_of_a_request_covers_the_wait_for_a_replica(placed: Nodes) -> None:  # noqa: ARG001
    handle = mr.get("models", "double")
    run(handle.infer({"X": X}))

    with pytest.raises(RequestTimedOut):
        run(handle.infer({"X": X}, timeout_s=1e-6))


def test_a_handle_streams_the_responses_of_a_decoupled_model(placed: Nodes) -> None:  # noqa: ARG001
    async def ask() -> list[float]:
        stream = mr.get("models", "repeats").stream({"X": np.array([3], np.float32)})
        return [float(outputs["Y"][0]) async for outputs in stream]

    assert run(ask()) == [0.0, 1.0, 2.0]


@pytest.mark.promise("Ray Serve", "A model and those that it calls (BLS) are in one replica, and share its memory.")
def test_a_model_asks_another_one_in_its_replica(placed: Nodes) -> None:  # noqa: ARG001
    target = serve.get_deployment_handle("asks", "models")
    processes = target.processes.remote().result(timeout_s=LONG_S)
    outputs = infer("asks")

    assert outputs["Y"].tolist() == [[2.0, 4.0]]
    assert outputs["PID"].tolist() == [processes["double"]]


@pytest.mark.promise("Ray Serve", "An unmodified tritonclient works with Ray's port for gRPC, streams included.")
def test_tritonclient_over_grpc(placed: Nodes) -> None:
    with grpc_client.InferenceServerClient(f"127.0.0.1:{placed.grpc}") as client:
        assert client.is_server_live()
        wait_until(client.is_server_ready, LONG_S, "a ready application")
        assert client.is_model_ready("double")
        assert client.get_model_metadata("double").inputs[0].name == "X"
        names = {each.name for each in client.get_model_repository_index().models}
        assert names == {"double", "once", "asks", "repeats", "speaks", "sums"}
        asked = grpc_client.InferInput("X", X.shape, "FP32")
        asked.set_data_from_numpy(X)
        assert client.infer("double", [asked]).as_numpy("Y").tolist() == [[2.0, 4.0]]
        with pytest.raises(InferenceServerException) as error:
            client.infer("nobody", [asked])
        assert error.value.status() == "StatusCode.NOT_FOUND"
        assert error.value.message() == "Request for unknown model: 'nobody' is not found"
        with pytest.raises(InferenceServerException, match="cannot change them"):
            client.update_log_settings({"log_info": False})


def streamed(client: Any, requests: list[tuple[str, Any, dict[str, Any]]]) -> list[Any]:
    """Send requests over one stream, and return all responses, in the order of their arrival."""
    arrived: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: arrived.put(error or result), stream_timeout=LONG_S)
    for model, x, options in requests:
        asked = grpc_client.InferInput("X", x.shape, "FP32")
        asked.set_data_from_numpy(x)
        client.async_stream_infer(model, [asked], **options)
    client.stop_stream()
    return list(arrived.queue)


def test_tritonclient_streams_responses_and_sequences(placed: Nodes) -> None:
    one = np.ones((1, 1), np.float32)
    steps = [
        ("sums", one, {"sequence_id": key, "sequence_start": not n, "sequence_end": n == 3})
        for n in range(4)
        for key in (7, 8)
    ]
    with grpc_client.InferenceServerClient(f"127.0.0.1:{placed.grpc}") as client:
        three = streamed(client, [("repeats", np.array([3], np.float32), {})])
        sums = streamed(client, steps)
        (refused,) = streamed(client, [("nobody", one, {})])

    assert [float(each.as_numpy("Y")[0]) for each in three] == [0.0, 1.0, 2.0]
    # In the order of the requests.
    assert [float(each.as_numpy("Y")[0, 0]) for each in sums] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert "unknown model: 'nobody'" in str(refused)


@pytest.mark.promise("Ray Serve", "Ray's port for HTTP serves KServe v2, with binary tensors and Triton's errors.")
def test_tritonclient_over_http(placed: Nodes) -> None:
    with http_client.InferenceServerClient(
        f"127.0.0.1:{placed.http}", network_timeout=LONG_S, connection_timeout=LONG_S
    ) as client:
        assert client.is_server_live()
        assert client.is_model_ready("double")
        index = client.get_model_repository_index()
        assert {(each["name"], each["state"]) for each in index} == {
            (name, "READY") for name in ("double", "once", "asks", "repeats", "speaks", "sums")
        }
        asked = http_client.InferInput("X", X.shape, "FP32")
        asked.set_data_from_numpy(X, binary_data=True)
        wanted = [http_client.InferRequestedOutput("Y", binary_data=True)]
        found = client.infer("double", [asked], outputs=wanted)
        assert found.as_numpy("Y").tolist() == [[2.0, 4.0]]
        with pytest.raises(InferenceServerException, match="unknown model: 'nobody'"):
            client.infer("nobody", [asked])


def post(nodes: Nodes, path: str, value: Any) -> tuple[int, bytes]:
    body = json.dumps(value).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{nodes.http}{path}", body)
    try:
        with urllib.request.urlopen(request, timeout=LONG_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_events_and_refusals_over_http(placed: Nodes) -> None:
    status, events = post(placed, "/v2/models/repeats/generate_stream", {"X": 2})
    assert status == 200
    shown = [json.loads(line[6:])["Y"] for line in events.decode().split("\n\n") if line]
    assert shown == [0.0, 1.0]
    status, text = post(placed, "/v2/repository/models/double/load", {})
    assert (status, b"not allowed" in text) == (503, True)
    status, text = post(placed, "/v2/logging", {"log_info": False})
    assert (status, b"cannot change them" in text) == (501, True)
    # Ray decodes the path, and a question mark in it begins no query.
    assert post(placed, "/v2/logging%3F", {"log_info": False})[0] == 404
    assert post(placed, "/v2/models/double%3Fx/infer", {})[0] == 404


@pytest.mark.promise("Ray Serve", "Ray's port for HTTP has OpenAI's API, with streams and its form of errors.")
def test_openais_api_whole_and_in_streams(placed: Nodes) -> None:
    asked = {"model": "speaks", "messages": [{"role": "user", "content": "one two"}]}

    status, whole = post(placed, "/v1/chat/completions", asked)
    assert (status, json.loads(whole)["choices"][0]["message"]["content"]) == (200, "one two ")
    status, events = post(placed, "/v1/chat/completions", {**asked, "stream": True})
    assert (status, events.count(b"data: "), events[-14:]) == (200, 5, b"data: [DONE]\n\n")
    status, vectors = post(placed, "/v1/embeddings", {"model": "speaks", "input": ["ab", "c"]})
    assert [each["embedding"] for each in json.loads(vectors)["data"]] == [[2, 0.5], [1, 0.5]]
    for wrong, code in ({"model": "unknown"}, "model_not_found"), ({"model": "double"}, "model_not_found"):
        status, text = post(placed, "/v1/chat/completions", {**asked, **wrong})
        assert (status, json.loads(text)["error"]["code"]) == (400, code)
    assert post(placed, "/v1/chat/completions", {**asked, "temperature": 3})[0] == 422
    with urllib.request.urlopen(f"http://127.0.0.1:{placed.http}/v1/models", timeout=LONG_S) as response:
        assert "speaks" in {each["id"] for each in json.load(response)["data"]}


@pytest.mark.promise(
    "Ray Serve", "Ray's ports for metrics have moonpool's counters, with application, deployment, replica and model."
)
def test_ray_has_the_metrics(placed: Nodes) -> None:  # noqa: ARG001
    infer("once")
    pages = [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"]
    ]

    def counted() -> str | None:
        for page in pages:
            with urllib.request.urlopen(page, timeout=LONG_S) as response:
                for line in response.read().decode().splitlines():
                    name, _, value = line.rpartition(" ")
                    # It may have been exported before the request.
                    if name.startswith("ray_nv_inference_request_success{") and 'model="once"' in name and float(value):
                        return str(line)
        return None

    line = wait_until(counted, LONG_S, "the counter of the model") or ""

    for label in ('application="models"', 'deployment="once"', 'replica="', 'version="1"'):
        assert label in line
    assert float(line.rpartition(" ")[2]) >= 1


@pytest.mark.promise("Ray Serve", "The requests of a sequence go to the replica that had the first one.")
def test_sequences_stay_with_their_replica(placed: Nodes) -> None:  # noqa: ARG001
    one = np.ones((1, 1), np.float32)

    async def ask() -> list[list[dict[str, Any]]]:
        handle = mr.get("models", "sums")

        async def sequence(key: int) -> list[dict[str, Any]]:
            return [await handle.infer({"X": one}, correlation_id=key, flags=1 if not n else 0) for n in range(4)]

        return await asyncio.gather(*(sequence(key) for key in range(1, 9)))

    found = run(ask())

    for answers in found:
        assert [float(each["Y"][0, 0]) for each in answers] == [1, 2, 3, 4]
        assert len({int(each["PID"][0, 0]) for each in answers}) == 1
    # How they spread is not checked: with a chance of 1 in 128, one of 2 replicas has all 8 sequences.


@pytest.mark.promise("Ray Serve", "A stub that dies is restarted inside its replica, and Ray keeps the replica.")
def test_a_stub_that_dies_costs_no_replica(placed: Nodes) -> None:  # noqa: ARG001
    target = serve.get_deployment_handle("once", "models")
    before = target.processes.remote().result(timeout_s=LONG_S)

    with pytest.raises(StubDied):
        infer("once", X * np.nan)
    outputs = infer_when_ready("once")

    assert outputs["PID"][0, 0] not in before["once"]
    assert replicas_of("once") == {"RUNNING": 1}
    actors = serve.get_deployment_handle("once", "models").process.remote().result(timeout_s=LONG_S)
    assert Path(f"/proc/{actors}").exists()


def infer_when_ready(model: str) -> dict[str, Any]:
    """Ask until an instance answers."""

    def ask() -> dict[str, Any] | None:
        try:
            return infer(model)
        except (StubDied, mr.ReplicaDied):
            return None

    found = wait_until(ask, LONG_S, f"an answer of {model}")
    return found or {}


@pytest.mark.promise(
    "Ray Serve",
    "If a replica dies, requests inside it to an idempotent model are answered by another one. Others fail, and no "
    "request outside of it does.",
)
def test_requests_in_a_replica_that_dies_go_to_another_one_if_they_may(placed: Nodes) -> None:  # noqa: ARG001
    async def ask() -> list[Any]:
        handle = mr.get("models", "double")
        outcomes: list[Any] = []
        wanted, reached = 20, asyncio.Event()

        async def caller() -> None:
            while len(outcomes) < wanted or not reached.is_set():
                outcomes.append(await handle.infer({"X": X}, timeout_s=LONG_S))
                if len(outcomes) >= wanted:
                    reached.set()

        callers = [asyncio.create_task(caller()) for _ in range(4)]
        await reached.wait()
        reached.clear()
        wanted = len(outcomes) + 100
        target = serve.get_deployment_handle("double", "models")
        os.kill(await target.process.remote(), signal.SIGKILL)
        await asyncio.gather(*callers)
        return outcomes

    outcomes = run(ask())

    assert all(each["Y"].tolist() == [[2.0, 4.0]] for each in outcomes)
    wait_until(lambda: replicas_of("double").get("RUNNING") == 2, LONG_S, "the second replica")


def test_a_config_file_is_an_application(nodes: Nodes, repository: Path) -> None:  # noqa: ARG001
    config = {
        "name": "configured",
        "route_prefix": "/configured",
        "import_path": "moonpool.ray:build",
        "args": {
            "repository": str(repository),
            "models": {"double": {"num_cpus": 0.1, "instances": 2}},
            "defaults": {"num_cpus": 0.1},
            "sandbox": "strict",
        },
    }
    # What `serve deploy` does through Ray's dashboard, which these nodes do not have.
    _get_global_client().deploy_apps(ServeDeploySchema(applications=[config]))
    try:
        wait_until(lambda: serve.status().applications["configured"].status == "RUNNING", LONG_S)
        answer = run(mr.get("configured", "double").infer({"X": X}, timeout_s=LONG_S))
        assert answer["Y"].tolist() == [[2.0, 4.0]]
    finally:
        serve.delete("configured")


def test_the_chart_s_application_is_one_that_ray_reads() -> None:
    manifest = Path(__file__).parents[3] / "deploy" / "ray" / "rayservice.yaml"
    if not manifest.is_file():
        pytest.skip("only the tests are here, not the manifests")
    config = ServeDeploySchema.model_validate(
        yaml.safe_load(yaml.safe_load(manifest.read_text())["spec"]["serveConfigV2"])
    )

    assert config.grpc_options.grpc_servicer_functions == ["moonpool.ray.add_servicer"]
    (application,) = config.applications
    assert application.import_path == "moonpool.ray:build"
    assert mr.Options(**application.args["models"]["ocr"]).autoscaling == {"min_replicas": 1, "max_replicas": 8}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "there is no 'repository'"),
        ({"repository": "/m", "model": []}, "there is no 'model'; did you mean \"models\"?"),
        ({"repository": "/m", "models": {"m": {"replica": 1}}}, "args.models.m: there is no 'replica'"),
        ({"repository": "/m", "models": {"m": 3}}, "args.models.m: 3 is not a mapping"),
        ({"repository": "/m", "ingress": {"cpus": 1}}, "args.ingress: there is no 'cpus'"),
    ],
)
def test_a_config_file_with_a_wrong_name_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(words)):
        mr.build(arguments)
