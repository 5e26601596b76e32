"""The stub's end of the control channel: a thread that listens, and sending for everybody."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.codec import control_codec, encode
from moonpool.ipc.errors import MoonpoolError, PeerGone
from moonpool.ipc.messages import MAX_RESPONSES_IN_PACKET, Kind, Side
from moonpool.ipc.texts import beginning, end
from moonpool.stub import logger, threads
from moonpool.stub.metric_changes import MetricChanges
from moonpool.stub.outbox import Outbox

if TYPE_CHECKING:
    from collections import deque
    from typing import Any, Callable

    from moonpool.ipc.channel import Channel
    from moonpool.stub.metric_changes import Row
    from moonpool.stub.regions import Regions

# While one thread waits for the runtime to read, others go on logging.
_MANY_WAITING = 1024
# Both fit into a packet.
_LOGGED_BYTES, _FILE_BYTES = 8192, 1024
_RESPONSES = int(Kind.RESPONSES)
_INDIRECT = int(Kind.INDIRECT)


class Control:
    """Sends from any thread; what arrives is handled on a thread of its own."""

    def __init__(self, channel: Channel, on_gone: Callable[[], None]) -> None:
        """`on_gone` is called, on any thread, when the peer is gone, or not to be listened to any more."""
        self._channel = channel
        self._on_gone = on_gone
        self._regions: Regions
        self._cancel: Callable[[int, int], None]
        self._handle_other: Callable[[list[Any], list[int]], None]
        self._codec = control_codec(Side.STUB)
        self.begin()

    def begin(self) -> None:
        """Have nothing to send. Also in a process that the model forked.

        What was to be sent is the parent's to send, and its locks may be in the hand of a thread of its.
        """
        # Packets, and responses as they are described.
        self._outbox = Outbox(self._channel, self._on_gone, _next_packet)
        self._left_out = 0
        # Past the outbox: nothing else on the channel depends on their order.
        self.metric_changes = MetricChanges(self._send_changes)

    def send(self, *message: Any) -> None:
        """Send a control message; blocks while the runtime is behind with reading."""
        self._outbox.put(self._regions.pack(*message))

    def respond(self, response: list[Any]) -> None:
        """Send a response, a row of RESPONSES, together with others that are ready.

        What the model did to metrics before goes first.
        """
        self.metric_changes.flush()
        size_bytes = len(encode(response))
        if size_bytes > MAX_PACKET_BYTES // MAX_RESPONSES_IN_PACKET:
            self._outbox.put(self._regions.pack(_RESPONSES, [response]))
        else:
            self._outbox.put(response)

    def _send_changes(self, changes: list[Row], dropped: list[int]) -> None:
        self._outbox.send(encode(Kind.METRICS, changes, dropped))

    def log(self, level: int, message: str, file: str, line: int) -> None:
        """A log line for the runtime; long ones are cut, and left out while too many wait to be sent."""
        if len(self._outbox) >= _MANY_WAITING:
            self._left_out += 1
            return
        if self._left_out:
            count, self._left_out = self._left_out, 0
            self.log(logger.WARNING, f"{count} messages were left out: too many at once", "", 0)
        self.send(Kind.LOG, level, beginning(message, _LOGGED_BYTES), end(file, _FILE_BYTES), line)

    def listen(
        self,
        regions: Regions,
        cancel: Callable[[int, int], None],
        handle_other: Callable[[list[Any], list[int]], None],
    ) -> None:
        """Start handling what arrives, until the end of the peer.

        `cancel` gets batch and index of a request that nobody waits for any more, `handle_other` the messages
        that are neither about requests nor about memory, with their descriptors.
        """
        self._regions = regions
        self._cancel = cancel
        self._handle_other = handle_other
        self._listener = threads.start(self._listen, "moonpool-control")

    def _listen(self) -> None:
        try:
            while True:
                packet, fds = self._channel.receive_with_fds()
                self._handle(self._codec.decode(packet), fds)
        except PeerGone:
            self._on_gone()
        except MoonpoolError as error:
            sys.stderr.write(f"A process of the runtime is not listened to any more: {error}\n")
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
            self._handle_other(fields, fds)

    def close(self) -> None:
        """Close the channel, whose other end is gone, and wait until nobody listens there any more."""
        self._channel.wake()
        self._listener.join()
        self._outbox.close()


def _next_packet(items: deque[Any]) -> bytes:
    """Responses that are ready together travel together."""
    item = items.popleft()
    if isinstance(item, bytes):
        return item
    responses = [item]
    while items and len(responses) < MAX_RESPONSES_IN_PACKET and type(items[0]) is list:
        responses.append(items.popleft())
    return encode(_RESPONSES, responses)
