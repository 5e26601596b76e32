"""Requests of clients for inference count once each, whatever their models ask further."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.ensemble_repositories import FAILS, REPEATS, chain, write_ensemble, write_model
from tests.server.running import RunningServer, running
from tests.waiting import wait_until

pytestmark = pytest.mark.promise(
    "Watching a server",
    "Requests for inference of clients are counted once each, over HTTP, gRPC and streams, with their outcome "
    "and duration: not what ensembles and models ask others for them.",
)

# Asks the ensemble twice, and so its two steps four times.
ASKS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.Tensor("A", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())
            for _ in range(2):
                asked = pb_utils.InferenceRequest(
                    model_name="twice", requested_output_names=["B"], inputs=[x]
                )
                answer = asked.exec()
            y = pb_utils.get_output_tensor_by_name(answer, "B").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]))
        return responses
"""
# Answers when its client has left.
WAITS = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            while not sender.is_cancelled():
                time.sleep(0.01)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ROW = np.array([2, 0, 0], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "adds")
    write_model(folder, "asks", ASKS)
    write_model(folder, "fails", FAILS)
    decoupled = "model_transaction_policy { decoupled: true }"
    write_model(folder, "repeats", REPEATS, more=decoupled)
    write_model(folder, "waits", WAITS, more=decoupled)
    write_ensemble(folder, "twice", chain(["adds", "adds"]))
    with running(folder) as server:
        yield server


def overview(server: RunningServer) -> dict[str, Any]:
    return dict(server.get("/v2/moonpool/overview")[1])


def clients(server: RunningServer) -> tuple[int, int]:
    """Return the requests of clients that succeeded and failed."""
    counts = overview(server)["clients"]
    return counts["success"], counts["failure"]


def executed(server: RunningServer) -> dict[str, int]:
    """Return the requests that each model has answered."""
    return {model["name"]: model["success"] + model["failure"] for model in overview(server)["models"]}


def infer(server: RunningServer, model: str, name: str = "X") -> int:
    tensor = {"name": name, "datatype": "FP32", "shape": [3], "data": ROW.tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()
    return server.get(f"/v2/models/{model}/infer", "POST", body)[0]


def generate(server: RunningServer, model: str, how: str = "generate") -> int:
    body = json.dumps({"X": ROW.tolist()}).encode()
    return server.get(f"/v2/models/{model}/{how}", "POST", body)[0]


def tensor(name: str = "X") -> triton.InferInput:
    made = triton.InferInput(name, [3], "FP32")
    made.set_data_from_numpy(ROW)
    return made


def over_http(server: RunningServer) -> None:
    assert [infer(server, "twice", "A"), infer(server, "asks"), infer(server, "adds")] == [200] * 3
    assert [infer(server, "fails"), infer(server, "twice", "C"), infer(server, "no")] != [200] * 3


def over_generate(server: RunningServer) -> None:
    assert generate(server, "asks") == 200
    assert generate(server, "repeats", "generate_stream") == 200
    assert generate(server, "adds", "generate_stream") == 200
    assert generate(server, "fails", "generate_stream") == 400
    assert generate(server, "fails") == 400
    assert generate(server, "no") == 404


def over_grpc(server: RunningServer) -> None:
    with triton.InferenceServerClient(server.grpc) as client:
        client.infer("twice", [tensor("A")])
        client.infer("asks", [tensor()])
        client.infer("adds", [tensor()])
        for model in ("fails", "no", "repeats"):
            with pytest.raises(triton.InferenceServerException):
                client.infer(model, [tensor()])


def over_a_stream(server: RunningServer) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    with triton.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for model, name in (("twice", "A"), ("asks", "X"), ("fails", "X"), ("no", "X"), ("adds", "Z")):
            client.async_stream_infer(model, [tensor(name)])
        client.async_stream_infer("repeats", [tensor()])
        for _ in range(5 + 2):
            answers.get(timeout=60)
        client.stop_stream()


def test_a_model_has_what_it_executed(server: RunningServer) -> None:
    before, asked = executed(server), sum(clients(server))
    assert infer(server, "asks") == 200

    def came() -> dict[str, int]:
        now = executed(server)
        return {name: now[name] - before[name] for name in ("asks", "twice", "adds")}

    wait_until(lambda: came() == {"asks": 1, "twice": 2, "adds": 4}, 60.0, "the counts of models")
    wait_until(lambda: sum(clients(server)) == asked + 1, 60.0, "the client's request")


@pytest.mark.parametrize("ask", [over_http, over_generate, over_grpc, over_a_stream])
def test_each_request_counts_once_by_its_outcome(server: RunningServer, ask: Callable[[RunningServer], None]) -> None:
    before = clients(server)
    ask(server)

    def came() -> tuple[int, int]:
        now = clients(server)
        return now[0] - before[0], now[1] - before[1]

    wait_until(lambda: sum(came()) >= 6, 60.0, "all requests of the clients")
    assert came() == (3, 3)


def test_a_request_whose_client_leaves_has_failed_once(server: RunningServer) -> None:
    before = clients(server)

    def is_executing() -> bool:
        return any(each["executing"] for each in overview(server)["models"] if each["name"] == "waits")

    with triton.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: None)  # noqa: ARG005 - by their names
        client.async_stream_infer("waits", [tensor()])
        wait_until(is_executing, 60.0, "the request")
        client.stop_stream(cancel_requests=True)

    wait_until(lambda: sum(clients(server)) > sum(before), 60.0, "the end of the request")
    assert clients(server) == (before[0], before[1] + 1)


def test_what_is_no_request_for_inference_does_not_count(server: RunningServer) -> None:
    before = clients(server)
    with triton.InferenceServerClient(server.grpc) as client:
        assert client.is_server_ready()
    assert server.get("/v2/models/adds")[0] == 200
    assert server.get("/v2/models/no")[0] != 200
    assert infer(server, "adds") == 200

    wait_until(lambda: clients(server) != before, 60.0, "the only request")
    assert clients(server) == (before[0] + 1, before[1])


def test_prometheus_and_the_overview_have_the_same_counts(server: RunningServer) -> None:
    assert infer(server, "adds") == 200
    success, failure = clients(server)

    def scraped() -> tuple[float, float, float]:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as response:
            text = response.read().decode()

        def total(pattern: str) -> float:
            return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))

        prefix = "moonpool_frontend_inference_"
        return (
            total(prefix + r'requests_total\{\S*outcome="success"\S*\}'),
            total(prefix + r'requests_total\{\S*outcome="failure"\S*\}'),
            total(prefix + r"duration_seconds_count\{\S*\}"),
        )

    wait_until(lambda: scraped() >= (success, failure, success), 60.0, "the counts")
    assert scraped()[0] == scraped()[2] >= success
