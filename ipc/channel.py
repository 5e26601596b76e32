"""Packets between runtime and stub: one SEQPACKET socket per direction pair.

The kernel copies every packet, so a peer cannot change it after it was checked. Each end has its
own file description: flags that the peer sets on its end change nothing here.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import sys
import termios
from collections import deque
from typing import TYPE_CHECKING

from moonpool.ipc.errors import Closed, LocalProtocolError, PeerGone, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_PACKET_BYTES = 32 * 1024
_ROOM = (
    MAX_PACKET_BYTES + 1,
)  # one more, so that a packet that was cut short is told by its length
_MAX_FDS = 16
_FD_BYTES = array.array("i").itemsize
# Plain numbers: `|` between the socket module's flags is a call that costs as much as a packet.
_DONT_WAIT = int(socket.MSG_DONTWAIT)
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)
_AT_ONCE = _DONT_WAIT | _NO_SIGNAL


class Channel:
    """One end. One thread at a time may receive; any may send, as the kernel takes packets whole."""

    __slots__ = ("_inbox", "_receive", "_send", "_socket")

    def __init__(self, end: socket.socket) -> None:
        """Own `end` from now on."""
        end.setblocking(True)
        self._socket = end
        self._receive = end.recv
        self._send = end.send
        self._inbox: deque[bytes] = deque()

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """A channel, and the socket for the other end of it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def fileno(self) -> int:
        """Readable when a packet or the end of the peer can be received. -1 when closed."""
        return self._socket.fileno()

    def send(self, packet: bytes) -> None:
        """Hand a packet to the kernel; never blocks.

        Raises `PeerGone`, `LocalProtocolError` for what no packet can hold, and `BlockingIOError` when
        the peer has not read what was sent before.
        """
        try:
            self._send(packet, _AT_ONCE)
        except BlockingIOError:
            raise
        except OSError as error:
            raise self._gone(error) from error

    def send_waiting(self, packet: bytes) -> None:
        """Hand a packet to the kernel; blocks while the peer does not read. For the stub's side."""
        try:
            self._send(packet, _NO_SIGNAL)
        except OSError as error:
            raise self._gone(error) from error

    @property
    def is_half_full(self) -> bool:
        """Whether the peer leaves so much unread that only what has to be said should be sent."""
        unread = int.from_bytes(
            fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder
        )
        return unread > self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2

    def send_fds(self, packet: bytes, *descriptors: int) -> None:
        """As `send`, with descriptors for the peer. The caller keeps its own."""
        fds = array.array("i", descriptors)
        try:
            self._socket.sendmsg(
                [packet],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)],
                _AT_ONCE,
            )
        except BlockingIOError:
            raise
        except OSError as error:
            raise self._gone(error) from error

    def send_waiting_with(self, packet: bytes, descriptors: Sequence[int]) -> None:
        """As `send_waiting`, with descriptors for the peer. The caller keeps its own."""
        fds = array.array("i", descriptors)
        try:
            self._socket.sendmsg(
                [packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else [], _NO_SIGNAL
            )
        except OSError as error:
            raise self._gone(error) from error

    def wait(self) -> None:
        """Block until `receive` will not. Raises `PeerGone` where the socket itself is broken.

        An exception that a signal handler raises meanwhile loses no packet.
        """
        if not self._inbox:
            # One call into C: no signal handler runs between a packet's arrival and its safekeeping.
            try:
                self._inbox.extend(map(self._receive, _ROOM))
            except ConnectionResetError:
                # Told once, ahead of what the peer sent before it ended with packets unread.
                self.wait()
            except OSError as error:
                raise self._gone(error) from error

    @property
    def has_received(self) -> bool:
        """Whether a packet is here already, so that `receive` does not look at the socket."""
        return bool(self._inbox)

    def receive(self) -> bytes:
        """The next packet; blocks. Raises `PeerGone` at the end of the peer, after its last packet.

        Descriptors that the peer sent along are dropped by the kernel.
        """
        if self._inbox:
            packet = self._inbox.popleft()
        else:
            try:
                packet = self._receive(_ROOM[0])
            except ConnectionResetError:  # as in `wait`
                return self.receive()
            except OSError as error:
                raise self._gone(error) from error
        return packet if 0 < len(packet) <= MAX_PACKET_BYTES else self._checked(packet)

    def receive_ready(self) -> bytes | None:
        """The next packet if one is there, else None; never blocks. Raises `PeerGone`."""
        if self._inbox:
            return self._checked(self._inbox.popleft())
        try:
            packet = self._receive(_ROOM[0], _DONT_WAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # as in `wait`
            return self.receive_ready()
        except OSError as error:
            raise self._gone(error) from error
        return self._checked(packet)

    def receive_with_fds(self) -> tuple[bytes, list[int]]:
        """The next packet and the descriptors in it, which the caller owns; blocks.

        For the stub alone: the runtime takes no descriptors from anybody.
        """
        try:
            packet, ancillary, _, _ = self._socket.recvmsg(
                _ROOM[0], socket.CMSG_SPACE(_MAX_FDS * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # as in `wait`
            return self.receive_with_fds()
        except OSError as error:
            raise self._gone(error) from error
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
        try:
            return self._checked(packet), list(fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _checked(self, packet: bytes) -> bytes:
        if not packet:
            raise PeerGone("the peer closed the channel")
        if len(packet) > MAX_PACKET_BYTES:
            raise RemoteProtocolError(f"a packet of more than {MAX_PACKET_BYTES} bytes")
        return packet

    def _gone(self, error: OSError) -> Exception:
        if self._socket.fileno() < 0:
            return Closed("this end of the channel was closed")
        if error.errno in (errno.EMSGSIZE, errno.EBADF):  # EBADF: the descriptor to be sent
            return LocalProtocolError(f"a packet cannot be sent: {error.strerror}")
        return PeerGone(f"the peer closed the channel ({error.strerror})")

    def wake(self) -> None:
        """Make whoever blocks in `receive` here see the end of the channel. Safe from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed already, or the peer is gone: then it is awake

    def close(self) -> None:
        """Close this end; the peer sees the end of the channel. May be called many times."""
        self._socket.close()
