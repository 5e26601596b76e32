"""Runs the stub's end of the control channel: one thread receives, any thread sends. Gathers changes of metrics, too.

Theory of operation. The control thread handles what the runtime sends at any time: regions, events of devices, blocks
that come back, cancellations. It never waits for the main thread, because the main thread waits for it when a message
names a region that has not arrived. All threads send through one queue (`send_queue.py`), so messages keep the order in
which each thread put them. Responses are queued as they are described, and those that are ready together travel in one
packet.

Changes of metrics do not take the queue. A model may change a metric anywhere, also in a finalizer that runs in the
middle of any of this code, so `add` and `drop` append to deques and wake the sender, and never wait for a lock.
`flush` adds the changes up and sends them under a lock that the same thread may take again (RLock), since a finalizer
may interrupt the thread that holds it. If another thread holds the lock, `flush` waits for it: when it returns, all
changes made before are sent, and a response may follow. The thread `moonpool-metrics` sends changes that no response
carries. It clears `_is_wished` before it flushes, so that a change which comes during the flush wakes it again. A
signal handler of the model's may raise anywhere. So changes leave their deques at once with their coming into the sums
or into a message, and a message stays until the queue of its own has it. If a finalizer or a handler has flushed
meanwhile, the sums are others by then (`replacing`), and all of it begins anew.

In a process that the model forked, a thread of the parent may have held these locks at the moment of the fork. `begin`
makes new ones.

End: if the runtime is gone, `on_gone` ends the process.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from queue import SimpleQueue
from typing import Any

from moonpool.ipc.arena import Block
from moonpool.ipc.channel import MAX_PACKET_BYTES, Channel
from moonpool.ipc.codec import control_codec, encode
from moonpool.ipc.errors import MoonpoolError, PeerGone
from moonpool.ipc.messages import (
    INCREMENT,
    MAX_METRIC_CHANGES,
    MAX_OBSERVATIONS,
    MAX_RESPONSES_IN_PACKET,
    OBSERVE,
    SET,
    Kind,
    Side,
)
from moonpool.ipc.signals import NOWHERE, at_once, replacing
from moonpool.stub import threads
from moonpool.stub.pb_utils import logger
from moonpool.stub.peers.regions import Regions
from moonpool.stub.peers.send_queue import SendQueue

# From so many queued messages on, log lines are left out: while one thread waits for the runtime to read, others go on
# logging.
_MANY_WAITING = 1024
MAX_ROW_BYTES = MAX_PACKET_BYTES // MAX_RESPONSES_IN_PACKET
"""As many of the longest rows of RESPONSES fit into a packet as may be in one."""
_RESPONSES = int(Kind.RESPONSES)
_INDIRECT = int(Kind.INDIRECT)


class Control:
    """Sends from any thread, and handles what arrives on its own thread."""

    def __init__(self, channel: Channel, on_gone: Callable[[], None]) -> None:
        """Take `on_gone`, which any thread calls when the runtime is gone or has broken the protocol."""
        self._channel = channel
        self._on_gone = on_gone
        self._regions: Regions
        self._cancel: Callable[[int, int], None]
        self._handle_other: Callable[[list[Any]], None]
        self._codec = control_codec(Side.STUB)
        self.begin()

    def begin(self) -> None:
        """Start with nothing to send. Called again in a process that the model forked.

        The parent sends what was queued, and its threads may have held the locks at the fork.
        """
        # Holds packets, and packed responses in tuples, which become packets when they are sent.
        self._send_queue = SendQueue(self._channel, self._on_gone, _packet_of)
        self._left_out = 0
        # Another one, so that `MetricChanges.flush` has sent when it returns: no other message depends on the order.
        self._metrics_queue = SendQueue(self._channel, self._on_gone)
        self.metric_changes = MetricChanges(self._send_changes)

    def send(self, *message: Any, notes: Iterable[Callable[[], object]] = ()) -> None:
        """Send a control message; blocks while the runtime is behind with reading.

        `notes` are the steps of `SendQueue.put`.
        """
        taken: list[Block] = []
        try:
            packet = self._regions.pack(taken, *message)
            self._send_queue.put(packet, *notes, taken.clear)
        finally:
            if taken:  # it was not queued
                self._regions.take_back(taken)

    def respond(self, response: bytes | list[Any], *steps: Callable[[], object]) -> None:
        """Send a response, a row of RESPONSES, together with others that are ready. `steps` are those of
        `SendQueue.put`. One that is packed has at most `MAX_ROW_BYTES`.

        Changes of metrics that the model made before go first.
        """
        if self.metric_changes.are_made:
            self.metric_changes.flush()
        row = response if isinstance(response, bytes) else encode(*response)
        if len(row) > MAX_ROW_BYTES:
            self.send(_RESPONSES, [response], notes=steps)
        else:
            self._send_queue.put((row,), *steps)

    def _send_changes(self, changes: list[Row], dropped: list[int], *steps: Callable[[], object]) -> None:
        self._metrics_queue.put(encode(Kind.METRICS, changes, dropped), *steps)

    def send_packet(self, packet: bytes) -> None:
        """Send a packet whose order among the others does not matter. Blocks as `send` does."""
        self._send_queue.send(packet)

    def log(self, level: int, message: str, file: str, line: int) -> None:
        """Send a log line. Cuts long ones, and drops them while too many messages wait to be sent."""
        if len(self._send_queue) >= _MANY_WAITING:
            self._left_out += 1
            return
        if self._left_out:
            count, self._left_out = self._left_out, 0
            self.log(logger.WARNING, f"{count} messages were left out: too many at once", "", 0)
        self.send(*logger.log_message(level, message, file, line))

    def listen(
        self, regions: Regions, cancel: Callable[[int, int], None], handle_other: Callable[[list[Any]], None]
    ) -> None:
        """Start the thread that handles what arrives, until the runtime is gone.

        `cancel` gets batch and index of a cancelled request. `handle_other` gets messages
        that are neither about requests nor about memory.
        """
        self._regions = regions
        self._cancel = cancel
        self._handle_other = handle_other
        self._listener = threads.BareThread(self._listen)

    def _listen(self) -> None:
        try:
            while True:
                packet, fds = self._channel.receive_with_fds()
                self._handle(self._codec.decode(packet), fds)
        except PeerGone:
            self._on_gone()
        except MoonpoolError as error:
            sys.stderr.write(f"No more messages of the runtime are read: {error}\n")
            self._on_gone()

    def _handle(self, fields: list[Any], fds: list[int]) -> None:
        kind = fields[0]
        regions = self._regions
        if kind == Kind.REGION and len(fds) <= 1:
            regions.arrive(fds[0] if fds else -1, *fields[1:])
        elif kind == Kind.EVENT:
            regions.on_devices().meet(*fields[1:])
        elif kind == Kind.LENT_REGION and len(fds) == 1:
            regions.arrive_lent(fields[1], fields[2], fds[0])
        elif kind == Kind.REFUSED:
            regions.refuse(fields[1])
        elif kind == Kind.RELEASE:
            regions.returned.extend(map(tuple, fields[1]))
        elif kind == Kind.RETIRE:
            regions.forget(fields[1])
        elif kind == Kind.CANCEL:
            self._cancel(fields[1], fields[2])
        elif kind == _INDIRECT:
            self._handle(self._codec.decode(regions.load(*fields[1:])), fds)
        else:
            self._handle_other(fields)


def _packet_of(items: deque[Any]) -> tuple[bytes, int]:
    """Make one packet of all responses at the head of the queue, or return the packet there; with the number of
    items.
    """
    item = items[0]
    if type(item) is bytes:
        return item, 1
    if len(items) == 1:
        return _ONE_RESPONSE + item[0], 1
    rows = []
    # By their numbers, since other threads and destructors append meanwhile.
    for number in range(min(len(items), MAX_RESPONSES_IN_PACKET)):
        each = items[number]
        if type(each) is not tuple:
            break
        rows.append(each[0])
    # The header of a message with one field, which is an array of so many rows, all packed already.
    return encode(_RESPONSES, [0] * len(rows))[: -len(rows)] + b"".join(rows), len(rows)


# The beginning of a packet with one response: all but the row.
_ONE_RESPONSE = encode(_RESPONSES, [0])[:-1]


# Number of the metric, operation, value, how many times.
Row = tuple[int, int, float, int]
# By the number of the metric, operation and value; and by number and value, how often that was observed.
Sums = tuple[dict[int, tuple[int, float]], dict[tuple[int, float], int]]
# The fields of METRICS.
_Message = tuple[list[Row], list[int]]


# Changes that no response follows wait so long for others.
_GATHER_S = 0.05
# From so many changes on, the thread that makes another one adds them up.
_MANY = 1 << 16
# The argument of `acquire` for a lock that is not waited for.
_AT_ONCE = (False,)


class MetricChanges:
    """Takes changes from any thread at any moment, also from finalizers that interrupt its own methods."""

    # `threads` says why this lock is not in the dictionary.
    __slots__ = ("__dict__", "__weakref__", "_lock")

    def __init__(self, send: Callable[..., object]) -> None:
        """Take `send`, which sends rows and the numbers of dropped metrics to the runtime.

        Further arguments of it are steps that it takes at once with making certain that these are sent
        (`SendQueue.put`).
        """
        self._send = send
        # False while `flush` has nothing to do: models without metrics call it for every batch.
        self.are_made = False
        self._new: deque[tuple[int, int, float]] = deque()
        self._dropped: deque[int] = deque()
        # The changes that are added up, and the messages that are not sent yet: other objects after each change.
        self._sums: Sums = ({}, {})
        self._messages: tuple[_Message, ...] = ()
        # A finalizer may interrupt the thread that holds it, and need it, too.
        self._lock = threads.RLock()
        self._try_lock = self._lock.acquire
        # SimpleQueue.put may be called in the middle of itself, as a finalizer does.
        self._wishes: SimpleQueue[None] = SimpleQueue()
        self._is_wished = False
        self._sender: threads.Thread | None = None

    def add(self, metric: int, operation: int, value: float) -> None:
        """Apply an operation to a metric, soon."""
        try:
            self._new.append((metric, operation, value))
            self.are_made = True
        finally:  # a signal handler of the model's may raise
            self._wish()
        if len(self._new) >= _MANY:
            self._add_up_early()

    def drop(self, metric: int) -> None:
        """Release a metric, after all its changes are sent."""
        try:
            self._dropped.append(metric)
        finally:
            self._wish()

    def _wish(self) -> None:
        if not self._is_wished:
            at_once(partial(setattr, self, "_is_wished", True), partial(self._wishes.put, None))

    def _add_up_early(self) -> None:
        """Add up the changes so far, unless another thread does."""
        has_lock: list[bool] = []
        try:
            # One call into C takes the lock and notes it: no signal handler runs in between.
            has_lock.extend(map(self._try_lock, _AT_ONCE))
            if has_lock[0]:
                self._add_up()
        finally:
            if has_lock and has_lock[0]:
                self._lock.release()

    def start(self) -> None:
        """Start the thread that sends changes which no `flush` sends."""
        with self._lock:
            self.are_made = True
            if self._sender is None:
                self._sender = threads.start(self._run, "moonpool-metrics")

    def _run(self) -> None:
        while True:
            self._wishes.get()
            threads.sleep(_GATHER_S)
            # Before the flush: a change that comes during it must wake this thread again.
            self._is_wished = False
            self.flush()

    def flush(self) -> None:
        """Send all changes made before, or wait until another thread has sent them."""
        if not self.are_made:
            return
        with self._lock:
            self._add_up(packs=True)
            # A finalizer or a signal handler that flushes, too, may send some of them first.
            while messages := self._messages:
                self._send(*messages[0], *replacing(self, "_messages", messages, messages[1:]))

    def _add_up(self, *, packs: bool = False) -> None:
        """Add up the changes so far, and with `packs` make messages of them, and of the metrics that were dropped.

        Needs the lock.
        """
        new, dropped = self._new, self._dropped
        done: list[bool] = []
        while not done:
            before = self._sums
            # First: one that is dropped from here on may have changes that are not among these.
            gone = dropped.copy() if packs else ()
            changes = new.copy()
            sums = after = _added(before, changes)
            messages = self._messages
            if packs:
                messages, after = (*messages, *_messages(sums, [*gone])), ({}, {})
            at_once(
                *replacing(self, "_sums", before, after),
                partial(setattr, self, "_messages", messages),
                partial(NOWHERE.extend, map(deque.popleft, repeat(new, len(changes)))),
                partial(NOWHERE.extend, map(deque.popleft, repeat(dropped, len(gone)))),
                partial(done.append, True),
            )


def _added(before: Sums, changes: Iterable[tuple[int, int, float]]) -> Sums:
    """Return the sums with further changes."""
    sums, observed = before[0].copy(), before[1].copy()
    for metric, operation, value in changes:
        if operation == OBSERVE:
            observed[metric, value] = observed.get((metric, value), 0) + 1
        elif operation == SET:
            sums[metric] = (SET, value)
        else:
            kind, amount = sums.get(metric, (INCREMENT, 0.0))
            sums[metric] = (kind, amount + value)
    return sums, observed


def _messages(added: Sums, dropped: list[int]) -> Iterator[_Message]:
    """Divide changes into messages. The metrics that were dropped come after all of them."""
    sums, observed = added
    rows: list[Row] = [(m, op, value, 1) for m, (op, value) in sums.items()]
    rows += [(m, OBSERVE, value, n) for (m, value), n in observed.items()]
    chunks = deque(_chunks(rows))
    while chunks or dropped:
        chunk = chunks.popleft() if chunks else []
        gone = [] if chunks else dropped[:MAX_METRIC_CHANGES]
        dropped = dropped[len(gone) :]
        yield chunk, gone


def _chunks(rows: list[Row]) -> Iterator[list[Row]]:
    """Divide rows into those of one message each. Divides rows with more observations than a message may have, too."""
    chunk: list[Row] = []
    room = MAX_OBSERVATIONS
    for metric, operation, value, count in rows:
        left = count
        while left:
            if not room or len(chunk) == MAX_METRIC_CHANGES:
                yield chunk
                chunk, room = [], MAX_OBSERVATIONS
            taken = min(left, room)
            chunk.append((metric, operation, value, taken))
            room -= taken
            left -= taken
    if chunk:
        yield chunk
