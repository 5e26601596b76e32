"""A real tritonserver with its Python backend, for the length of a run."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
VARIABLE = "MOONPOOL_TRITON_PYTHON"
# Both sides have these Python-based backends.
BACKENDS = Path(__file__).parent / "backends"
# All names of this test process in /dev/shm begin like this.
REGIONS = f"moonpool_tests_{os.getpid()}_"
_NUMBERS = itertools.count()
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
_READY = "Started Metrics Service"

_FACTS = """
import importlib.util, sys, sysconfig
spec = importlib.util.find_spec("pytriton")
print("" if spec is None else spec.submodule_search_locations[0])
print(sysconfig.get_config_var("LIBDIR"))
print("%d.%d" % sys.version_info[:2])
"""


def interpreter() -> Path:
    """The interpreter beside which nvidia-pytriton is installed. Skips the test where there is none."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    usual = ROOT / ".venv-triton" / "bin" / "python"
    if not usual.exists():
        pytest.skip(f"no tritonserver: {usual.parents[1].name} is not here and {VARIABLE} not set")
    return usual


def _reserved(count: int) -> list[socket.socket]:
    """Ports, bound and not listened to: nobody is given one, and a server that names one may listen there (ip(7),
    SO_REUSEADDR).
    """
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(("127.0.0.1", 0))
    return sockets


class TritonServer:
    """The process, its ports and its log. `models` are loaded from `repository`, others when asked for."""

    def __init__(
        self, python: Path, repository: Path, folder: Path, models: Sequence[str] = (), options: Sequence[str] = ()
    ) -> None:
        facts = subprocess.run([python, "-c", _FACTS], capture_output=True, text=True, check=True).stdout.splitlines()
        if not facts[0]:
            pytest.fail(f"nvidia-pytriton is not installed beside {python}", pytrace=False)
        self._package, self._libraries, self._version = Path(facts[0]), facts[1], facts[2]
        self._python = python
        self._repository = repository
        self._models = models
        self._options = options
        self._backends = folder / "backends"
        # The ports are set while the server runs.
        self.http_port = self.grpc_port = self.metrics_port = 0
        self._reserved: list[socket.socket] = []
        # A run may have several servers, and each removes all names with its prefix when it ends.
        self._regions = f"{REGIONS}{next(_NUMBERS)}_"
        self.log_file = folder / "tritonserver.log"
        self._process: subprocess.Popen[bytes] | None = None
        # The exit code of the last run that was stopped.
        self.exit_code: int | None = None

    def start(self) -> None:
        """Return when it takes requests."""
        if not self._backends.exists():
            self.lay_out_backend()
        self._reserved = _reserved(3)
        ports = [each.getsockname()[1] for each in self._reserved]
        self.http_port, self.grpc_port, self.metrics_port = ports
        with open(self.log_file, "wb") as log:
            self._process = subprocess.Popen(self.command(), env=self.environment(), stdout=log, stderr=log, cwd="/")
        process = self._process

        def has_started() -> bool:
            # The line is written before the last port is bound.
            ready = _READY in self.log() and _is_listening(self.metrics_port)
            return ready or process.poll() is not None

        try:
            wait_until(has_started, START_TIMEOUT_S, "tritonserver to start")
        except AssertionError:
            process.kill()
            process.wait()
        if process.poll() is not None:
            self.stop()
            pytest.fail(f"tritonserver did not start:\n{self.log()[-4000:]}", pytrace=False)

    def lay_out_backend(self) -> None:
        """Copy the backends: the wheel keeps the stubs of all Pythons apart. The server wants one beside its own."""
        wheel = self._package / "tritonserver"
        shutil.copytree(wheel / "backends", self._backends)
        shutil.copytree(BACKENDS, self._backends, dirs_exist_ok=True)
        stub = "triton_python_backend_stub"
        shutil.copy(wheel / "python_backend_stubs" / self._version / stub, self._backends / "python")

    def command(self) -> list[str]:
        return [
            str(self._package / "tritonserver" / "bin" / "tritonserver"),
            f"--model-repository={self._repository}",
            f"--backend-directory={self._backends}",
            f"--cache-directory={self._package}/tritonserver/caches",
            f"--backend-config=python,shm-region-prefix-name={self._regions}",
            "--model-control-mode=explicit",
            "--strict-readiness=false",
            "--model-load-thread-count=8",
            "--http-address=127.0.0.1",
            f"--http-port={self.http_port}",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={self.grpc_port}",
            "--metrics-address=127.0.0.1",
            f"--metrics-port={self.metrics_port}",
            "--exit-timeout-secs=10",
            *(f"--load-model={name}" for name in self._models),
            *self._options,
        ]

    def environment(self) -> dict[str, str]:
        """Return the variables: the stub is linked to libpython, and takes the first environment of the path."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        bundled = self._package.parent / "nvidia_pytriton.libs"
        environment["LD_LIBRARY_PATH"] = f"{self._libraries}:{bundled}"
        environment["PATH"] = f"{self._python.parent}:{environment.get('PATH', os.defpath)}"
        environment["VIRTUAL_ENV"] = str(self._python.parents[1])
        return environment

    @property
    def has_died(self) -> bool:
        """True if the server ended without being stopped."""
        return self._process is not None and self._process.poll() is not None

    def log(self) -> str:
        """Return the log of the server and its stubs so far."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def stop(self, *, at_once: bool = False) -> None:
        """End it and all that it leaves behind: a stub that hangs in its end, and its region.

        `at_once`, nothing is finalized: with many models that takes half a minute.
        """
        process, self._process = self._process, None
        for each in self._reserved:
            each.close()
        self._reserved = []
        if process is None:
            return
        process.send_signal(signal.SIGKILL if at_once else signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.exit_code = process.returncode
        if not at_once:
            with suppress(AssertionError):
                wait_until(lambda: not _stubs(self._regions), 3.0)
        for pid in _stubs(self._regions):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not _stubs(self._regions), 60.0, "the server's stubs to end")
        for name in os.listdir("/dev/shm"):
            if name.startswith(self._regions):
                os.unlink(f"/dev/shm/{name}")


def _is_listening(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _stubs(regions: str) -> list[int]:
    """The processes of this server's stubs that are running: each names its region."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        # Processes end while they are being listed.
        with suppress(OSError):
            words = Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
            if any(word.startswith(regions) for word in words):
                found.append(int(process))
    return found


@contextmanager
def running(
    python: Path, repository: Path, folder: Path, models: Sequence[str] = (), options: Sequence[str] = ()
) -> Iterator[TritonServer]:
    """A server, ready, which is ended afterwards. `options` are further ones of its command line."""
    server = TritonServer(python, repository, folder, models, options)
    server.start()
    try:
        yield server
    finally:
        server.stop(at_once=True)
