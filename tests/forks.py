"""Processes of moonpool's command line, forked from one that has imported it already.

To import what a command or a server needs takes half a second of processor time, and tests start hundreds of them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.dispositions import default_signals

PATIENCE_S = 120.0

# Forks a command for each message, and answers with the number of its process. Once that has ended, its status is
# written to the last descriptor of the message.
PROGRAM = """
import gc, json, os, select, socket, sys
import moonpool.runtime.server.process, uvloop
from moonpool.runtime.cli.main import main, make_parser


def command():
    forked = {}
    looks = select.poll()
    looks.register(channel, select.POLLIN)
    while True:
        for fd, _ in looks.poll():
            if fd in forked:
                looks.unregister(fd)
                pid, status = forked.pop(fd)
                ended = os.waitpid(pid, 0)[1]
                try:
                    os.write(status, b"%d" % ended)
                except BrokenPipeError:
                    pass  # nobody waits for it any more
                os.close(status)
                os.close(fd)
                continue
            message, received, _, _ = socket.recv_fds(channel, 1 << 18, 3)
            if not message:
                sys.exit()
            pid = os.fork()
            *outputs, status = received
            if pid == 0:
                for fd in [status, *forked, *(status for _, status in forked.values())]:
                    os.close(fd)
                channel.close()
                return json.loads(message), outputs
            channel.send(b"%d" % pid)
            for output in outputs:
                os.close(output)
            forked[os.pidfd_open(pid)] = pid, status
            looks.register(next(reversed(forked)), select.POLLIN)


channel = socket.socket(fileno=int(sys.argv[1]))
make_parser()  # imports each command
gc.freeze()
(arguments, folder, variables), outputs = command()
for number, output in enumerate(outputs, 1):
    os.dup2(output, number)
    os.close(output)
os.chdir(folder)
os.environ.clear()
os.environ.update(variables)
sys.path[0] = folder
sys.argv = ["moonpool", *arguments]
sys.exit(main())
"""


class Forked:
    """A process as one of `subprocess.Popen`, but for its parent."""

    def __init__(self, pid: int, args: Sequence[str], status: int) -> None:
        self.pid = pid
        self.args = args
        self.returncode: int | None = None
        self._status = status

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def poll(self) -> int | None:
        """Return the exit code if it has ended."""
        if self.returncode is None and self._has_ended(0):
            self._note()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code."""
        if self.returncode is not None:
            return self.returncode
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self._note()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout_s: float | None) -> bool:
        looks = select.poll()
        looks.register(self._status, select.POLLIN)
        return bool(looks.poll(None if timeout_s is None else timeout_s * 1000))

    def _note(self) -> int:
        self.returncode = os.waitstatus_to_exitcode(int(os.read(self._status, 32)))
        os.close(self._status)
        return self.returncode


class Forks:
    """A process that has imported the command line, and forks commands and servers."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = dict(variables)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, default_signals():
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=self.variables,
                pass_fds=[theirs.fileno()],
            )
        self._channel.settimeout(PATIENCE_S)

    def start(
        self,
        arguments: Sequence[str],
        folder: Path,
        stdout: int,
        stderr: int,
        variables: Mapping[str, str] | None = None,
    ) -> Forked:
        """Start a command in a folder. It reads from nowhere, and has these variables or those of this object."""
        message = json.dumps([arguments, str(folder), dict(variables or self.variables)])
        status, theirs = os.pipe()
        try:
            socket.send_fds(self._channel, [message.encode()], [stdout, stderr, theirs])
        finally:
            os.close(theirs)
        return Forked(int(self._channel.recv(32)), arguments, status)

    def run(self, arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder to its end."""
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            with self.start(arguments, folder, stdout.fileno(), stderr.fileno()) as process:
                try:
                    code = process.wait(PATIENCE_S)
                finally:
                    process.kill()
            stdout.seek(0)
            stderr.seek(0)
            return subprocess.CompletedProcess(arguments, code, stdout.read(), stderr.read())

    def close(self) -> None:
        self._channel.close()
        self._process.wait(PATIENCE_S)
