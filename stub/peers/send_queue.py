"""Sends packets to the runtime, from any thread and in order, without making a thread wait for another one.

Theory of operation. `put` appends to a deque, which needs no lock, and then tries to take the turn without blocking.
The thread that gets the turn sends all packets that are there. The others return at once: their packets are sent by the
thread that has the turn. After giving up the turn that thread looks at the deque once more, so a packet that came in
between is not left behind. Since no thread ever blocks for the turn, a destructor may put a packet in the middle of
another `put` of the same thread.

A signal handler may raise anywhere in `put`, above all while the socket is full. An item stays in the deque until its
packet is sent (`Channel.send_first`). The turn is noted in the call that takes it, so it is given up in any case.
Other threads may have left their packets to the one that was interrupted, and may wait for the answers: so it sends
what is left before it raises. If it is interrupted again, the next `put` does. What a caller has to remember of a
message that is certain to be sent, it notes at once with the item's coming into the queue. The first of these steps
may find out that the message must not be sent any more (`signals.replacing`): then there is neither.

A send blocks while the runtime is behind with reading, and so does the thread that has the turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.errors import Closed, PeerGone
from moonpool.ipc.signals import at_once
from moonpool.stub import threads

# The argument of `acquire` for a lock that is not waited for.
_AT_ONCE = (False,)


class SendQueue:
    """Queues packets for one channel. Any thread may call any method, and so may a destructor during another call."""

    __slots__ = ("_channel", "_items", "_on_gone", "_packet_of", "_take_turn", "_turn")

    def __init__(
        self,
        channel: Channel,
        on_gone: Callable[[], None],
        packet_of: Callable[[deque[Any]], tuple[bytes, int]] | None = None,
    ) -> None:
        """Take `packet_of`, which returns a packet and the number of items at the head of the queue that it is made of.

        By default the items are packets. `on_gone` is called for each packet that cannot be sent because the runtime is
        gone.
        """
        self._channel = channel
        self._on_gone = on_gone
        self._items: deque[Any] = deque()
        self._packet_of = packet_of
        self._turn = threads.Lock()
        self._take_turn = self._turn.acquire

    @property
    def items(self) -> deque[Any]:
        """The items that wait for their turn."""
        return self._items

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Any, *steps: Callable[[], object]) -> None:
        """Send an item, after those that are queued already.

        `steps`, functions of C, are taken right before it comes into the queue, at once with that.
        """
        try:
            if steps:
                at_once(*steps, partial(self._items.append, item))
            else:
                self._items.append(item)
            self._send_all()
        except BaseException:
            self._send_all()
            raise

    def flush(self) -> None:
        """Send the items that are queued, also where a signal handler raises meanwhile."""
        try:
            self._send_all()
        except BaseException:
            self._send_all()
            raise

    def _send_all(self) -> None:
        items = self._items
        # The loop looks again after giving up the turn: an item that came meanwhile must not stay behind.
        while items:
            has_turn: list[bool] = []
            try:
                # One call into C takes the turn and notes it: no signal handler runs in between.
                has_turn.extend(map(self._take_turn, _AT_ONCE))
                if not has_turn[0]:
                    return
                while items:
                    self._send_first()
            finally:
                if has_turn and has_turn[0]:
                    self._turn.release()

    def _send_first(self) -> None:
        items = self._items
        packet, count = (items[0], 1) if self._packet_of is None else self._packet_of(items)
        try:
            self._channel.send_first(items, count, packet)
        except (PeerGone, Closed):
            for _ in range(count):
                items.popleft()
            self._on_gone()

    def send(self, packet: bytes) -> None:
        """Send a packet at once, past the queue."""
        try:
            self._channel.send_waiting(packet)
        except (PeerGone, Closed):
            self._on_gone()
