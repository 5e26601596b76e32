"""A connection of the load generator: a socket that never blocks, and the protocol on it."""

from __future__ import annotations

import errno
import select
import socket
from collections import deque
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.runtime.bench.wire import Wire

_CONNECT_S = 10.0
_READ_BYTES = 1 << 16
# As many buffers as one system call takes.
_BUFFERS = 512
# What is dropped is all read to one place.
_DROPPED = memoryview(bytearray(1 << 20))


class Unreachable(MoonpoolError):
    """Nobody answers at the address, or nobody can be asked."""

    code = "UNAVAILABLE"


class Connection:
    """Open from the first request on; opened anew when it was lost."""

    def __init__(
        self, address: tuple[str, int], make_wire: Callable[[], Wire], poller: select.epoll
    ) -> None:
        self._address = address
        self._make_wire = make_wire
        self._poller = poller
        self._socket: socket.socket | None = None
        self._waiting: deque[memoryview] = deque()
        self.wire: Wire = make_wire()
        # When the request in flight was sent, or was to be.
        self.begin_ns = 0
        # When its latest response came; 0 before the first.
        self.heard_ns = 0

    def open(self) -> int:
        """Returns the descriptor to be polled. Raises `Unreachable`."""
        host, port = self._address
        try:
            self._socket = socket.create_connection(self._address, _CONNECT_S)
        except OSError as error:
            what = f"no server answers at {host}:{port}"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                what = f"there can be no more connections to {host}:{port} (ulimit -n)"
            raise Unreachable(f"{what}: {error}") from error
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wire = self._make_wire()
        self._poller.register(self._socket, select.EPOLLIN)
        self._send(self.wire.opening())
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def close(self) -> None:
        """What is in flight is lost."""
        if self._socket is not None:
            self._poller.unregister(self._socket)
            self._socket.close()
            self._socket = None
        self._waiting.clear()

    def begin(self) -> None:
        """Send the next request. Raises OSError."""
        self.heard_ns = 0
        self._send(self.wire.begin())

    def _send(self, buffers: Sequence[bytes | memoryview]) -> None:
        sock = self._socket
        if not buffers or sock is None:
            return
        if not self._waiting and len(buffers) == 1:
            # Nearly all: one small piece, sent at once.
            data = buffers[0]
            try:
                sent = sock.send(data)
            except BlockingIOError:
                sent = 0
            if sent == len(data):
                return
            self._waiting.append(memoryview(data)[sent:])
        else:
            self._waiting.extend(memoryview(data) for data in buffers)
        self.flush()
        if self._waiting:
            self._poller.modify(sock, select.EPOLLIN | select.EPOLLOUT)

    def flush(self) -> None:
        """Send on what the socket did not take before."""
        sock, waiting = self._socket, self._waiting
        if sock is None:
            return
        while waiting:
            buffers = [waiting[index] for index in range(min(len(waiting), _BUFFERS))]
            try:
                sent = sock.sendmsg(buffers)
            except BlockingIOError:
                return
            for buffer in buffers:
                if sent < len(buffer):
                    waiting[0] = buffer[sent:]
                    break
                sent -= len(buffer)
                waiting.popleft()
        self._poller.modify(sock, select.EPOLLIN)

    def receive(self) -> str | None:
        """Take what has come; the outcome of the request if that was its end.

        Raises OSError, and `WireError` where no more can be read.
        """
        sock, wire = self._socket, self.wire
        if sock is None:
            return None
        try:
            if wire.skip > _READ_BYTES:
                size = sock.recv_into(_DROPPED, min(wire.skip, len(_DROPPED)))
                wire.skip -= size
                data = b""
            else:
                data = sock.recv(_READ_BYTES)
                size = len(data)
        except BlockingIOError:
            return None
        if not size:
            raise ConnectionResetError("the server closed the connection")
        if wire.skip and not data:
            return None
        outcome = wire.feed(data)
        self._send(wire.outgoing())
        return outcome
