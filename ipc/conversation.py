"""One end of a work channel, which neither sends nor accepts a message out of its turn.

Theory of operation. The work channel is lockstep: `messages.WORK` says which kinds may follow each kind, and each kind
has one sender. So a conversation keeps only one fact: the kinds that may come next, from us and from the peer. There is
never more than one batch on the way.

A kind changes the turn only after the message was sent, or was checked. If a send fails (the peer is gone, memory
is exhausted, the message is too large), nothing was sent, and the same end may send another message, for instance the
error. If the peer ends before it answers, `receive` raises `PeerGone`, after the last message that the peer sent, and
the conversation is over.

A message that does not fit into a packet is stored in a block of the sender's region, and INDIRECT says where. The
reader copies it out before it checks it. A peer can still write to that memory, so only the copy counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from moonpool.ipc.channel import MAX_PACKET_BYTES, Channel
from moonpool.ipc.codec import encode, work_codec
from moonpool.ipc.errors import LocalProtocolError, RemoteProtocolError
from moonpool.ipc.messages import WORK, Kind, Side

if TYPE_CHECKING:
    from moonpool.ipc.slots import SlotChannel

_INDIRECT = int(Kind.INDIRECT)
_FIRST = frozenset([Kind.CONFINED, Kind.FAILED])


class Overflow:
    """Stores messages that are too large for a packet in the memory of their sender."""

    def indirect(self, packet: bytes, most_bytes: int = sys.maxsize) -> bytes:
        """Store a packet, and return the packet of INDIRECT that points to it.

        Raises `LocalProtocolError` if it has more than `most_bytes`, and `OutOfMemory`.
        """
        check_size(packet, most_bytes)
        return encode(_INDIRECT, *self.store(packet))

    def store(self, packet: bytes) -> tuple[int, int, int]:
        """Copy a packet into a block; return region, offset and size. Raises `OutOfMemory`."""
        raise NotImplementedError

    def load(self, region: int, offset: int, size_bytes: int) -> bytes:
        """Copy a packet out of the peer's block, and release the block. Raises `RemoteProtocolError`."""
        raise NotImplementedError


def check_size(packet: bytes, most_bytes: int) -> None:
    """Raise `LocalProtocolError` if a packet to be stored has more than so many bytes."""
    if len(packet) > most_bytes:
        raise LocalProtocolError(f"a message of {len(packet)} bytes beside its tensors; {most_bytes} is the most")


class Conversation:
    """One end of a work channel. One thread at a time."""

    __slots__ = ("_codec", "_is_stub", "_overflow", "after", "channel", "turn")

    def __init__(self, channel: Channel, us: Side, overflow: Overflow, after: Kind | None = None) -> None:
        """`after` is the kind after which this conversation begins; None if it begins with the first message."""
        self.channel: Channel | SlotChannel = channel
        self._is_stub = us is Side.STUB
        self._overflow = overflow
        self._codec = work_codec(us)
        # The kinds that may come next, from us and from the peer; then the same after each kind.
        self.turn = _split(_FIRST if after is None else WORK[after].followers, us)
        self.after = {int(kind): _split(message.followers, us) for kind, message in WORK.items()}

    def use_overflow(self, overflow: Overflow) -> None:
        """Store large messages in this memory from now on."""
        self._overflow = overflow

    def send(self, *message: Any) -> None:
        """Send a message whose turn it is.

        Raises `LocalProtocolError` (nothing was sent), `PeerGone`, `OutOfMemory`, and in the runtime
        `RemoteProtocolError` if the stub does not read.
        """
        kind = message[0]
        if kind not in self.turn[0]:
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
        self.turn = self.after[kind]

    def receive(self) -> list[Any]:
        """Return the next message, its kind first. Blocks. Raises `PeerGone`, `RemoteProtocolError`."""
        return self.accept(self.channel.receive())

    def accept(self, packet: bytes) -> list[Any]:
        """Check a received packet, and return its fields, the kind first. Raises `RemoteProtocolError`."""
        fields = self._codec.decode(packet)
        kind = fields[0]
        if kind == _INDIRECT:
            fields = self._codec.decode_stored(self._overflow.load(*fields[1:]))
            kind = fields[0]
        if kind not in self.turn[1]:
            raise RemoteProtocolError(f"{Kind(kind).name} came out of turn; {self._words()}")
        self.turn = self.after[kind]
        return fields

    @property
    def allowed(self) -> frozenset[int]:
        """The kinds that may come next, from either side."""
        ours, theirs = self.turn
        return ours | theirs

    def _words(self) -> str:
        names = " or ".join(sorted(Kind(kind).name for kind in self.allowed)) or "nothing"
        return f"{names} may come next"


def _split(kinds: Iterable[Kind], us: Side) -> tuple[frozenset[int], frozenset[int]]:
    """Split kinds into those that we send and those that the peer sends."""
    ours = frozenset(int(kind) for kind in kinds if WORK[kind].sender is us)
    return ours, frozenset(map(int, kinds)) - ours
