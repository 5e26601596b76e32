"""The process of a host that answers at ports of this machine: started, waited for, and ended with all that it has
started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moonpool import MoonpoolError
from moonpool.runtime.process.terminal import harmless
from moonpool.runtime.process.usage import usage_of, with_descendants

# Some hosts start a dozen processes, on machines that are busy.
_READY_S = 600.0
_END_S = 30.0
_LOOK_S = 0.05
_SAID_CHARACTERS = 300
# The folder that holds the package `moonpool`.
_ROOT = Path(__file__).parents[3]


class Unavailable(MoonpoolError):
    """A host cannot be measured here; the text says why."""

    code = "UNAVAILABLE"


def with_moonpool() -> dict[str, str]:
    """Return this process's variables, by which another interpreter finds the same moonpool."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


class ServerProcess:
    """A server that is ready. `close` ends it. For one thread."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        variables: Mapping[str, str] | None,
        log: Path,
        is_ready: Callable[[], bool],
    ) -> None:
        """Start it with these variables, or those of this process, and wait until it is ready. Raises `Unavailable`
        with the end of its log.
        """
        self._name, self._log = name, log
        with log.open("w+", errors="replace") as file:
            try:
                self._process = subprocess.Popen(
                    [*map(str, command)],
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env=variables,
                    # Ctrl-C is for this process, which ends the server.
                    process_group=0,
                )
            except OSError as error:
                raise Unavailable(f"{name} does not start: {error}") from error
            try:
                self._wait(is_ready)
            except BaseException as error:
                self.close()
                if not isinstance(error, Unavailable):
                    raise
                raise Unavailable(f"{error}: {self.said()}") from None

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _READY_S
        while not is_ready():
            if self._process.poll() is not None:
                raise Unavailable(f"{self._name} ended with {self._process.returncode}")
            if time.monotonic() > deadline:
                raise Unavailable(f"{self._name} was not ready after {_READY_S:g} s")
            time.sleep(_LOOK_S)

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def said(self) -> str:
        """Return the end of its log."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return harmless(" ".join(text.split())[-_SAID_CHARACTERS:])

    @property
    def pid(self) -> int:
        """The number of the process that was started, not of those that it has started."""
        return self._process.pid

    def close(self) -> None:
        """End the server by a signal, or by force if that takes too long, and then all that it has left."""
        family = {pid: usage_of(pid) for pid in with_descendants([self._process.pid])}
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pid, before in family.items():
            now = usage_of(pid)
            # A number may be used again, but not with the same time of start.
            if before is not None and now is not None and now.started_s == before.started_s:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def held_ports(count: int) -> list[socket.socket]:
    """Return sockets that hold free ports: nobody else is given them, and a server that names one may listen there.

    They are bound and not listened to (socket(7), SO_REUSEADDR and SO_REUSEPORT: servers set one of them). The caller
    closes them when the server has ended.
    """
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        each.bind(("127.0.0.1", 0))
    return held


def port_of(held: socket.socket) -> int:
    """Return the port that a socket holds."""
    port: int = held.getsockname()[1]
    return port
