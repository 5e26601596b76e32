"""Servers side by side, moonpool's and a real Triton: processes with the same models, started as by `bench --hosts`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moonpool.benchmarks.hosts.kserve import TRITON_PYTHON, KserveHost, MoonpoolHost, TritonHost
from moonpool.benchmarks.hosts.process import Unavailable
from moonpool.benchmarks.suites.hosted import folders_of
from moonpool.benchmarks.suites.report import Report
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


class Served(KserveHost):
    """A server, with its own counts."""

    def port(self, protocol: str) -> int:
        """Return the port for http or grpc."""
        return self.http_port if protocol == "http" else self.grpc_port

    def busy_by_process_s(self) -> dict[int, float]:
        """Return the processor time so far of the server and of each of its children that live."""
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


def both_servers(report: Report, stack: contextlib.ExitStack, models: Sequence[str]) -> list[Served]:
    """Start both with these models; the stack ends them. One that is not available is reported and left out."""
    servers: list[Served] = []
    for make in (MoonpoolServed, TritonServed):
        try:
            servers.append(make(models))
            stack.callback(servers[-1].close)
        except Unavailable as error:
            report.skipped(make.name, str(error))
    return servers
