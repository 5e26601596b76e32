"""Resources that a model and its server use while they are measured: processors, memory, and GPUs from the metrics
port.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

from moonpool import MoonpoolError
from moonpool.runtime.process.usage import proportional_bytes, usage_of, with_descendants

_TIMEOUT_S = 10.0
_MOST_BYTES = 64 << 20
# Families of Triton's metrics, and whether the values of several GPUs are added up or averaged.
_OF_GPUS = {"nv_gpu_utilization": "mean", "nv_gpu_memory_used_bytes": "sum"}
_SAMPLE = re.compile(r"(\w+)(?:\{[^}]*\})?\s+([0-9.eE+-]+|NaN)")


class NoMetrics(MoonpoolError):
    """A metrics port does not answer, or not with metrics."""

    code = "UNAVAILABLE"


@dataclass(frozen=True, slots=True)
class Resources:
    """Sums of processor time over a window, and the memory and GPUs at its end."""

    cpu_s: float
    memory_bytes: int
    gpu_utilization: float | None = None
    gpu_memory_bytes: float | None = None

    def as_dict(self, requests: int, seconds: float) -> dict[str, float | None]:
        """Return the figures for a result."""
        return {
            "cpu_s_per_request": self.cpu_s / requests if requests else None,
            "cores": self.cpu_s / seconds if seconds else None,
            "memory_bytes": self.memory_bytes,
            "gpu_utilization": self.gpu_utilization,
            "gpu_memory_bytes": self.gpu_memory_bytes,
        }


def resources_together(each: Sequence[Resources | None]) -> Resources | None:
    """Join those of windows: the sum of processor time, the most of all others; None if one is unknown."""
    known = [one for one in each if one is not None]
    if not known or len(known) < len(each):
        return None
    utilizations = [one.gpu_utilization for one in known if one.gpu_utilization is not None]
    memories = [one.gpu_memory_bytes for one in known if one.gpu_memory_bytes is not None]
    return Resources(
        sum(one.cpu_s for one in known),
        max(one.memory_bytes for one in known),
        max(utilizations, default=None),
        max(memories, default=None),
    )


class ResourceMeter:
    """Reads what processes and their descendants use between `begin` and `end`. For one thread."""

    def __init__(self, roots: Callable[[], Sequence[int]], metrics_url: str | None = None) -> None:
        """`roots` returns the topmost processes. Raises `NoMetrics` if the metrics port does not answer."""
        self._roots = roots
        self._metrics_url = metrics_url
        self._before: dict[int, float] = {}
        self._gpus()

    def begin(self) -> None:
        """Begin a window."""
        self._before = self._used_s()

    def end(self) -> Resources:
        """End the window. The time of a process that ended within it is not known, and does not count."""
        after = self._used_s()
        used_s = sum(now - self._before.get(pid, 0.0) for pid, now in after.items())
        gpus = self._gpus()
        return Resources(
            used_s,
            sum(map(proportional_bytes, after)),
            gpus.get("nv_gpu_utilization"),
            gpus.get("nv_gpu_memory_used_bytes"),
        )

    def _used_s(self) -> dict[int, float]:
        found = {pid: usage_of(pid) for pid in with_descendants(self._roots())}
        return {pid: usage.cpu_s for pid, usage in found.items() if usage is not None}

    def _gpus(self) -> Mapping[str, float]:
        if self._metrics_url is None:
            return {}
        if urlsplit(self._metrics_url).scheme not in ("http", "https"):
            raise NoMetrics(f"{self._metrics_url!r} is not an http:// address of metrics")
        try:
            with urlopen(self._metrics_url, timeout=_TIMEOUT_S) as answer:
                text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
        except (URLError, OSError, ValueError) as error:
            raise NoMetrics(f"no metrics at {self._metrics_url}: {error}") from error
        return gpus_in(text)


def gpus_in(text: str) -> dict[str, float]:
    """Read the figures of GPUs from metrics in Prometheus' form; empty without GPUs."""
    values: dict[str, list[float]] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is not None and found[1] in _OF_GPUS and found[2] != "NaN":
            try:
                values.setdefault(found[1], []).append(float(found[2]))
            except ValueError:
                raise NoMetrics(f"a metric has the value {found[2]!r}") from None
    return {name: sum(each) / (len(each) if _OF_GPUS[name] == "mean" else 1) for name, each in values.items()}


def local_pid(overview: Mapping[str, Any], port: int) -> int | None:
    """Return the process of a moonpool server, from its overview; None if it does not listen at that port of this
    machine.

    A server may name any process. Only the one that holds the port is believed.
    """
    server = overview.get("server")
    pid = server.get("pid") if isinstance(server, Mapping) else None
    return pid if isinstance(pid, int) and _holds_port(pid, port) else None


_TRITON_STUB = "triton_python_backend_stub"


def triton_stubs(server_pid: int, model: str) -> list[int]:
    """Return the stubs of a model of Triton's Python backend, among the processes that a server has started.

    The first argument of a stub is the model's file, MODEL/VERSION/model.py.
    """
    found = []
    for pid in with_descendants([server_pid]):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        program, file = (Path(os.fsdecode(word)) for word in (*words, b"", b"")[:2])
        if program.name == _TRITON_STUB and file.parent.parent.name == model:
            found.append(pid)
    return found


# The state of a listening socket in /proc/net/tcp, and the places of its columns.
_LISTENING, _LOCAL, _STATE, _INODE = "0A", 1, 3, 9


def _holds_port(pid: int, port: int) -> bool:
    wanted = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text("ascii").splitlines()[1:]:
                words = line.split()
                is_port = int(words[_LOCAL].rpartition(":")[2], 16) == port
                if is_port and words[_STATE] == _LISTENING:
                    wanted.add(f"socket:[{words[_INODE]}]")
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{descriptor}") in wanted:
                    return True
    return False
