"""Packets on their way to the runtime, from whichever thread has one."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from moonpool.ipc.errors import Closed, PeerGone

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from moonpool.ipc.channel import Channel


class Outbox:
    """Any thread may call any method, and so may a destructor in the middle of another call.

    Whoever has the turn sends all that is there; whoever does not get it need not wait. Sending blocks while the
    runtime is behind with reading.
    """

    __slots__ = ("_channel", "_items", "_next_packet", "_on_gone", "_turn")

    def __init__(
        self,
        channel: Channel,
        on_gone: Callable[[], None],
        next_packet: Callable[[deque[Any]], bytes] = deque.popleft,
    ) -> None:
        """`next_packet` takes one item, or several that go together, and makes a packet of them.

        `on_gone` is called for each packet that finds nobody at the other end.
        """
        self._channel = channel
        self._on_gone = on_gone
        self._items: deque[Any] = deque()
        self._next_packet = next_packet
        self._turn = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Any) -> None:
        """Send this, behind what is there already."""
        self._items.append(item)
        # Whoever has the turn looks once more after giving it up, so nothing is left behind.
        while self._items and self._turn.acquire(blocking=False):
            try:
                while self._items:
                    self.send(self._next_packet(self._items))
            finally:
                self._turn.release()

    def send(self, packet: bytes) -> None:
        """Send a packet that need not wait for the others."""
        try:
            self._channel.send_waiting(packet)
        except (PeerGone, Closed):
            self._on_gone()

    def close(self) -> None:
        """Close the channel, whose other end is gone."""
        with self._turn:
            self._channel.close()
