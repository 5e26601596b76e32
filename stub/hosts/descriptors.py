"""Passes descriptors between the processes that a model forked, through the stub.

`multiprocessing` passes a descriptor by a Unix socket with a name, as torch's DataLoader does with each tensor of a
worker. A contained model has no such sockets unless they are granted: no filter keeps them from the sockets of other
programs. So where it may fork, and no more, its processes pass descriptors by the stub. `SharedDescriptor` takes the
place of the class of `multiprocessing`.

Theory of operation. The `Shelf` of the stub holds a copy of each descriptor under a random key until a process takes
it. A fork asks for both over a pair of sockets with the stub, which it makes as it does for its questions (`forks.py`).
Each request is answered, also to put one on the shelf: otherwise the process that gets the key by another way could
come before it. A thread of the stub serves each pair until its end of file. Then the fork has ended, and what it put
there and nobody took goes, as the memory of a process would. The number of descriptors is bounded by the limit of the
stub: at the limit the kernel delivers none, and the fork gets an error.

A fork of a fork makes a pair of its own, with a new lock, since another thread may have held the lock at the fork.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Callable, Protocol

from moonpool.stub import threads

_KEY_BYTES = 16
_PUT, _TAKE, _DONE, _FAILED = b"p", b"t", b"d", b"f"
_GONE = "the process that shared this descriptor has ended, or too many are shared"


class DescriptorPlace(Protocol):
    """Holds descriptors under keys."""

    def put(self, key: bytes, fd: int) -> None:
        """Own a descriptor until it is taken. Raises OSError."""

    def take(self, key: bytes) -> int:
        """Return a descriptor, which the caller owns. Raises OSError."""


class Shelf:
    """Holds descriptors in the stub. Any thread may call any method."""

    def __init__(self) -> None:
        # Each with the end of the fork that put it there, or None.
        self._fds: dict[bytes, tuple[int, socket.socket | None]] = {}

    def put(self, key: bytes, fd: int, owner: socket.socket | None = None) -> None:
        if key in self._fds:  # only a model that makes its own keys does that
            os.close(self.take(key))
        self._fds[key] = fd, owner

    def take(self, key: bytes) -> int:
        try:
            return self._fds.pop(key)[0]
        except KeyError:
            raise ConnectionError(_GONE) from None

    def serve(self, end: socket.socket) -> None:
        """Answer one fork until it has ended."""
        try:
            while True:
                packet, fds, _, _ = socket.recv_fds(end, 1 + _KEY_BYTES, 1)
                if not packet:
                    return
                key = packet[1:]
                if packet[:1] == _PUT and fds:
                    self.put(key, fds[0], end)
                    end.send(_DONE)
                elif packet[:1] == _TAKE and key in self._fds:
                    fd = self.take(key)
                    try:
                        socket.send_fds(end, [_DONE], [fd])
                    finally:
                        os.close(fd)
                else:
                    end.send(_FAILED)
        finally:
            for key in [key for key, (_, owner) in list(self._fds.items()) if owner is end]:
                with contextlib.suppress(OSError):
                    os.close(self.take(key))


class ForkedShelf:
    """Asks the stub's shelf, in a fork. Any thread may call any method."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        """Take `connect`, which returns the end of a new pair with the stub. Raises OSError if the stub is gone."""
        self._connect = connect
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threads.Lock()
        self._end: socket.socket | None = None

    def put(self, key: bytes, fd: int) -> None:
        try:
            self._ask(_PUT + key, [fd])
        finally:
            os.close(fd)

    def take(self, key: bytes) -> int:
        (fd,) = self._ask(_TAKE + key, [])
        return fd

    def _ask(self, packet: bytes, fds: list[int]) -> list[int]:
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            if self._end is None:
                self._end = self._connect()
            socket.send_fds(self._end, [packet], fds)
            answer, found, _, _ = socket.recv_fds(self._end, 1, 1)
        if answer != _DONE:
            raise ConnectionError(_GONE)
        return found


class _Current:
    place: DescriptorPlace


def use(place: DescriptorPlace) -> None:
    """Set the place of the descriptors that this process shares."""
    _Current.place = place


class SharedDescriptor:
    """A descriptor that one process puts into a message and another one takes out of it, once."""

    def __init__(self, fd: int) -> None:
        self._key = os.urandom(_KEY_BYTES)
        _Current.place.put(self._key, os.dup(fd))

    def detach(self) -> int:
        """Return the descriptor, which the caller owns. Raises OSError."""
        return _Current.place.take(self._key)
