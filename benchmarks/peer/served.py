"""Servers side by side: moonpool's and a real Triton, each a process with the same models."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.hosted import folder_of
from benchmarks.peer.peer import Unavailable
from benchmarks.peer.triton_files import TritonFiles, triton_python
from moonpool.runtime.bench.control_client import HttpControlClient
from moonpool.runtime.bench.request import Endpoint

_READY_S = 60.0
_END_S = 30.0


class Served:
    """A server that is ready, with its ports. `close` ends it."""

    name = ""

    def __init__(
        self, command: Sequence[str | Path], environment: Mapping[str, str] | None, log: Path
    ) -> None:
        """Raises Unavailable with the end of its log."""
        self._held = held_ports(3)
        numbers: list[int] = [each.getsockname()[1] for each in self._held]
        ports = dict(zip(("http", "grpc", "metrics"), numbers, strict=True))
        self.http_port, self.grpc_port = ports["http"], ports["grpc"]
        options = [f"--{name}-port={port}" for name, port in ports.items()]
        options += [f"--{name}-address=127.0.0.1" for name in ports]
        with log.open("w+") as file:
            self._process = subprocess.Popen(
                [*command, *options], stdout=file, stderr=file, env=environment
            )
            deadline = time.monotonic() + _READY_S
            while not self._is_ready():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self._end()
                    file.seek(0)
                    said = " ".join(file.read().split())[-300:]
                    raise Unavailable(f"{self.name} did not start: {said}")
                time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self.http_port}/v2/health/ready"
            with urllib.request.urlopen(url, timeout=_READY_S):
                return True
        except OSError:
            return False

    def port(self, protocol: str) -> int:
        """Return the port for http or grpc."""
        return self.http_port if protocol == "http" else self.grpc_port

    def busy_s(self) -> float:
        """Return the processor time of the server and its children so far."""
        return sum(self.busy_by_process_s().values())

    def busy_by_process_s(self) -> dict[int, float]:
        """Return `busy_s` for each live process. The first is the one that was started."""
        return {pid: _busy_s(pid) for pid in _tree(self._process.pid)}

    def answered(self, model: str) -> int:
        """Requests that the server has answered so far, by its own count."""
        asked = HttpControlClient(Endpoint("http", "127.0.0.1", self.http_port), (), _END_S)
        statistics = asked.statistics(model, "")
        return int(statistics["inference_stats"]["success"]["count"]) if statistics else 0

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for each in self._held:
            each.close()

    def close(self) -> None:
        """End the server, with a signal first, by force if that takes too long."""
        self._end()


class MoonpoolServed(Served):
    """`moonpool serve`, of the tree or installation that this benchmark runs in."""

    name = "moonpool"

    def __init__(self, models: Sequence[str], options: Sequence[str] = ()) -> None:
        """Serve these models, each named as `folder_of` says."""
        self._scratch = tempfile.TemporaryDirectory(prefix="moonpool-")
        repository = Path(self._scratch.name) / "models"
        repository.mkdir()
        for model in models:
            name, folder = folder_of(model)
            (repository / name).symlink_to(folder)
        command: list[str | Path] = [sys.executable, "-m", "moonpool", "serve"]
        command += [f"--model-repository={repository}", "--allow-client-shm=true", *options]
        try:
            super().__init__(command, None, Path(self._scratch.name) / "log")
        except BaseException:
            self._scratch.cleanup()
            raise

    def close(self) -> None:
        super().close()
        self._scratch.cleanup()


class TritonServed(Served):
    """tritonserver with its Python backend."""

    name = "Triton"

    def __init__(self, models: Sequence[str], options: Sequence[str] = ()) -> None:
        """Serve these models, each named as `folder_of` says."""
        self._files = TritonFiles(triton_python(), models)
        command: list[str | Path] = [
            self._files.server,
            f"--model-repository={self._files.repository}",
            f"--backend-directory={self._files.backends}",
            "--log-info=false",
            "--log-warning=false",
            *options,
        ]
        try:
            super().__init__(command, self._files.environment(), self._files.folder / "log")
        except BaseException:
            self._files.remove()
            raise

    def close(self) -> None:
        super().close()
        self._files.remove()


def _tree(pid: int) -> list[int]:
    """Return a process and its descendants; it may start more at any time."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def _busy_s(pid: int) -> float:
    """Return the processor time of all threads that a process has or had."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def held_ports(count: int) -> list[socket.socket]:
    """Return sockets that hold free ports: nobody else is given them, and a server that names one may listen there.

    They are bound and not listened to (ip(7), SO_REUSEADDR). The caller closes them when the server has ended.
    """
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(("127.0.0.1", 0))
    return held
