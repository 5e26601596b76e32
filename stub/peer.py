"""One process of the runtime as a stub sees it: its channels, its memory, its batch.

The runtime itself is the main peer, which loads and finalizes the model; without it there is no stub. A front end
is a peer that only sends batches, and may come and go.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from moonpool.ipc.errors import PeerGone
from moonpool.ipc.messages import MAX_PLACES_IN_PACKET, Kind
from moonpool.stub.answer import Answer
from moonpool.stub.batch import Batch
from moonpool.stub.control import Control
from moonpool.stub.placement import Placer
from moonpool.stub.regions import Regions
from moonpool.stub.responses import Responses

if TYPE_CHECKING:
    from typing import Any

    from moonpool.ipc.channel import Channel
    from moonpool.ipc.conversation import Conversation
    from moonpool.stub.request import InferenceRequest


_ANSWER = int(Kind.ANSWER)


class Peer:
    """Its work channel is for the main thread of the stub alone, as is what is not said to be for others."""

    def __init__(
        self, conversation: Conversation, control: Channel, start: dict[str, Any], *, is_main: bool
    ) -> None:
        self.conversation = conversation
        self.is_main = is_main
        self._is_gone = False
        self.control = Control(control, self._gone)
        self.regions = Regions(self.control.send)
        conversation.use_overflow(self.regions)
        placer = Placer(self.regions, start)
        self.responses = Responses(placer, self.control, start)
        self.batch = Batch(self.regions, self.responses, start)
        self.answer = Answer(placer, self.batch)
        # The batch that is executing, for the control thread; and the cancellations that overtook theirs.
        self._executing: tuple[int, list[InferenceRequest]] = (0, [])
        self._cancelled: set[tuple[int, int]] = set()

    def _gone(self) -> None:
        """It has closed a channel, or said what it may not. From any thread, perhaps many times."""
        if self.is_main:
            # Whatever this thread is doing, there is nobody left to do it for.
            os._exit(1)
        self._is_gone = True
        self.regions.desert()
        # The main thread sees the end of the channel, if need be after the batch that it executes.
        self.conversation.channel.wake()
        for request in self._executing[1]:
            request._cancelled = True
        self.responses.cancel_all()

    @property
    def needs_care(self) -> bool:
        """Whether there is something to look after while no work comes."""
        return self.regions.has_grown or self.is_waited_for

    @property
    def is_waited_for(self) -> bool:
        """Whether the model, or a device, may let go of something, or the model answer, at any moment."""
        devices = self.regions.devices
        is_device_busy = devices is not None and devices.is_waited_for
        return bool(self.batch.kept or self.responses.are_open or is_device_busy)

    def tidy(self, *, give_up_memory: bool) -> None:
        """Tell what the model has let go of; give regions back that nothing lies in, if so wanted."""
        while places := self.batch.let_go_late(MAX_PLACES_IN_PACKET):
            self.regions.publish()
            self.control.send(Kind.RELEASE, places)
        if self.regions.devices is not None:
            self.regions.devices.tidy()
        if give_up_memory:
            self.regions.retire_idle()

    def open(self, message: list[Any]) -> list[InferenceRequest]:
        """The requests of an EXECUTE, as the model sees them. Raises `PeerGone`, `RemoteProtocolError`."""
        _, batch_id, released, blocks, layout, details, targets = message
        if released:
            self.regions.returned.extend(map(tuple, released))
        requests = self.batch.open(batch_id, blocks, layout, details, targets)
        self._executing = (batch_id, requests)
        # In this order: whoever finds that it is gone either cancels these, or is seen here.
        if self._is_gone:
            raise PeerGone("the process that sent the batch has ended")
        if self._cancelled:
            self._cancel_early(batch_id, requests)
        return requests

    def give(self) -> tuple[object, ...]:
        """ANSWER, as it is sent. To be called when nothing else refers to the batch's objects."""
        # In no variable: a name for the requests would keep them beyond this.
        batch_id = self._executing[0]
        self._executing = (batch_id, [])
        held, released = self.batch.let_go()
        if self.regions.devices is not None:
            self.regions.devices.publish()
        blocks, layout, remarks, states = self.answer.give()
        return _ANSWER, batch_id, held, released, blocks, layout, remarks, states

    # Cancellation

    def cancel(self, batch_id: int, index: int) -> None:
        """Nobody waits for a request any more. On the control thread."""
        executing, requests = self._executing
        if batch_id > executing:
            self._cancelled.add((batch_id, index))  # the word of it overtook the request
            executing, requests = self._executing
        if batch_id == executing and index < len(requests):
            requests[index]._cancelled = True
        reply = self.responses.find(batch_id, index)
        if reply is not None:
            reply.is_cancelled = True

    def _cancel_early(self, batch_id: int, requests: list[InferenceRequest]) -> None:
        for index, request in enumerate(requests):
            if (batch_id, index) in self._cancelled:
                request._cancelled = True
        self._cancelled -= {each for each in list(self._cancelled) if each[0] <= batch_id}

    # The end

    def leave_to_parent(self) -> None:
        """In a process that the model forked: the runtime speaks with the one process only."""
        self.control.begin()
        self.responses.is_forked = True

    def close(self) -> None:
        """A front end is gone: nothing of it is kept but what the model still holds."""
        self._gone()
        self.control.close()
        self.conversation.channel.close()
        self.regions.close()
