"""What is seen of one request on its way through the server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from moonpool.ipc.tensors import NAMES
from moonpool.runtime.frontend.trace_text import tensor_text
from moonpool.runtime.request import Details, Response, Wire

if TYPE_CHECKING:
    from moonpool.runtime.backend import Model
    from moonpool.runtime.request import Answer, InferenceRequest


class SpanIds(NamedTuple):
    """What a request is called in OpenTelemetry, each as its number."""

    trace: int
    root: int | None
    """Of the span of the whole request; None where a model sent it."""
    model: int
    compute: int
    parent: int | None
    """Of the span above all of these."""


class Tensor(NamedTuple):
    """An input or output as it is told."""

    activity: str
    name: str
    datatype: str
    shape: str
    data: str
    ns: int


class Keeper(Protocol):
    """Who made a trace, and gets it when it is finished."""

    def over(self, trace: Trace, *, is_awaited: bool) -> None:
        """Its frontend tells no more; `is_awaited` says that its model may."""

    def executed(self, trace: Trace) -> None:
        """Its model tells no more."""

    def child(self, parent: Trace, model: Model, request_id: str) -> Trace:
        """A trace of a request that a model makes."""


class Trace:
    """One traced request. Its frontend, and whoever executes it, tell what happens; each on one thread at a time.

    The frontend calls `follow` before it submits the request, and `end` once, after its last mark.
    """

    __slots__ = (
        "_ends",
        "_keeper",
        "_request",
        "_wants_tensors",
        "context",
        "is_executed",
        "log_frequency",
        "marks",
        "model",
        "number",
        "parent",
        "request_id",
        "spans",
        "tensors",
    )

    def __init__(
        self,
        number: int,
        model: Model,
        request_id: str,
        keeper: Keeper,
        *,
        parent: Trace | None = None,
        spans: SpanIds | None = None,
        wants_tensors: bool = False,
        log_frequency: int = 0,
    ) -> None:
        self.number = number
        self.model = model
        self.request_id = request_id
        self.parent = parent
        self.spans = spans
        self.log_frequency = log_frequency
        # What the model gets to hand on. In OpenTelemetry's form it can read it, else it is just a name.
        self.context = f"#{number}"
        if spans is not None:
            self.context = f'{{"traceparent":"00-{spans.trace:032x}-{spans.model:016x}-01"}}'
        self.marks: list[tuple[str, int]] = []
        self.tensors: list[Tensor] = []
        self.is_executed = False
        # Whoever pops it ends it.
        self._ends = [None]
        self._keeper = keeper
        self._request: InferenceRequest | None = None
        self._wants_tensors = wants_tensors

    def mark(self, activity: str, ns: int | None = None) -> None:
        """Something happened, now or at a time of `time.monotonic_ns`."""
        self.marks.append((activity, time.monotonic_ns() if ns is None else ns))

    def follow(self, request: InferenceRequest) -> None:
        """This is the request, which is about to be submitted: watch it, and let its model know its trace."""
        self.mark("REQUEST_START")
        self._request = request
        request.trace = self
        request.details = (request.details or Details())._replace(trace=self.context)
        if self._wants_tensors:
            inputs = self.model.config.inputs
            for tensor, array in zip(request.shapes.tensors, request.arrays, strict=True):
                name = inputs[tensor.number].name
                self._tell("TENSOR_QUEUE_INPUT", name, tensor.datatype, tensor.shape, array)

    def end(self) -> None:
        """Nothing follows in the frontend. From any thread; a second call does nothing."""
        try:
            self._ends.pop()
        except IndexError:
            return
        self.mark("REQUEST_END")
        request, self._request = self._request, None
        # What came apart from the answer to its batch may have come before it.
        self._keeper.over(self, is_awaited=request is not None and request.responses > 0)

    # For those who execute it

    def executed(
        self,
        answer: Answer,
        queued_ns: int,
        started_ns: int,
        sent_ns: int,
        answered_ns: int,
        ended_ns: int,
    ) -> None:
        """It was in a batch that is answered now."""
        self.marks += (
            ("QUEUE_START", queued_ns),
            ("COMPUTE_START", started_ns),
            ("COMPUTE_INPUT_END", sent_ns),
            ("COMPUTE_OUTPUT_START", answered_ns),
            ("COMPUTE_END", ended_ns),
        )
        self.responded(answer)
        self._keeper.executed(self)

    def responded(self, answer: object) -> None:
        """Here is a response, if it is one."""
        if self._wants_tensors and isinstance(answer, Response):
            for name, output in answer.outputs.items():
                self._tell("TENSOR_BACKEND_OUTPUT", name, *Wire.of(output))

    def child(self, model: Model, request_id: str) -> Trace:
        """Of a request that the model makes meanwhile."""
        return self._keeper.child(self, model, request_id)

    def _tell(
        self,
        activity: str,
        name: str,
        datatype: int,
        shape: list[int] | tuple[int, ...],
        array: Any,
    ) -> None:
        told = Tensor(
            activity,
            name,
            NAMES[datatype],
            ",".join(map(str, shape)),
            tensor_text(datatype, array),
            time.monotonic_ns(),
        )
        self.tensors.append(told)
