"""One end of the channel between the shim and its launcher: whole messages, with their descriptors."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from moonpool.ipc.channel import MAX_PACKET_BYTES, Channel
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import Closed, PeerGone, RemoteProtocolError
from moonpool.runtime.triton.messages import MAX_MESSAGE_BYTES, Word, codec

if TYPE_CHECKING:
    from moonpool.runtime.triton.messages import End

_Letter = tuple[bytes, tuple[int, ...]]
# How many descriptors come with a message; with those that are not here, none.
_DESCRIPTORS = {int(Word.BORN): 5, int(Word.STARTED): 1, int(Word.SET_ASIDE): 1}


class Post:
    """Any thread may `tell`; one thread hears."""

    def __init__(self, channel: Channel, us: End) -> None:
        """Own the channel from now on."""
        self._channel = channel
        self._codec = codec(us)
        # Nobody who tells something waits until it is read.
        self._letters: SimpleQueue[_Letter | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="moonpool-post", daemon=True)
        self._sender.start()

    def tell(self, *message: object, fds: tuple[int, ...] = ()) -> None:
        """Send a message, soon and in order; never blocks. Owns the descriptors.

        Raises `LocalProtocolError` for what cannot travel.
        """
        packet = encode(*message)
        if len(packet) > MAX_PACKET_BYTES:
            fds = (_file_of(packet), *fds)
            packet = encode(Word.LONG, len(packet))
        self._letters.put((packet, fds))

    def _send(self) -> None:
        while (letter := self._letters.get()) is not None:
            packet, fds = letter
            with suppress(PeerGone, Closed):  # whoever hears sees the end
                self._channel.send_waiting_with(packet, fds)
            for fd in fds:
                os.close(fd)

    def hear(self) -> tuple[list[Any], list[int]]:
        """The next message, its word first, and the descriptors in it, which the caller owns; blocks.

        Raises `PeerGone`, `RemoteProtocolError`.
        """
        packet, fds = self._channel.receive_with_fds()
        try:
            fields = self._codec.decode(packet)
            if fields[0] == Word.LONG:
                fields = self._codec.decode_stored(_contents(fds, fields[1]))
                if fields[0] == Word.LONG:
                    raise RemoteProtocolError("LONG that stands for another one")
            if len(fds) != _DESCRIPTORS.get(fields[0], 0):
                raise RemoteProtocolError(f"{len(fds)} descriptors with {Word(fields[0]).name}")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fields, fds

    def wake(self) -> None:
        """Make whoever hears here see the end of the channel."""
        self._channel.wake()

    def close(self) -> None:
        """Send what was told, as far as the peer takes it, and close the channel."""
        self._letters.put(None)
        self._sender.join()
        self._channel.close()


def _file_of(packet: bytes) -> int:
    fd = os.memfd_create("moonpool-message", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(packet)
    return fd


def _contents(fds: list[int], size_bytes: int) -> bytes:
    """What lies in the first of the descriptors, which is taken out and closed."""
    if not fds:
        raise RemoteProtocolError("LONG without a file")
    with open(fds.pop(0), "rb") as file:
        file.seek(0)
        packet = file.read(min(size_bytes, MAX_MESSAGE_BYTES))
    if len(packet) != size_bytes:
        raise RemoteProtocolError(f"{len(packet)} bytes in a file that is to hold {size_bytes}")
    return packet
