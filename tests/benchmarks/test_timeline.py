"""The timeline of a measurement: which trace belongs to which request, and the file for Perfetto."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.cli.shell import MODELS, CommandLine
from tests.server.running import running
from tests.triton.server import interpreter

from moonpool.benchmarks.generator.engine import COLUMNS, DUE, END, OUTCOME, SENT, SUCCEEDED
from moonpool.benchmarks.hosts.kserve import TritonHost
from moonpool.benchmarks.loads import Concurrency
from moonpool.benchmarks.timeline import NoTraces, ServerTrace, paired, read_traces, timeline_events, write_timeline
from moonpool.benchmarks.windows import Log, Point, Window

MS = 1_000_000
MARKS = ("QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")


def trace(*times_ms: float, model: str = "m", is_child: bool = False) -> ServerTrace:
    queued, started, sent, answered, ended = (round(each * MS) for each in times_ms)
    return ServerTrace(model, (queued, started, sent, answered, ended), is_child)


def point(requests_ms: list[tuple[float, float, float]]) -> Point:
    """A point of one window, with when each request was due, sent and answered."""
    rows = np.zeros((len(requests_ms), len(COLUMNS)), np.int64)
    times = np.array(requests_ms).reshape(-1, 3) * MS
    rows[:, DUE], rows[:, SENT], rows[:, END] = times.T
    rows[:, OUTCOME] = SUCCEEDED
    return Point(Concurrency(2), [Window(1.0, log=Log(rows))], stable=True)


def check(events: list[dict[str, Any]]) -> None:
    """Check the events by the published form, and that all on a row are nested or apart."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index")
            assert len(event["args"]) == 1
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert isinstance(event["args"], dict)
        end = event["ts"] + event["dur"]
        rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], end))
    for spans in rows.values():
        opened: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while opened and opened[-1] <= begin + 1e-3:
                opened.pop()
            assert not opened or end <= opened[-1] + 1e-3
            opened.append(end)


def test_parts_of_a_request_are_inside_it_and_batches_are_apart() -> None:
    measured = point([(0, 2, 10), (1, 1, 11), (10, 10, 20)])
    traces = [
        # A batch of two, one of another instance, and one of a model that was asked.
        trace(3, 4, 5, 8, 9), trace(2, 4, 5, 8, 9), trace(11, 12, 13, 18, 19),
        trace(13, 14, 15, 16, 17, model="child", is_child=True), trace(-100, -99, -98, -97, -96),
    ]  # fmt: skip
    events = list(timeline_events([measured], traces, "m"))

    check(events)
    callers = [event for event in events if event["pid"] == 1 and event["ph"] == "X"]
    assert [event["name"] for event in callers].count("request") == 3
    for part in ("queue", "input", "compute", "output"):
        assert [event["name"] for event in callers].count(part) == 3
    assert [event["name"] for event in callers].count("wait to be sent") == 1
    batches = [event for event in events if event["cat" if event["ph"] == "X" else "ph"] == "batch"]
    sizes = [event["args"]["requests"] for event in batches if event["name"].endswith(("request", "requests"))]
    assert sizes == [2, 1, 1]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["callers", "batches of m", "batches of child"]


def test_a_batch_may_end_after_its_answers() -> None:
    # The answer is there at 10 ms, the batch ends at 12 ms.
    events = list(timeline_events([point([(0, 0, 10)])], [trace(1, 2, 3, 9, 12)], "m"))

    check(events)
    output = {event["pid"]: event for event in events if event["name"] == "output"}
    assert output[1]["dur"] == 1000
    assert output[2]["dur"] == 3000


def test_batches_at_the_same_time_are_on_rows_of_their_own() -> None:
    measured = point([(0, 0, 10), (0, 0, 10)])
    traces = [trace(1, 2, 3, 6, 7), trace(1, 3, 4, 7, 8)]
    events = list(timeline_events([measured], traces, "m"))

    check(events)
    rows = {event["tid"] for event in events if event["pid"] == 2 and event["ph"] == "X"}
    assert rows == {1, 2}


@given(st.lists(st.tuples(*[st.integers(0, 20)] * 4), max_size=12), st.randoms())
def test_traces_are_paired_with_requests_that_they_fit(steps: list[tuple[int, int, int, int]], chance: Any) -> None:
    # Requests with a trace inside each, so that a pairing of all exists.
    requests, traces = [], []
    for at, before, length, after in steps:
        begin = at * 3
        end = begin + before + length + after
        requests.append((begin, end))
        inside = begin + before, begin + before + length
        traces.append(ServerTrace("m", (inside[0], inside[0], inside[0], inside[1], inside[1])))
    chance.shuffle(traces)

    found = paired(requests, traces)

    for number, each in found.items():
        begin, end = requests[number]
        assert begin <= each.times_ns[0]
        assert each.computed_ns <= end
    assert len({id(each) for each in found.values()}) == len(found)
    if len(requests) == 1:
        assert len(found) == 1


def test_alone_each_request_has_its_trace() -> None:
    requests = [(0, 10), (10, 20), (20, 30)]
    traces = [trace(*(each / MS for each in (at + 1, at + 2, at + 3, at + 4, at + 5))) for at in (0, 10, 20)]  # fmt: skip

    assert paired(requests, traces) == dict(enumerate(traces))


def test_a_request_without_a_trace_is_left_alone() -> None:
    assert paired([(0, 10), (20, 30)], [ServerTrace("m", (21, 22, 23, 24, 25))]) == {
        1: ServerTrace("m", (21, 22, 23, 24, 25))
    }
    assert paired([], [ServerTrace("m", (1, 2, 3, 4, 5))]) == {}


def rows_of(number: int, model: str, begin_ns: int, **more: object) -> list[dict[str, object]]:
    """A trace in Triton's form."""
    stamps = [{"name": name, "ns": begin_ns + i} for i, name in enumerate(MARKS)]
    return [
        {"id": number, "model_name": model, "model_version": 1, **more},
        {"id": number, "timestamps": stamps[:2]},
        {"id": number, "timestamps": stamps[2:]},
    ]


@pytest.mark.parametrize("is_closed", [False, True])
def test_traces_in_tritons_form_are_read(tmp_path: Path, *, is_closed: bool) -> None:
    path = tmp_path / "traces"
    unfinished = [{"id": 3, "model_name": "m"}, {"id": 3, "timestamps": [{"name": "QUEUE_START", "ns": 1}]}]  # fmt: skip
    text = json.dumps([*rows_of(1, "m", 10), *rows_of(2, "child", 20, parent_id=1), *unfinished])
    # A tritonserver that runs has not closed its list.
    path.write_text(text if is_closed else text[:-1])

    assert read_traces(path) == [
        ServerTrace("m", (10, 11, 12, 13, 14)),
        ServerTrace("child", (20, 21, 22, 23, 24), is_child=True),
    ]


@pytest.mark.parametrize(
    "text", ["", "{}[", "[1]", '[{"id":1,"timestamps":5}]', '[{"id":[],"model_name":"m"}]', "[" * 9999]
)
def test_a_file_that_has_no_traces_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "traces"
    path.write_text(text)

    with pytest.raises(NoTraces, match="is not a file of Triton's traces"):
        read_traces(path)


def test_without_requests_the_file_is_empty_but_whole(tmp_path: Path) -> None:
    write_timeline(tmp_path / "t", [point([])], [], "m")

    assert json.loads((tmp_path / "t").read_text())["traceEvents"] == []


QUICK = ("--seconds", "0.05", "--warm-up", "0", "--windows", "3", "--stable", "10000")


def events_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    check(found)
    return found


@pytest.mark.promise(
    "Measuring (`moonpool bench`)",
    "A timeline shows each request with its time in the queue and the parts of its batch, in process and at a server "
    "on this machine.",
)
@pytest.mark.parametrize("mode", [(), ("--async",)])
def test_a_timeline_of_this_process(cli: CommandLine, mode: tuple[str, ...]) -> None:
    # Long enough for requests of both callers to meet.
    quick = (*QUICK, "--seconds", "0.5", *mode)
    ended = cli("bench", MODELS, "add_sub", "--concurrency", "2", "--timeline", "line.json", *quick)

    assert ended.returncode == 0, ended.stderr
    events = events_of(cli.folder / "line.json")
    callers = [event["name"] for event in events if event["pid"] == 1]
    assert callers.count("request") == callers.count("queue") == callers.count("compute") > 0
    assert {event["tid"] for event in events if event["pid"] == 1 and event["ph"] == "X"} == {1, 2}


def test_a_timeline_of_a_server(cli: CommandLine) -> None:
    traces = cli.folder / "traces"
    with running(
        MODELS, "--exit-on-error=false", "--model-control-mode=explicit", "--load-model=add_sub",
        f"--trace-config=triton,file={traces}",
    ) as server:  # fmt: skip
        url = f"http://{server.http}"
        bench = ("bench", "add_sub", "--url", url, "--concurrency", "1", *QUICK)
        ended = cli(*bench, "--seconds", "0.5", "--timeline", "line.json")
        _, settings = server.get("/v2/trace/setting")
        refused = cli("bench", "add_sub", "--url", f"grpc://{server.grpc}", "--timeline", "x", *QUICK)

    assert ended.returncode == 0, ended.stderr
    assert "give an http:// address" in refused.stderr
    # The server has its settings back.
    assert settings["trace_level"] == ["OFF"]
    events = events_of(cli.folder / "line.json")
    callers = [event["name"] for event in events if event["pid"] == 1]
    # The trace of the last request may be written after its answer was read.
    assert callers.count("queue") >= callers.count("request") - 3 > 0
    assert "batches of add_sub" in [event["args"].get("name") for event in events]


@pytest.mark.triton
def test_a_timeline_of_a_tritonserver(cli: CommandLine) -> None:
    options = [f"--trace-config=triton,file={cli.folder / 'traces'}"]
    # A tritonserver that traces dies now and then.
    for _ in range(3):
        with contextlib.closing(TritonHost(interpreter(), {"add_sub": MODELS / "add_sub"}, options)) as server:
            bench = ("bench", "add_sub", "--url", f"http://127.0.0.1:{server.http_port}", *QUICK)
            ended = cli(*bench, "--concurrency", "2", "--seconds", "0.5", "--timeline", "line.json")
        if "Connection refused" not in ended.stderr:
            break

    assert (cli.folder / "line.json").exists(), ended.stderr
    events = events_of(cli.folder / "line.json")
    callers = [event["name"] for event in events if event["pid"] == 1]
    assert callers.count("request") >= callers.count("queue") == callers.count("compute") > 0
    assert "batches of add_sub" in [event["args"].get("name") for event in events]


def test_sides_that_have_no_timeline_are_refused(cli: CommandLine) -> None:
    ended = cli("bench", "m", "--url", "http://a", "--against", "http://b", "--timeline", "x")

    assert ended.returncode == 2
    assert "it shows one side" in ended.stderr
