"""Sends packets to the runtime, from any thread and in order, without making a thread wait for another one.

Theory of operation. `put` appends to a deque, which needs no lock, and then tries to take the turn without blocking. The thread that gets the turn
sends all packets that are there. The others return at once: their packets are sent by the thread that has the turn. After
giving up the turn that thread looks at the deque once more, so a packet that came in between is not left behind. Since
no thread ever blocks for the turn, a destructor may put a packet in the middle of another `put` of the same thread.

A send blocks while the runtime is behind with reading, and so does the thread that has the turn. `close` takes the turn with
blocking, so that no thread is still sending when the descriptor goes away; the peer is gone then, and no send blocks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import Closed, PeerGone


class SendQueue:
    """Queues packets for one channel. Any thread may call any method, and so may a destructor during another call."""

    __slots__ = ("_channel", "_items", "_next_packet", "_on_gone", "_turn")

    def __init__(
        self,
        channel: Channel,
        on_gone: Callable[[], None],
        next_packet: Callable[[deque[Any]], bytes] = deque.popleft,
    ) -> None:
        """Take `next_packet`, which removes one item or several from the queue and makes a packet of them.

        `on_gone` is called for each packet that cannot be sent because the peer is gone.
        """
        self._channel = channel
        self._on_gone = on_gone
        self._items: deque[Any] = deque()
        self._next_packet = next_packet
        self._turn = threading.Lock()

    @property
    def items(self) -> deque[Any]:
        """The items that wait for their turn."""
        return self._items

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Any) -> None:
        """Send an item, after those that are queued already."""
        self._items.append(item)
        # The loop looks again after giving up the turn: an item that came meanwhile must not stay behind.
        while self._items and self._turn.acquire(blocking=False):
            try:
                while self._items:
                    self.send(self._next_packet(self._items))
            finally:
                self._turn.release()

    def send(self, packet: bytes) -> None:
        """Send a packet at once, past the queue."""
        try:
            self._channel.send_waiting(packet)
        except (PeerGone, Closed):
            self._on_gone()

    def close(self) -> None:
        """Close the channel after the peer is gone."""
        with self._turn:
            self._channel.close()
