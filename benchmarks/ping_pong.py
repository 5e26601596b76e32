"""The least that a call to another process can cost from Python: one packet there, one back.

Run by path, this file is the other process.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from types import TracebackType

_PACKET = bytes(64)


class PingPong:
    """Another Python process that sends back what it gets, over a SEQPACKET socket pair."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-I", __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._send, self._receive = self._socket.send, self._socket.recv
        self.call()

    @property
    def pid(self) -> int:
        """The process number of the other side."""
        return self._process.pid

    def call(self) -> None:
        """There and back."""
        self._send(_PACKET)
        self._receive(256)

    def __enter__(self) -> PingPong:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._process.wait()


def echo(fd: int) -> None:
    """Send back what comes, until the other end is closed."""
    with socket.socket(fileno=fd) as channel:
        send, receive = channel.send, channel.recv
        while packet := receive(256):
            send(packet)


if __name__ == "__main__":
    echo(int(sys.argv[1]))
