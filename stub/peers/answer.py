"""Collects the responses of a batch for ANSWER, and sends the responses that go apart from it."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

from moonpool.ipc.errors import CODES
from moonpool.ipc.messages import ANSWERED, FINAL, OPEN, RESCHEDULED
from moonpool.stub.pb_utils.errors import TritonModelException
from moonpool.stub.pb_utils.request import RELEASE_RESCHEDULE, InferenceRequest
from moonpool.stub.pb_utils.response import DROPPED, InferenceResponse, Reply, ReplyPort
from moonpool.stub.peers.batch import Batch
from moonpool.stub.peers.control import Control
from moonpool.stub.peers.placement import NO_OUTPUTS, PlacementPlan, Placer, error_remark

INTERNAL = CODES.index("INTERNAL")


class Answer:
    """Collects the outcome of each request of one batch. The next batch uses it again."""

    __slots__ = (
        "_batch",
        "_placer",
        "blocks",
        "plans",
        "remarks",
        "states",
    )

    def __init__(self, placer: Placer, batch: Batch) -> None:
        self._placer = placer
        self._batch = batch
        self.blocks: list[list[int]] = []
        self.plans: list[PlacementPlan] = []
        # Remarks, and states other than ANSWERED, by the place of the request in the batch.
        self.remarks: dict[int, list[Any]] = {}
        self.states: dict[int, int] = {}

    def take(
        self, requests: list[InferenceRequest], responses: list[InferenceResponse | None]
    ) -> None:
        """Place the outputs of each response. A response that cannot be placed becomes an error.

        A request without a response stays open, or is scheduled again if the model asked for that.
        """
        placer, batch = self._placer, self._batch
        targets = batch.targets
        for request, response in zip(requests, responses):
            if response is None:
                self._leave(request)
                continue
            reply = request._reply
            if reply is not None and not reply.close(1):
                reply.finish(response)
                self.add(NO_OUTPUTS, None, OPEN)
                continue
            plan, remark = placer.answer(
                response,
                request._requested_output_names,
                self.blocks,
                batch,
                targets.get(len(self.plans)) if targets else None,
                request._preferred_memory,
            )
            if remark is None and plan is not None:
                self.plans.append(plan)
            else:
                self.add(plan or NO_OUTPUTS, remark)

    def leave_open(self, requests: list[InferenceRequest]) -> None:
        """Leave requests open: their responses come later, or a message that schedules them again."""
        for request in requests:
            request.reply().leave_open()
            self.add(NO_OUTPUTS, None, OPEN)

    def fail(self, requests: list[InferenceRequest], message: str) -> None:
        """Answer all requests of the batch that have no answer yet with the same error."""
        for request in requests[len(self.plans) :]:
            reply = request._reply
            if reply is None or reply.close(0):
                self.add(NO_OUTPUTS, error_remark(INTERNAL, message))
            else:
                reply.fail(message)
                self.add(NO_OUTPUTS, None, OPEN)

    def give(
        self,
    ) -> tuple[list[list[int]], bytes, list[list[Any] | None] | None, list[int] | None]:
        """Return blocks, layout, remarks and states as ANSWER takes them, and start anew for the next batch."""
        blocks, plans = self.blocks, tuple(self.plans)
        self.blocks, self.plans = [], []
        remarks = states = None
        if self.remarks:
            remarks = [self.remarks.get(index) for index in range(len(plans))]
            self.remarks.clear()
        if self.states:
            states = [self.states.get(index, ANSWERED) for index in range(len(plans))]
            self.states.clear()
        return blocks, self._placer.layout(plans), remarks, states

    def _leave(self, request: InferenceRequest) -> None:
        reply = request._reply
        if request._release_flags != RELEASE_RESCHEDULE:
            self.leave_open([request])
        elif reply is None or reply.close(0):
            self.add(NO_OUTPUTS, None, RESCHEDULED)
        else:
            reply.reschedule()
            self.add(NO_OUTPUTS, None, OPEN)

    def add(self, plan: PlacementPlan, remark: list[Any] | None, state: int = ANSWERED) -> None:
        """Add the outcome of the next request."""
        if remark is not None:
            self.remarks[len(self.plans)] = remark
        if state:
            self.states[len(self.plans)] = state
        self.plans.append(plan)


class Responses(ReplyPort):
    """Places responses that go apart from ANSWER, and sends them on the control channel. Any thread may call any method."""

    def __init__(self, placer: Placer, control: Control, start: dict[str, Any]) -> None:
        self.is_decoupled = bool(start["decoupled"])
        self._placer = placer
        self._control = control
        # Replies of requests that may still be answered apart from their batches.
        self.replies: dict[tuple[int, int], weakref.ref[Reply]] = {}
        # True in a process that the model forked, which has only copies of the replies.
        self.is_forked = False

    @property
    def are_open(self) -> bool:
        """Return whether any request may still be answered apart from its batch."""
        return bool(self.replies)

    def reply(self, batch: int, index: int, wanted: Collection[str]) -> Reply:
        reply = Reply(self, batch, index, wanted)
        self.replies[batch, index] = weakref.ref(reply)
        return reply

    def find(self, batch: int, index: int) -> Reply | None:
        """Return the reply of a request, as long as somebody may send with it."""
        known = self.replies.get((batch, index))
        return None if known is None else known()

    def cancel_all(self) -> None:
        """Mark all open requests as cancelled. From any thread."""
        for known in self.replies.copy().values():
            reply = known()
            if reply is not None:
                reply.is_cancelled = True

    def respond(self, reply: Reply, response: InferenceResponse | None, flags: int) -> None:
        """Send a response. One that cannot be placed reaches the client as an error, as in Triton."""
        if self.is_forked:
            raise TritonModelException(
                "Unable to send response. A process that the model forked cannot send any."
            )
        blocks: list[list[int]] = []
        layout = remark = None
        if response is not None:
            plan, remark = self._placer.answer(
                response, reply.wanted, blocks, wish=reply.preferred_memory
            )
            layout = self._placer.layout((plan,)) if plan else None
        if flags:
            self.forget(reply)
        if blocks:
            self._placer.publish()
        self._control.respond([reply.batch, reply.index, flags, blocks, layout, remark])

    def forget(self, reply: Reply) -> None:
        self.replies.pop((reply.batch, reply.index), None)

    def abandon(self, reply: Reply) -> None:
        if self.is_forked:
            return
        self.forget(reply)
        remark = error_remark(CODES.index("INTERNAL"), DROPPED)
        self._control.respond([reply.batch, reply.index, FINAL, [], None, remark])
