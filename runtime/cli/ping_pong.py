"""The floor under any call into another process: a packet there and back, and nothing else."""

from __future__ import annotations

import socket
import subprocess
import sys

_ECHO = (
    "import socket, sys\n"
    "end = socket.socket(fileno=int(sys.argv[1]))\n"
    "while packet := end.recv(4096): end.send(packet)\n"
)


class PingPong:
    """Two Python processes and a SEQPACKET socket between them; a context manager."""

    def __init__(self, size_bytes: int = 64) -> None:
        self._packet = bytes(size_bytes)
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-I", "-S", "-c", _ECHO, str(other.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[other.fileno()])
        self()  # when it answers, it has started

    @property
    def pid(self) -> int:
        """The process number of the other side."""
        return self._process.pid

    def __call__(self) -> None:
        """Once there and back."""
        self._socket.send(self._packet)
        self._socket.recv(4096)

    def __enter__(self) -> PingPong:
        return self

    def __exit__(self, *_: object) -> None:
        # The other process ends at the end of the file.
        self._socket.close()
        self._process.wait()
