"""What is to be sent to a stub that may be behind with reading."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import Closed, PeerGone, RemoteProtocolError
from moonpool.ipc.messages import Kind
from moonpool.runtime.budgets import UNREAD_BYTES

if TYPE_CHECKING:
    from moonpool.ipc.channel import Channel
    from moonpool.runtime.loans import Loans
    from moonpool.runtime.reactor import Reactor


class Outbox:
    """Sends in order, from any thread; `flush` is for the reactor's, which watches the channel."""

    def __init__(self, channel: Channel, reactor: Reactor) -> None:
        self._channel = channel
        self._reactor = reactor
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0

    def send(self, message: tuple[Any, ...], loans: Loans) -> None:
        """Never blocks. What is too large for a packet is lent. Raises `OutOfMemory`."""
        packet = encode(*message)
        if len(packet) > MAX_PACKET_BYTES:
            block = loans.allocate(len(packet), keep=True)
            start = block.offset
            block.region.memory()[start : start + len(packet)] = packet
            packet = encode(Kind.INDIRECT, block.region.id, start, len(packet))
        with self._lock:
            if self._waiting:
                self._put(packet)
                return
            try:
                self._channel.send(packet)
            except BlockingIOError:
                self._put(packet)
                self._reactor.call_soon(self._watch)
            except (PeerGone, Closed):
                return  # its end is seen elsewhere

    @property
    def is_full(self) -> bool:
        """Whether nothing that can be done without should be sent."""
        return self._waiting_bytes >= UNREAD_BYTES

    def _put(self, packet: bytes) -> None:
        self._waiting.append(packet)
        self._waiting_bytes += len(packet)

    def _watch(self) -> None:
        self._reactor.watch_room(self._channel.fileno(), wanted=True)

    def flush(self) -> None:
        """Send what waits, as far as there is room. Raises `PeerGone`, `RemoteProtocolError`."""
        if not self._waiting:
            return
        if self._waiting_bytes > 2 * UNREAD_BYTES:
            raise RemoteProtocolError(f"the stub leaves {self._waiting_bytes} bytes unread")
        with self._lock:
            while self._waiting:
                try:
                    self._channel.send(self._waiting[0])
                except BlockingIOError:
                    return
                self._waiting_bytes -= len(self._waiting.popleft())
        self._reactor.watch_room(self._channel.fileno(), wanted=False)
