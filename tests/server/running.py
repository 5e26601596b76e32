"""Real servers for tests: `moonpool serve` as a process of its own, on free ports, until the test has ended.

They are forked from a process that has imported what they need, unless they have other variables than this process or
their command is given to another one, such as `env`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.dispositions import default_signals
from tests.forks import Forked, Forks
from tests.waiting import wait_until

import moonpool

SOURCE = Path(moonpool.__path__[0]).parent
_STARTED = {
    "grpc": re.compile(r"Started GRPCInferenceService at \S+:(\d+)"),
    "openai": re.compile(r"Started OpenAI Service at \S+:(\d+)"),
    "http": re.compile(r"Started HTTPService at \S+:(\d+)"),
    "metrics": re.compile(r"Started Metrics Service at \S+:(\d+)"),
}
_OPEN = re.compile(r"Ready|Listening, but not ready")
# No test may depend on variables of the machine.
_ENVIRONMENT = {name: text for name, text in os.environ.items() if not name.startswith("MOONPOOL_SERVE_")}
# Set for a whole run, where pytest runs.
forks: Forks | None = None


class RunningServer:
    """A server process. `log` is the file with its log, and `ports` are by "http", "grpc" and "metrics"."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, log: Path) -> None:
        self.process = process
        self.log = log

    def text(self) -> str:
        """Return its log until now."""
        return self.log.read_text()

    @property
    def ports(self) -> dict[str, int]:
        text = self.text()
        found = {name: pattern.search(text) for name, pattern in _STARTED.items()}
        return {name: int(match[1]) for name, match in found.items() if match}

    @property
    def http(self) -> str:
        """Return its address in the form for clients, such as `127.0.0.1:41234`."""
        return f"127.0.0.1:{self.ports['http']}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports['grpc']}"

    @property
    def metrics(self) -> str:
        return f"127.0.0.1:{self.ports['metrics']}"

    def get(self, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, Any]:
        """Return status and body of an answer, the body as JSON if it is JSON."""
        request = urllib.request.Request(f"http://{self.http}{path}", body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status, raw = response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode("utf-8", "replace")

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until its log has this text."""
        wait_until(lambda: text in self.text() or self.process.poll() is not None, timeout_s, repr(text))
        assert text in self.text(), f"the server ended without {text!r}:\n{self.text()}"

    def tell(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for its end, and return the exit code."""
        return self.process.wait(timeout_s)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "moonpool", "serve", *map(str, arguments)]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(SOURCE), _ENVIRONMENT.get("PYTHONPATH", "")]))
    return {**_ENVIRONMENT, "PYTHONPATH": path, **(extra or {})}


def _started(
    arguments: Sequence[str], log: IO[bytes], variables: Mapping[str, str] | None, before: Sequence[str]
) -> subprocess.Popen[bytes] | Forked:
    if forks is not None and not variables and not before:
        words = ["serve", *arguments]
        return forks.start(words, Path.cwd(), log.fileno(), log.fileno(), environment())
    with default_signals():
        return subprocess.Popen(
            [*before, *command(*arguments)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(variables),
        )


@contextlib.contextmanager
def starting(
    *arguments: object,
    variables: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    shares_memory: bool = True,
) -> Iterator[RunningServer]:
    """Start a server on free ports with more arguments. It may still be loading when this returns, or fail later.

    `before` are words that its command is given to. Unless it `shares_memory`, the server has its default, which
    lets no client do so. At the end it is killed if it runs still.
    """
    with tempfile.TemporaryDirectory(prefix="moonpool-test-") as folder:
        path = Path(folder) / "log"
        ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
        if shares_memory:
            ports.append("--allow-client-shm=true")
        with open(path, "wb") as log, _started([*ports, *map(str, arguments)], log, variables, before) as process:
            try:
                yield RunningServer(process, path)
            finally:
                if process.poll() is None:
                    process.kill()


@contextlib.contextmanager
def running(
    *arguments: object,
    variables: Mapping[str, str] | None = None,
    serves: Sequence[str] = ("grpc", "http", "metrics"),
    before: Sequence[str] = (),
    shares_memory: bool = True,
) -> Iterator[RunningServer]:
    """Run a server until it has loaded everything. At the end it must end in order, with exit code 0.

        with running(repository, "--model-control-mode=explicit") as server:
            client = tritonclient.http.InferenceServerClient(server.http)

    `serves` are the services that it is to have; `before` and `shares_memory` are as for `starting`.
    """
    with starting(*arguments, variables=variables, before=before, shares_memory=shares_memory) as server:
        wait_until(
            lambda: set(serves) <= set(server.ports) or server.process.poll() is not None, 60.0, "the server to start"
        )
        assert server.process.poll() is None, f"the server did not start:\n{server.text()}"
        # The server writes this line when it accepts requests, even if some models are missing.
        wait_until(lambda: _OPEN.search(server.text()) or server.process.poll() is not None, 60.0)
        assert _OPEN.search(server.text()), f"the server ended at its start:\n{server.text()}"
        yield server
        if server.process.poll() is None:
            server.tell(signal.SIGTERM)
            code = server.wait()
            assert code == 0, f"the server ended with {code}:\n{server.text()}"
