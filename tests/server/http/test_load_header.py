"""The load of the server in its responses, for load balancers that ask for it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.repositories import write
from tests.server.running import RunningServer, running
from tests.waiting import wait_until

CACHES = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily("nv_trt_llm_kv_cache_block_metrics", "x", pb_utils.MetricFamily.GAUGE)
        self.metrics = []
        for kind, value in (("max", 64), ("tokens_per", 128), ("used", 16)):
            labels = {"model": args["model_name"], "kv_cache_block_type": kind}
            self.metrics.append(self.family.Metric(labels=labels))
            self.metrics[-1].set(value)

    def execute(self, requests):
        out = pb_utils.Tensor("OUT", np.zeros((1, 4), np.float32))
        return [pb_utils.InferenceResponse([out]) for _ in requests]
"""
BODY = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}
TOLD = "TEXT named_metrics.kv_cache_utilization=0.250000, named_metrics.max_token_capacity=8192"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    write(repository, "caches", CACHES)
    with running(repository) as server:
        yield server


def told(server: RunningServer, form: str | None, path: str = "infer") -> str | None:
    connection = http.client.HTTPConnection(server.http, timeout=60)
    body = BODY if path == "infer" else {"IN": [1, 2, 3, 4]}
    headers = {} if form is None else {"Endpoint-Load-Metrics-Format": form}
    try:
        connection.request("POST", f"/v2/models/caches/{path}", json.dumps(body), headers)
        response = connection.getresponse()
        response.read()
        assert response.status == 200
        return response.headers["endpoint-load-metrics"]
    finally:
        connection.close()


@pytest.mark.promise(
    "HTTP", "A response has the load of the KV caches that models count, in ORCA's form, if the request asks for it."
)
@pytest.mark.parametrize("path", ["infer", "generate"])
def test_a_response_has_the_load_in_the_form_that_was_asked_for(server: RunningServer, path: str) -> None:
    # What a model counts in a request reaches the runtime by another way than the response, perhaps later.
    wait_until(lambda: told(server, "text", path) == TOLD)
    found = told(server, "json", path)
    assert found is not None
    assert found.startswith("JSON ")
    named = {"kv_cache_utilization": 0.25, "max_token_capacity": 8192}
    assert json.loads(found.removeprefix("JSON ")) == {"named_metrics": named}
    assert told(server, None, path) is None
    assert told(server, "xml", path) is None


def test_without_these_metrics_there_is_no_load_to_tell(tmp_path: Path) -> None:
    write(tmp_path, "caches", CACHES.replace('("used", 16)', '("free", 16)'))
    with running(tmp_path) as server:
        assert told(server, "text") is None
