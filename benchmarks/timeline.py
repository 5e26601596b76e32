"""The timeline of a measurement: each request as its caller saw it and as the server did, as a trace for Perfetto.

Callers and server read the same clock, CLOCK_MONOTONIC, so their times belong together without more ado on one machine.
A server tells its times in Triton's traces, which have no field that a caller knows. So a trace is paired with a
request that was in flight from before it was queued until after its batch was computed. If several were, as with
several callers, it is the one that ended first, which leaves a request for every other trace if any choice does. Two
requests that were in flight at the same time may be swapped therefore.

Requests of one batch have the same times of it. An instance executes a batch at a time, so batches that overlap are on
several instances; each is on the first row that is free.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from moonpool import MoonpoolError
from moonpool.benchmarks.export import outcome_of
from moonpool.benchmarks.generator.engine import DUE, END, KIND, OUTCOME, SENT
from moonpool.benchmarks.windows import Point, Window
from moonpool.runtime.model.request import Answer, InferenceRequest, ModelVersion, RequestTrace
from moonpool.runtime.process.files import parsed_json

# The most requests that are traced, as a file of more is hard to look at.
MOST_TRACES = 50_000
# The times of a trace in Triton's words, in the order of `ServerTrace`.
_MARKS = ("QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")  # fmt: skip
_PARTS = ("queue", "input", "compute", "output")


class NoTraces(MoonpoolError):
    """The traces of a server cannot be read. The text says why."""

    code = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class ServerTrace:
    """The times of one request in the server, in nanoseconds: queued, batch begun, inputs passed, computed, batch
    ended.
    """

    model: str
    times_ns: tuple[int, int, int, int, int]
    # True if a model or an ensemble has sent the request.
    is_child: bool = False

    @property
    def computed_ns(self) -> int:
        """The time when the model had its outputs. A tritonserver answers before the end of the batch."""
        return self.times_ns[3]

    @property
    def batch(self) -> tuple[str, tuple[int, ...]]:
        """Equal for the requests of one batch."""
        return self.model, self.times_ns[1:]


def read_traces(path: Path) -> list[ServerTrace]:
    """Read a file of Triton's traces; those without all times are left out. Raises `NoTraces` and OSError."""
    try:
        text = path.read_text(encoding="utf-8").rstrip()
        # A tritonserver closes the list when it ends.
        rows = parsed_json(f"{text}]" if text.endswith("}") else text)
        models: dict[int, tuple[str, bool]] = {}
        times: dict[int, dict[str, int]] = {}
        for row in rows:
            number = row["id"]
            if "model_name" in row:
                models[number] = str(row["model_name"]), "parent_id" in row
            for mark in row.get("timestamps", ()):
                times.setdefault(number, {})[mark["name"]] = int(mark["ns"])
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise NoTraces(f"{path} is not a file of Triton's traces: {error!r:.100}") from error
    return [
        ServerTrace(model, _times_of(times[number]), is_child)
        for number, (model, is_child) in models.items()
        if times.get(number, {}).keys() >= set(_MARKS)
    ]


def _times_of(marks: Mapping[str, int]) -> tuple[int, int, int, int, int]:
    queued, started, sent, answered, ended = (marks[name] for name in _MARKS)
    return queued, started, sent, answered, ended


class TraceRecorder:
    """Traces of requests in this process. Any thread may call any method; `make` gives a request its trace."""

    def __init__(self) -> None:
        self.traces: list[ServerTrace] = []
        self._numbers = count()

    def make(self, model: ModelVersion, *, is_child: bool = False) -> RequestTrace | None:
        """Return a trace for a request that is about to be submitted; None if there are enough."""
        if next(self._numbers) >= MOST_TRACES:
            return None
        return _RecordedTrace(self, model.name, is_child=is_child)


class _RecordedTrace:
    """The trace of one request. Appending to a list is atomic, so it needs no lock."""

    context = ""

    def __init__(self, recorder: TraceRecorder, model: str, *, is_child: bool) -> None:
        self._recorder, self._model, self._is_child = recorder, model, is_child

    def executed(
        self,
        answer: Answer,  # noqa: ARG002 - as the protocol has it
        queued_ns: int,
        started_ns: int,
        sent_ns: int,
        answered_ns: int,
        ended_ns: int,
    ) -> None:
        times = queued_ns, started_ns, sent_ns, answered_ns, ended_ns
        self._recorder.traces.append(ServerTrace(self._model, times, self._is_child))

    def answered(self) -> None:
        """Nothing more is recorded."""

    settled = end = answered

    def responded(self, answer: object) -> None:
        """Nothing more is recorded."""

    def child(self, model: ModelVersion, request_id: str) -> RequestTrace:  # noqa: ARG002
        return _RecordedTrace(self._recorder, model.name, is_child=True)

    def follow(self, request: InferenceRequest) -> None:
        request.trace = self


# What a caller saw: its window, and the row of the engine's log.
_Request = tuple[Point, Window, list[int]]


def paired(requests: Sequence[tuple[int, int]], traces: Sequence[ServerTrace]) -> dict[int, ServerTrace]:
    """Return the trace of each request, by its number. `requests` have the times at which they were sent and
    answered.
    """
    order = sorted(range(len(requests)), key=lambda number: requests[number][0])
    waiting: list[tuple[int, int]] = []
    found: dict[int, ServerTrace] = {}
    begun = 0
    for trace in sorted(traces, key=lambda each: each.times_ns[0]):
        while begun < len(order) and requests[order[begun]][0] <= trace.times_ns[0]:
            heapq.heappush(waiting, (requests[order[begun]][1], order[begun]))
            begun += 1
        # Requests that ended before it have no trace.
        passed = []
        while waiting and waiting[0][0] < trace.computed_ns:
            passed.append(heapq.heappop(waiting))
        if waiting:
            found[heapq.heappop(waiting)[1]] = trace
        # They may still have one of a quicker batch that was queued later.
        for each in passed:
            if each[0] > trace.times_ns[0]:
                heapq.heappush(waiting, each)
    return found


def timeline_events(points: Sequence[Point], traces: Sequence[ServerTrace], model: str) -> Iterator[dict[str, Any]]:
    """Yield the events of Chrome's trace format: callers first, and then the batches of each model."""
    requests: list[_Request] = [
        (point, window, row) for point in points for window in point.windows for row in window.log.rows.tolist()
    ]
    if not requests:
        return
    requests.sort(key=lambda each: each[2][DUE])
    begin_ns = requests[0][2][DUE]
    end_ns = max(row[END] for _, _, row in requests)
    # A server's file may have traces of other times.
    known = [each for each in traces if begin_ns <= each.times_ns[0] <= end_ns]
    mine = [each for each in known if each.model == model and not each.is_child]
    pairs = paired([(row[SENT], row[END]) for _, _, row in requests], mine)
    yield from _named(1, "callers")
    free_ns: list[int] = []
    for number, (point, window, row) in enumerate(requests):
        track = _row_of(free_ns, row[DUE], row[END])
        arguments = {"request": row[KIND], "load": point.load.words, "outcome": outcome_of(window, row[OUTCOME])}
        place = {"ph": "X", "pid": 1, "tid": track, "cat": "request", "args": arguments}
        for name, from_ns, to_ns in _parts_of(row, pairs.get(number)):
            yield {**place, "name": name, **_time(from_ns, to_ns, begin_ns)}
    yield from _batches(known, begin_ns)


def _parts_of(row: Sequence[int], trace: ServerTrace | None) -> Iterator[tuple[str, int, int]]:
    """Yield the parts of a request, each inside the first."""
    yield "request", row[DUE], row[END]
    if row[SENT] - row[DUE] > 1000:
        yield "wait to be sent", row[DUE], row[SENT]
    if trace is not None:
        times = [min(each, row[END]) for each in trace.times_ns]
        yield from zip(_PARTS, times, times[1:], strict=False)


def _batches(traces: Iterable[ServerTrace], begin_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the batches, a process for each model and a row for each that executes at the same time."""
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for trace in traces:
        sizes[trace.batch] = sizes.get(trace.batch, 0) + 1
    numbers: dict[str, int] = {}
    free_ns: dict[str, list[int]] = {}
    for (model, times), size in sorted(sizes.items(), key=lambda item: item[0][1]):
        if model not in numbers:
            numbers[model] = len(numbers) + 2
            yield from _named(numbers[model], f"batches of {model}")
        row = _row_of(free_ns.setdefault(model, []), times[0], times[-1])
        place = {"ph": "X", "pid": numbers[model], "tid": row, "cat": "batch"}
        place["args"] = {"requests": size}
        words = "1 request" if size == 1 else f"{size} requests"
        yield {**place, "name": words, **_time(times[0], times[-1], begin_ns)}
        for name, from_ns, to_ns in zip(_PARTS[1:], times, times[1:], strict=False):
            yield {**place, "name": name, **_time(from_ns, to_ns, begin_ns)}


def _named(number: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": number, "tid": 0, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": number, "tid": 0, "name": "process_sort_index", "args": {"sort_index": number}}


def _row_of(free_ns: list[int], from_ns: int, to_ns: int) -> int:
    """Take the first row that is free, from 1 on, until `to_ns`."""
    row = next((i for i, at_ns in enumerate(free_ns) if at_ns <= from_ns), len(free_ns))
    free_ns[row : row + 1] = [to_ns]
    return row + 1


def _time(from_ns: int, to_ns: int, begin_ns: int) -> dict[str, float]:
    """Return begin and length in microseconds, as the format has them."""
    return {"ts": (from_ns - begin_ns) / 1000, "dur": (to_ns - from_ns) / 1000}


def write_timeline(path: Path, points: Sequence[Point], traces: Sequence[ServerTrace], model: str) -> None:
    """Write a file that https://ui.perfetto.dev and chrome://tracing open. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(timeline_events(points, traces, model)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")
