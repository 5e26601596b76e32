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
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.request import ModelVersion
from moonpool.runtime.server.setting_values import BadSetting
from moonpool.runtime.server.tracing.settings import OPENTELEMETRY, TraceOptions, TraceSetting, changed
from moonpool.runtime.server.tracing.trace import SpanIds, Trace

# The most traces whose protocol has ended and whose model has not. Beyond it, the oldest one is written as it is.
_MAX_UNFINISHED = 1000


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

    # For traces: see `Keeper`

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
                finished = next(iter(self._unfinished)) if self._is_full() else None
                if finished is not None:
                    del self._unfinished[finished]
        if finished is not None:
            self._sink.write(finished)

    def _is_full(self) -> bool:
        return len(self._unfinished) > _MAX_UNFINISHED

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
        """Close the file."""
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
