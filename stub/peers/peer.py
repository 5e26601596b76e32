"""Keeps what a stub has of each process of the runtime, a peer: its channels, its memory, its batch. Serves them in turns.

The runtime itself is the main peer. It loads and finalizes the model, and when it ends, the stub ends. Front ends are
peers that only send batches. They come and go.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from select import POLLIN
from select import poll as new_poll
from typing import Any

from moonpool.ipc.arena import Keep
from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import encode, unpack_layout
from moonpool.ipc.conversation import Conversation
from moonpool.ipc.errors import (
    LocalProtocolError,
    MoonpoolError,
    OutOfMemory,
    PeerGone,
    RemoteProtocolError,
)
from moonpool.ipc.messages import (
    ANSWERED,
    MAX_PLACES_IN_PACKET,
    NO_CORE,
    Kind,
    Side,
)
from moonpool.ipc.slots import SlotChannel
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.peers.answer import INTERNAL, Answer, Responses
from moonpool.stub.peers.batch import Batch
from moonpool.stub.peers.control import Control
from moonpool.stub.peers.placement import Placer, error_remark
from moonpool.stub.peers.port import StubPort, compiled_port
from moonpool.stub.peers.regions import Regions

_ANSWER = int(Kind.ANSWER)


class Peer:
    """Serves one process of the runtime. For the main thread of the stub, unless a method says otherwise."""

    def __init__(
        self, conversation: Conversation, control: Channel, start: dict[str, Any], *, is_main: bool
    ) -> None:
        self.conversation = conversation
        self.is_main = is_main
        self.is_gone = False
        self.control = Control(control, self._gone)
        self.regions = Regions(self.control.send)
        conversation.use_overflow(self.regions)
        # The batch that is executing, which the control thread reads; and cancellations that came before their batches.
        self.executing: tuple[int, list[InferenceRequest]] = (0, [])
        self.cancelled: set[tuple[int, int]] = set()
        self.become(start)

    def become(self, start: dict[str, Any]) -> None:
        """Serve a model as this START describes it. Called again only while no batch has come."""
        self.placer = placer = Placer(self.regions, start)
        self.responses = Responses(placer, self.control, start)
        self.batch = Batch(self.regions, self.responses, start)
        self.answer = Answer(placer, self.batch)
        self.make_port(start)

    def make_port(self, start: dict[str, Any]) -> None:
        """Make the port anew, for the channel that the conversation has now."""
        self.port = self._made_port(start)

    def _made_port(self, start: dict[str, Any]) -> StubPort:
        extension = compiled_port(start)
        if extension is None:
            return StubPort(self.conversation.channel)
        port: StubPort = extension.StubPort(self, start)
        return port

    def _gone(self) -> None:
        """Handle the end of a peer, which has closed a channel or broken the protocol. From any thread, perhaps many times."""
        if self.is_main:
            # Nobody is left to work for.
            os._exit(1)
        self.is_gone = True
        self.regions.desert()
        # So that the main thread sees the end of the channel, after the batch that it may be executing.
        self.conversation.channel.wake()
        for request in self.executing[1]:
            request._cancelled = True
        self.responses.cancel_all()

    @property
    def needs_care(self) -> bool:
        """Return whether the peer needs attention while no work comes."""
        return self.regions.has_grown or self.is_waited_for

    @property
    def is_waited_for(self) -> bool:
        """Return whether the model or a device may release memory at any moment, or the model answer."""
        devices = self.regions.devices
        is_device_busy = devices is not None and devices.is_waited_for
        return bool(self.batch.kept or self.responses.are_open or is_device_busy)

    def tidy(self, idle_s: float) -> None:
        """Report the blocks that the model has released, and give back memory that an idle stub keeps no longer."""
        while places := self.batch.release_late(MAX_PLACES_IN_PACKET):
            self.regions.publish()
            self.control.send(Kind.RELEASE, places)
        if self.regions.devices is not None:
            self.regions.devices.tidy()
        if idle_s >= self.regions.keep.others_s:
            self.regions.retire_idle(idle_s)

    def open(self, message: list[Any]) -> list[InferenceRequest]:
        """Return the requests of an EXECUTE for the model. Raises `PeerGone`, `RemoteProtocolError`."""
        _, batch_id, _, released, blocks, layout, details, targets = message
        if released:
            self.regions.returned.extend(map(tuple, released))
        requests = self.batch.open(batch_id, blocks, layout, details, targets)
        self.executing = (batch_id, requests)
        self.begun()
        return requests

    def begun(self) -> None:
        """Look for what came before the batch that is executing now. Raises `PeerGone`."""
        # In this order: a thread that finds the peer gone either cancels these requests, or is seen here.
        if self.is_gone:
            raise PeerGone("the process that sent the batch has ended")
        if self.cancelled:
            self._cancel_early(*self.executing)

    def give(self) -> tuple[Any, ...]:
        """Return the fields of ANSWER. To be called when nothing else of ours refers to the objects of the batch."""
        # Not in a variable: a name for the requests would keep their blocks.
        batch_id = self.executing[0]
        self.executing = (batch_id, [])
        held, released = self.batch.end()
        if self.regions.devices is not None:
            self.regions.devices.publish()
        blocks, layout, remarks, states = self.answer.give()
        return _ANSWER, batch_id, NO_CORE, held, released, blocks, layout, remarks, states

    def send(self, answer: tuple[Any, ...]) -> None:
        """Send ANSWER. If it is too large beside its outputs, each response in it becomes an error.

        Raises `PeerGone`.
        """
        try:
            self.conversation.send(*answer)
        except (LocalProtocolError, OutOfMemory) as error:
            kind, batch_id, core, held, released, blocks, layout, _, states = answer
            # The peer will not learn of these blocks.
            self.regions.returned.extend((region, offset) for region, offset, _ in blocks)
            count = len(unpack_layout(layout))
            failed = error_remark(INTERNAL, f"the answer to the batch: {error}")
            remarks = [
                failed if states is None or states[index] == ANSWERED else None
                for index in range(count)
            ]
            none = encode(*[[]] * count)
            self.conversation.send(kind, batch_id, core, held, released, [], none, remarks, states)

    # Cancellation

    def cancel(self, batch_id: int, index: int) -> None:
        """Mark a request as cancelled. On the control thread."""
        executing, requests = self.executing
        if batch_id > executing:
            self.cancelled.add((batch_id, index))  # CANCEL overtook EXECUTE
            # Read again: the main thread may have opened the batch in between, without seeing this cancellation.
            executing, requests = self.executing
        if batch_id == executing and index < len(requests):
            requests[index]._cancelled = True
        reply = self.responses.find(batch_id, index)
        if reply is not None:
            reply.cancel()

    def _cancel_early(self, batch_id: int, requests: list[InferenceRequest]) -> None:
        """Mark the requests whose cancellations came before their batch."""
        for index, request in enumerate(requests):
            if (batch_id, index) in self.cancelled:
                request._cancelled = True
        self.cancelled -= {each for each in list(self.cancelled) if each[0] <= batch_id}

    # The end

    def leave_to_parent(self) -> None:
        """Send nothing any more, in a process that the model forked: the channels belong to its parent."""
        self.control.begin()
        self.responses.is_forked = True

    def close(self) -> None:
        """Close the channels and regions of a front end that is gone. Arrays of the model stay valid."""
        self._gone()
        # The compiled one refers to this object, and no collection of garbage sees that.
        self.port = StubPort(self.conversation.channel)
        self.control.close()
        self.conversation.channel.close()
        self.regions.close()


# An idle stub so often looks whether the model has released requests that it answered late.
_LOOK_S = 0.25


class Peers:
    """Serves all peers of a stub. `add` is for the control thread, `leave_to_parent` for forks, the rest for the main thread."""

    def __init__(self, main: Peer, start: dict[str, Any]) -> None:
        self._main = main
        self._start = start
        self._all: dict[int, Peer] = {}
        # Not epoll, which makes each packet on a registered descriptor slower, and which a contained stub may not use.
        self._poll = new_poll()
        # Peers that the main thread does not know yet, and a pipe that wakes it from its poll.
        self._arrivals: deque[Peer] = deque()
        self._heard_fd = self._bell_fd = -1
        if start["shared"]:
            self._heard_fd, self._bell_fd = os.pipe()
            self._poll.register(self._heard_fd, POLLIN)
        main.regions.keep = Keep(*(milliseconds / 1000 for milliseconds in start["keep_ms"]))
        self._arrive(main)

    def use(self, slots: SlotChannel) -> None:
        """Talk to the runtime in memory from now on, and close the socket. Called before the first batch."""
        conversation = self._main.conversation
        socket, conversation.channel = conversation.channel, slots
        self._main.make_port(self._start)
        self._poll.unregister(socket.fileno())
        del self._all[socket.fileno()]
        socket.close()
        self._arrive(self._main)

    def become(self, start: dict[str, Any]) -> None:
        """Serve a model as this START describes it. Called before front ends come."""
        self._start = start

    def add(self, work_fd: int, control_fd: int) -> None:
        """Add a front end. It speaks as the runtime does after LOADED. For a shared stub, on the control thread."""
        work = Channel.of_descriptor(work_fd)
        # Replaced by the regions of the new peer in its constructor.
        conversation = Conversation(work, Side.STUB, self._main.regions, after=Kind.LOADED)
        control = Channel.of_descriptor(control_fd)
        peer = Peer(conversation, control, self._start, is_main=False)
        peer.control.listen(peer.regions, peer.cancel, _refuse)
        self._arrivals.append(peer)
        os.write(self._bell_fd, b"\0")

    def _arrive(self, peer: Peer) -> None:
        peer.regions.keep = self._main.regions.keep
        fd = peer.conversation.channel.fileno()
        self._all[fd] = peer
        self._poll.register(fd, POLLIN)

    def drop(self, peer: Peer, because: MoonpoolError) -> None:
        """Remove a front end that is gone or has broken the protocol."""
        if not isinstance(because, PeerGone):
            sys.stderr.write(f"No more messages of a front end are read: {because}\n")
        fd = peer.conversation.channel.fileno()
        self._poll.unregister(fd)
        del self._all[fd]
        peer.close()

    def ready(self) -> list[Peer]:
        """Wait for work. Returns the peers that have sent something or are gone.

        While none comes, gives back memory: regions by which the stub grew, and blocks that the model has released. The blocks
        may be free only now, or be held by cycles of garbage, which an idle process would never collect by itself.
        """
        idle_s, keep_s = 0.0, self._main.regions.keep.others_s
        while some := [peer for peer in self._all.copy().values() if peer.needs_care]:
            for peer in some:
                peer.responses.end_dropped()
            wait_s = min(_LOOK_S, keep_s) if any(peer.is_waited_for for peer in some) else keep_s
            if ready := self._wait(wait_s * 1000):
                return self._of(ready)
            if idle_s == 0.0:
                gc.collect(1)  # young objects only: all of them may take long
            elif idle_s < keep_s <= idle_s + wait_s:
                gc.collect()
            idle_s += wait_s
            for peer in some:
                peer.tidy(idle_s)
        return self._of(self._wait(None))

    def _wait(self, most_ms: float | None) -> list[tuple[int, int]]:
        """Wait for work for so long. Returns the descriptors of those that have sent something, with their events."""
        while True:
            ready = self._poll.poll(most_ms)
            # A bell may be rung for a message that was read already.
            some = [each for each in ready if self._is_ready(each[0])]
            if some or not ready:
                return some

    def _is_ready(self, fd: int) -> bool:
        return fd == self._heard_fd or self._all[fd].conversation.channel.is_ready()

    def _of(self, ready: list[tuple[int, int]]) -> list[Peer]:
        """Return the peers of these descriptors, and add one that has arrived."""
        if any(fd == self._heard_fd for fd, _ in ready):
            os.read(self._heard_fd, 1)
            self._arrive(self._arrivals.popleft())
        return [self._all[fd] for fd, _ in ready if fd != self._heard_fd]

    def finish(self) -> None:
        """Wait until devices have done what other processes wait for. To be called before the process ends."""
        for peer in self._all.values():
            if peer.regions.devices is not None:
                peer.regions.devices.finish()

    def leave_to_parent(self) -> None:
        """Send nothing any more, in a process that the model forked: the channels belong to its parent."""
        for peer in self._all.values():
            peer.leave_to_parent()


def _refuse(fields: list[Any], _: list[int]) -> None:
    raise RemoteProtocolError(f"{Kind(fields[0]).name}, which a front end may not send")
