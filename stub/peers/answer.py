"""Collects the responses of a batch for ANSWER, and sends the responses that go apart from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from moonpool.ipc.codec import packed_list
from moonpool.ipc.errors import CODES
from moonpool.ipc.messages import ANSWERED, FINAL, OPEN, RESCHEDULED
from moonpool.ipc.signals import at_once
from moonpool.stub.attributes import AnswerBase
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.request import RELEASE_RESCHEDULE, InferenceRequest
from moonpool.stub.pb_utils.response import DROPPED, InferenceResponse, Reply, ReplyPort
from moonpool.stub.peers.batch import Batch
from moonpool.stub.peers.control import MAX_ROW_BYTES, Control
from moonpool.stub.peers.placement import NO_OUTPUTS, Placer, error_remark, refusal_remark

INTERNAL = CODES.index("INTERNAL")


class Answer(AnswerBase):
    """Collects the outcome of each request of one batch. The next batch uses it again."""

    __slots__ = ("_batch", "_placer")

    def __init__(self, placer: Placer, batch: Batch) -> None:
        self._placer = placer
        self._batch = batch
        self.blocks: list[list[int]] = []
        # The packed description of each response so far.
        self.layouts: list[bytes] = []
        # Remarks, and states other than ANSWERED, by the place of the request in the batch.
        self.remarks: dict[int, list[Any]] = {}
        self.states: dict[int, int] = {}

    def take(self, requests: list[InferenceRequest], responses: Sequence[InferenceResponse | None]) -> None:
        """Place the outputs of each response. A response that cannot be placed becomes an error.

        A request without a response stays open, or is scheduled again if the model asked for that.
        """
        for request, response in zip(requests, responses):
            self.take_one(request, response)

    def take_one(self, request: InferenceRequest, response: InferenceResponse | None) -> None:
        """Do that for the next request of the batch."""
        if response is None:
            self._leave(request)
            return
        reply = request._reply
        if reply is not None and not reply.close(1):
            reply.finish(response)
            self.add(NO_OUTPUTS, None, OPEN)
            return
        self._place(request, response)

    def _place(self, request: InferenceRequest, response: InferenceResponse) -> None:
        """Place the outputs of the response to the next request.

        The model's `execute` is over, so nobody waits for what a signal handler raises here: it fails this response,
        as everything else does.
        """
        index, targets = len(self.layouts), self._batch.targets
        blocks: list[list[int]] = []
        try:
            layout, remark = self._placer.answer(
                response,
                request._requested_output_names,
                blocks,
                self._batch,
                targets.get(index) if targets else None,
                request._preferred_memory,
                len(self.blocks),
            )
            self.add(layout or NO_OUTPUTS, remark, blocks=blocks)
        except Exception as error:
            if len(self.layouts) == index:
                self.refuse(error)
        finally:
            if blocks:
                self._placer.give_back(blocks)

    def refuse(self, error: Exception) -> None:
        """Make the answer to the next request an error, as its response cannot be sent."""
        self.add(NO_OUTPUTS, refusal_remark(error))

    def leave_open(self, requests: list[InferenceRequest]) -> None:
        """Leave requests open: their responses come later, or a message that schedules them again."""
        for request in requests:
            request.reply().leave_open()
            self.add(NO_OUTPUTS, None, OPEN)

    def fail(self, requests: list[InferenceRequest], message: str) -> None:
        """Answer all requests of the batch that have no answer yet with the same error."""
        for request in requests[len(self.layouts) :]:
            reply = request._reply
            if reply is None or reply.close(0):
                self.add(NO_OUTPUTS, error_remark(INTERNAL, message))
            else:
                reply.fail(message)
                self.add(NO_OUTPUTS, None, OPEN)

    def give(self) -> tuple[list[list[int]], bytes, list[list[Any] | None] | None, list[int] | None]:
        """Return blocks, layout, remarks and states as ANSWER takes them, and start anew for the next batch."""
        blocks, layouts = self.blocks, self.layouts
        self.blocks, self.layouts = [], []
        remarks = states = None
        if self.remarks:
            remarks = [self.remarks.get(index) for index in range(len(layouts))]
            self.remarks.clear()
        if self.states:
            states = [self.states.get(index, ANSWERED) for index in range(len(layouts))]
            self.states.clear()
        return blocks, packed_list(layouts), remarks, states

    def _leave(self, request: InferenceRequest) -> None:
        reply = request._reply
        if request._release_flags != RELEASE_RESCHEDULE:
            self.leave_open([request])
        elif reply is None or reply.close(0):
            self.add(NO_OUTPUTS, None, RESCHEDULED)
        else:
            reply.reschedule()
            self.add(NO_OUTPUTS, None, OPEN)

    def add(
        self, layout: bytes, remark: list[Any] | None, state: int = ANSWERED, blocks: list[list[int]] | None = None
    ) -> None:
        """Add the outcome of the next request, all of it at once. Takes the blocks out of `blocks`."""
        index = len(self.layouts)
        steps: list[Callable[[], object]] = [partial(self.layouts.append, layout)]
        if remark is not None:
            steps.append(partial(self.remarks.__setitem__, index, remark))
        if state:
            steps.append(partial(self.states.__setitem__, index, state))
        if blocks:
            steps += (partial(self.blocks.extend, blocks), blocks.clear)
        at_once(*steps)


class Responses(ReplyPort):
    """Places responses that go apart from ANSWER, and sends them on the control channel. Any thread may call any
    method.
    """

    def __init__(self, placer: Placer, control: Control, start: dict[str, Any], usual: Any = None) -> None:
        """`usual` is the compiled form, which places usual responses in blocks that came back, as `placer` would."""
        self.is_decoupled = bool(start["decoupled"])
        self._placer = placer
        self._usual = usual
        self._control = control
        # Replies of requests that may still be answered apart from their batches.
        self.replies: dict[tuple[int, int], weakref.ref[Reply]] = {}
        # Those of them that were dropped, and whose destructors have not ended their requests, or not yet.
        self._dropped: dict[tuple[int, int], object] = {}
        # True in a process that the model forked, which has only copies of the replies.
        self.is_forked = False

    @property
    def are_open(self) -> bool:
        """Return whether any request may still be answered apart from its batch."""
        return bool(self.replies)

    def remember(self, reply: Reply, *steps: Callable[[], object]) -> None:
        key = reply.batch, reply.index
        # A function of C notes the end of a reply that is remembered still. Usually its destructor has ended the
        # request before, but a collection of garbage calls this first.
        known = weakref.ref(reply, partial(self._dropped.__setitem__, key))
        at_once(*steps, partial(self.replies.__setitem__, key, known))

    def find(self, batch: int, index: int) -> Reply | None:
        """Return the reply of a request, as long as somebody may send with it."""
        known = self.replies.get((batch, index))
        return None if known is None else known()

    def respond(
        self, reply: Reply, response: InferenceResponse | None, flags: int, *steps: Callable[[], object]
    ) -> None:
        """Send a response. One that cannot be placed reaches the client as an error, as in Triton.

        Passes on what a signal handler raises. Then the response is queued, or it has no blocks any more.
        """
        if self.is_forked:
            raise TritonModelException("Unable to send response. A process that the model forked cannot send any.")
        blocks: list[list[int]] = []
        try:
            row = self._row(reply, response, flags, blocks)
            if blocks:
                self._placer.publish()
                steps += (blocks.clear,)
            if flags:
                steps += (self._forgetting(reply.batch, reply.index),)
            self._control.respond(row, *steps)
        finally:
            if blocks:
                self._placer.give_back(blocks)

    def _row(
        self, reply: Reply, response: InferenceResponse | None, flags: int, blocks: list[list[int]]
    ) -> bytes | list[Any]:
        """Place a response, and return its row of RESPONSES, perhaps packed. `blocks` gets its blocks."""
        batch, index, wish = reply.batch, reply.index, reply.preferred_memory
        layout = remark = None
        if response is not None:
            if self._usual is not None and wish is None:
                row: bytes | None = self._usual.row(batch, index, flags, response, reply.wanted, blocks, MAX_ROW_BYTES)
                if row is not None:
                    return row
            placed, remark = self._placer.answer(response, reply.wanted, blocks, wish=wish)
            layout = packed_list([placed]) if placed else None
        return [batch, index, flags, blocks, layout, remark]

    def forget(self, reply: Reply, *steps: Callable[[], object]) -> None:
        at_once(*steps, self._forgetting(reply.batch, reply.index))

    def _forgetting(self, batch: int, index: int) -> Callable[[], object]:
        return partial(self.replies.pop, (batch, index), None)

    def abandon(self, reply: Reply, *steps: Callable[[], object]) -> None:
        if not self.is_forked and not self._end(reply.batch, reply.index, *steps):
            at_once(*steps)

    def _end(self, batch: int, index: int, *steps: Callable[[], object]) -> bool:
        """End a request whose reply was dropped. Returns False, and takes no step, if it has ended."""
        row = [batch, index, FINAL, [], None, error_remark(INTERNAL, DROPPED)]
        try:
            self._control.respond(row, partial(self.replies.__delitem__, (batch, index)), *steps)
        except KeyError as error:
            if error.args != ((batch, index),):  # a signal handler has raised it
                raise
            return False
        return True

    def end_dropped(self) -> None:
        """End the requests whose replies were dropped while a signal handler raised in their destructors.

        For the main thread.
        """
        for key in list(self._dropped):
            self._end(*key)
            self._dropped.pop(key, None)
