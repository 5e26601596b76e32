"""Servers side by side, moonpool's and a real Triton: processes with the same models, started as by `bench --hosts`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from moonpool.benchmarks.generator.engine import Generator, Wire
from moonpool.benchmarks.hosts.kserve import TRITON_PYTHON, KserveHost, MoonpoolHost, TritonFiles, TritonHost
from moonpool.benchmarks.hosts.process import with_moonpool
from moonpool.benchmarks.suites.hosted import folders_of
from moonpool.benchmarks.suites.report import Report
from moonpool.benchmarks.suites.rounds import Series, in_turns
from moonpool.runtime.client.control_client import HttpControlClient
from moonpool.runtime.client.request import Endpoint
from moonpool.runtime.process.usage import usage_of, with_descendants

_ANSWER_S = 30.0
_USUAL = Path(__file__).resolve().parents[3] / ".venv-triton" / "bin" / "python"


def triton_python() -> Path:
    """Find the interpreter beside which nvidia-pytriton is installed: this one, unless another is named."""
    named = os.environ.get(TRITON_PYTHON)
    if named:
        return Path(named)
    return _USUAL if _USUAL.exists() else Path(sys.executable)


def triton_files(models: Sequence[str] = ("add_sub",)) -> TritonFiles:
    """Return a folder with models, named as `folder_of` says, for this interpreter. Raises Unavailable."""
    return TritonFiles(Path(sys.executable), folders_of(models))


class EchoProcess:
    """A server in a process of its own, which prints its port and ends with its input, and 16 connections to it."""

    CALLERS = 16

    def __init__(self, module: str, kind: str, make_wire: Callable[[str], Wire]) -> None:
        """Start `python -m MODULE --serve KIND`. `make_wire` takes the address."""
        self.kind = kind
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--serve", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=with_moonpool(),
        )
        number = int(self._process.stdout.readline())  # type: ignore[union-attr]
        address = "127.0.0.1", number
        wire = partial(make_wire, f"127.0.0.1:{number}")
        self._generator = Generator(address, [wire], timeout_s=_ANSWER_S)

    def rates(self, seconds: float) -> tuple[float, float]:
        """Return requests a second, and microseconds of the server's processor time for each."""
        before = usage_of(self._process.pid)
        tally = self._generator.closed_loop(self.CALLERS, seconds, time.perf_counter_ns())
        after, answered = usage_of(self._process.pid), len(tally.latencies_ns)
        if tally.errors or before is None or after is None:
            raise RuntimeError(f"{self.kind} answers {tally.errors.most_common(1)}")
        return answered / tally.seconds, (after.cpu_s - before.cpu_s) / answered * 1e6

    def close(self) -> None:
        """End the server, too."""
        self._generator.close()
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.terminate()
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]


def report_echoes(report: Report, clients: Mapping[str, EchoProcess], what: Mapping[str, str], quick: bool) -> None:
    """Measure all servers in turns. `what` says what each does; the first is shown over the others that do the same."""
    seconds = 0.05 if quick else 1.0
    cases = {kind: partial(client.rates, seconds) for kind, client in clients.items()}
    measured = in_turns(cases, 1 if quick else 5)
    rates = {kind: Series([[each[0]] for each in found.rounds]) for kind, found in measured.items()}
    for kind, found in measured.items():
        name, used = f"{kind}: {what[kind]}", [each[1] for each in found.rounds]
        report.figure(name, "requests/s", rates[kind].values, column="rate", headline=True)
        report.figure(name, "µs", used, column="processor time of the server")
    first, *others = rates
    for kind in others:
        if what[kind] == what[first]:
            ratio = rates[first].over(rates[kind])
            report.ratio(f"{first} over {kind}", ratio, column="rate")
    report.note("The client is moonpool bench's generator, and takes its part of the same processors.")


class Served(KserveHost):
    """A server, with its own counts."""

    def port(self, protocol: str) -> int:
        """Return the port for http or grpc."""
        return self.http_port if protocol == "http" else self.grpc_port

    def busy_s(self) -> float:
        """Return the processor time of the server and its children so far."""
        return sum(self.busy_by_process_s().values())

    def busy_by_process_s(self) -> dict[int, float]:
        """Return `busy_s` for each live process. The first is the one that was started."""
        found = {pid: usage_of(pid) for pid in with_descendants([self.pid])}
        return {pid: usage.cpu_s for pid, usage in found.items() if usage is not None}

    def answered(self, model: str) -> int:
        """Requests that the server has answered so far, by its own count."""
        asked = HttpControlClient(Endpoint("http", "127.0.0.1", self.http_port), (), _ANSWER_S)
        statistics = asked.statistics(model, "")
        return int(statistics["inference_stats"]["success"]["count"]) if statistics else 0


class MoonpoolServed(MoonpoolHost, Served):
    """`moonpool serve`, of the tree or installation that this benchmark runs in."""

    def __init__(self, models: Sequence[str], options: Sequence[str] = ()) -> None:
        """Serve these models, each named as `folder_of` says."""
        super().__init__(folders_of(models), options)


class TritonServed(TritonHost, Served):
    """tritonserver with its Python backend."""

    def __init__(self, models: Sequence[str], options: Sequence[str] = ()) -> None:
        """Serve these models, each named as `folder_of` says."""
        super().__init__(triton_python(), folders_of(models), options)
