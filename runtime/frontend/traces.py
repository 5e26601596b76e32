"""Which requests are traced, decided once for each, and where their traces go."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Protocol

from moonpool.runtime.frontend.setting_values import BadSetting
from moonpool.runtime.frontend.trace import Trace
from moonpool.runtime.frontend.trace_file import TraceFile
from moonpool.runtime.frontend.trace_settings import (
    OPENTELEMETRY,
    TraceOptions,
    TraceSetting,
    changed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moonpool.runtime.backend import Model
    from moonpool.runtime.frontend.trace import SpanIds

# Traces whose frontend is done and whose model is not; beyond these the oldest are told as they are.
_MAX_UNFINISHED = 1000


class Sink(Protocol):
    """Where finished traces go."""

    def write(self, trace: Trace) -> None:
        """From any thread; does not raise."""

    def close(self) -> None:
        """Nothing follows."""


class _Sampler:
    """A setting while it is in force: how many requests it has seen, and how many it may still trace."""

    def __init__(self, setting: TraceSetting, *, is_valid: bool) -> None:
        self.setting = setting
        self.left = setting.count
        self._seen = 0
        self.is_on = bool(setting.levels) and is_valid

    def takes(self, *, has_context: bool) -> bool:
        """Whether to trace the next request. With the lock held."""
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

    `is_on` says whether any request may be traced; where it is False nobody needs to ask.
    """

    def __init__(
        self,
        options: TraceOptions | None = None,
        has_model: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """`has_model` says whether a model of that name is loaded.

        Raises `BadSetting` where the mode is `opentelemetry` and its packages are not installed.
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
            from moonpool.runtime.frontend.trace_spans import Spans

            self._sink = self._spans = Spans(options)
        else:
            self._sink = TraceFile(options.file)
        self.is_on = self._all.is_on
        # Called with `is_on` after each change; it must not block.
        self.on_change: Callable[[bool], object] = bool

    def _sampler(self, setting: TraceSetting) -> _Sampler:
        return _Sampler(setting, is_valid=self._options.invalid_reason(setting) is None)

    # Settings

    def settings(
        self, model: str = "", changes: Mapping[str, object] | None = None
    ) -> dict[str, object]:
        """What is set for a model, or for all where it is "", after the changes, in the protocol's JSON form.

        A change to None takes a model's own value back, and one for all models what the command line says.
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
        """Models with values of their own have those of all others from the setting for all."""
        for name, own in list(self._set_of.items()):
            if changed_model in ("", name):
                if own:
                    setting = changed(self._all.setting, own, self._all.setting)
                    self._of[name] = self._sampler(setting)
                else:
                    del self._set_of[name]
                    self._of.pop(name, None)
        self.is_on = self._all.is_on or any(each.is_on for each in self._of.values())
        self.on_change(self.is_on)

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
        self,
        model: Model,
        request_id: str = "",
        traceparent: str | None = None,
        tracestate: str | None = None,
    ) -> Trace | None:
        """A trace for a request that has come in, None where it is not to be traced.

        The last two are the headers of W3C's trace context that came with it.
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
        self,
        setting: TraceSetting,
        model: Model,
        request_id: str,
        parent: Trace | None,
        spans: SpanIds | None,
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

    # What traces tell

    def child(self, parent: Trace, model: Model, request_id: str) -> Trace:
        """A trace of a request that the model of `parent` makes."""
        setting = self._of.get(model.name, self._all).setting
        spans = None
        if self._spans is not None and parent.spans is not None:
            spans = self._spans.ids_below(parent.spans)
        return self._trace(setting, model, request_id, parent, spans)

    def over(self, trace: Trace, *, is_awaited: bool) -> None:
        """Its frontend is done with it; with `is_awaited` what executes it may not be."""
        finished: Trace | None = trace
        with self._lock:
            if is_awaited and not trace.is_executed:
                self._unfinished[trace] = None
                # An instance that died says no more of its requests.
                finished = next(iter(self._unfinished)) if self._is_full() else None
                if finished is not None:
                    del self._unfinished[finished]
        if finished is not None:
            self._sink.write(finished)

    def _is_full(self) -> bool:
        return len(self._unfinished) > _MAX_UNFINISHED

    def executed(self, trace: Trace) -> None:
        """What executes it is done with it."""
        with self._lock:
            trace.is_executed = True
            is_over = trace in self._unfinished
            self._unfinished.pop(trace, None)
        if is_over:
            self._sink.write(trace)

    def close(self) -> None:
        """Write what is there; nothing is traced any more."""
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
