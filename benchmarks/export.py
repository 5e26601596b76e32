"""Files with each request of a measurement: lines of JSON, Parquet, histograms of latency, and a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moonpool.benchmarks.generator.engine import CANCELLED, COLUMNS, DUE, END, FIRST, KIND, OUTCOME, SENT, SUCCEEDED
from moonpool.benchmarks.windows import Point, Window
from moonpool.runtime.client.request import MissingPackage
from moonpool.runtime.process.extras import how_to_install


def rows(points: Sequence[Point]) -> Iterator[dict[str, Any]]:
    """Yield each request: its load, its window, its times and how it ended.

    `at_s` counts from the first request of the window, `sent_s`, `first_s` (of streams, or None) and `latency_s` from
    the moment when the request was due.
    """
    for point in points:
        load = point.load.as_dict()
        for number, window in enumerate(point.windows):
            log = window.log
            if not len(log.rows):
                continue
            begin_ns = int(log.rows[:, DUE].min())
            # Plain numbers, since those of numpy are slow one by one.
            for row in log.rows[np.argsort(log.rows[:, DUE], kind="stable")].tolist():
                due_ns = row[DUE]
                yield {
                    **load,
                    "window": number,
                    "at_s": (due_ns - begin_ns) / 1e9,
                    "sent_s": (row[SENT] - due_ns) / 1e9,
                    "first_s": (row[FIRST] - due_ns) / 1e9 if row[FIRST] else None,
                    "latency_s": (row[END] - due_ns) / 1e9,
                    "request": row[KIND],
                    "outcome": outcome_of(window, row[OUTCOME]),
                }


def outcome_of(window: Window, outcome: int) -> str:
    """Say how a request ended: `answered`, `cancelled` or the text of the error."""
    if outcome == SUCCEEDED:
        return "answered"
    return "cancelled" if outcome == CANCELLED else window.log.texts[outcome]


def write_jsonl(path: Path, points: Sequence[Point]) -> None:
    """Write a line of JSON for each request. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows(points):
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def write_parquet(path: Path, points: Sequence[Point]) -> None:
    """Write a row for each request. Raises OSError, and `MissingPackage` without pyarrow."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise MissingPackage(f"Parquet needs pyarrow: {how_to_install('parquet')}") from error
    parquet.write_table(pyarrow.Table.from_pylist(list(rows(points))), path)


# Lines for each halving of the distance to 100 %, as HdrHistogram prints them.
_TICKS = 5


def histogram_lines(latencies_ns: NDArray[np.int64]) -> Iterator[str]:
    """Yield the percentiles in the text form of HdrHistogram, whose plotters read it. Values are in milliseconds."""
    yield f"{'Value':>12} {'Percentile':>14} {'TotalCount':>10} {'1/(1-Percentile)':>14}\n\n"
    ordered = np.sort(latencies_ns)
    count, at = len(ordered), 0.0
    while count and at < 1:
        rank = max(1, int(np.ceil(at * count)))
        yield f"{ordered[rank - 1] / 1e6:12.3f} {at:2.12f} {rank:10d} {1 / (1 - at):14.2f}\n"
        # So many steps in each half of what is left to 1, until a step is less than a request.
        half = 2.0 ** int(np.log2(1 / (1 - at)))
        at += 1 / (half * 2 * _TICKS)
        if rank == count:
            break
    if count:
        yield f"{ordered[-1] / 1e6:12.3f} {1.0:2.12f} {count:10d}\n"
        mean, deviation = latencies_ns.mean() / 1e6, latencies_ns.std() / 1e6
        yield f"#[Mean    = {mean:12.3f}, StdDeviation   = {deviation:12.3f}]\n"
        yield f"#[Max     = {ordered[-1] / 1e6:12.3f}, Total count    = {count:12d}]\n"


def write_histogram(path: Path, points: Sequence[Point]) -> None:
    """Write a histogram of the last three windows of each load, one below the other. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        for point in points:
            file.write(f"# {point.load.words}\n")
            file.writelines(histogram_lines(point.whole.latencies_ns))
            file.write("\n")


def trace_events(points: Sequence[Point]) -> Iterator[dict[str, Any]]:
    """Yield the requests as the caller saw them, as events of Chrome's trace format; Perfetto reads it.

    A request is on the first free track, so that tracks are as many as requests were in flight. Time that a planned
    request waited for a connection is a part of its own.
    """
    logs = [window.log for point in points for window in point.windows if len(window.log.rows)]
    if not logs:
        return
    begin_ns = min(int(log.rows[:, DUE].min()) for log in logs)
    free_ns: list[int] = []
    for point in points:
        for window in point.windows:
            for row in window.log.rows[np.argsort(window.log.rows[:, DUE], kind="stable")].tolist():
                due_ns, end_ns = row[DUE], row[END]
                track = next((i for i, at_ns in enumerate(free_ns) if at_ns <= due_ns), len(free_ns))
                free_ns[track : track + 1] = [end_ns]
                common = {"ph": "X", "pid": 1, "tid": track + 1, "cat": point.load.words}
                named = dict(zip(COLUMNS, row, strict=True))
                parts = {"request": (due_ns, end_ns)}
                if row[SENT] - due_ns > 1000:
                    parts["wait to be sent"] = (due_ns, row[SENT])
                if row[FIRST]:
                    parts["to the first response"] = (max(due_ns, row[SENT]), row[FIRST])
                for name, (from_ns, to_ns) in parts.items():
                    yield {
                        **common,
                        "name": name,
                        "ts": (from_ns - begin_ns) / 1000,
                        "dur": (to_ns - from_ns) / 1000,
                        "args": {"request": named["kind"], "outcome": outcome_of(window, row[OUTCOME])},
                    }


def write_trace(path: Path, points: Sequence[Point]) -> None:
    """Write a trace that https://ui.perfetto.dev and chrome://tracing open. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents":[\n')
        for number, event in enumerate(trace_events(points)):
            file.write((",\n" if number else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


# The endings of files by the names of formats, with what writes them.
WRITERS: dict[str, tuple[str, Callable[[Path, Sequence[Point]], None]]] = {
    "jsonl": (".requests.jsonl", write_jsonl),
    "parquet": (".requests.parquet", write_parquet),
    "hgrm": (".hgrm", write_histogram),
    "trace": (".trace.json", write_trace),
}
