"""One traced request: the times of its activities, and its tensors as text."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from moonpool.ipc.tensors import BF16, BYTES, DTYPES, NAMES
from moonpool.runtime.model.request import Answer, Details, InferenceRequest, ModelVersion, Response, WireTensor


class SpanIds(NamedTuple):
    """The numbers of a request's spans in OpenTelemetry."""

    trace: int
    root: int | None
    """The span of the whole request; None if a model has sent it."""
    model: int
    compute: int
    parent: int | None
    """The span above these; None for a new trace."""


class TracedTensor(NamedTuple):
    """An input or an output in the form of a trace."""

    activity: str
    name: str
    datatype: str
    shape: str
    data: str
    ns: int


class Keeper(Protocol):
    """Makes traces, and gets them when they are finished."""

    def over(self, trace: Trace, *, is_awaited: bool) -> None:
        """Note that the protocol adds nothing more to a trace. With `is_awaited`, its model may still do."""

    def executed(self, trace: Trace) -> None:
        """Note that the model adds nothing more to a trace."""

    def child(self, parent: Trace, model: ModelVersion, request_id: str) -> Trace:
        """Make a trace for a request that the model of `parent` sends."""


class Trace:
    """One traced request. Its protocol and its scheduler add marks, each on one thread at a time.

    The protocol calls `follow` before it submits the request, and `end` once, after its last mark.
    """

    __slots__ = (
        "_answer",
        "_ends",
        "_keeper",
        "_request",
        "_size_bytes",
        "_wants_tensors",
        "attributes",
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
        model: ModelVersion,
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
        # The model gets this to pass on. It can read OpenTelemetry's form; the other form is only a name.
        self.context = f"#{number}"
        if spans is not None:
            self.context = f'{{"traceparent":"00-{spans.trace:032x}-{spans.model:016x}-01"}}'
        # What else OpenTelemetry's span of the model has, by OpenTelemetry's names.
        self.attributes: dict[str, str | int] = {}
        self.marks: list[tuple[str, int]] = []
        self.tensors: list[TracedTensor] = []
        self.is_executed = False
        # `pop` is atomic: the thread that gets the item ends the trace.
        self._ends = [None]
        self._keeper = keeper
        self._request: InferenceRequest | None = None
        # The answer whose outputs are not added yet.
        self._answer: Answer | None = None
        self._wants_tensors = wants_tensors
        # What its marks and tensors take.
        self._size_bytes = 0

    def mark(self, activity: str, ns: int | None = None) -> None:
        """Add an activity at a time of `time.monotonic_ns`, by default now."""
        self.marks.append((activity, time.monotonic_ns() if ns is None else ns))
        self._size_bytes += _MARK_BYTES

    def follow(self, request: InferenceRequest) -> None:
        """Trace a request that is about to be submitted, and let its model know the trace."""
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
        """End the protocol's part of the trace. From any thread; a second call does nothing."""
        try:
            self._ends.pop()
        except IndexError:
            return
        self.mark("REQUEST_END")
        request, self._request = self._request, None
        # Responses of a decoupled model may have come before the answer to its batch, with which the model's part ends.
        self._keeper.over(self, is_awaited=request is not None and request.responses > 0)

    # For the scheduler

    def executed(
        self, answer: Answer, queued_ns: int, started_ns: int, sent_ns: int, answered_ns: int, ended_ns: int
    ) -> None:
        """Add the times of the batch that the request was in. `answered` follows, and then `settled`."""
        self._answer = answer
        # A model may reschedule a request for ever.
        if self._size_bytes < MAX_TRACE_BYTES:
            self.mark("QUEUE_START", queued_ns)
            self.mark("COMPUTE_START", started_ns)
            self.mark("COMPUTE_INPUT_END", sent_ns)
            self.mark("COMPUTE_OUTPUT_START", answered_ns)
            self.mark("COMPUTE_END", ended_ns)

    def answered(self) -> None:
        """Add the outputs of the answer. Their text may take long, so the caller must not hold a lock."""
        answer, self._answer = self._answer, None
        self.responded(answer)

    def settled(self) -> None:
        """End the model's part of the trace. The trace may be written now, so the caller must not hold a lock."""
        self._keeper.executed(self)

    def responded(self, answer: object) -> None:
        """Add the outputs of an answer, if it is a response."""
        if self._wants_tensors and isinstance(answer, Response):
            for name, output in answer.outputs.items():
                self._tell("TENSOR_BACKEND_OUTPUT", name, *WireTensor.of(output))

    def child(self, model: ModelVersion, request_id: str) -> Trace:
        """Make a trace for a request that the model sends while it executes this one."""
        return self._keeper.child(self, model, request_id)

    def _tell(self, activity: str, name: str, datatype: int, shape: list[int] | tuple[int, ...], array: Any) -> None:
        # A model may respond for ever.
        if self._size_bytes >= MAX_TRACE_BYTES:
            return
        tensor = TracedTensor(
            activity,
            name,
            NAMES[datatype],
            ",".join(map(str, shape)),
            tensor_text(datatype, array),
            time.monotonic_ns(),
        )
        self.tensors.append(tensor)
        self._size_bytes += _TENSOR_BYTES + sum(map(sys.getsizeof, (tensor.name, tensor.shape, tensor.data)))


# Traces are for people, who read no more than this.
MAX_ELEMENTS = 4096
MAX_STRING_BYTES = 4096
# A trace with more gets no more tensors, and no more times of executions.
MAX_TRACE_BYTES = 4 << 20
_MARK_BYTES, _TENSOR_BYTES = 128, 256


def tensor_text(datatype: int, array: np.ndarray[Any, Any]) -> str:
    """Write the elements in C order, with commas between them. A long tensor is cut, and ends with dots.

    `array` has the elements, or their bytes as they travel.
    """
    if datatype == BYTES:
        wire = array.reshape(-1).view(np.uint8).data
        strings = list(islice(_strings(wire), MAX_ELEMENTS + 1))
        words = [f'"{each.decode("utf-8", "backslashreplace")}"' for each in strings[:MAX_ELEMENTS]]
        is_cut = len(strings) > MAX_ELEMENTS
    else:
        elements = _elements(datatype, array)
        is_cut = elements.size > MAX_ELEMENTS
        shown = elements[:MAX_ELEMENTS].tolist()
        words = [f"{each:g}" if isinstance(each, float) else str(int(each)) for each in shown]
    return ",".join([*words, "..."] if is_cut else words)


def _elements(datatype: int, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if datatype == BF16:
        # BF16 is the upper half of a float.
        words: np.ndarray[Any, Any] = array.reshape(-1).view(np.uint16)[: MAX_ELEMENTS + 1]
        return (words.astype(np.uint32) << 16).view(np.float32)
    return array.reshape(-1).view(DTYPES[datatype])


def _strings(wire: memoryview) -> Iterator[bytes]:
    place = 0
    while place + 4 <= len(wire):
        (size,) = struct.unpack_from("<I", wire, place)
        place += 4
        cut = min(size, MAX_STRING_BYTES)
        yield bytes(wire[place : place + cut]) + (b"..." if cut < size else b"")
        place += size
