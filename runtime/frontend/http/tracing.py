"""A request over HTTP that is traced, from its head to the last byte of its response."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.runtime.frontend.http.exchange import Exchange
    from moonpool.runtime.frontend.service import Service
    from moonpool.runtime.frontend.submission import Hosted
    from moonpool.runtime.frontend.trace import Trace
    from moonpool.runtime.request import InferenceRequest


def begin_trace(
    service: Service, exchange: Exchange, hosted: Hosted, request: InferenceRequest
) -> Trace | None:
    """The trace of a request that is about to be submitted, None where it has none.

    It ends with the exchange.
    """
    headers, details = exchange.head.headers, request.details
    trace = service.traces.begin(
        hosted.model,
        "" if details is None else details.request_id,
        headers.get(b"traceparent", b"").decode("latin-1") or None,
        headers.get(b"tracestate", b"").decode("latin-1") or None,
    )
    if trace is not None:
        trace.mark("HTTP_RECV_START", exchange.begun_ns)
        trace.mark("HTTP_RECV_END")
        trace.follow(request)
        exchange.ended = partial(_end, trace)
    return trace


def _end(trace: Trace) -> None:
    trace.mark("HTTP_SEND_END")
    trace.end()
