"""Runs the stub's end of the calls channel: any thread asks, and the runtime answers the calls in any order.

Theory of operation. A hand-over between threads costs more than the trip to the runtime and back, so no thread reads
for all. Among the threads that wait, one reads the socket: the *leader*, which holds `_leading`. It puts the answers
for others into their inboxes and rings their bells. When it has its own answer, it gives up `_leading` and wakes one
follower, which becomes the leader.

A thread that cannot lead at once makes its bell, registers as a follower, and tries again before it sleeps. A leader
stops leading before it looks for followers. So a thread that failed twice is either found by the old leader, or another
leader serves it; nobody sleeps while the socket has no reader. A follower has its bell before it looks into its inbox,
and the leader fills the inbox before it looks for the bell: one of the two sees the other. A bell that rings twice
stays rung once, and a thread that wakes without an answer tries to lead again.

A signal handler of the model's may raise anywhere in this code on the main thread, and nobody's answer may be lost
then. So a step that takes something away puts it into its next place in the same call into C (`at_once`). A packet
stays in the channel's inbox until its answer is in the inbox of its call, an answer stays there until it is a response
(`StubHost._response`), and INFER comes into the queue as its call becomes one that is open. Whoever led gives
`_leading` back and wakes a follower, however it ended; a step that an exception may have left out is taken again, as to
wake a thread twice does no harm.

Coroutines must not block, so the first of their calls starts the thread `moonpool-calls`, which takes `_leading` and
keeps it for good. From then on all others are followers.

A collection of garbage may run a destructor of the model's on a thread that leads, in the middle of a packet, and a
signal handler may interrupt it. If they asked and waited for an answer, no thread would read it. So `_leading` knows
its thread, which gets an error if it asks there.

Sending takes no lock that blocks (`send_queue.py`), so destructors may send, too. `abandon` may run in a destructor in
the middle of anything. It sets `is_wanted` before it empties the inbox, and `_take` fills the inbox before it looks at
`is_wanted`: one of the two gives back the blocks of each answer. A destructor may interrupt the encoder, so a call that
a destructor may abandon has its WITHDRAW encoded before (`prepare`).

Where moonpool is compiled, the usual call takes its whole way there (`_stub_calls.pyx`), as a leader without a `Call`.
What is not usual about it comes here, with a `Call` that the asker makes.

If the runtime is gone, the process ends. In a process that the model forked, `disown` closes the channel.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from moonpool.ipc.arena import Block
from moonpool.ipc.channel import MAX_PACKET_BYTES, Channel
from moonpool.ipc.codec import calls_codec, encode
from moonpool.ipc.errors import MoonpoolError, PeerGone
from moonpool.ipc.messages import MAX_CALL_BYTES, MAX_PLACES_IN_PACKET, Kind, Side
from moonpool.ipc.signals import at_once
from moonpool.stub import threads
from moonpool.stub.hosts.call_tensors import prepared
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.peers.regions import Regions
from moonpool.stub.peers.send_queue import SendQueue

_REPLY = int(Kind.REPLY)
_INDIRECT = int(Kind.INDIRECT)
_CANCEL_CALL = int(Kind.CANCEL_CALL)
_WITHDRAW = int(Kind.WITHDRAW)
# The last field of an answer in an inbox: the places of its blocks.
_places_of = operator.itemgetter(-1)
# The argument of `acquire` for a lock that is not waited for.
_AT_ONCE = (False,)


def _end() -> None:
    """End the process: the runtime is gone, and nobody is left to work for."""
    os._exit(1)


class Call:
    """Holds one call and its answers as they come."""

    __slots__ = ("bell", "inbox", "is_sent", "is_wanted", "keeps", "notify", "number", "withdrawal")

    def __init__(self, number: int, keeps: object, notify: Callable[[], None] | None = None) -> None:
        """Keep `keeps` alive while the call is open. `notify` is called once, when the next answer comes, on any
        thread.
        """
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

    def make_bell(self) -> threading.Lock:
        """Return the bell that `ring` rings. An answer that came before it is in the inbox."""
        if self.bell is None:
            bell = threads.Lock()
            bell.acquire()
            self.bell = bell
        return self.bell


class Calls:
    """Asks the runtime, and waits for its answers. Any thread may call any method."""

    # `threads` says why this lock is not in the dictionary.
    __slots__ = ("__dict__", "__weakref__", "_leading")

    def __init__(self, channel: Channel, regions: Regions) -> None:
        self._channel = channel
        self._regions = regions
        self._codec = calls_codec(Side.STUB)
        self._numbers = itertools.count(1)
        self._open: dict[int, Call] = {}
        self._leading = threads.RLock()
        self._try_to_lead = self._leading.acquire
        self._followers: dict[int, Call] = {}
        self._send_queue = SendQueue(channel, _end)
        self._starting = threads.Lock()
        self._has_listener = False
        # Places of blocks of replies. The thread that drops the last view of a block appends its place.
        self.released: deque[Any] = deque()
        # One object for all leases: each access to a bound method would make another one.
        self.give_back = self.released.append

    # Asking

    def open(self, keeps: object = None, notify: Callable[[], None] | None = None) -> Call:
        """Return a call, which is open from `begin` on. With `notify`, the thread `moonpool-calls` reads the answers.

        Raises RuntimeError if that thread cannot be started, and `TritonModelException` if this thread may not wait.
        """
        if notify is None:
            self._check_may_wait()
        elif not self._has_listener:
            self._start_listener()
        return Call(next(self._numbers), keeps, notify)

    def send(self, *message: Any) -> None:
        """Send a message; blocks while the runtime is behind with reading.

        Raises `LocalProtocolError` for fields that cannot travel, and `OutOfMemory`.
        """
        self._put(message)

    def begin(self, call: Call, kind: int, *fields: Any) -> None:
        """Send the message of a call, which is open then. Blocks and raises as `send`."""
        self._put(
            (kind, call.number, *fields),
            partial(self._open.__setitem__, call.number, call),
            partial(setattr, call, "is_sent", True),
        )

    def flush(self) -> None:
        """Send what a compiled form has queued."""
        self._send_queue.flush()

    def _put(self, message: tuple[Any, ...], *steps: Callable[[], object]) -> None:
        packet = encode(*message)
        if len(packet) <= MAX_PACKET_BYTES:
            self._send_queue.put(packet, *steps)
            return
        most_bytes = sys.maxsize if message[0] == Kind.LOAD_MODEL else MAX_CALL_BYTES
        taken: list[Block] = []
        try:
            packet = self._regions.indirect(packet, most_bytes, taken)
            self._send_queue.put(packet, *steps, taken.clear)
        finally:
            if taken:  # it was not queued
                self._regions.take_back(taken)

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
            return
        call.is_wanted = False
        self._discard(call)
        self.withdraw(call)

    def _discard(self, call: Call) -> None:
        inbox = call.inbox
        with contextlib.suppress(IndexError):  # another thread took the last one
            while inbox:
                # One call into C: the places of an answer are in its fields or released.
                taken = map(deque.popleft, (inbox,))
                self.released.extend(itertools.chain.from_iterable(map(_places_of, taken)))

    def disown(self) -> None:
        """Close the channel in a process that the model forked: it belongs to the parent."""
        self._open.clear()
        self._channel.close()

    def take_released(self, taken: list[Any] | None = None) -> list[Any]:
        """Return the places of the blocks of replies that the model has released, in `taken` if that is given."""
        places: list[Any] = [] if taken is None else taken
        if self.released:
            with contextlib.suppress(IndexError):  # another thread took the last one
                places.extend(map(deque.popleft, (self.released,) * len(self.released)))
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
        """Block until the next answer to a call is in its inbox, and return it, but leave it there.

        Its fields are those of the message, and the places of the blocks in it.

        Raises `TritonModelException` if this thread may not wait.
        """
        self._check_may_wait()
        try:
            if not self._lead(call):
                self._follow(call)
        finally:
            if self._followers:
                try:
                    self._appoint()
                except BaseException:
                    self._appoint()
                    raise
        return call.inbox[0]

    def _lead(self, call: Call) -> bool:
        """Read packets until a call has its answer. Returns False if another thread leads."""
        inbox = call.inbox
        leads: list[bool] = []
        try:
            # One call into C takes the lock and notes it: no signal handler runs in between.
            leads.extend(map(self._try_to_lead, _AT_ONCE))
            while leads[0] and not inbox:
                self._receive()
            return leads[0]
        finally:
            if leads and leads[0]:
                self._leading.release()

    def _check_may_wait(self) -> None:
        if self._leading._is_owned():  # type: ignore[attr-defined]
            raise TritonModelException(
                "a destructor or a signal handler cannot ask while its thread waits for the answer to another question"
            )

    def _follow(self, call: Call) -> None:
        """Wait until the leader has brought an answer, or lead when it stops."""
        inbox, bell = call.inbox, call.make_bell()
        try:
            # Before the second attempt to lead: a thread that stops leading must find all threads that wait.
            self._followers[call.number] = call
            while not inbox:
                if not self._lead(call) and not inbox:
                    bell.acquire()
        finally:
            self._followers.pop(call.number, None)

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
            self._channel.wait()
            packet = self._channel.first()
        except PeerGone:
            _end()
        self._take(packet)

    def _take(self, packet: bytes) -> None:
        """Take the packet at the head of the channel's inbox."""
        steps: list[Callable[[], object]] = [self._channel.inbox.popleft]
        try:
            fields, place = self._read(packet)
        except MoonpoolError:
            self._channel.inbox.popleft()
            raise
        if place is not None:
            steps.append(partial(self.released.append, place))
        is_last = True
        places: list[tuple[int, int]] = []
        if fields[0] == _REPLY:
            is_last = fields[2]
            if fields[3]:
                steps.append(partial(self._regions.returned.extend, list(map(tuple, fields[3]))))
            places = [(region, offset) for region, offset, _ in fields[4]]
        fields.append(places)
        call = self._open.get(fields[1])
        if is_last:
            steps.append(partial(self._open.pop, fields[1], None))
        if call is None:
            steps.append(partial(self.released.extend, places))
            at_once(*steps)
            return
        try:
            at_once(*steps, partial(call.inbox.append, fields))
            self._arrived(call, is_last=is_last)
        except BaseException:
            call.ring()
            raise

    def _arrived(self, call: Call, *, is_last: bool) -> None:
        """Let the one know who waits for an answer, which is in the inbox."""
        if is_last:
            call.keeps = None
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

    def _read(self, packet: bytes) -> tuple[list[Any], tuple[int, int] | None]:
        """Decode an answer, with the outputs of a reply as `read_outputs` takes them. Returns the place of its block,
        too, if it lies in one.
        """
        fields = self._codec.decode(packet)
        place = None
        if fields[0] == _INDIRECT:
            place = (fields[1], fields[2])
            fields = self._codec.decode(self._regions.load(*fields[1:]))
        if fields[0] == _REPLY:
            fields[5] = prepared(fields[5])
        return fields, place
