"""The runtime's end of a control channel: notices in both directions, in any order."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from moonpool.ipc.codec import control_codec, encode
from moonpool.ipc.errors import ProtocolError, RemoteProtocolError
from moonpool.ipc.messages import Kind, Side
from moonpool.runtime.client_region import ClientRegion
from moonpool.runtime.output import Budget

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moonpool.ipc.channel import Channel
    from moonpool.ipc.conversation import Overflow
    from moonpool.ipc.region import SharedRegion


_RESPONSES = int(Kind.RESPONSES)
# What a stub may tell beside responses, which are work that was asked for: an honest one tells of a batch now and
# then. A long one counts as several.
_NOTICES_PER_S = 20_000
_NOTICE_BYTES = 512


class ControlChannel:
    """Any thread may send; one reads."""

    def __init__(self, channel: Channel) -> None:
        """Own the channel from now on."""
        self.channel = channel
        self._codec = control_codec(Side.RUNTIME)
        self._sending = threading.Lock()
        self._notices = Budget(_NOTICES_PER_S)
        self._unpaid = 0

    def send(self, *message: object) -> None:
        """Send a message; never blocks. Raises `PeerGone`, `Closed`, `RemoteProtocolError`."""
        packet = encode(*message)
        with self._sending, _reading_peer():
            self.channel.send(packet)

    def send_peer(self, work_fd: int, control_fd: int) -> None:
        """Let another process send batches, through channels of its own. Raises what `send` does."""
        packet = encode(Kind.PEER)
        with self._sending, _reading_peer():
            self.channel.send_fds(packet, work_fd, control_fd)

    def send_fork(self, name: str, *descriptors: int) -> None:
        """Have a template fork a stub of that name, with these descriptors. Raises what `send` does."""
        packet = encode(Kind.FORK, name)
        with self._sending, _reading_peer():
            self.channel.send_fds(packet, *descriptors)

    def send_region(self, region: SharedRegion, writer: Side) -> None:
        """Announce a region with its descriptor. Raises what `send` does."""
        if isinstance(region, ClientRegion):
            packet = encode(Kind.LENT_REGION, region.id, region.size_bytes)
        else:
            packet = encode(Kind.REGION, region.id, region.size_bytes, writer)
        with self._sending, _reading_peer():
            self.channel.send_fds(packet, region.fd)

    def receive(self, most: int, overflow: Overflow) -> Iterator[list[Any]]:
        """The messages that are there, at most so many. Raises `PeerGone`, `RemoteProtocolError`."""
        for _ in range(most):
            packet = self.channel.receive_ready()
            if packet is None:
                return
            fields = self._codec.decode(packet)
            if fields[0] != _RESPONSES:
                self._unpaid += 1 + len(packet) // _NOTICE_BYTES
            if fields[0] == Kind.INDIRECT:
                fields = self._codec.decode_stored(overflow.load(*fields[1:]))
                if fields[0] == Kind.INDIRECT:
                    raise ProtocolError("INDIRECT that stands for another one")
            yield fields

    def is_flooded(self) -> bool:
        """Whether what was received lately is more than the stub may tell, and it should wait."""
        unpaid, self._unpaid = self._unpaid, 0
        return unpaid > 0 and not self._notices.spend(unpaid)


@contextlib.contextmanager
def _reading_peer() -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:
        raise RemoteProtocolError("the stub does not read its control channel") from error
