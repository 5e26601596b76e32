"""Real servers for tests: `moonpool serve` as a process of its own, on free ports, until the test has ended."""

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
from typing import Any

from tests.waiting import wait_until

import moonpool

SOURCE = Path(moonpool.__path__[0]).parent
_STARTED = {
    "grpc": re.compile(r"Started GRPCInferenceService at \S+:(\d+)"),
    "http": re.compile(r"Started HTTPService at \S+:(\d+)"),
    "metrics": re.compile(r"Started Metrics Service at \S+:(\d+)"),
}
# That no test depends on what the machine has set.
_ENVIRONMENT = {
    name: text for name, text in os.environ.items() if not name.startswith("MOONPOOL_SERVE_")
}


class RunningServer:
    """A server process; `log` is the file with what it says, and `ports` are by "http", "grpc" and "metrics"."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def text(self) -> str:
        """What it has said so far."""
        return self.log.read_text()

    @property
    def ports(self) -> dict[str, int]:
        text = self.text()
        found = {name: pattern.search(text) for name, pattern in _STARTED.items()}
        return {name: int(match[1]) for name, match in found.items() if match}

    @property
    def http(self) -> str:
        """Its address, such as `127.0.0.1:41234`, as clients want it."""
        return f"127.0.0.1:{self.ports['http']}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.ports['grpc']}"

    @property
    def metrics(self) -> str:
        return f"127.0.0.1:{self.ports['metrics']}"

    def get(self, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, Any]:
        """Status and body of an answer, the body as JSON where it is that."""
        request = urllib.request.Request(f"http://{self.http}{path}", body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                status, raw = response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode("utf-8", "replace")

    def wait_for(self, text: str, timeout_s: float = 30.0) -> None:
        """Until it has said this."""
        wait_until(
            lambda: text in self.text() or self.process.poll() is not None, timeout_s, repr(text)
        )
        assert text in self.text(), f"the server ended without {text!r}:\n{self.text()}"

    def tell(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 40.0) -> int:
        """The exit code, once it has ended."""
        return self.process.wait(timeout_s)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "moonpool", "serve", *map(str, arguments)]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(SOURCE), _ENVIRONMENT.get("PYTHONPATH", "")]))
    return {**_ENVIRONMENT, "PYTHONPATH": path, **(extra or {})}


@contextlib.contextmanager
def starting(
    *arguments: object,
    variables: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    shares_memory: bool = True,
) -> Iterator[RunningServer]:
    """Start a server on free ports with these arguments beside; it may yet be loading, or fail.

    `before` are words that its command is given to. Unless it `shares_memory`, the server has its default, which
    lets no client do so. At the end it is killed if it runs still.
    """
    with tempfile.TemporaryDirectory(prefix="moonpool-test-") as folder:
        path = Path(folder) / "log"
        ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
        if shares_memory:
            ports.append("--allow-client-shm=true")
        with (
            open(path, "wb") as log,
            subprocess.Popen(
                [*before, *command(*ports, *arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(variables),
            ) as process,
        ):
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
    """A server that serves: everything is loaded. At the end it must end in order, with 0.

        with running(repository, "--model-control-mode=explicit") as server:
            client = tritonclient.http.InferenceServerClient(server.http)

    `serves` are the services that it is to have; `before` and `shares_memory` are as for `starting`.
    """
    with starting(
        *arguments, variables=variables, before=before, shares_memory=shares_memory
    ) as server:
        wait_until(
            lambda: set(serves) <= set(server.ports) or server.process.poll() is not None,
            30.0,
            "the server to start",
        )
        assert server.process.poll() is None, f"the server did not start:\n{server.text()}"
        # The last line of the start is said when requests are welcome.
        server.wait_for("Ready")
        yield server
        if server.process.poll() is None:
            server.tell(signal.SIGTERM)
            code = server.wait()
            assert code == 0, f"the server ended with {code}:\n{server.text()}"
