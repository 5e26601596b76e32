"""Sends traces as OpenTelemetry's spans, by its own exporter.

Theory of operation. The exporter has a thread that sends batches, and tries again while the collector does not answer.
`close` must end, so a timer shuts the exporter down if its last batches take too long, which has the tries fail. The
timer is joined: no thread is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from moonpool.runtime.process.extras import how_to_install
from moonpool.runtime.server.setting_values import BadSetting
from moonpool.runtime.server.tracing.settings import TraceOptions
from moonpool.runtime.server.tracing.traces import SpanIds, Trace

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise BadSetting(
        f"--trace-config mode=opentelemetry needs OpenTelemetry's packages ({error}): {how_to_install('otel')}"
    ) from error

# The time for one attempt to send, and for all attempts at the end together.
_PATIENCE_S = 5.0
_OF_MODEL = ("REQUEST_START", "QUEUE_START", "REQUEST_END")


class Spans:
    """Makes the numbers of spans, and sends finished traces. Any thread may call any method."""

    def __init__(self, options: TraceOptions) -> None:
        """Start the exporter's thread, which `close` ends."""
        exporter = options.exporter
        self._resource = Resource.create(dict(options.resource))
        self._scope = InstrumentationScope("moonpool")
        self._numbers = RandomIdGenerator()
        self._propagator = TraceContextTextMapPropagator()
        self._exporter = OTLPSpanExporter(endpoint=exporter["url"], timeout=_PATIENCE_S)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=int(exporter["bsp_max_queue_size"]),
            schedule_delay_millis=int(exporter["bsp_schedule_delay"]),
            max_export_batch_size=int(exporter["bsp_max_export_batch_size"]),
        )
        # Marks have times of the monotonic clock, spans those of the wall clock.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def ids(self, traceparent: str | None, tracestate: str | None) -> SpanIds:
        """Make the numbers for a request, below the span that the headers name, if they do."""
        new = self._numbers.generate_span_id
        if traceparent is not None:
            headers = {"traceparent": traceparent, "tracestate": tracestate or ""}
            above = get_current_span(self._propagator.extract(headers)).get_span_context()
            if above.is_valid:
                return SpanIds(above.trace_id, new(), new(), new(), above.span_id)
        return SpanIds(self._numbers.generate_trace_id(), new(), new(), new(), None)

    def ids_below(self, parent: SpanIds) -> SpanIds:
        """Make the numbers for a request that a model has sent."""
        new = self._numbers.generate_span_id
        return SpanIds(parent.trace, None, new(), new(), parent.model)

    def write(self, trace: Trace) -> None:
        """Give the spans of a trace to the exporter, which sends them soon."""
        ids = trace.spans
        if ids is None:
            return
        marks = sorted(trace.marks, key=lambda mark: mark[1])
        compute = [mark for mark in marks if mark[0].startswith("COMPUTE_")]
        of_model = [mark for mark in marks if mark[0] in _OF_MODEL]
        rest = [mark for mark in marks if mark not in compute and mark not in of_model]
        attributes: dict[str, str | int] = {
            "triton.model_name": trace.model.name,
            "triton.model_version": trace.model.version,
            "triton.trace_id": trace.number,
            "triton.trace_parent_id": 0 if trace.parent is None else trace.parent.number,
            **trace.attributes,
        }
        if trace.request_id:
            attributes["triton.request_id"] = trace.request_id
        if compute:
            self._send(ids, "compute", ids.compute, ids.model, compute, {})
        above_model = ids.parent if ids.root is None else ids.root
        self._send(ids, trace.model.name, ids.model, above_model, of_model, attributes)
        if ids.root is not None:
            times = [*rest, *of_model]
            self._send(ids, "InferRequest", ids.root, ids.parent, rest, {}, times)

    def _send(
        self,
        ids: SpanIds,
        name: str,
        number: int,
        parent: int | None,
        marks: Sequence[tuple[str, int]],
        attributes: dict[str, str | int],
        times: Sequence[tuple[str, int]] | None = None,
    ) -> None:
        moments = [ns + self._epoch_ns for _, ns in times or marks]
        span = ReadableSpan(
            name,
            _context(ids.trace, number),
            None if parent is None else _context(ids.trace, parent),
            self._resource,
            attributes,
            [Event(activity, timestamp=ns + self._epoch_ns) for activity, ns in marks],
            kind=SpanKind.SERVER,
            start_time=min(moments),
            end_time=max(moments),
            instrumentation_scope=self._scope,
        )
        self._processor.on_end(span)

    def close(self) -> None:
        """Send the rest, for some seconds at most, and end the exporter's thread."""
        # Without a collector, the exporter would try again until it is shut down.
        enough = threading.Timer(_PATIENCE_S, self._exporter.shutdown)
        enough.start()
        self._processor.shutdown()
        enough.cancel()
        enough.join()


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
