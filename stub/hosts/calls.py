"""Runs the stub's end of the calls channel: any thread asks, and the runtime answers the calls in any order.

Theory of operation. A hand-over between threads costs more than the trip to the runtime and back, so no thread reads for all. Among
the threads that wait, one reads the socket: the *leader*, which holds `_leading`. It puts the answers for others into their inboxes
and rings their bells. When it has its own answer, it gives up `_leading` and wakes one follower, which becomes the leader.

A thread that cannot lead at once registers as a follower, and tries again before it sleeps. A leader stops leading before it looks for
followers. So a thread that failed twice is either found by the old leader, or another leader serves it; nobody sleeps while
the socket has no reader. A follower has its bell before it looks into its inbox, and the leader fills the inbox before it looks for the
bell: one of the two sees the other. A bell that rings twice stays rung once, and a thread that wakes without an answer tries to lead
again.

Coroutines must not block, so the first of their calls starts the thread `moonpool-calls`, which takes `_leading` and keeps it for good.
From then on all others are followers.

A collection of garbage may run a destructor of the model's on a thread that leads, in the middle of a packet, and a signal handler may
interrupt it. If they asked and waited for an answer, no thread would read it. So `_leading` knows its thread, which gets an error if it asks there.

Sending takes no lock that blocks (`send_queue.py`), so destructors may send, too. `abandon` may run in a destructor in the middle
of anything. It sets `is_wanted` before it empties the inbox, and `_take` fills the inbox before it looks at `is_wanted`: one of the
two gives back the blocks of each answer. A destructor may interrupt the encoder, so a call that a destructor may abandon has its WITHDRAW
encoded before (`prepare`).

Most replies differ from earlier ones in nothing but numbers and blocks. `_replies` knows them by their bytes, and the leader,
which alone uses it, then has their outputs as they were read the first time. Where moonpool is compiled, the usual call takes its whole way in
C++, as a leader without a `Call`; what is not usual about it comes here (`adopt`).

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
from moonpool.ipc.codec import KnownCalls, calls_codec, encode
from moonpool.ipc.errors import PeerGone
from moonpool.ipc.messages import MAX_CALL_BYTES, MAX_PLACES_IN_PACKET, Kind, Side
from moonpool.stub import threads
from moonpool.stub.hosts.call_tensors import CallOutput, prepared
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.peers.regions import Regions
from moonpool.stub.peers.send_queue import SendQueue

_REPLY = int(Kind.REPLY)
_INDIRECT = int(Kind.INDIRECT)
_CANCEL_CALL = int(Kind.CANCEL_CALL)
_WITHDRAW = int(Kind.WITHDRAW)


def _end() -> None:
    """End the process: the runtime is gone, and nobody is left to work for."""
    os._exit(1)


class Call:
    """Holds one call and its answers as they come."""

    __slots__ = ("bell", "inbox", "is_sent", "is_wanted", "keeps", "notify", "number", "withdrawal")

    def __init__(
        self, number: int, keeps: object, notify: Callable[[], None] | None = None
    ) -> None:
        """Keep `keeps` alive while the call is open. `notify` is called once, when the next answer comes, on any thread."""
        self.number = number
        self.keeps = keeps
        self.notify = notify
        self.inbox: deque[list[Any]] = deque()
        self.is_wanted = True
        # True from the moment at which the runtime may know the call.
        self.is_sent = False
        # The packet of WITHDRAW, once it is encoded.
        self.withdrawal = b""
        # None until a thread has to sleep.
        self.bell: threading.Lock | None = None

    def prepare(self) -> None:
        """Encode WITHDRAW, so that a destructor may abandon the call."""
        self.withdrawal = encode(_WITHDRAW, self.number)

    def ring(self) -> None:
        """Wake the thread that waits, if one does."""
        if self.bell is not None:
            try:
                self.bell.release()
            except RuntimeError:  # the bell rings already
                return

    def sleep(self) -> None:
        """Wait for `ring`, or for an answer that came before this thread had a bell. One thread at a time."""
        if self.bell is None:
            bell = threading.Lock()
            bell.acquire()
            self.bell = bell
        # After the bell: an answer that comes from here on rings it.
        if not self.inbox:
            self.bell.acquire()


class Calls:
    """Asks the runtime, and waits for its answers. Any thread may call any method."""

    def __init__(self, channel: Channel, regions: Regions) -> None:
        self._channel = channel
        self._regions = regions
        self._codec = calls_codec(Side.STUB)
        # The flag `final` and the outputs of replies that have come before.
        self._replies: KnownCalls[tuple[bool, list[CallOutput]]] = KnownCalls(Kind.REPLY)
        self._numbers = itertools.count(1)
        self._open: dict[int, Call] = {}
        self._leading = threading.RLock()
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

        Raises RuntimeError if that thread cannot be started, and `TritonModelException` if this thread may not wait.
        """
        if notify is None:
            self._check_may_wait()
        elif not self._has_listener:
            self._start_listener()
        call = Call(next(self._numbers), keeps, notify)
        self._open[call.number] = call
        return call

    def adopt(self, number: int, keeps: object) -> Call:
        """Take over a call that a compiled form has sent, or is about to send, as the leader."""
        call = self._open[number] = Call(number, keeps)
        call.is_sent = True
        return call

    def parts(self) -> dict[str, object]:
        """Return the objects with which the compiled form (`_usual_calls.cpp`) works."""
        channel, queue = self._channel, self._send_queue
        return {
            "numbers": self._numbers,
            "leads": self._leading._is_owned,  # type: ignore[attr-defined]
            "lead": self._leading.acquire,
            "stop_leading": self._leading.release,
            "followers": self._followers,
            "appoint": self._appoint,
            "adopt": self.adopt,
            "abandon": self.abandon,
            "send": queue.put,
            "queued": queue.items,
            "fileno": channel.fileno,
            "inbox": channel.inbox,
            "store": channel.inbox.append,
            "replies": self._replies,
            "released": self.released,
            "take_released": self.released.popleft,
            "give_back": self.give_back,
        }

    def send(self, *message: Any) -> None:
        """Send a message; blocks while the runtime is behind with reading.

        Raises `LocalProtocolError` for fields that cannot travel, and `OutOfMemory`.
        """
        self._send_queue.put(self._packet(*message))

    def begin(self, call: Call, kind: int, *fields: Any) -> None:
        """Send the message of a call. Blocks and raises as `send`."""
        packet = self._packet(kind, call.number, *fields)
        # Before it is sent: a signal handler may raise right after.
        call.is_sent = True
        self._send_queue.put(packet)

    def _packet(self, *message: Any) -> bytes:
        packet = encode(*message)
        if len(packet) > MAX_PACKET_BYTES:
            is_load = message[0] == Kind.LOAD_MODEL
            packet = self._regions.indirect(packet, sys.maxsize if is_load else MAX_CALL_BYTES)
        return packet

    def cancel(self, call: Call) -> None:
        """Let the other model know that it may stop. Its answers come until it ends."""
        if self._open.get(call.number) is call:
            self.send(_CANCEL_CALL, call.number)

    def withdraw(self, call: Call) -> None:
        """Ask the runtime for no further answers but the last, empty one."""
        if self._open.get(call.number) is call:
            self._send_queue.put(call.withdrawal or encode(_WITHDRAW, call.number))

    def abandon(self, call: Call) -> None:
        """Give up a call: its answers are dropped. Destructors may call this."""
        if not call.is_sent:
            self.forget(call)
            return
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
        places: list[Any] = []
        if not self.released:
            return places
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
        """Return the next answer to a call; blocks until it is there. Raises `TritonModelException` if this thread may not wait."""
        self._check_may_wait()
        inbox = call.inbox
        if self._leading.acquire(blocking=False):
            try:
                while not inbox:
                    self._receive()
            finally:
                self._leading.release()
                if self._followers:
                    self._appoint()
        else:
            self._follow(call)
        return inbox.popleft()

    def _check_may_wait(self) -> None:
        if self._leading._is_owned():  # type: ignore[attr-defined]
            raise TritonModelException(
                "a destructor or a signal handler cannot ask while its thread waits for the answer to another question"
            )

    def _follow(self, call: Call) -> None:
        """Wait until the leader has brought an answer, or lead when it stops."""
        inbox, followers = call.inbox, self._followers
        # Before the second attempt to lead: a thread that stops leading must find all threads that wait.
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
        known = self._replies.find(packet)
        if known is not None:
            number, released, blocks, (is_last, outputs) = known
            fields: list[Any] = [_REPLY, number, is_last, released, blocks, outputs, None, None]
        else:
            fields = self._read(packet)
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

    def _read(self, packet: bytes) -> list[Any]:
        """Decode an answer, with the outputs of a reply as `read_outputs` takes them."""
        fields = self._codec.decode(packet)
        kind = fields[0]
        if kind == _INDIRECT:
            place = (fields[1], fields[2])
            fields = self._codec.decode(self._regions.load(*fields[1:]))
            self.released.append(place)
        if fields[0] == _REPLY:
            outputs = prepared(fields[5])
            if kind == _REPLY and fields[6] is None and fields[7] is None:
                self._replies.learn(packet, fields, (fields[2], outputs))
            fields[5] = outputs
        return fields
