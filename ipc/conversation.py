"""The work channel in order: one end that neither sends nor accepts a message out of its turn."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from moonpool.ipc.channel import MAX_PACKET_BYTES
from moonpool.ipc.codec import encode, work_codec
from moonpool.ipc.errors import LocalProtocolError, RemoteProtocolError
from moonpool.ipc.messages import WORK, Kind, Side

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from moonpool.ipc.channel import Channel

_INDIRECT = int(Kind.INDIRECT)
_FIRST = frozenset([Kind.CONFINED, Kind.FAILED])


class Overflow:
    """Where messages go that are too large for a packet: the sender's memory."""

    def pack(self, *message: Any) -> bytes:
        """The packet of a message: itself, or INDIRECT where it is too large and was stored.

        Raises `LocalProtocolError` for what cannot travel, `OutOfMemory`.
        """
        packet = encode(*message)
        return packet if len(packet) <= MAX_PACKET_BYTES else self.indirect(packet)

    def indirect(self, packet: bytes, most_bytes: int = sys.maxsize) -> bytes:
        """Store a packet that is too large, and return the packet of INDIRECT that points to it.

        Raises `LocalProtocolError` for more than `most_bytes`, `OutOfMemory`.
        """
        if len(packet) > most_bytes:
            raise LocalProtocolError(
                f"a message of {len(packet)} bytes beside its tensors; {most_bytes} is the most"
            )
        return encode(_INDIRECT, *self.store(packet))

    def store(self, packet: bytes) -> tuple[int, int, int]:
        """Copy into a block; returns region, offset and size. Raises `OutOfMemory`."""
        raise NotImplementedError

    def load(self, region: int, offset: int, size_bytes: int) -> bytes:
        """Copy out of the peer's block and give the block back. Raises `RemoteProtocolError`."""
        raise NotImplementedError


class Conversation:
    """One end of a work channel. One thread at a time."""

    __slots__ = ("_after", "_codec", "_is_stub", "_overflow", "_turn", "channel")

    def __init__(
        self, channel: Channel, us: Side, overflow: Overflow, after: Kind | None = None
    ) -> None:
        """`after` is the message that goes without saying; None where everything is to be said."""
        self.channel = channel
        self._is_stub = us is Side.STUB
        self._overflow = overflow
        self._codec = work_codec(us)
        # What may come next, from us and from the peer; and the same after each kind, worked out before.
        self._turn = _split(_FIRST if after is None else WORK[after].followers, us)
        self._after = {int(kind): _split(message.followers, us) for kind, message in WORK.items()}

    def use_overflow(self, overflow: Overflow) -> None:
        """From now on, large messages go through this memory."""
        self._overflow = overflow

    def send(self, *message: Any) -> None:
        """Send a message whose turn it is.

        Raises `LocalProtocolError` (nothing was sent), `PeerGone`, `OutOfMemory`, and
        `RemoteProtocolError` where the runtime's peer does not read.
        """
        kind = message[0]
        if kind not in self._turn[0]:
            raise LocalProtocolError(f"{Kind(kind).name} may not be sent now; {self._words()}")
        packet = encode(*message)
        if len(packet) > MAX_PACKET_BYTES:
            packet = self._overflow.indirect(packet)
        if self._is_stub:
            self.channel.send_waiting(packet)
        else:
            try:
                self.channel.send(packet)
            except BlockingIOError as error:
                raise RemoteProtocolError("the stub answers without reading") from error
        self._turn = self._after[kind]

    def receive(self) -> list[Any]:
        """The next message, its kind first; blocks. Raises `PeerGone`, `RemoteProtocolError`."""
        return self.accept(self.channel.receive())

    def accept(self, packet: bytes) -> list[Any]:
        """Check a packet that was received. Raises `RemoteProtocolError`."""
        fields = self._codec.decode(packet)
        kind = fields[0]
        if kind == _INDIRECT:
            fields = self._codec.decode_stored(self._overflow.load(*fields[1:]))
            kind = fields[0]
        if kind not in self._turn[1]:
            raise RemoteProtocolError(f"{Kind(kind).name} came out of turn; {self._words()}")
        self._turn = self._after[kind]
        return fields

    @property
    def allowed(self) -> frozenset[int]:
        """The kinds that may come next, from either side."""
        ours, theirs = self._turn
        return ours | theirs

    def _words(self) -> str:
        names = " or ".join(sorted(Kind(kind).name for kind in self.allowed)) or "nothing"
        return f"{names} may come next"


def _split(kinds: Iterable[Kind], us: Side) -> tuple[frozenset[int], frozenset[int]]:
    """Those that we send, and those that the peer sends."""
    ours = frozenset(int(kind) for kind in kinds if WORK[kind].sender is us)
    return ours, frozenset(map(int, kinds)) - ours
