"""The runtime's end of a control channel: notices in both directions, in any order."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from moonpool.ipc.codec import control_codec, encode
from moonpool.ipc.errors import RemoteProtocolError
from moonpool.ipc.messages import NO_DEVICE, Kind, Side
from moonpool.runtime.budgets import GROWTH_COST
from moonpool.runtime.client_region import ClientRegion

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moonpool.ipc.channel import Channel
    from moonpool.ipc.conversation import Overflow
    from moonpool.ipc.cuda.region import DeviceRegion
    from moonpool.ipc.region import SharedRegion
    from moonpool.runtime.flow import Flow


_RESPONSES = int(Kind.RESPONSES)
_COSTS = {int(Kind.GROW): GROWTH_COST}


class ControlChannel:
    """Any thread may send; one reads."""

    def __init__(self, channel: Channel) -> None:
        """Own the channel from now on."""
        self.channel = channel
        self._codec = control_codec(Side.RUNTIME)
        self._sending = threading.Lock()

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

    def send_region(
        self, region: SharedRegion | DeviceRegion, writer: Side, device: int = NO_DEVICE
    ) -> None:
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

    def receive(self, most: int, overflow: Overflow, flow: Flow) -> Iterator[list[Any]]:
        """The messages that are there, at most so many. Raises `PeerGone`, `RemoteProtocolError`.

        `flow` is told of all but responses, which are work that was asked for.
        """
        for _ in range(most):
            packet = self.channel.receive_ready()
            if packet is None:
                return
            fields = self._codec.decode(packet)
            if fields[0] == Kind.INDIRECT:
                packet = overflow.load(*fields[1:])
                fields = self._codec.decode_stored(packet)
                if fields[0] == Kind.INDIRECT:
                    raise RemoteProtocolError("INDIRECT that stands for another one")
            if fields[0] != _RESPONSES:
                flow.took(len(packet), _COSTS.get(fields[0], 1))
            yield fields


@contextlib.contextmanager
def _reading_peer() -> Iterator[None]:
    try:
        yield
    except BlockingIOError as error:
        raise RemoteProtocolError("the stub does not read its control channel") from error
