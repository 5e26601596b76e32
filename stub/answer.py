"""From what `execute` returned to the fields of ANSWER: validate, place outputs, count what is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.ipc.errors import CODES
from moonpool.ipc.messages import ANSWERED, OPEN, RESCHEDULED
from moonpool.stub.execute import RELEASE_RESCHEDULE
from moonpool.stub.placement import NO_OUTPUTS, Plan, error_remark

if TYPE_CHECKING:
    from typing import Any

    from moonpool.stub.batch import Batch
    from moonpool.stub.placement import Placer
    from moonpool.stub.request import InferenceRequest
    from moonpool.stub.response import InferenceResponse

INTERNAL = CODES.index("INTERNAL")


class Answer:
    """Collects what becomes of the requests of one batch; used again for the next."""

    __slots__ = (
        "_batch",
        "_blocks",
        "_placer",
        "_plans",
        "_remarks",
        "_states",
    )

    def __init__(self, placer: Placer, batch: Batch) -> None:
        self._placer = placer
        self._batch = batch
        self._blocks: list[list[int]] = []
        self._plans: list[Plan] = []
        # Of those requests that have any, by their places in the batch.
        self._remarks: dict[int, list[Any]] = {}
        self._states: dict[int, int] = {}

    def take(
        self, requests: list[InferenceRequest], responses: list[InferenceResponse | None]
    ) -> None:
        """Place the outputs of each response; one that cannot be placed becomes an error.

        A request without a response stays open, or is rescheduled where the model asked for that.
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
                self._add(NO_OUTPUTS, None, OPEN)
                continue
            plan, remark = placer.answer(
                response,
                request._requested_output_names,
                self._blocks,
                batch,
                targets.get(len(self._plans)) if targets else None,
                request._preferred_memory,
            )
            if remark is None and plan is not None:
                self._plans.append(plan)
            else:
                self._add(plan or NO_OUTPUTS, remark)

    def leave_open(self, requests: list[InferenceRequest]) -> None:
        """All responses come later, or the word that a request is to be rescheduled."""
        for request in requests:
            request.reply().leave_open()
            self._add(NO_OUTPUTS, None, OPEN)

    def fail(self, requests: list[InferenceRequest], message: str) -> None:
        """The same error for all requests of the batch that are not answered yet."""
        for request in requests[len(self._plans) :]:
            reply = request._reply
            if reply is None or reply.close(0):
                self._add(NO_OUTPUTS, error_remark(INTERNAL, message))
            else:
                reply.fail(message)
                self._add(NO_OUTPUTS, None, OPEN)

    def give(
        self,
    ) -> tuple[list[list[int]], bytes, list[list[Any] | None] | None, list[int] | None]:
        """Blocks, layout, remarks and states for the wire; the next batch begins with none."""
        blocks, plans = self._blocks, tuple(self._plans)
        self._blocks, self._plans = [], []
        remarks = states = None
        if self._remarks:
            remarks = [self._remarks.get(index) for index in range(len(plans))]
            self._remarks.clear()
        if self._states:
            states = [self._states.get(index, ANSWERED) for index in range(len(plans))]
            self._states.clear()
        return blocks, self._placer.layout(plans), remarks, states

    def _leave(self, request: InferenceRequest) -> None:
        reply = request._reply
        if request._release_flags != RELEASE_RESCHEDULE:
            self.leave_open([request])
        elif reply is None or reply.close(0):
            self._add(NO_OUTPUTS, None, RESCHEDULED)
        else:
            reply.reschedule()
            self._add(NO_OUTPUTS, None, OPEN)

    def _add(self, plan: Plan, remark: list[Any] | None, state: int = ANSWERED) -> None:
        if remark is not None:
            self._remarks[len(self._plans)] = remark
        if state:
            self._states[len(self._plans)] = state
        self._plans.append(plan)
