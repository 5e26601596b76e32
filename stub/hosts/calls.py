"""Runs the stub's end of the calls channel: any thread asks, and the runtime answers the calls in any order.

Theory of operation. A hand-over between threads costs more than the trip to the runtime and back, so no thread reads for all. Among
the threads that wait, one reads the socket: the *leader*, which holds `_leading`. It puts the answers for others into their inboxes
and rings their bells. When it has its own answer, it gives up `_leading` and wakes one follower, which becomes the leader.

A thread registers as a follower before it tries to lead. A leader stops leading before it looks for followers. So a thread
that failed to become the leader is either found by the old leader, or another leader serves it; nobody sleeps while
the socket has no reader. A bell that rings twice stays rung once, and a thread that wakes without an answer tries to lead again.

Coroutines must not block, so the first of their calls starts the thread `moonpool-calls`, which takes `_leading` and keeps it for good.
From then on all others are followers.

Sending takes no lock that blocks (`send_queue.py`), so destructors may send, too. `abandon` may run in a destructor in the middle
of anything. It sets `is_wanted` before it empties the inbox, and `_take` fills the inbox before it looks at `is_wanted`: one of the
two gives back the blocks of each answer. A WITHDRAW is encoded when the call is made, as the destructor may
interrupt the encoder.

If the runtime is gone, the process ends. If memory runs out while an answer is read, some thread would wait for the lost answer
for ever, so the process ends, too. In a process that the model forked, `disown` closes the channel.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from moonpool.ipc.channel import MAX_PACKET_BYTES, Channel
from moonpool.ipc.codec import calls_codec, encode
from moonpool.ipc.errors import PeerGone
from moonpool.ipc.messages import MAX_CALL_BYTES, MAX_PLACES_IN_PACKET, Kind, Side
from moonpool.stub import threads
from moonpool.stub.peers.regions import Regions
from moonpool.stub.peers.send_queue import SendQueue

_REPLY = int(Kind.REPLY)
_INDIRECT = int(Kind.INDIRECT)
_CANCEL_CALL = int(Kind.CANCEL_CALL)


def _end() -> None:
    """End the process: the runtime is gone, and nobody is left to work for."""
    os._exit(1)


class Call:
    """Holds one call and its answers as they come."""

    __slots__ = ("_bell", "inbox", "is_wanted", "keeps", "notify", "number", "withdrawal")

    def __init__(
        self, number: int, keeps: object, notify: Callable[[], None] | None = None
    ) -> None:
        """Keep `keeps` alive while the call is open. `notify` is called once, when the next answer comes, on any thread."""
        self.number = number
        self.keeps = keeps
        self.notify = notify
        self.inbox: deque[list[Any]] = deque()
        self.is_wanted = True
        # Encoded now: the destructor that sends it may interrupt the encoder.
        self.withdrawal = encode(Kind.WITHDRAW, number)
        self._bell = threading.Lock()
        self._bell.acquire()

    def ring(self) -> None:
        """Wake the thread that waits."""
        try:
            self._bell.release()
        except RuntimeError:  # the bell rings already
            return

    def sleep(self) -> None:
        """Wait for `ring`."""
        self._bell.acquire()


class Calls:
    """Asks the runtime, and waits for its answers. Any thread may call any method."""

    def __init__(self, channel: Channel, regions: Regions) -> None:
        self._channel = channel
        self._regions = regions
        self._codec = calls_codec(Side.STUB)
        self._numbers = itertools.count(1)
        self._open: dict[int, Call] = {}
        self._leading = threading.Lock()
        self._followers: dict[int, Call] = {}
        self._send_queue = SendQueue(channel, _end)
        self._starting = threading.Lock()
        self._has_listener = False
        # Places of blocks of replies. The thread that drops the last view of a block appends its place.
        self.released: deque[Any] = deque()
        # One object for all leases: each access to a bound method would make another one.
        self.give_back = self.released.append

    # Asking

    def open(self, keeps: object = None, notify: Callable[[], None] | None = None) -> Call:
        """Open a call, which the caller sends then. With `notify`, the thread `moonpool-calls` reads the answers.

        Raises RuntimeError if that thread cannot be started.
        """
        if notify is not None and not self._has_listener:
            self._start_listener()
        call = Call(next(self._numbers), keeps, notify)
        self._open[call.number] = call
        return call

    def send(self, *message: Any) -> None:
        """Send a message; blocks while the runtime is behind with reading.

        Raises `LocalProtocolError` for fields that cannot travel, and `OutOfMemory`.
        """
        packet = encode(*message)
        if len(packet) > MAX_PACKET_BYTES:
            is_load = message[0] == Kind.LOAD_MODEL
            packet = self._regions.indirect(packet, sys.maxsize if is_load else MAX_CALL_BYTES)
        self._send_queue.put(packet)

    def cancel(self, call: Call) -> None:
        """Let the other model know that it may stop. Its answers come until it ends."""
        if self._open.get(call.number) is call:
            self.send(_CANCEL_CALL, call.number)

    def withdraw(self, call: Call) -> None:
        """Ask the runtime for no further answers but the last, empty one."""
        if self._open.get(call.number) is call:
            self._send_queue.put(call.withdrawal)

    def abandon(self, call: Call) -> None:
        """Give up a call: its answers are dropped. Destructors may call this."""
        call.is_wanted = False
        self._discard(call)
        self.withdraw(call)

    def _discard(self, call: Call) -> None:
        inbox = call.inbox
        with contextlib.suppress(IndexError):  # another thread took the last one
            while inbox:
                fields = inbox.popleft()
                if fields[0] == _REPLY:
                    self.released.extend([(region, offset) for region, offset, _ in fields[4]])

    def disown(self) -> None:
        """Close the channel in a process that the model forked: it belongs to the parent."""
        self._open.clear()
        self._channel.close()

    def forget(self, call: Call) -> None:
        """Remove a call that was not sent."""
        self._open.pop(call.number, None)

    def take_released(self) -> list[Any]:
        """Return the places of the blocks of replies that the model has released."""
        places = []
        try:
            while self.released:
                places.append(self.released.popleft())
        except IndexError:  # another thread took the last one
            return places
        return places

    def tidy(self) -> None:
        """Report the blocks that the model has released, since no call reports them on its way."""
        places = self.take_released()
        if places:
            self._regions.publish()
        for start in range(0, len(places), MAX_PLACES_IN_PACKET):
            self.send(Kind.LET_GO, places[start : start + MAX_PLACES_IN_PACKET])

    # Waiting

    def wait(self, call: Call) -> list[Any]:
        """Return the next answer to a call; blocks until it is there."""
        inbox, followers = call.inbox, self._followers
        # Before the attempt to lead: a thread that stops leading must find all threads that wait.
        followers[call.number] = call
        try:
            while not inbox:
                if self._leading.acquire(blocking=False):
                    try:
                        while not inbox:
                            self._receive()
                    finally:
                        self._leading.release()
                else:
                    call.sleep()
        finally:
            del followers[call.number]
            if followers:
                self._appoint()
        return inbox.popleft()

    def _appoint(self) -> None:
        """Wake a follower, which becomes the leader unless another thread has."""
        others = list(self._followers.values())
        if others:  # the last one may have left
            others[0].ring()

    def _start_listener(self) -> None:
        with self._starting:
            if not self._has_listener:
                threads.start(self._listen, "moonpool-calls")
                self._has_listener = True

    def _listen(self) -> None:
        with self._leading:
            while True:
                self._receive()

    def _receive(self) -> None:
        """Read a packet and put it into the inbox of its call."""
        try:
            packet = self._channel.receive()
        except PeerGone:
            _end()
        try:
            self._take(packet)
        except MemoryError:  # the packet is lost, and a thread waits for it
            threads.end_process()

    def _take(self, packet: bytes) -> None:
        fields = self._codec.decode(packet)
        if fields[0] == _INDIRECT:
            place = (fields[1], fields[2])
            fields = self._codec.decode(self._regions.load(*fields[1:]))
            self.released.append(place)
        is_last = True
        if fields[0] == _REPLY:
            is_last = fields[2]
            if fields[3]:
                self._regions.returned.extend(map(tuple, fields[3]))
        call = self._open.pop(fields[1], None) if is_last else self._open.get(fields[1])
        if call is None:
            return
        if is_last:
            call.keeps = None
        call.inbox.append(fields)
        # After the append: `abandon` may have emptied the inbox before it.
        if not call.is_wanted:
            self._discard(call)
            return
        notify = call.notify
        if notify is None:
            call.ring()
        else:
            call.notify = None
            notify()
