"""Sends and receives packets between runtime and stub over a pair of SEQPACKET sockets.

The kernel copies every packet, so a peer cannot change it after it was checked. Each end has its
own file description, so flags that the peer sets on its end change nothing here.

Three things about these sockets are easy to get wrong:

- *A peer that does not read.* The runtime never blocks in a send to a stub (`send`, `send_fds`), because a hostile stub
  could stop it for ever. A stub may block (`send_waiting`): the runtime reads, or ends it. So may processes of the
  runtime that send to each other.
- *A peer that ended with packets unread.* The kernel then reports ECONNRESET once, before it delivers the last packets
  that the peer sent. So each receiving method tries again after ECONNRESET. Otherwise the reason that a dying stub
  sends would be lost.
- *A signal handler that raises.* It may raise an error of the same class as the socket, such as TimeoutError, which
  says nothing about the peer (`signals.pass_on`). Between the return of `recv` and the next line of Python, a handler
  may raise KeyboardInterrupt, and the packet would be gone. `wait` receives and stores the packet in a single call of C
  code (`deque.extend` over `map`), so a packet is either in the socket or in the inbox. `send_first` sends and removes
  in the same way.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import select
import socket
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress, repeat
from typing import Any, NoReturn

from moonpool.ipc.errors import Closed, LocalProtocolError, PeerGone, RemoteProtocolError
from moonpool.ipc.signals import pass_on

MAX_PACKET_BYTES = 32 * 1024
# One byte more than a packet may have: a longer packet, which the kernel cuts, is recognized by its length.
_ROOM = (MAX_PACKET_BYTES + 1,)
_MAX_FDS = 16
_FD_BYTES = array.array("i").itemsize
# Plain numbers: `|` between the socket module's flags is a call that costs as much as a packet.
_DONT_WAIT = int(socket.MSG_DONTWAIT)
_NO_SIGNAL = int(socket.MSG_NOSIGNAL)
_AT_ONCE = _DONT_WAIT | _NO_SIGNAL
_NO_SIGNAL_ONCE = (_NO_SIGNAL,)
# Drops whatever is put into it.
_NOWHERE: deque[Any] = deque(maxlen=0)
_remove_first = deque.popleft
# Python's own: a model may replace it, as gevent does.
_Socket = socket.socket


class Channel:
    """One end of a channel. One thread at a time may receive. Any thread may send, because the kernel takes packets
    whole.
    """

    __slots__ = ("_inbox", "_receive", "_send", "_socket")

    def __init__(self, end: socket.socket) -> None:
        """Own `end` from now on."""
        end.setblocking(True)
        self._socket = end
        self._receive = end.recv
        self._send = end.send
        self._inbox: deque[bytes] = deque()

    @classmethod
    def of_descriptor(cls, fd: int) -> Channel:
        """Return a channel for the descriptor of a socket, which it owns from now on."""
        return cls(_Socket(fileno=fd))

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return a channel, and the socket for its other end."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    @property
    def inbox(self) -> deque[bytes]:
        """The packets that were received before they were wanted. `receive` returns them first."""
        return self._inbox

    def fileno(self) -> int:
        """Return the descriptor, which is readable when a packet or the end of the peer can be received; -1 if
        closed.
        """
        return self._socket.fileno()

    @property
    def descriptor(self) -> Callable[[], int]:
        """A function of C that returns what `fileno` returns."""
        return self._socket.fileno

    def send(self, packet: bytes) -> None:
        """Hand a packet to the kernel. Never blocks.

        Raises `PeerGone`, `LocalProtocolError` if it does not fit into a packet, and `BlockingIOError` if
        the socket is full because the peer has not read.
        """
        try:
            self._send(packet, _AT_ONCE)
        except BlockingIOError:
            raise
        except OSError as error:
            self._fail(error)

    def send_waiting(self, packet: bytes) -> None:
        """Hand a packet to the kernel. Blocks while the socket is full. Not for a channel to a stub."""
        try:
            self._send(packet, _NO_SIGNAL)
        except OSError as error:
            self._fail(error)

    def send_first(self, items: deque[Any], count: int, packet: bytes) -> None:
        """Send a packet made of the first `count` items of a queue, as `send_waiting` does, and remove the items.

        If a signal handler raises meanwhile, either both have happened or neither. After any other error the items are
        there.
        """
        # One call into C again. The number of bytes sent, which is never 0, stands for the first item, a 1 for each
        # other one.
        sent: Iterator[int] = map(self._send, (packet,), _NO_SIGNAL_ONCE)
        if count > 1:
            sent = chain(sent, repeat(1, count - 1))
        try:
            _NOWHERE.extend(map(_remove_first, compress((items,) * count, sent)))
        except OSError as error:
            self._fail(error)

    @property
    def is_half_full(self) -> bool:
        """True if the peer has so much unread that only necessary messages should be sent."""
        unread = int.from_bytes(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        return unread > self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2

    def send_fds(self, packet: bytes, *descriptors: int) -> None:
        """Send a packet as `send` does, with descriptors for the peer. The caller keeps its own."""
        fds = array.array("i", descriptors)
        try:
            self._socket.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)], _AT_ONCE)
        except BlockingIOError:
            raise
        except OSError as error:
            self._fail(error)

    def send_waiting_with(self, packet: bytes, descriptors: Sequence[int]) -> None:
        """Send a packet as `send_waiting` does, with descriptors for the peer. The caller keeps its own."""
        fds = array.array("i", descriptors)
        try:
            self._socket.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else [], _NO_SIGNAL)
        except OSError as error:
            self._fail(error)

    def wait(self) -> None:
        """Block until `receive` would not block. Raises `PeerGone` if the socket itself is broken.

        If a signal handler raises meanwhile, no packet is lost.
        """
        if not self._inbox:
            # One call into C: no signal handler runs between the arrival of a packet and its place in the inbox.
            try:
                self._inbox.extend(map(self._receive, _ROOM))
            except ConnectionResetError as error:
                # The kernel reports it once, before the last packets of a peer that ended with packets unread.
                pass_on(error)
                self.wait()
            except OSError as error:
                self._fail(error)

    def wait_until(self, deadline: float | None) -> bool:
        """Wait until `receive` would not block. Returns False if that is not so at `deadline`, of `time.monotonic`."""
        if self._inbox:
            return True
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000))

    def is_ready(self) -> bool:
        """Return True if `receive` would not block, when the descriptor was readable: here nothing else makes it so."""
        return True

    @property
    def has_received(self) -> bool:
        """True if `wait` has received a packet that `receive` returns without a look at the socket."""
        return bool(self._inbox)

    def first(self) -> bytes:
        """Return the packet that `wait` has received, and leave it in the inbox. Raises as `receive`."""
        return self._checked(self._inbox[0])

    def receive(self) -> bytes:
        """Return the next packet. Blocks. Raises `PeerGone` at the end of the peer, after its last packet.

        The kernel closes descriptors that the peer sent with it.
        """
        if self._inbox:
            packet = self._inbox.popleft()
        else:
            try:
                packet = self._receive(_ROOM[0])
            except ConnectionResetError as error:  # as in `wait`
                pass_on(error)
                return self.receive()
            except OSError as error:
                self._fail(error)
        return packet if 0 < len(packet) <= MAX_PACKET_BYTES else self._checked(packet)

    def receive_ready(self) -> bytes | None:
        """Return the next packet, or None if there is none yet. Never blocks. Raises `PeerGone`."""
        if self._inbox:
            return self._checked(self._inbox.popleft())
        try:
            packet = self._receive(_ROOM[0], _DONT_WAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:  # as in `wait`
            return self.receive_ready()
        except OSError as error:
            self._fail(error)
        return packet if 0 < len(packet) <= MAX_PACKET_BYTES else self._checked(packet)

    def receive_with_fds(self) -> tuple[bytes, list[int]]:
        """Return the next packet and the descriptors in it, which the caller owns. Blocks.

        Not for a channel to a stub: the runtime accepts no descriptors from one.
        """
        try:
            packet, ancillary, _, _ = self._socket.recvmsg(
                _ROOM[0], socket.CMSG_SPACE(_MAX_FDS * _FD_BYTES), socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:  # as in `wait`
            return self.receive_with_fds()
        except OSError as error:
            self._fail(error)
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

    def _fail(self, error: OSError) -> NoReturn:
        try:
            pass_on(error)
            if self._socket.fileno() < 0:
                raise Closed("this end of the channel was closed") from error
            if error.errno in (errno.EMSGSIZE, errno.EBADF):  # EBADF is about a descriptor to send
                raise LocalProtocolError(f"a packet cannot be sent: {error.strerror}") from error
            raise PeerGone(f"the peer closed the channel ({error.strerror})") from error
        finally:
            del error  # as in `pass_on`

    def wake(self) -> None:
        """Wake a thread that blocks in `receive` on this end: it sees the end of the channel. Any thread may call
        it.
        """
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # closed already, or the peer is gone: then the thread is awake

    def close(self) -> None:
        """Close this end. The peer sees the end of the channel. May be called many times."""
        self._socket.close()
