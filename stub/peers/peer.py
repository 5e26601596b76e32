"""Keeps what a stub has of the runtime, its peer: channels, memory, batch. When the runtime ends, the stub ends."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

from moonpool.ipc.arena import Keep
from moonpool.ipc.channel import Channel
from moonpool.ipc.codec import encode, unpack_layout
from moonpool.ipc.conversation import Conversation
from moonpool.ipc.errors import LocalProtocolError, OutOfMemory
from moonpool.ipc.messages import ANSWERED, MAX_PLACES_IN_PACKET, NO_CORE, Kind
from moonpool.ipc.slots import SlotChannel
from moonpool.stub.pb_utils.request import InferenceRequest
from moonpool.stub.peers.answer import INTERNAL, Answer, Responses
from moonpool.stub.peers.batch import Batch
from moonpool.stub.peers.control import Control
from moonpool.stub.peers.placement import Placer, error_remark
from moonpool.stub.peers.port import StubPort, compiled_port
from moonpool.stub.peers.regions import Regions

_ANSWER = int(Kind.ANSWER)
# An idle stub so often looks whether the model has released requests that it answered late.
_LOOK_S = 0.25


def _end() -> None:
    """End the process: nobody is left to work for."""
    os._exit(1)


class Peer:
    """Serves the runtime. For the main thread of the stub, unless a method says otherwise."""

    def __init__(
        self, conversation: Conversation, control: Channel, start: dict[str, Any], on_gone: Callable[[], None] = _end
    ) -> None:
        """`on_gone` is called when the runtime has closed a channel or broken the protocol. From any thread, perhaps
        many times.
        """
        self.conversation = conversation
        self.control = Control(control, on_gone)
        self.regions = Regions(self.control.send)
        self.regions.keep = Keep(*(milliseconds / 1000 for milliseconds in start["keep_ms"]))
        conversation.use_overflow(self.regions)
        # The batch that is executing, which the control thread reads; and cancellations that came before their batches.
        self.executing: tuple[int, list[InferenceRequest]] = (0, [])
        self.cancelled: set[tuple[int, int]] = set()
        self.become(start)

    def become(self, start: dict[str, Any]) -> None:
        """Serve a model as this START describes it. Called again only while no batch has come."""
        self._start = start
        self.placer = placer = Placer(self.regions, start)
        extension = compiled_port(start)
        usual = None if extension is None else extension.ApartPlacer(self.regions, placer.indices)
        self.responses = Responses(placer, self.control, start, usual)
        self.batch = Batch(self.regions, self.responses, start)
        self.answer = Answer(placer, self.batch)
        self.port = self._made_port()

    def _made_port(self) -> StubPort:
        """Make the port for the channel that the conversation has now."""
        extension = compiled_port(self._start)
        if extension is None:
            return StubPort(self.conversation.channel)
        port: StubPort = extension.StubPort(self, self._start)
        return port

    def open(self, message: list[Any]) -> list[InferenceRequest]:
        """Return the requests of an EXECUTE for the model. Raises `RemoteProtocolError`."""
        _, batch_id, _, released, blocks, layout, details, targets = message
        if released:
            self.regions.returned.extend(map(tuple, released))
        requests = self.batch.open(batch_id, blocks, layout, details, targets)
        self.executing = (batch_id, requests)
        self.begun()
        return requests

    def begun(self) -> None:
        """Cancel requests of the batch that is executing now whose cancellations came before it."""
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
            remarks = [failed if states is None or states[index] == ANSWERED else None for index in range(count)]
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

    # Waiting

    def use(self, slots: SlotChannel) -> None:
        """Talk to the runtime in memory from now on, and close the socket. Called before the first batch."""
        socket, self.conversation.channel = self.conversation.channel, slots
        self.port = self._made_port()
        socket.close()

    @property
    def needs_care(self) -> bool:
        """Return whether there is something to do while no work comes."""
        return self.regions.has_grown or self.is_waited_for

    @property
    def is_waited_for(self) -> bool:
        """Return whether the model or a device may release memory at any moment, or the model answer."""
        devices = self.regions.devices
        is_device_busy = devices is not None and devices.is_waited_for
        return bool(self.batch.kept or self.responses.are_open or is_device_busy)

    def care(self) -> None:
        """Give back memory while no work comes: regions by which the stub grew, and blocks that the model has released.

        Returns when work has come, or nothing is left to give back. The blocks may be free only now, or be held by
        cycles of garbage, which an idle process would never collect by itself.
        """
        idle_s, keep_s = 0.0, self.regions.keep.others_s
        while self.needs_care:
            self.responses.end_dropped()
            wait_s = min(_LOOK_S, keep_s) if self.is_waited_for else keep_s
            if self._has_work(time.monotonic() + wait_s):
                return
            if idle_s == 0.0:
                gc.collect(1)  # young objects only: all of them may take long
            elif idle_s < keep_s <= idle_s + wait_s:
                gc.collect()
            idle_s += wait_s
            self._tidy(idle_s)

    def _has_work(self, deadline: float) -> bool:
        """Wait for work until then. Returns False if none has come."""
        channel = self.conversation.channel
        while channel.wait_until(deadline):
            # A bell may be rung for a message that was read already.
            if channel.is_ready():
                return True
        return False

    def _tidy(self, idle_s: float) -> None:
        """Report the blocks that the model has released, and give back memory that an idle stub keeps no longer."""
        while places := self.batch.release_late(MAX_PLACES_IN_PACKET):
            self.regions.publish()
            self.control.send(Kind.RELEASE, places)
        if self.regions.devices is not None:
            self.regions.devices.tidy()
        if idle_s >= self.regions.keep.others_s:
            self.regions.retire_idle(idle_s)

    # The end

    def finish(self) -> None:
        """Wait until devices have done what other processes wait for. To be called before the process ends."""
        if self.regions.devices is not None:
            self.regions.devices.finish()

    def leave_to_parent(self) -> None:
        """Send nothing any more, in a process that the model forked: the channels belong to its parent."""
        self.control.begin()
        self.responses.is_forked = True
