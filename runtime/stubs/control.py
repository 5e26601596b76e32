"""The control channel of a stub, which carries notices in both directions in any order, and the limit on its rate.

Theory of operation. Any thread may send. `_sending` keeps a message and its descriptors together, and orders a region
before the messages of the same thread that name it. Sending never blocks: a stub that does not read its channel breaks
the protocol, since an honest one has a thread for it. Only the reactor's thread reads, so reading and the rate limiter
need no lock.

The rate limiter. Every message of a stub costs the reactor time that all stubs share. So a stub has a budget of
messages a second, which it may save up for one second. A message that costs more than it is long counts as several
(`COSTS`), and responses count nothing: each belongs to a request that the runtime sent. Over budget, the reactor does
not read any channel of that stub for a while. The messages stay in the sockets, and when these are full, the stub
blocks in its own `send`. Nothing is lost, no other stub waits, and the driver of a batch, who reads the work channel,
is not delayed by the limit.

All channels of a stub share one budget and pause together. Otherwise a stub could have the budget once for each
channel, and a call could overtake a notice that it depends on, which was sent on another channel before.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import control_codec, encode
from moonpool.ipc.conversation import Overflow
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import NO_DEVICE, Kind, Side
from moonpool.ipc.region import SharedRegion
from moonpool.runtime.model.budgets import COSTS, MESSAGE_BYTES, MESSAGES_PER_S, PAUSE_MS
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.stubs.regions import ClientRegion

if TYPE_CHECKING:
    from moonpool.ipc.cuda.region import DeviceRegion


_RESPONSES = int(Kind.RESPONSES)


class ControlChannel:
    """The runtime's end of a control channel. Any thread may send, one reads."""

    def __init__(self, channel: Channel) -> None:
        """Own the channel."""
        self.channel = channel
        self._codec = control_codec(Side.RUNTIME)
        self._sending = threading.Lock()

    def send(self, *message: object) -> None:
        """Send a message; never blocks. Raises `PeerGone`, `Closed`, `RemoteProtocolError`."""
        packet = encode(*message)
        with self._sending, _reading_peer():
            self.channel.send(packet)

    def send_slots(self, *descriptors: int) -> None:
        """Offer a work channel in memory, with these descriptors. Raises what `send` does."""
        packet = encode(Kind.SLOTS)
        with self._sending, _reading_peer():
            self.channel.send_fds(packet, *descriptors)

    def send_fork(self, name: str, *descriptors: int) -> None:
        """Have a template fork a stub of that name, with these descriptors. Raises what `send` does."""
        packet = encode(Kind.FORK, name)
        with self._sending, _reading_peer():
            self.channel.send_fds(packet, *descriptors)

    def send_region(self, region: SharedRegion | DeviceRegion, writer: Side, device: int = NO_DEVICE) -> None:
        """Announce a region with its descriptor, on the device of that number. Raises what `send` does."""
        if isinstance(region, ClientRegion):
            packet = encode(Kind.LENT_REGION, region.id, region.size_bytes)
        else:
            handle = b"" if device == NO_DEVICE else region.handle  # type: ignore[union-attr]
            packet = encode(Kind.REGION, region.id, region.size_bytes, writer, device, handle)
        with self._sending, _reading_peer():
            if region.fd < 0:
                self.channel.send(packet)
            else:
                self.channel.send_fds(packet, region.fd)

    def receive(self, most: int, overflow: Overflow, rate_limiter: MessageRateLimiter) -> Iterator[list[Any]]:
        """Yield the messages that have come, at most `most`. Raises `PeerGone`, `RemoteProtocolError`.

        `rate_limiter` counts all of them but responses. `overflow` loads messages that lie in memory.
        """
        receive_ready, decode = self.channel.receive_ready, self._codec.decode
        for _ in range(most):
            packet = receive_ready()
            if packet is None:
                return
            fields = decode(packet)
            if fields[0] == _RESPONSES:
                yield fields
                continue
            if fields[0] == Kind.INDIRECT:
                packet = overflow.load(*fields[1:])
                fields = self._codec.decode_stored(packet)
                if fields[0] == Kind.INDIRECT:
                    raise RemoteProtocolError("INDIRECT that refers to another one")
            if fields[0] != _RESPONSES:
                rate_limiter.took(len(packet), COSTS.get(fields[0], 1))
            yield fields


@contextlib.contextmanager
def _reading_peer() -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:
        raise RemoteProtocolError("the stub does not read its control channel") from error


class MessageRateLimiter:
    """Rate limiter for the channels of one stub. Over budget the runtime stops reading, which blocks only that stub.

    Methods are for the reactor's thread.
    """

    def __init__(self, reactor: Reactor, *fds: int) -> None:
        """Limit the channels `fds`, which the reactor watches or will watch."""
        self._reactor = reactor
        self._fds = list(fds)
        # The messages that may come at once, those of one second at most. Negative while the stub is over budget.
        self._left = float(MESSAGES_PER_S)
        self._at_s = time.monotonic()
        self._unpaid = 0.0

    def add(self, fd: int) -> None:
        """Limit this channel as well. All channels share one budget."""
        self._fds.append(fd)

    def took(self, size_bytes: int, messages: float = 1) -> None:
        """Count a packet of this size, which costs as much as so many short messages."""
        self._unpaid += messages + size_bytes // MESSAGE_BYTES

    def settle(self) -> None:
        """Charge for a round of receiving. Over budget, the channel is not read until the stub is back in it."""
        if not self._unpaid:
            return
        now_s = time.monotonic()
        saved = self._left + (now_s - self._at_s) * MESSAGES_PER_S
        self._left = min(MESSAGES_PER_S, saved) - self._unpaid
        self._at_s, self._unpaid = now_s, 0.0
        if self._left < 0:
            pause_s = max(PAUSE_MS / 1000, -self._left / MESSAGES_PER_S)
            for fd in self._fds:
                self._reactor.pause(fd, pause_s)
