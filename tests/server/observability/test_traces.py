"""Traces of requests on their way through a server with real stubs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.inside import hosted_in, registry_of
from tests.runtime.held_batches import HeldBatch, holding
from tests.runtime.recorder import PATIENCE_S, model_directory, x
from tests.runtime.server.outcomes import outcome_of
from tests.server.observability.models import write
from tests.waiting import wait_until

import moonpool
from moonpool.ipc.messages import FINAL
from moonpool.runtime.model.request import LATER, Details, Response
from moonpool.runtime.schedule.stream import ResponseStream
from moonpool.runtime.server.inference.request import make_request
from moonpool.runtime.server.tracing import traces as tracing
from moonpool.runtime.server.tracing.settings import trace_options
from moonpool.runtime.server.tracing.traces import Trace, Traces

pytestmark = pytest.mark.promise(
    "Watching a server",
    "A trace covers a request from end to end, with its tensors if they are wanted. "
    "Requests that models send are its children.",
)

COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
Ask = Callable[..., bool]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime(write(tmp_path_factory.mktemp("models"))) as runtime:
        yield runtime


@pytest.fixture
def ask(runtime: moonpool.Runtime) -> Ask:
    """Send a request as a protocol does, and return whether it was traced."""

    def ask(traces: Traces, model: str, value: float = 1, request_id: str = "") -> bool:
        hosted = hosted_in(runtime, model)
        is_stream = hosted.model.config.decoupled
        shape = (4,) if is_stream else (1, 4)
        inputs = {"IN": np.full(shape, value, np.float32)}
        if is_stream:
            inputs["IN"][1] = 0
        trace = traces.begin(hosted.model, request_id)
        request = make_request(hosted, inputs, None, Details(request_id) if request_id else None)
        if trace is not None:
            trace.mark("HTTP_RECV_START")
            trace.follow(request)
        if is_stream:
            assert len(list(ResponseStream(hosted.scheduler, request, 30))) == value
        else:
            outcome_of(hosted, request)
        if trace is not None:
            trace.mark("HTTP_SEND_END")
            trace.end()
        return trace is not None

    return ask


def entries(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def activities(path: Path, number: int) -> list[str]:
    """Return the entries of a trace in order; "model" for the one that names model and request."""
    names = []
    for entry in entries(path):
        if entry["id"] == number:
            marks = entry.get("timestamps") or [{"name": entry.get("activity", "model")}]
            names += [mark["name"] for mark in marks]
    return names


def test_a_request_is_told_from_end_to_end(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    traces = Traces(trace_options([f"triton,file={path}", "level=TIMESTAMPS", "rate=1"]))

    ask(traces, "doubles", request_id="mine")
    ask(traces, "doubles", 13)

    expected = ["HTTP_RECV_START", "model", "REQUEST_START", "QUEUE_START", *COMPUTE]
    assert activities(path, 1) == [*expected, "HTTP_SEND_END", "REQUEST_END"]
    assert activities(path, 2) == [*expected, "HTTP_SEND_END", "REQUEST_END"]
    models = [entry for entry in entries(path) if "model_name" in entry]
    assert models == [
        {"id": 1, "model_name": "doubles", "model_version": 1, "request_id": "mine"},
        {"id": 2, "model_name": "doubles", "model_version": 1},
    ]
    traces.close()


def test_nobody_waits_for_who_reads_a_pipe_of_traces(
    ask: Ask, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    traces = Traces(trace_options([f"triton,file={path}", "level=TIMESTAMPS", "rate=1"]))

    assert ask(traces, "doubles")

    assert f"traces cannot be written to '{path}'" in caplog.text
    # The log record holds the error, which refers to the trace.
    caplog.clear()
    traces.close()


def test_tensors_are_told_where_they_are_wanted(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    traces = Traces(trace_options([f"triton,file={path}", "level=TENSORS", "rate=1"]))

    ask(traces, "doubles", 1.5)
    ask(traces, "counts", 2)
    wait_until(lambda: activities(path, 2), what="the model to return, after its responses")

    tensors = [(e["id"], e["activity"], e["tensor"]) for e in entries(path) if "tensor" in e]
    told = {"shape": "1,4", "dtype": "FP32"}
    assert tensors[:2] == [
        (1, "TENSOR_QUEUE_INPUT", {"name": "IN", "data": "1.5,1.5,1.5,1.5", **told}),
        (1, "TENSOR_BACKEND_OUTPUT", {"name": "OUT", "data": "3,3,3,3", **told}),
    ]
    assert [(row[1], row[2]["data"]) for row in tensors[2:]] == [
        ("TENSOR_QUEUE_INPUT", "2,0,2,2"),
        ("TENSOR_BACKEND_OUTPUT", "2,0,2,2"),
        ("TENSOR_BACKEND_OUTPUT", "3,1,3,3"),
    ]
    traces.close()


def test_a_model_that_responds_for_long_fills_no_memory_with_its_trace(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    monkeypatch.setattr(tracing, "MAX_TRACE_BYTES", 20_000)
    traces = Traces(trace_options([f"triton,file={path}", "level=TENSORS", "rate=1"]))

    ask(traces, "counts", 200)
    wait_until(path.exists, what="the model to return, after its responses")

    tensors = [entry["activity"] for entry in entries(path) if "tensor" in entry]
    assert 10 < len(tensors) < 100
    traces.close()


def test_a_request_of_a_model_is_told_as_a_child(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    traces = Traces(trace_options([f"triton,file={path}", "level=TIMESTAMPS", "rate=1"]))

    ask(traces, "asks", 3)
    # If a model hands no trace on, its request has no parent.
    ask(traces, "asks", 3, request_id="alone")

    models = [(e["id"], e["model_name"], e.get("parent_id")) for e in entries(path) if "model_name" in e]
    assert sorted(models) == [(1, "asks", None), (2, "doubles", 1), (3, "asks", None)]
    assert activities(path, 2) == ["model", "REQUEST_START", "QUEUE_START", *COMPUTE, "REQUEST_END"]
    traces.close()


def test_one_of_so_many_is_traced_and_no_more_than_so_many(ask: Ask, tmp_path: Path) -> None:
    flags = [f"triton,file={tmp_path / 't'}", "level=TIMESTAMPS", "rate=3", "count=2"]
    traces = Traces(trace_options(flags))

    assert [ask(traces, "doubles") for _ in range(10)] == [False, False, True] * 2 + [False] * 4
    assert traces.settings()["trace_count"] == "0"
    traces.settings("", {"trace_count": None})
    assert sum(ask(traces, "doubles") for _ in range(6)) == 2
    traces.close()


@pytest.mark.promise(
    "Watching a server",
    "A trace file is a whole JSON list at any time. If it cannot be written, requests are still served.",
)
def test_files_have_so_many_traces_each(ask: Ask, tmp_path: Path) -> None:
    flags = [f"triton,file={tmp_path / 't'}", "triton,log-frequency=2", "level=TIMESTAMPS", "rate=1"]
    traces = Traces(trace_options(flags))
    for _ in range(5):
        ask(traces, "doubles")
    traces.close()

    ids = {p.name: sorted({e["id"] for e in entries(p)}) for p in tmp_path.iterdir()}
    assert ids == {"t.0": [1, 2], "t.1": [3, 4], "t.2": [5]}


@pytest.mark.promise("Watching a server", "A trace file is a whole …")
def test_where_no_file_can_be_the_request_is_served_all_the_same(
    ask: Ask, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "none" / "trace.json"
    traces = Traces(trace_options([f"triton,file={path}", "level=TIMESTAMPS", "rate=1"]))

    assert ask(traces, "doubles")
    assert ask(traces, "doubles")
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    path.parent.mkdir()
    assert ask(traces, "doubles")
    assert activities(path, 3)
    traces.close()


def test_an_instance_that_dies_takes_no_trace_with_it(ask: Ask, tmp_path: Path, runtime: moonpool.Runtime) -> None:
    path = tmp_path / "trace.json"
    traces = Traces(trace_options([f"triton,file={path}", "level=TIMESTAMPS", "rate=1"]))

    ask(traces, "doubles", 99)

    assert activities(path, 1) == ["HTTP_RECV_START", "model", "REQUEST_START", "HTTP_SEND_END", "REQUEST_END"]
    wait_until(lambda: runtime.is_ready("doubles"), 60.0)
    traces.close()


def test_a_trace_is_written_without_the_scheduler_s_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last response comes before the answer to its batch, and so the scheduler ends the trace."""
    path = tmp_path / "trace.json"
    traces = Traces(trace_options([f"triton,file={path}", "level=TIMESTAMPS", "rate=1"]))
    write_trace = traces._sink.write
    free: list[bool] = []

    def write(trace: Trace) -> None:
        # Another thread may have the lock for a moment.
        is_free = lock.acquire(timeout=PATIENCE_S)
        if is_free:
            lock.release()
        write_trace(trace)
        free.append(is_free)

    monkeypatch.setattr(traces._sink, "write", write)
    monkeypatch.setattr(HeldBatch, "finish", lambda _, requests: [LATER] * len(requests))
    decoupled = {"model_transaction_policy": {"decoupled": True}}
    with holding(model_directory(tmp_path / "m", 1), **decoupled) as (backend, runtime):
        hosted = hosted_in(runtime, "m")
        lock = hosted.scheduler._lock
        trace = traces.begin(hosted.model)
        assert trace is not None
        request = make_request(hosted, x(1), None, None)
        trace.follow(request)
        stream = ResponseStream(hosted.scheduler, request, PATIENCE_S)
        held = backend.wait_for(1)
        reactor = registry_of(runtime).stubs.reactor
        reactor.call_soon(lambda: held.instance.respond(request, Response({}), FINAL))
        assert len(list(stream)) == 1
        trace.end()
        assert not free
        held.answer()
        wait_until(lambda: bool(free), PATIENCE_S)
    traces.close()
    assert free == [True]
    # The caller had everything before the batch was answered.
    before = ["model", "REQUEST_START", "QUEUE_START", *COMPUTE[:2], "REQUEST_END"]
    assert activities(path, 1) == [*before, *COMPUTE[2:]]


def test_nothing_is_told_where_tracing_is_off(ask: Ask, tmp_path: Path) -> None:
    traces = Traces(trace_options([f"triton,file={tmp_path / 'trace.json'}"]))

    assert not ask(traces, "doubles")
    assert not (tmp_path / "trace.json").exists()
    traces.close()
