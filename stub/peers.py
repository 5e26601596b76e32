"""The processes of the runtime that send batches to one stub, in turns."""

from __future__ import annotations

import gc
import os
import select
import socket
import sys
from collections import deque
from typing import TYPE_CHECKING

from moonpool.ipc.channel import Channel
from moonpool.ipc.conversation import Conversation
from moonpool.ipc.errors import MoonpoolError, PeerGone, RemoteProtocolError
from moonpool.ipc.messages import Kind, Side
from moonpool.stub.peer import Peer

if TYPE_CHECKING:
    from typing import Any

# How long an idle stub keeps memory that it grew by, and how often it looks whether the model has let
# go of requests that it answered later.
_KEEP_S = 5.0
_LOOK_S = 0.25


class Peers:
    """`add` is for the control thread, `leave_to_parent` for a fork, the rest for the main thread."""

    def __init__(self, main: Peer, start: dict[str, Any]) -> None:
        self._main = main
        self._start = start
        self._all: dict[int, Peer] = {}
        # Not epoll: a descriptor that is registered with it makes each packet slower, and a contained stub may not use it.
        self._poll = select.poll()
        # Peers that the main thread, which may be waiting, does not know yet, and a pipe that wakes it.
        self._arrivals: deque[Peer] = deque()
        self._heard_fd = self._bell_fd = -1
        if start["shared"]:
            self._heard_fd, self._bell_fd = os.pipe()
            self._poll.register(self._heard_fd, select.POLLIN)
        self._arrive(main)

    def add(self, work_fd: int, control_fd: int) -> None:
        """Take in another process, which speaks as the runtime does after LOADED; for a stub that is shared."""
        work = Channel(socket.socket(fileno=work_fd))
        # Its memory stands in for its overflow from the first message on.
        conversation = Conversation(work, Side.STUB, self._main.regions, after=Kind.LOADED)
        control = Channel(socket.socket(fileno=control_fd))
        peer = Peer(conversation, control, self._start, is_main=False)
        peer.control.listen(peer.regions, peer.cancel, _refuse)
        self._arrivals.append(peer)
        os.write(self._bell_fd, b"\0")

    def _arrive(self, peer: Peer) -> None:
        fd = peer.conversation.channel.fileno()
        self._all[fd] = peer
        self._poll.register(fd, select.POLLIN)

    def drop(self, peer: Peer, because: MoonpoolError) -> None:
        """A front end is gone, or is not to be believed."""
        if not isinstance(because, PeerGone):
            sys.stderr.write(f"A front end is not listened to any more: {because}\n")
        fd = peer.conversation.channel.fileno()
        self._poll.unregister(fd)
        del self._all[fd]
        peer.close()

    def ready(self) -> list[Peer]:
        """Wait for work; returns those that have sent something, or are gone.

        While none comes, give back memory: what the stub grew by, and requests. Word of what is free again may
        come only now, and to another thread. What the model dropped may be in a cycle, to which an idle process
        would not come by itself.
        """
        idle_s = 0.0
        while some := [peer for peer in self._all.copy().values() if peer.needs_care]:
            wait_s = _LOOK_S if any(peer.is_waited_for for peer in some) else _KEEP_S
            if ready := self._poll.poll(wait_s * 1000):
                return self._of(ready)
            if idle_s == 0.0:
                gc.collect(1)  # the young ones: the others may take long
            elif idle_s < _KEEP_S <= idle_s + wait_s:
                gc.collect()
            idle_s += wait_s
            for peer in some:
                peer.tidy(give_up_memory=idle_s >= _KEEP_S)
        return self._of(self._poll.poll())

    def _of(self, ready: list[tuple[int, int]]) -> list[Peer]:
        """Return the peers of these descriptors, and take in one that has arrived."""
        if any(fd == self._heard_fd for fd, _ in ready):
            os.read(self._heard_fd, 1)
            self._arrive(self._arrivals.popleft())
        return [self._all[fd] for fd, _ in ready if fd != self._heard_fd]

    def finish(self) -> None:
        """Before the process ends: wait until devices have done what others wait for."""
        for peer in self._all.values():
            if peer.regions.devices is not None:
                peer.regions.devices.finish()

    def leave_to_parent(self) -> None:
        """In a process that the model forked: the runtime speaks with the one process only."""
        for peer in self._all.values():
            peer.leave_to_parent()


def _refuse(fields: list[Any], _: list[int]) -> None:
    raise RemoteProtocolError(f"{Kind(fields[0]).name} is not for a front end to say")
