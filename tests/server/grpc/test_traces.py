"""Traces of requests over gRPC."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.server.grpc.asking import add_sub, refused, repeat
from tests.server.grpc.serving import TIMEOUT_S, Served
from tests.server.grpc.streaming import ask_all
from tests.waiting import wait_until

from moonpool.runtime.server.tracing.settings import trace_options
from moonpool.runtime.server.tracing.traces import Traces

pytestmark = pytest.mark.promise(
    "gRPC", "Requests over gRPC are traced from end to end, and those of a stream one by one."
)

Serve = Callable[..., Served]


def traced(serve: Serve, file: Path, *models: str) -> Served:
    served = serve(*models)
    flags = [f"triton,file={file}", "level=TIMESTAMPS", "rate=1"]
    served.service.traces = Traces(trace_options(flags))
    return served


def marks(served: Served, file: Path) -> dict[str, list[str]]:
    """Return the marks of each request by its id, once no request is open."""
    wait_until(lambda: not served.server.calls)
    served.service.traces.close()
    lines: list[dict[str, Any]] = json.loads(file.read_text())
    ids = {line["id"]: line["request_id"] for line in lines if "request_id" in line}
    found: dict[str, list[str]] = {request_id: [] for request_id in ids.values()}
    for line in lines:
        for stamp in line.get("timestamps", []):
            found[ids[line["id"]]].append(stamp["name"])
    return found


def test_a_request_is_traced_from_end_to_end(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    served = traced(serve, file, "add_sub")
    stub = served.stub()
    stub.ModelInfer(add_sub(request_id="me"), timeout=TIMEOUT_S)
    refused(stub.ModelInfer, add_sub(b"short", request_id="bad"))

    found = marks(served, file)

    assert list(found) == ["me"]
    assert found["me"][:3] == ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START"]
    assert found["me"][-4:-1] == ["INFER_RESPONSE_COMPLETE", "GRPC_SEND_START", "GRPC_SEND_END"]
    assert {"QUEUE_START", "COMPUTE_START", "COMPUTE_END", "REQUEST_END"} <= set(found["me"])


def test_requests_of_a_stream_are_traced_one_by_one(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "traces.json"
    served = traced(serve, file, "add_sub", "repeat")
    ask_all(served.stub(), add_sub(request_id="one"), repeat(3, request_id="many"))

    found = marks(served, file)

    assert set(found) == {"one", "many"}
    assert all("REQUEST_END" in names for names in found.values())
