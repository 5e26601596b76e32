"""Who presses a server: perf_analyzer where it is installed, else moonpool's own load generator."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.bench.desk import desk
from moonpool.runtime.bench.endpoint import Endpoint
from moonpool.runtime.bench.load import Concurrency
from moonpool.runtime.bench.question import Question, Tensor
from moonpool.runtime.bench.server import Server

VARIABLE = "MOONPOOL_PERF_ANALYZER"
_USUAL = Path(__file__).parents[2] / ".venv-clients" / "bin" / "perf_analyzer"
_TIMEOUT_S = 120.0


class Failed(Exception):
    """A window has no figures; the text says why."""


class Case(NamedTuple):
    """What is asked, and by how many at once. `shapes` are those of the inputs, all of one datatype."""

    protocol: str
    model: str
    datatype: str
    shapes: Mapping[str, int]
    is_batched: bool
    callers: int
    shared_memory: bool = False

    @property
    def output_bytes(self) -> int:
        """Of the largest output, which is as large as an input."""
        sizes = {"UINT8": 1, "FP32": 4}
        return max(self.shapes.values()) * sizes[self.datatype]

    def tensors(self) -> list[Tensor]:
        """Ones."""
        dtype = {"UINT8": np.uint8, "FP32": np.float32}[self.datatype]
        return [
            Tensor.of(name, self.datatype, np.ones((1, size) if self.is_batched else size, dtype))
            for name, size in self.shapes.items()
        ]

    def check(self, port: int) -> None:
        """Raises Failed unless the server answers: perf_analyzer takes some errors for answers."""
        asked = desk(Endpoint(self.protocol, "127.0.0.1", port), (), _TIMEOUT_S)
        try:
            asked.output_sizes(Question(self.model, "", self.tensors()))
        except MoonpoolError as error:
            raise Failed(str(error)) from error
        finally:
            asked.close()


class Sample(NamedTuple):
    """What a window gave."""

    requests_per_s: float
    p50_us: float
    p99_us: float


class Presser(Protocol):
    """Any number of windows, one at a time."""

    words: str

    def press(self, case: Case, port: int, seconds: float) -> Sample:
        """A window of so long against the server at this port."""


class PerfAnalyzer:
    """Triton's own load generator, a process for each window."""

    def __init__(self, program: Path) -> None:
        self.words = "pressed by perf_analyzer"
        self._program = program

    def press(self, case: Case, port: int, seconds: float) -> Sample:
        # It measures three windows at least, and shows the three together.
        window_ms = max(100, round(seconds * 1000 / 3))
        with tempfile.TemporaryDirectory(prefix="perf-") as room:
            found = Path(room) / "found.csv"
            command: list[str | Path] = [self._program, "-m", case.model, "-i", case.protocol]
            command += ["-u", f"127.0.0.1:{port}", "-b", "1", "-f", found]
            command += ["--concurrency-range", f"{case.callers}:{case.callers}"]
            command += ["-p", str(window_ms), "--stability-percentage", "999"]
            for name, size in case.shapes.items():
                command += ["--shape", f"{name}:{size}"]
            if case.shared_memory:
                command += ["--shared-memory", "system"]
                command += ["--output-shared-memory-size", str(case.output_bytes)]
            ended = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=_TIMEOUT_S,
                env=self._environment(),
            )
            if ended.returncode or not found.exists():
                said = " ".join((ended.stdout + ended.stderr).split())[-300:]
                raise Failed(f"perf_analyzer ended with {ended.returncode}: {said}")
            [row] = csv.DictReader(found.read_text().splitlines())
        return Sample(
            float(row["Inferences/Second"]), float(row["p50 latency"]), float(row["p99 latency"])
        )

    def _environment(self) -> dict[str, str]:
        """It wants a CUDA runtime, also where nothing is to be done with it."""
        environment = self._program.resolve().parents[1]
        found = environment.glob("lib/python*/site-packages/nvidia/cuda_runtime/lib")
        paths = [*map(str, found), os.environ.get("LD_LIBRARY_PATH", "")]
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}


class Own:
    """`moonpool bench`'s generator; connections are made anew for each window."""

    words = "pressed by moonpool bench's generator"
    # Whether each request is answered by a stream of responses.
    is_stream = False

    def tensors(self, case: Case) -> list[Tensor]:
        """What a request holds."""
        return case.tensors()

    def press(self, case: Case, port: int, seconds: float) -> Sample:
        endpoint = Endpoint(case.protocol, "127.0.0.1", port)
        server = Server(endpoint, case.model, "", timeout_s=_TIMEOUT_S)
        try:
            server.prepare(
                self.tensors(case),
                processes=1,
                most_connections=case.callers,
                shared_memory=case.shared_memory,
                is_stream=self.is_stream,
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
        return Sample(window.requests_per_s, window.latency_us(50), window.latency_us(99))


def presser() -> Presser:
    """The best there is."""
    named = os.environ.get(VARIABLE) or shutil.which("perf_analyzer")
    program = Path(named) if named else _USUAL
    return PerfAnalyzer(program) if program.exists() else Own()
