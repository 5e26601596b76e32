"""A server process, watched from outside: metrics, traces, log settings."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.server.observability.models import trace_entries, write
from tests.server.observability.test_server_metrics import Scrape
from tests.server.running import RunningServer, running
from tests.waiting import wait_until

pytestmark = pytest.mark.promise("Watching a server", "Requests, batches, durations, responses by place, …")


def scrape(server: RunningServer) -> Scrape:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=60) as response:
        assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
        return Scrape(response.read().decode())


def infer(server: RunningServer, model: str, value: float = 1) -> int:
    tensor = {"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [value] * 4}
    body = json.dumps({"id": "mine", "inputs": [tensor]}).encode()
    return server.get(f"/v2/models/{model}/infer", "POST", body)[0]


def post(server: RunningServer, path: str, changes: dict[str, Any]) -> tuple[int, Any]:
    return server.get(path, "POST", json.dumps(changes).encode())


def models_of(path: Path) -> list[tuple[str, int | None]]:
    found = trace_entries(path)
    return [(each["model_name"], each.get("parent_id")) for each in found if "model_name" in each]


def test_a_server_is_watched(tmp_path: Path) -> None:
    traces = tmp_path / "trace.json"
    flags = [f"--trace-config=triton,file={traces}", "--metrics-config=summary_latencies=true"]
    with running(write(tmp_path / "models", "doubles", "asks"), *flags) as server:
        first = scrape(server)
        assert infer(server, "doubles") == 200
        assert infer(server, "doubles", 13) == 500
        assert server.get("/v2/models/none/infer", "POST", b"{}")[0] in (400, 404)
        second = scrape(server)

        def came(name: str, **labels: str) -> float:
            return second(name, **labels) - first(name, **labels)

        assert came("nv_inference_request_success", model="doubles") == 1
        assert came("nv_inference_request_failure", model="doubles", reason="BACKEND") == 1
        assert second("nv_inference_request_summary_us_count", model="doubles") == 1
        assert second("moonpool_frontend_requests_total", protocol="http", status="500") == 1
        assert second("moonpool_frontend_requests_total", protocol="http", status="200") == 1
        assert second("moonpool_frontend_connections_total", protocol="http") == 3
        assert not traces.exists()

        on = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
        status, shown = post(server, "/v2/models/asks/trace/setting", on)
        assert (status, shown["trace_rate"]) == (200, "1")
        assert server.get("/v2/trace/setting")[1]["trace_level"] == ["OFF"]
        assert infer(server, "doubles") == 200
        assert infer(server, "asks") == 200
        # A trace is written once the client has the response.
        wait_until(lambda: len(models_of(traces)) == 2)
        assert set(models_of(traces)) == {("asks", None), ("doubles", 1)}
        names = [e["timestamps"][0]["name"] for e in trace_entries(traces) if e["id"] == 1 and "timestamps" in e]
        assert names[:2] == ["HTTP_RECV_START", "HTTP_RECV_END"]
        assert {"INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END"} <= set(names)

        assert post(server, "/v2/trace/setting", {"trace_rate": "x"}) == (
            400,
            {"error": "Unable to parse 'trace_rate', got: x"},
        )
        assert post(server, "/v2/logging", {"log_file": "x"})[0] == 501
        assert post(server, "/v2/logging", {"log_info": False})[1]["log_info"] is False
        said = server.text()
        infer(server, "doubles")
        assert server.text() == said


def test_metrics_can_be_left_out(tmp_path: Path) -> None:
    with running(write(tmp_path, "doubles"), "--allow-metrics=false", serves=("grpc", "http")) as server:
        assert "metrics" not in server.ports
        assert infer(server, "doubles") == 200


def test_streams_over_http_are_traced(tmp_path: Path) -> None:
    traces = tmp_path / "trace.json"
    flags = [f"triton,file={traces}", "level=TIMESTAMPS", "rate=1"]
    repository = write(tmp_path / "models", "counts")
    with running(repository, *(f"--trace-config={flag}" for flag in flags)) as server:
        asked = json.dumps({"id": "s", "IN": [3, 0, 0, 0]}).encode()
        status, events = server.get("/v2/models/counts/generate_stream", "POST", asked)
        assert (status, events.count("data: ")) == (200, 3)
        one = json.dumps({"IN": [1, 0, 0, 0]}).encode()
        assert server.get("/v2/models/counts/generate", "POST", one)[0] == 200
        wait_until(lambda: len(models_of(traces)) == 2)
        found = trace_entries(traces)
        marks = [(e["id"], e["timestamps"][0]["name"]) for e in found if "timestamps" in e]

    assert [name for number, name in marks if number == 1].count("HTTP_SEND_START") == 3
    assert {"HTTP_RECV_START", "COMPUTE_END", "HTTP_SEND_END", "REQUEST_END"} <= {
        name for number, name in marks if number == 2
    }
