"""Traces sent to a collector of OpenTelemetry, by its own exporter."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import MODELS, Config, hosted, tensor
from tests.inside import hosted_in
from tests.runtime.server.outcomes import outcome_of
from tests.server.http.serving import Serving
from tests.server.observability.models import write

import moonpool
from moonpool.runtime.model.request import Response
from moonpool.runtime.server.inference.request import make_request
from moonpool.runtime.server.tracing.settings import trace_options
from moonpool.runtime.server.tracing.traces import Traces

pytestmark = pytest.mark.promise(
    "Watching a server",
    "Spans are Triton's, below the client's span. The model gets the context to pass on. "
    "A collector that is away or never answers delays no request.",
)

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")

TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{ABOVE}-01"


class Collector(ThreadingHTTPServer):
    """Keeps the spans that it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        import gzip

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for of_resource in service.ExportTraceServiceRequest.FromString(body).resource_spans:
            said = of_resource.resource.attributes
            self.server.resources.append({each.key: each.value.string_value for each in said})
            for scope in of_resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


def flags(collector: Collector, rate: int) -> list[str]:
    return [
        "mode=opentelemetry",
        "level=TIMESTAMPS",
        f"rate={rate}",
        f"opentelemetry,url={collector.url}",
        "opentelemetry,resource=team=blue",
    ]


def ask(runtime: moonpool.Runtime, traces: Traces, model: str, inputs: dict[str, Any], header: str | None) -> Response:
    found = hosted_in(runtime, model)
    request = make_request(found, inputs)
    request.wants_wire = False
    trace = traces.begin(found.model, "", header)
    if trace is not None:
        trace.mark("GRPC_WAITREAD_START")
        trace.follow(request)
    outcome = outcome_of(found, request)
    if trace is not None:
        trace.mark("GRPC_SEND_END")
        trace.end()
    assert isinstance(outcome, Response)
    return outcome


def test_spans_are_as_tritons_and_below_the_clients(tmp_path: Path, collector: Collector) -> None:
    traces = Traces(trace_options(flags(collector, 1)))
    with moonpool.Runtime(write(tmp_path, "doubles", "asks")) as runtime:
        ask(runtime, traces, "asks", {"IN": np.ones((1, 4), np.float32)}, TRACEPARENT)
    traces.close()

    spans = {(span.name, bytes(span.parent_span_id).hex()): span for span in collector.spans}
    root = spans["InferRequest", ABOVE]
    asks = spans["asks", root.span_id.hex()]
    doubles = spans["doubles", asks.span_id.hex()]
    assert ("compute", asks.span_id.hex()) in spans
    assert ("compute", doubles.span_id.hex()) in spans
    assert len(collector.spans) == 5
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert [event.name for event in asks.events] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert [event.name for event in root.events] == ["GRPC_WAITREAD_START", "GRPC_SEND_END"]
    assert root.start_time_unix_nano <= doubles.start_time_unix_nano
    assert doubles.end_time_unix_nano <= root.end_time_unix_nano
    assert {each.key: each.value.int_value or each.value.string_value for each in doubles.attributes} == {
        "triton.model_name": "doubles",
        "triton.model_version": 1,
        "triton.trace_id": 2,
        "triton.trace_parent_id": 1,
    }
    assert collector.resources[0]["service.name"] == "moonpool"
    assert collector.resources[0]["team"] == "blue"


def test_spans_of_openai_s_api_have_the_model_and_its_tokens(collector: Collector) -> None:
    traces = Traces(trace_options(flags(collector, 1)))
    with moonpool.Runtime() as runtime:
        runtime.load("writer", str(MODELS / "writer.py"))
        serving = Serving(runtime)
        serving.service.traces = traces
        with serving:
            for stream in (False, True):
                messages = [{"role": "user", "content": "counts"}]
                asked = {"model": "writer", "messages": messages, "stream": stream}
                assert serving.post("/v1/chat/completions", asked).status == 200
            assert serving.post("/v1/completions", {"model": "writer", "prompt": ["a", "b"]}).status == 200
    traces.close()

    found = [
        {each.key: each.value.int_value or each.value.string_value for each in span.attributes}
        for span in collector.spans
        if span.name == "writer"
    ]
    assert [each["gen_ai.operation.name"] for each in found] == ["chat"] * 2 + ["text_completion"] * 2
    assert {each["gen_ai.request.model"] for each in found} == {"writer"}
    counts = [(each.get("gen_ai.usage.input_tokens"), each.get("gen_ai.usage.output_tokens")) for each in found]
    assert counts == [(3, 2)] * 2 + [(1, 1)] * 2


def test_the_model_gets_the_context_to_hand_on(collector: Collector) -> None:
    # With rate 0, only requests of traced clients are traced.
    traces = Traces(trace_options(flags(collector, 0)))
    config: Config = {"output": [tensor("TRACE", "STRING", 1)]}
    with moonpool.Runtime() as runtime, hosted(runtime, "traced", MODELS / "traced.py", config):
        seen = [
            ask(runtime, traces, "traced", {}, header).outputs["TRACE"].tolist()[0]
            for header in (None, "nonsense", TRACEPARENT)
        ]
    traces.close()

    assert seen[:2] == [b"None", b"None"]
    (of_model,) = [span for span in collector.spans if span.name == "traced"]
    context = json.loads(eval(seen[2]))
    assert context == {"traceparent": f"00-{TRACE}-{of_model.span_id.hex()}-01"}


def test_settings_say_where_the_spans_go(collector: Collector) -> None:
    traces = Traces(trace_options(flags(collector, 2)))

    assert traces.settings("", {"log_frequency": "3", "trace_rate": "5"}) == {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": "5",
        "trace_count": "-1",
        "trace_mode": "opentelemetry",
        "url": collector.url,
        "resource": "service.name=moonpool,team=blue",
        "bsp_max_queue_size": "2048",
        "bsp_schedule_delay": "5000",
        "bsp_max_export_batch_size": "512",
    }
    traces.close()


def test_a_server_ends_though_its_collector_never_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        given = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={url}"]
        traces = Traces(trace_options(given))
        with moonpool.Runtime(write(tmp_path, "doubles")) as runtime:
            ask(runtime, traces, "doubles", {"IN": np.ones((1, 4), np.float32)}, None)
        # A close that waits for ever would end at the test's time limit.
        traces.close()
        assert not traces.is_on
