"""The processes of the runtime that send batches to one stub, in turns."""

from __future__ import annotations

import gc
import select
import socket
import sys
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
        # What is registered with epoll costs each packet some of the time that it takes to pass it on, so a stub that
        # has one peer asks only when it wants to know.
        self._poll = select.epoll() if start["shared"] else select.poll()
        self._units_per_s = 1 if start["shared"] else 1000
        self._arrive(main)

    def add(self, work_fd: int, control_fd: int) -> None:
        """Take in another process, which speaks as the runtime does after LOADED."""
        work = Channel(socket.socket(fileno=work_fd))
        # Its memory stands in for its overflow from the first message on.
        conversation = Conversation(work, Side.STUB, self._main.regions, after=Kind.LOADED)
        control = Channel(socket.socket(fileno=control_fd))
        peer = Peer(conversation, control, self._start, is_main=False)
        peer.control.listen(peer.regions, peer.cancel, _refuse)
        self._arrive(peer)

    def _arrive(self, peer: Peer) -> None:
        fd = peer.conversation.channel.fileno()
        self._all[fd] = peer
        # The main thread, which may be waiting, hears of it at once.
        self._poll.register(fd, select.EPOLLIN)

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
            if ready := self._poll.poll(wait_s * self._units_per_s):
                return [self._all[fd] for fd, _ in ready]
            if idle_s == 0.0:
                gc.collect(1)  # the young ones: the others may take long
            elif idle_s < _KEEP_S <= idle_s + wait_s:
                gc.collect()
            idle_s += wait_s
            for peer in some:
                peer.tidy(give_up_memory=idle_s >= _KEEP_S)
        return [self._all[fd] for fd, _ in self._poll.poll()]

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
