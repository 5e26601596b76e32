"""One end of the channel between the shim and its launcher: whole messages, with their descriptors.

Theory of operation. `send` never blocks. It puts the message into an unbounded queue, and one thread writes the queue
to the socket in order. So a thread that holds a lock, or the reactor, can report something even while the server does
not read. The queue also owns the descriptors until they are sent; the thread closes its copies afterwards. Only one
thread may `receive`. If the peer goes away, the writing thread drops what is left, and `receive` raises `PeerGone`,
which is the one place where the end is handled. `close` lets the thread write everything that was sent before it closes
the socket.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from moonpool.ipc.channel import MAX_PACKET_BYTES, Channel
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import Closed, PeerGone, RemoteProtocolError
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.triton.messages import MAX_MESSAGE_BYTES, End, Word, codec

_Message = tuple[bytes, tuple[int, ...]]
# The number of descriptors that come with a message. Messages that are not listed have none.
_DESCRIPTORS = {int(Word.BORN): 5, int(Word.STARTED): 1, int(Word.SET_ASIDE): 1}


class LauncherChannel:
    """An end of the channel. Any thread may `send`, one thread may `receive`."""

    def __init__(self, channel: Channel, us: End) -> None:
        """Own the channel. Raises `OutOfThreads`."""
        self._channel = channel
        self._codec = codec(us)
        # Unbounded, so that `send` never waits.
        self._messages: SimpleQueue[_Message | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="moonpool-post", daemon=True)
        start_thread(self._sender)

    def send(self, *message: object, fds: tuple[int, ...] = ()) -> None:
        """Queue a message, and own its descriptors. Messages are sent in order. Never blocks.

        Raises `LocalProtocolError` if the message cannot be encoded.
        """
        packet = encode(*message)
        if len(packet) > MAX_PACKET_BYTES:
            fds = (_file_of(packet), *fds)
            packet = encode(Word.LONG, len(packet))
        self._messages.put((packet, fds))

    def _send(self) -> None:
        while (message := self._messages.get()) is not None:
            packet, fds = message
            with suppress(PeerGone, Closed):  # `receive` reports the end
                self._channel.send_waiting_with(packet, fds)
            for fd in fds:
                os.close(fd)

    def receive(self) -> tuple[list[Any], list[int]]:
        """Wait for a message; return its fields, the word first, and its descriptors, which the caller owns.

        Raises `PeerGone`, `RemoteProtocolError`.
        """
        packet, fds = self._channel.receive_with_fds()
        try:
            fields = self._codec.decode(packet)
            if fields[0] == Word.LONG:
                fields = self._codec.decode_stored(_contents(fds, fields[1]))
                if fields[0] == Word.LONG:
                    raise RemoteProtocolError("LONG that refers to another one")
            if len(fds) != _DESCRIPTORS.get(fields[0], 0):
                raise RemoteProtocolError(f"{len(fds)} descriptors with {Word(fields[0]).name}")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fields, fds

    def wake(self) -> None:
        """End the channel for the thread that receives here."""
        self._channel.wake()

    def close(self) -> None:
        """Write the queued messages, as far as the peer reads them, and close the channel."""
        self._messages.put(None)
        self._sender.join()
        self._channel.close()


def _file_of(packet: bytes) -> int:
    fd = os.memfd_create("moonpool-message", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(packet)
    return fd


def _contents(fds: list[int], size_bytes: int) -> bytes:
    """Read the message in the first of the descriptors, and take that one out and close it."""
    if not fds:
        raise RemoteProtocolError("LONG without a file")
    with open(fds.pop(0), "rb") as file:
        file.seek(0)
        packet = file.read(min(size_bytes, MAX_MESSAGE_BYTES))
    if len(packet) != size_bytes:
        raise RemoteProtocolError(f"{len(packet)} bytes in a file that is to hold {size_bytes}")
    return packet
