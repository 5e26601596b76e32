"""Load on a server: by perf_analyzer where it is installed, else by moonpool's own load generator."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from moonpool import MoonpoolError
from moonpool.benchmarks.data import DataMix, RequestData
from moonpool.benchmarks.loads import Concurrency
from moonpool.benchmarks.server import MeasuredServer
from moonpool.benchmarks.suites.figure import counted
from moonpool.benchmarks.suites.peer.served import Served
from moonpool.benchmarks.suites.report import Report
from moonpool.benchmarks.suites.rounds import in_turns
from moonpool.runtime.client.control_client import control_client
from moonpool.runtime.client.request import Endpoint, Question, QuestionTensor
from moonpool.runtime.process.usage import usage_of

VARIABLE = "MOONPOOL_PERF_ANALYZER"
_USUAL = Path(__file__).resolve().parents[3] / ".venv-clients" / "bin" / "perf_analyzer"
_TIMEOUT_S = 120.0
# Windows in turns: their number and length, and the most callers of a window that perf_analyzer presses.
_ROUNDS, _SECONDS, _MOST_SHARED = 5, 1.5, 16
# The columns of perf_analyzer's file, as `Sample` has them.
_COLUMNS = ("Inferences/Second", "p50 latency", "p99 latency")
_DTYPES = {"UINT8": np.uint8, "FP32": np.float32, "INT32": np.int32}


class Failed(Exception):
    """A window has no figures; the text says why."""


class Case(NamedTuple):
    """A request and the number of callers at once. `shapes` are those of the inputs, all of one datatype."""

    protocol: str
    model: str
    datatype: str
    shapes: Mapping[str, int]
    is_batched: bool
    callers: int
    shared_memory: bool = False
    # The values of requests, as numbers for each input, sent again and again in this order; ones without them.
    values: Sequence[Mapping[str, Sequence[float]]] = ()
    # True if a stream of responses answers each request, and each caller asks for the next one when it has ended.
    is_stream: bool = False
    # For the ratio of throughputs.
    goal: str = ""

    @property
    def output_bytes(self) -> int:
        """Size of the largest output, which is as large as an input."""
        return max(self.shapes.values()) * np.dtype(_DTYPES[self.datatype]).itemsize

    def requests(self) -> list[list[QuestionTensor]]:
        """Return the tensors of each different request."""
        dtype = _DTYPES[self.datatype]
        ones: Mapping[str, Any] = {
            name: np.ones((1, size) if self.is_batched else size) for name, size in self.shapes.items()
        }
        return [
            [
                QuestionTensor.of(name, self.datatype, np.asarray(numbers).astype(dtype))
                for name, numbers in request.items()
            ]
            for request in self.values or [ones]
        ]

    def check(self, port: int) -> None:
        """Raises Failed unless the server answers: perf_analyzer takes some errors for answers."""
        asked = control_client(Endpoint(self.protocol, "127.0.0.1", port), (), _TIMEOUT_S)
        try:
            asked.output_sizes(Question(self.model, "", self.requests()[0]))
        except MoonpoolError as error:
            raise Failed(str(error)) from error
        finally:
            asked.close()


# Each request for a stream gets so many.
RESPONSES = 16
STREAM_CONFIG = """backend: "python"
input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
instance_group [ { kind: KIND_CPU count: 1 } ]
"""


def streams(model: str, goal: str = "") -> dict[str, Case]:
    """Return the cases of streams from a model of `STREAM_CONFIG`, by their names in a table."""
    asked = [{"X": [RESPONSES]}]
    return {
        f"stream of {RESPONSES} responses, gRPC, {counted(callers, 'caller')}": Case(
            "grpc", model, "INT32", {"X": 1}, False, callers, values=asked, is_stream=True, goal=goal
        )
        for callers in (1, 4)
    }


class Sample(NamedTuple):
    """The figures of one window."""

    requests_per_s: float
    p50_us: float
    p99_us: float
    # Share of a core that the generator takes.
    generator_share: float


class Presser(Protocol):
    """Any number of windows, one at a time."""

    words: str

    def press(self, case: Case, port: int, seconds: float) -> Sample:
        """Run a window of so many seconds against the server at this port."""


class PerfAnalyzer:
    """Triton's own load generator, a process for each window."""

    def __init__(self, program: Path) -> None:
        self.words = "pressed by perf_analyzer"
        self._program = program

    def press(self, case: Case, port: int, seconds: float) -> Sample:
        # It measures three windows at least, and shows the three together.
        window_ms = max(100, round(seconds * 1000 / 3))
        with tempfile.TemporaryDirectory(prefix="perf-") as scratch:
            found = Path(scratch) / "found.csv"
            command: list[str | Path] = [self._program, "-m", case.model, "-i", case.protocol]
            command += ["-u", f"127.0.0.1:{port}", "-b", "1", "-f", found]
            command += ["--concurrency-range", f"{case.callers}:{case.callers}"]
            command += ["-p", str(window_ms), "--stability-percentage", "999"]
            if case.values:
                data = Path(scratch) / "data.json"
                data.write_text(json.dumps({"data": list(case.values)}))
                command += ["--input-data", data]
            for name, size in case.shapes.items():
                command += ["--shape", f"{name}:{size}"]
            if case.shared_memory:
                command += ["--shared-memory", "system"]
                command += ["--output-shared-memory-size", str(case.output_bytes)]
            share = self._run(command, seconds)
            if not found.exists():
                raise Failed("perf_analyzer wrote no figures")
            [row] = csv.DictReader(found.read_text().splitlines())
        rate, p50_us, p99_us = (float(row[name]) for name in _COLUMNS)
        return Sample(rate, p50_us, p99_us, share)

    def _run(self, command: Sequence[str | Path], seconds: float) -> float:
        """Run the command; return the share of a core that it takes in the middle of its windows."""
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._environment()
        ) as running:
            try:
                looks = []
                for _ in range(2):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        running.wait(seconds / 2)
                    usage = usage_of(running.pid)
                    looks.append((time.monotonic(), 0.0 if usage is None else usage.cpu_s))
                said, _ = running.communicate(timeout=_TIMEOUT_S)
            except BaseException:
                running.kill()
                raise
        if running.returncode:
            words = " ".join(said.split())[-300:]
            raise Failed(f"perf_analyzer ended with {running.returncode}: {words}")
        (begin_s, before_s), (end_s, after_s) = looks
        return max(0.0, after_s - before_s) / (end_s - begin_s)

    def _environment(self) -> dict[str, str]:
        """Return an environment with a CUDA runtime, which it loads even if it does not use it."""
        environment = self._program.resolve().parents[1]
        found = environment.glob("lib/python*/site-packages/nvidia/cuda_runtime/lib")
        paths = [*map(str, found), os.environ.get("LD_LIBRARY_PATH", "")]
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}


class Own:
    """`moonpool bench`'s generator; connections are made anew for each window."""

    words = "pressed by moonpool bench's generator"

    def press(self, case: Case, port: int, seconds: float) -> Sample:
        endpoint = Endpoint(case.protocol, "127.0.0.1", port)
        server = MeasuredServer(endpoint, case.model, "", timeout_s=_TIMEOUT_S)
        try:
            requests = [RequestData(tensors) for tensors in case.requests()]
            server.prepare(
                DataMix(requests, np.arange(len(requests), dtype=np.int32)),
                processes=1,
                most_connections=case.callers,
                shared_memory=case.shared_memory,
                is_stream=case.is_stream,
            )
            load = Concurrency(case.callers)
            server.window(load, seconds / 5)
            window = server.window(load, seconds)
        except MoonpoolError as error:
            raise Failed(str(error)) from error
        finally:
            server.close()
        if window.failed or not len(window.latencies_ns):
            raise Failed(f"requests failed: {window.errors.most_common(1)}")
        return Sample(
            window.requests_per_s, window.latency_us(50), window.latency_us(99), window.generator_share or 0.0
        )


class Row(NamedTuple):
    """The figures of one side in a round. A busy machine changes the processor time least, which is that of all
    processes of the server, models included, for one request.
    """

    requests_per_s: float
    p50_us: float
    p99_us: float
    processor_us: float


class Shown(NamedTuple):
    """A figure of rows: its words in a column, its unit, and the goal of the ratio of two sides; None for no ratio."""

    words: str
    unit: str
    goal: str | None = ""
    # True if the short table has it, and the ratio.
    is_headline: bool = False
    is_ratio_headline: bool = True


def press_in_turns(pressed: Presser, sides: Mapping[str, tuple[Case, Served]], *, quick: bool) -> dict[str, list[Row]]:
    """Press each side once a round; the first one changes, and the first round does not count. Raises `Failed`."""
    rounds, seconds = (1, 0.3) if quick else (_ROUNDS, _SECONDS)
    for case, server in sides.values():
        # perf_analyzer counts no streams, and its callers share connections.
        if case.is_stream or case.callers > _MOST_SHARED:
            pressed = Own()
        if not case.is_stream:
            case.check(server.port(case.protocol))
    windows = {name: partial(_row, pressed, case, server, seconds) for name, (case, server) in sides.items()}
    return {name: [Row(*each) for each in series.rounds] for name, series in in_turns(windows, rounds).items()}


def _row(pressed: Presser, case: Case, server: Served, seconds: float) -> Row:
    answered, before = server.answered(case.model), server.busy_by_process_s()
    sample = pressed.press(case, server.port(case.protocol), seconds)
    after = server.busy_by_process_s()
    answered = max(1, server.answered(case.model) - answered)
    processor_us = sum(1e6 * (busy_s - before.get(pid, 0.0)) / answered for pid, busy_s in after.items())
    return Row(*sample[:3], processor_us)


def report_in_turns(
    report: Report,
    name: str,
    pressed: Presser,
    sides: Mapping[str, tuple[Case, Served]],
    shown: Mapping[str, Shown],
    *,
    quick: bool,
) -> None:
    """Press the sides of a case in turns, and report the figures, or the reason why there are none."""
    try:
        found = press_in_turns(pressed, sides, quick=quick)
    except Failed as error:
        report.skipped(name, str(error))
    else:
        report_rows(report, name, found, shown)


def report_rows(report: Report, name: str, found: Mapping[str, Sequence[Row]], shown: Mapping[str, Shown]) -> None:
    """Report the figures of each side, and of two sides the ratios of the first over the second."""
    for field, each in shown.items():
        for side, rows in found.items():
            values = [getattr(row, field) for row in rows]
            column = each.words + side
            report.figure(name, each.unit, values, column=column, headline=each.is_headline)
        if len(found) == 2 and each.goal is not None:
            pairs = zip(*found.values(), strict=True)
            ratios = [getattr(a, field) / getattr(b, field) for a, b in pairs if getattr(b, field)]
            if ratios:
                column, headline = f"{each.words}ratio", each.is_ratio_headline
                report.ratio(name, ratios, column=column, goal=each.goal, headline=headline)


def presser() -> Presser:
    """Return the best generator that is installed."""
    named = os.environ.get(VARIABLE) or shutil.which("perf_analyzer")
    program = Path(named) if named else _USUAL
    return PerfAnalyzer(program) if program.exists() else Own()
