"""A `moonpool serve` in a process of its own, for measurements that would harm other users of a server.

Theory of operation. The server gets free ports and tells them in its log, which comes through a pipe. A thread reads the pipe until its
end, so that the server never blocks on it, keeps the last lines for errors, and sets `_ready` when the port is known, or when
the log ends because the process did. The server has a session of its own, so Ctrl-C reaches only this process, which then ends
it; and the kernel kills it if this process ends in another way.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.client.control_client import HttpControlClient
from moonpool.runtime.client.request import Endpoint
from moonpool.runtime.process.spawner import spawn
from moonpool.runtime.process.threads import start_thread

# The folder that holds the package `moonpool`.
_ROOT = Path(__file__).parents[3]
_PROGRAM = (
    "import sys\n"
    "sys.path.insert(0, sys.argv[1])\n"
    "from moonpool.runtime.process.spawner import die_with\n"
    "die_with(int(sys.argv[2]))\n"
    "from moonpool.runtime.cli.main import main\n"
    "sys.exit(main(sys.argv[3:]))\n"
)
_STARTED = re.compile(r"Started HTTPService at 127\.0\.0\.1:(\d+)")
_LINES = 20
# Models may take long to load, and to finalize.
_START_S, _LOAD_S, _END_S = 600.0, 600.0, 60.0


class ServerFailed(MoonpoolError):
    """The server did not start, or has ended. The text has the last lines of its log."""

    code = "UNAVAILABLE"


class OwnServer:
    """The process. Making it starts it and waits until its models are loaded; `close` ends it. For one thread."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments` are those of `moonpool serve`, beside the ports. Raises `ServerFailed`."""
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._ready = threading.Event()
        self._port = 0
        words = [
            *("serve", "--allow-grpc=false", "--allow-metrics=false", "--http-port=0"),
            *("--http-address=127.0.0.1", "--model-control-mode=explicit", *arguments),
        ]
        read_fd, write_fd = os.pipe()
        self._log = open(read_fd, encoding="utf-8", errors="replace")  # noqa: SIM115 - `close` does it
        try:
            self._process = spawn(
                [sys.executable, "-c", _PROGRAM, str(_ROOT), str(os.getpid()), *words],
                environment=os.environ,
                folder=os.getcwd(),
                output_fd=write_fd,
                fds=(),
            )
        except BaseException:
            self._log.close()
            raise
        finally:
            os.close(write_fd)
        self._reader = threading.Thread(target=self._read, name="moonpool-tune-log", daemon=True)
        try:
            start_thread(self._reader)
            if not self._ready.wait(_START_S) or not self._port:
                raise ServerFailed(f"the server did not start:\n{self.last_lines()}")
        except BaseException:
            self.close()
            raise
        self.endpoint = Endpoint("http", "127.0.0.1", self._port)
        self.client = HttpControlClient(self.endpoint, (), _LOAD_S)

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def last_lines(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(list(self._lines)) or "it said nothing"

    def _read(self) -> None:
        for line in self._log:
            self._lines.append(line.rstrip("\n"))
            if found := _STARTED.search(line):
                self._port = int(found[1])
                self._ready.set()
        self._ready.set()

    def close(self) -> None:
        """End the process, by force after a minute. May be called many times."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader.ident is not None:
            # What the server has started may hold the pipe open a little longer.
            self._reader.join(_END_S)
        self._log.close()
