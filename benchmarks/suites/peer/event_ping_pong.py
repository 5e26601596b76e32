"""Two processes that only order work on a device: each has an event, and a packet says that it was recorded."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

from moonpool.ipc.cuda.device import Device, device
from moonpool.ipc.cuda.lane import DeviceLane

_TIMEOUT_S = 60.0


class EventPingPong:
    """The other process, and an order to it and back."""

    def __init__(self, here: Device) -> None:
        """Raises OSError, `CudaError`; TimeoutError if the other process does not start."""
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.settimeout(_TIMEOUT_S)
        self._lane = DeviceLane(here)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(here.ordinal)]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self._end.send(self._lane.handle or b"-")
        self.shares_events = bool(self._lane.handle)
        self._lane.meet(_handle(self._end.recv(256)))

    def __call__(self) -> None:
        self._lane.publish()
        self._end.send(b"!")
        self._end.recv(1)
        self._lane.receive()

    def close(self) -> None:
        """End the other process."""
        self._end.close()
        try:
            self._process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._lane.close()


def _handle(packet: bytes) -> bytes:
    return b"" if packet == b"-" else packet


def answer(fd: int, ordinal: int) -> None:
    """Answer in the other process."""
    end = socket.socket(fileno=fd)
    lane = DeviceLane(device(ordinal))
    with contextlib.closing(end), contextlib.closing(lane):
        lane.meet(_handle(end.recv(256)))
        end.send(lane.handle or b"-")
        while end.recv(1):
            lane.receive()
            lane.publish()
            end.send(b"!")


if __name__ == "__main__":
    answer(int(sys.argv[1]), int(sys.argv[2]))
