"""The stub's end of the calls channel: any thread asks, and the runtime answers each in its own time.

Theory of operation. A hand-over between threads costs more than the trip to the runtime and back, so there is no
thread that reads for all. Of those who wait, one reads the socket, the *leader*; it puts what is for others
into their inboxes, and when it has its own it makes another one the leader. Only where coroutines wait is
there a thread that does nothing but lead, started with the first of them.

Sending takes no lock either: whoever has the turn sends what is there, so a destructor can say something as well.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.codec import calls_codec, encode
from moonpool.ipc.errors import PeerGone
from moonpool.ipc.messages import MAX_CALL_BYTES, MAX_PLACES_IN_PACKET, Kind, Side
from moonpool.stub import threads
from moonpool.stub.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from moonpool.ipc.channel import Channel
    from moonpool.stub.regions import Regions

_REPLY = int(Kind.REPLY)
_INDIRECT = int(Kind.INDIRECT)
_CANCEL_CALL = int(Kind.CANCEL_CALL)


def _end() -> None:
    """Whatever this thread is doing, there is nobody left to do it for."""
    os._exit(1)


class Call:
    """One question, and the answers to it as they come."""

    __slots__ = ("_bell", "inbox", "is_wanted", "keeps", "notify", "number", "withdrawal")

    def __init__(
        self, number: int, keeps: object, notify: Callable[[], None] | None = None
    ) -> None:
        """`keeps` lives as long as the call is open. `notify` is called for each answer, on any thread."""
        self.number = number
        self.keeps = keeps
        self.notify = notify
        self.inbox: deque[list[Any]] = deque()
        self.is_wanted = True
        # Made at once: a destructor may have to send it in the middle of another message's making.
        self.withdrawal = encode(Kind.WITHDRAW, number)
        self._bell = threading.Lock()
        self._bell.acquire()

    def ring(self) -> None:
        """Wake the thread that waits."""
        try:
            self._bell.release()
        except RuntimeError:  # it rings already
            return

    def sleep(self) -> None:
        """Wait for `ring`."""
        self._bell.acquire()


class Calls:
    """Any thread may call any method."""

    def __init__(self, channel: Channel, regions: Regions) -> None:
        self._channel = channel
        self._regions = regions
        self._codec = calls_codec(Side.STUB)
        self._numbers = itertools.count(1)
        self._open: dict[int, Call] = {}
        self._leading = threading.Lock()
        self._followers: dict[int, Call] = {}
        self._outbox = Outbox(channel, _end)
        self._starting = threading.Lock()
        self._has_listener = False
        # Places of blocks of replies, appended by whichever thread drops the last view of one.
        self.let_go: deque[Any] = deque()
        # Kept, because each look at a bound method makes another object of it.
        self.give_back = self.let_go.append

    # Asking

    def open(self, keeps: object = None, notify: Callable[[], None] | None = None) -> Call:
        """A call to be sent. With `notify` a thread reads for it, else whoever waits for the answer.

        Raises RuntimeError where that thread cannot be started.
        """
        if notify is not None and not self._has_listener:
            self._start_listener()
        call = Call(next(self._numbers), keeps, notify)
        self._open[call.number] = call
        return call

    def send(self, *message: Any) -> None:
        """Send a message; blocks while the runtime is behind with reading.

        Raises `LocalProtocolError` for what cannot travel, `OutOfMemory`.
        """
        packet = encode(*message)
        if len(packet) > MAX_PACKET_BYTES:
            is_load = message[0] == Kind.LOAD_MODEL
            packet = self._regions.indirect(packet, sys.maxsize if is_load else MAX_CALL_BYTES)
        self._outbox.put(packet)

    def cancel(self, call: Call) -> None:
        """Tell the other model that it may stop. Its answers come until it ends."""
        if self._open.get(call.number) is call:
            self.send(_CANCEL_CALL, call.number)

    def withdraw(self, call: Call) -> None:
        """Ask for no further answers than the one that says that there are none."""
        if self._open.get(call.number) is call:
            self._outbox.put(call.withdrawal)

    def abandon(self, call: Call) -> None:
        """Nobody looks at the answers any more. Also for destructors."""
        call.is_wanted = False
        self._discard(call)
        self.withdraw(call)

    def _discard(self, call: Call) -> None:
        inbox = call.inbox
        with contextlib.suppress(IndexError):  # another thread took the last one
            while inbox:
                fields = inbox.popleft()
                if fields[0] == _REPLY:
                    self.let_go.extend([(region, offset) for region, offset, _ in fields[4]])

    def disown(self) -> None:
        """This is a fork of the process that the channel belongs to: it must not touch it."""
        self._open.clear()
        self._channel.close()

    def forget(self, call: Call) -> None:
        """The call was not sent."""
        self._open.pop(call.number, None)

    def take_let_go(self) -> list[Any]:
        """The places of replies that the model let go of."""
        places = []
        try:
            while self.let_go:
                places.append(self.let_go.popleft())
        except IndexError:  # another thread took the last one
            return places
        return places

    def tidy(self) -> None:
        """Say what the model let go of, as no request says it by the way."""
        places = self.take_let_go()
        if places:
            self._regions.publish()
        for start in range(0, len(places), MAX_PLACES_IN_PACKET):
            self.send(Kind.LET_GO, places[start : start + MAX_PLACES_IN_PACKET])

    # Waiting

    def wait(self, call: Call) -> list[Any]:
        """The next answer to a call; blocks until it is there."""
        inbox, followers = call.inbox, self._followers
        # In this order, whoever stops leading finds everybody who does not lead.
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
        """Wake somebody, who leads now unless another one does."""
        others = list(self._followers.values())
        if others:  # one that was there may have left
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
        """Read a packet and put it where it belongs."""
        try:
            packet = self._channel.receive()
        except PeerGone:
            _end()
        try:
            self._take(packet)
        except MemoryError:  # the packet is lost, and somebody waits for it
            threads.end_process()

    def _take(self, packet: bytes) -> None:
        fields = self._codec.decode(packet)
        if fields[0] == _INDIRECT:
            place = (fields[1], fields[2])
            fields = self._codec.decode(self._regions.load(*fields[1:]))
            self.let_go.append(place)
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
        # In this order: whoever abandons it meanwhile may have looked before.
        if not call.is_wanted:
            self._discard(call)
            return
        notify = call.notify
        if notify is None:
            call.ring()
        else:
            call.notify = None
            notify()
