"""The stub's end of the control channel: a thread that listens, and sending for everybody."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.codec import control_codec, encode
from moonpool.ipc.errors import PeerGone, RemoteProtocolError
from moonpool.ipc.messages import Kind, Side

if TYPE_CHECKING:
    from typing import Any

    from moonpool.ipc.channel import Channel
    from moonpool.stub.regions import Regions


class Control:
    """Sends from any thread; what arrives is handled on a thread of its own."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._codec = control_codec(Side.STUB)

    def send(self, *message: Any) -> None:
        """Send a control message; blocks while the runtime is behind with reading."""
        packet = encode(*message)
        if len(packet) > MAX_PACKET_BYTES:
            raise ValueError(
                f"{Kind(message[0]).name} of {len(packet)} bytes does not fit a packet"
            )
        with self._sending:
            self._channel.send_waiting(packet)

    def log(self, level: int, message: str, file: str, line: int) -> None:
        """A log line for the runtime; long ones are cut."""
        clean = message[:8192].encode("utf-8", "replace").decode()
        try:
            self.send(Kind.LOG, level, clean, file[-1024:], line)
        except PeerGone:
            os._exit(1)

    def listen(self, regions: Regions) -> None:
        """Start handling what arrives, until the process ends."""
        threading.Thread(
            target=self._listen, args=(regions,), name="moonpool-control", daemon=True
        ).start()

    def _listen(self, regions: Regions) -> None:
        try:
            while True:
                packet, fds = self._channel.receive_with_fds()
                self._handle(self._codec.decode(packet), fds, regions)
        except PeerGone:
            # Whatever the main thread is doing, there is nobody left to do it for.
            os._exit(1)

    def _handle(self, fields: list[Any], fds: list[int], regions: Regions) -> None:
        kind = fields[0]
        if kind == Kind.REGION:
            regions.arrive(fields[1], fields[2], fds[0], fields[3])
        elif kind == Kind.REFUSED:
            regions.refuse(fields[1])
        elif kind == Kind.RELEASE:
            regions.returned.extend(map(tuple, fields[1]))
        elif kind == Kind.RETIRE:
            regions.forget(fields[1])
        else:
            raise RemoteProtocolError(f"{Kind(kind).name} came after the handshake")
