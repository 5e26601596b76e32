"""Decides once for each request whether it is traced, and writes finished traces into files.

Theory of operation. Any thread may begin or end a trace, or change the settings. Requests read `is_on` without the
lock, so that a server that traces nothing pays for one attribute. `_lock` guards the settings and the counts of the
samplers, as two requests must not take the last trace that is left.

A trace has two parts with an end each: the protocol's (`over`) and the model's (`executed`). Either may come first, on
different threads: a decoupled model's last response may be sent before its batch is answered. The second one writes the
trace. `_lock` decides which that is, by `is_executed` and `_unfinished`; writing happens without it. An instance that
dies never ends its part, so beyond `_MAX_UNFINISHED` the oldest trace is written as it is.

`TraceFile` has a lock of its own for the file, since threads finish traces at once. A file is valid JSON after every
write: the closing bracket is overwritten by the next trace.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from moonpool.ipc.tensors import BF16, BYTES, DTYPES, NAMES
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.request import Answer, Details, InferenceRequest, ModelVersion, Response, WireTensor
from moonpool.runtime.server.setting_values import BadSetting
from moonpool.runtime.server.tracing.settings import OPENTELEMETRY, TraceOptions, TraceSetting, changed

# The most traces whose protocol has ended and whose model has not. Beyond it, the oldest one is written as it is.
_MAX_UNFINISHED = 1000
# Traces are for people, who read no more than this.
MAX_ELEMENTS = 4096
MAX_STRING_BYTES = 4096
# A trace with more gets no more tensors, and no more times of executions.
MAX_TRACE_BYTES = 4 << 20
_MARK_BYTES, _TENSOR_BYTES = 128, 256


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


class Trace:
    """One traced request. Its protocol and its scheduler add marks, each on one thread at a time.

    The protocol calls `follow` before it submits the request, and `end` once, after its last mark.
    """

    __slots__ = (
        "_answer",
        "_ends",
        "_request",
        "_size_bytes",
        "_traces",
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
        traces: Traces,
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
        self._traces = traces
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
        self._traces.over(self, is_awaited=request is not None and request.responses > 0)

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
        self._traces.executed(self)

    def responded(self, answer: object) -> None:
        """Add the outputs of an answer, if it is a response."""
        if self._wants_tensors and isinstance(answer, Response):
            for name, output in answer.outputs.items():
                self._tell("TENSOR_BACKEND_OUTPUT", name, *WireTensor.of(output))

    def child(self, model: ModelVersion, request_id: str) -> Trace:
        """Make a trace for a request that the model sends while it executes this one."""
        return self._traces.child(self, model, request_id)

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


class Sink(Protocol):
    """Takes finished traces."""

    def write(self, trace: Trace) -> None:
        """Write a trace. From any thread; does not raise."""

    def close(self) -> None:
        """Finish, as no trace follows."""


class _Sampler:
    """A setting in force, with the number of requests that it has seen, and of those that it may still trace."""

    def __init__(self, setting: TraceSetting, *, is_valid: bool) -> None:
        self.setting = setting
        self.left = setting.count
        self._seen = 0
        self.is_on = bool(setting.levels) and is_valid

    def takes(self, *, has_context: bool) -> bool:
        """Decide whether to trace the next request. The lock is held."""
        if has_context:
            return True
        if not self.setting.rate or not self.left:
            return False
        self._seen += 1
        if self._seen % self.setting.rate:
            return False
        if self.left > 0:
            self.left -= 1
        return True


class Traces:
    """The traces of a server. Any thread may call any method.

    If `is_on` is False, no request is traced, and `begin` need not be called.
    """

    def __init__(self, options: TraceOptions | None = None, has_model: Callable[[str], bool] = lambda _: True) -> None:
        """`has_model` returns whether a model of that name is loaded.

        Raises `BadSetting` if the mode is `opentelemetry` and its packages are not installed.
        """
        self._options = options = options or TraceOptions()
        self._has_model = has_model
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._set = options.setting
        self._set_of: dict[str, dict[str, object]] = {}
        self._all = self._sampler(options.setting)
        self._of: dict[str, _Sampler] = {}
        self._unfinished: dict[Trace, None] = {}
        self._spans = None
        self._sink: Sink
        if options.mode == OPENTELEMETRY:
            from moonpool.runtime.server.tracing.spans import Spans

            self._sink = self._spans = Spans(options)
        else:
            self._sink = TraceFile(options.file)
        self.is_on = self._all.is_on

    def _sampler(self, setting: TraceSetting) -> _Sampler:
        return _Sampler(setting, is_valid=self._options.invalid_reason(setting) is None)

    # Settings

    def settings(self, model: str = "", changes: Mapping[str, object] | None = None) -> dict[str, object]:
        """Apply changes to the settings of a model, or with "" of all models, and return them in the protocol's JSON
        form.

        None clears a value: a model's own one gives way to the one for all models, and that to the command line's.
        Raises `BadSetting`.
        """
        with self._lock:
            if model and not self._has_model(model):
                raise BadSetting(f"Request for unknown model : {model}")
            if changes:
                self._change(model, changes)
            return self._shown(self._of.get(model, self._all))

    def _change(self, model: str, changes: Mapping[str, object]) -> None:
        before = self._of.get(model, self._all).setting
        cleared = self._all.setting if model else self._options.setting
        setting = changed(before, changes, cleared)
        reason = self._options.invalid_reason(setting)
        if reason is not None:
            raise BadSetting(f"Attempting to set invalid trace setting :{reason}")
        if model:
            own = {**self._set_of.get(model, {}), **changes}
            self._set_of[model] = {name: value for name, value in own.items() if value is not None}
        else:
            self._all = self._sampler(setting)
        self._renew(model)

    def _renew(self, changed_model: str) -> None:
        """Make the samplers of models anew. They take all values that are not their own from the setting for all
        models.
        """
        for name, own in list(self._set_of.items()):
            if changed_model in ("", name):
                if own:
                    setting = changed(self._all.setting, own, self._all.setting)
                    self._of[name] = self._sampler(setting)
                else:
                    del self._set_of[name]
                    self._of.pop(name, None)
        self.is_on = self._all.is_on or any(each.is_on for each in self._of.values())

    def _shown(self, sampler: _Sampler) -> dict[str, object]:
        setting, options = sampler.setting, self._options
        shown: dict[str, object] = {
            "trace_level": setting.shown_levels(),
            "trace_rate": str(setting.rate),
            "trace_count": str(sampler.left),
        }
        if options.mode == OPENTELEMETRY:
            resource = ",".join(f"{key}={value}" for key, value in options.resource.items())
            return shown | {"trace_mode": options.mode, "resource": resource, **options.exporter}
        return shown | {
            "log_frequency": str(setting.log_frequency),
            "trace_file": options.file,
            "trace_mode": options.mode,
        }

    # Requests

    def begin(
        self, model: ModelVersion, request_id: str = "", traceparent: str | None = None, tracestate: str | None = None
    ) -> Trace | None:
        """Return a trace for a new request; None if it is not traced.

        `traceparent` and `tracestate` are the headers of W3C's trace context that came with it.
        """
        sampler = self._of.get(model.name, self._all)
        if not sampler.is_on:
            return None
        spans = None
        if self._spans is not None:
            spans = self._spans.ids(traceparent, tracestate)
        has_context = spans is not None and spans.parent is not None
        with self._lock:
            if not sampler.takes(has_context=has_context):
                return None
        return self._trace(sampler.setting, model, request_id, None, spans)

    def _trace(
        self, setting: TraceSetting, model: ModelVersion, request_id: str, parent: Trace | None, spans: SpanIds | None
    ) -> Trace:
        return Trace(
            next(self._numbers),
            model,
            request_id,
            self,
            parent=parent,
            spans=spans,
            # OpenTelemetry has no place for tensors.
            wants_tensors="TENSORS" in setting.levels and spans is None,
            log_frequency=setting.log_frequency,
        )

    # For the traces

    def child(self, parent: Trace, model: ModelVersion, request_id: str) -> Trace:
        """Make a trace for a request that the model of `parent` sends."""
        setting = self._of.get(model.name, self._all).setting
        spans = None
        if self._spans is not None and parent.spans is not None:
            spans = self._spans.ids_below(parent.spans)
        return self._trace(setting, model, request_id, parent, spans)

    def over(self, trace: Trace, *, is_awaited: bool) -> None:
        """Note the end of the protocol's part. With `is_awaited`, the model's part may still go on."""
        finished: Trace | None = trace
        with self._lock:
            if is_awaited and not trace.is_executed:
                self._unfinished[trace] = None
                # An instance that died never ends its part.
                finished = next(iter(self._unfinished)) if len(self._unfinished) > _MAX_UNFINISHED else None
                if finished is not None:
                    del self._unfinished[finished]
        if finished is not None:
            self._sink.write(finished)

    def executed(self, trace: Trace) -> None:
        """Note the end of the model's part."""
        with self._lock:
            trace.is_executed = True
            is_over = trace in self._unfinished
            self._unfinished.pop(trace, None)
        if is_over:
            self._sink.write(trace)

    def close(self) -> None:
        """Trace nothing more, write the unfinished traces, and close the sink."""
        self.is_on = False
        with self._lock:
            self._set_of.clear()
            self._of.clear()
            self._all = self._sampler(TraceSetting())
            unfinished = list(self._unfinished)
            self._unfinished.clear()
        for trace in unfinished:
            self._sink.write(trace)
        self._sink.close()


_log = RuntimeLog("moonpool")


class TraceFile:
    """Writes traces in Triton's JSON form into one file, or into several with so many traces each. Thread-safe.

    A file is a JSON list at any time. Every trace is added as soon as it is finished.
    """

    def __init__(self, path: str) -> None:
        """Files are made with their first trace. One from before is truncated."""
        self._path = path
        self._lock = threading.Lock()
        self._file: Any = None
        self._index = 0
        self._count = 0
        self._has_failed = False

    def write(self, trace: Trace) -> None:
        """Add a trace. If that fails, the trace is lost, and the log says so once."""
        rows = ",".join(json.dumps(row, separators=(",", ":")) for row in rows_of(trace))
        with self._lock:
            try:
                self._add(rows, trace.log_frequency)
                self._has_failed = False
            except OSError as error:
                self._give_up_file()
                if not self._has_failed:
                    self._has_failed = True
                    _log.error("traces cannot be written to %r: %s", self._path, error)

    def _add(self, rows: str, log_frequency: int) -> None:
        if log_frequency and self._count >= log_frequency:
            self._give_up_file()
        if self._file is None:
            path = self._path
            if log_frequency:
                path = f"{path}.{self._index}"
                self._index += 1
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            # The path may be a pipe, and no request may wait for its reader.
            fd = os.open(path, flags | os.O_NONBLOCK, 0o644)
            self._file = os.fdopen(fd, "wb", buffering=0)
            self._file.write(b"[" + rows.encode() + b"]")
        else:
            self._file.seek(-1, os.SEEK_END)
            self._file.write(b"," + rows.encode() + b"]")
        self._count += 1

    def _give_up_file(self) -> None:
        file, self._file, self._count = self._file, None, 0
        if file is not None:
            file.close()

    def close(self) -> None:
        with self._lock:
            self._give_up_file()


def rows_of(trace: Trace) -> list[dict[str, object]]:
    """Return the entries of one trace in order of time. The entry that names model and request comes before
    REQUEST_START.
    """
    number = trace.number
    entries: list[tuple[int, dict[str, object]]] = [
        (ns, {"id": number, "timestamps": [{"name": activity, "ns": ns}]}) for activity, ns in trace.marks
    ]
    for activity, name, datatype, shape, data, ns in trace.tensors:
        tensor = {"name": name, "data": data, "shape": shape, "dtype": datatype}
        entries.append((ns, {"id": number, "activity": activity, "tensor": tensor}))
    entries.sort(key=lambda entry: entry[0])
    rows = [row for _, row in entries]
    head: dict[str, object] = {"id": number, "model_name": trace.model.name, "model_version": trace.model.version}
    if trace.request_id:
        head["request_id"] = trace.request_id
    if trace.parent is not None:
        head["parent_id"] = trace.parent.number
    starts = [ns for activity, ns in trace.marks if activity == "REQUEST_START"]
    before = sum(1 for ns, _ in entries if starts and ns < starts[0])
    rows.insert(before, head)
    return rows


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
