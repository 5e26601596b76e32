"""What is to be sent to a stub that may be behind with reading."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.codec import encode
from moonpool.ipc.errors import Closed, PeerGone
from moonpool.ipc.messages import Kind

if TYPE_CHECKING:
    from moonpool.ipc.channel import Channel
    from moonpool.runtime.loans import Loans
    from moonpool.runtime.reactor import Reactor

# What a stub may leave unread: its model asked for all of it, but need not have the time to look at it.
_MAX_WAITING = 65536


class Outbox:
    """Sends in order, from any thread; `flush` is for the reactor's, which watches the channel."""

    def __init__(self, channel: Channel, reactor: Reactor) -> None:
        self._channel = channel
        self._reactor = reactor
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()

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
                self._waiting.append(packet)
                return
            try:
                self._channel.send(packet)
            except BlockingIOError:
                self._waiting.append(packet)
                self._reactor.call_soon(self._watch)
            except (PeerGone, Closed):
                return  # its end is seen elsewhere

    @property
    def is_full(self) -> bool:
        """Whether nothing that can be done without should be sent."""
        return len(self._waiting) >= _MAX_WAITING

    def _watch(self) -> None:
        self._reactor.watch_room(self._channel.fileno(), wanted=True)

    def flush(self) -> None:
        """Send what waits, as far as there is room. Raises `PeerGone`."""
        if not self._waiting:
            return
        with self._lock:
            while self._waiting:
                try:
                    self._channel.send(self._waiting[0])
                except BlockingIOError:
                    return
                self._waiting.popleft()
        self._reactor.watch_room(self._channel.fileno(), wanted=False)
