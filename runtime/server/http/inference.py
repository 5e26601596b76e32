"""The route for inference over HTTP: from a connection into a scheduler and back, without a task or a thread between.

Theory of operation. A request is read, checked and submitted in the callback of the connection that received it; the
rest is that of all calls (`inference.call`). Work that would hold the loop for long runs in `executor`: compression,
and copies of more than a megabyte from or to memory of clients. It goes on in the loop afterwards, unless the client
has gone meanwhile. JSON of more than 256 KiB is read there as well, one body at a time (`turns`), in pieces that let
the loop run in between (`json_text`).

On a thread of the executor a call only reads or writes memory that nothing else uses at that time: the body, the arrays
of its inputs, the response. If the client goes meanwhile, the thread ends by itself, and its result is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.details import with_parameters
from moonpool.runtime.model.request import InferenceRequest, Response
from moonpool.runtime.server.http.body import ENCODINGS, TooLong, accepted, deflate, inflate, over_input_size
from moonpool.runtime.server.http.connection import HttpExchange, error_headers, http_status
from moonpool.runtime.server.http.head import JSON, TEXT, BadHttpMessage, Body, Head, Headers, Part
from moonpool.runtime.server.http.infer_request import HttpRequestPlan, raw_plan, read_plan
from moonpool.runtime.server.http.infer_response import LongAnswer, finished, render
from moonpool.runtime.server.http.json_pieces import write
from moonpool.runtime.server.http.json_text import too_much_json
from moonpool.runtime.server.http.options import HttpLimits
from moonpool.runtime.server.http.turns import LONG_BYTES, Turns
from moonpool.runtime.server.inference import call
from moonpool.runtime.server.inference.request import Hosted, check_has_one_response, refused, room_for_body
from moonpool.runtime.server.inference.tensors import WrongSize
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.tracing.traces import Trace

# The headers by which load balancers ask for the load, and get it (ORCA).
LOAD_FORM, LOAD = b"endpoint-load-metrics-format", b"endpoint-load-metrics"
_ENCODINGS = ((b"Accept-Encoding", b"gzip, deflate"), *TEXT)
_log = RuntimeLog("moonpool")
# Larger work takes longer than a hand-over to a thread, and is not done in the loop.
_LONG_DEFLATE_BYTES = 64 << 10
_MEMORABLE_BYTES = 2048


class InferTarget:
    """The model that a path names, and the form of the body by its headers. One serves all requests of the same
    head.
    """

    __slots__ = ("_plan", "_text", "accepts", "encoding", "is_json", "load_form", "model", "version")

    def __init__(self, model: str, version: int | None, head: Head) -> None:
        headers = head.headers
        self.model = model
        self.version = version
        self.encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        self.accepts = accepted(headers.get(b"accept-encoding", b""))
        # The form in which a load balancer wants to know the load; "" if it does not.
        self.load_form = headers.get(LOAD_FORM, b"").decode("latin-1")
        # If the whole body is JSON.
        self.is_json = head.header_length is None
        # The last JSON of such a request, and its plan.
        self._text = b""
        self._plan: HttpRequestPlan = None  # type: ignore[assignment]

    def plan(self, text: Body) -> HttpRequestPlan:
        """Return the plan of a request with this JSON. Raises `MoonpoolError`.

        A client that sends binary tensors often sends the JSON that it sent before, and then nothing is read.
        """
        if len(text) > _MEMORABLE_BYTES:
            return read_plan(text)
        raw = bytes(text)
        if raw != self._text:
            self._plan = read_plan(raw)
            self._text = raw
        return self._plan


class HttpInference(call.Inference):
    """The route for inference. For the loop's thread."""

    refuses_without_thread = True

    def __init__(
        self, service: Service, loop: asyncio.AbstractEventLoop, executor: Executor, limits: HttpLimits
    ) -> None:
        super().__init__(service, loop, executor)
        self.limits = limits
        self.turns = Turns(loop)
        # The loop itself refers to tasks only weakly.
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, answer: Coroutine[Any, Any, None]) -> None:
        """Go on with an answer in a task, which raises nothing. If the client goes, it ends by itself."""
        task = self.loop.create_task(answer)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def handle(self, exchange: HttpExchange, target: InferTarget) -> None:
        """Answer the request, now or later."""
        try:
            hosted = self.find(target.model, target.version)
        except MoonpoolError as error:
            exchange.fail(http_status(error), public_text(error), error_headers(error, TEXT))
        else:
            HttpInferCall(self, exchange, target, hosted).begin()

    def find(self, model: str, version: int | None) -> Hosted:
        """Return the model, if it can be asked over HTTP. Raises `MoonpoolError`."""
        hosted: Hosted = self.service.models.find(model, version)
        check_has_one_response(hosted, "HTTP end point")
        return hosted

    def most_bytes_of(self, target: InferTarget) -> int:
        """Return the largest body of such a request."""
        is_json = target.is_json and target.encoding == "identity"
        return self.limits.json_bytes if is_json else self.limits.body_bytes

    def memory_for(self, target: InferTarget, head: Head, size_bytes: int) -> memoryview | None:
        """Return memory that the model's stubs see, so that nobody copies the tensors in a large body, or None for any
        memory.
        """
        length = head.header_length or 0
        if target.encoding != "identity" or not 0 < length < size_bytes:
            return None
        try:
            memory = self.service.caller_memory(self.find(target.model, target.version).model)
        except MoonpoolError:  # answered once the body has come
            return None
        # The JSON is received apart: a stub that could change it might have the request name memory of other clients.
        array = room_for_body(memory, size_bytes - length, 0)
        return None if array is None else array.data


class HttpInferCall(call.InferCall):
    __slots__ = ("_exchange", "_target")
    _inference: HttpInference
    plan: HttpRequestPlan

    def __init__(self, inference: HttpInference, exchange: HttpExchange, target: InferTarget, hosted: Hosted) -> None:
        call.InferCall.belong(self, inference)
        self.hosted = hosted
        self._exchange = exchange
        self._target = target

    def begin(self) -> None:
        """Read the request and send it to the model."""
        encoding, body = self._target.encoding, self._exchange.body
        if encoding == "identity":
            self._read(body)
        elif encoding in ENCODINGS:
            self._work(partial(self._inflated, body), self._read, TEXT)
        else:
            self._exchange.fail(501, "Unsupported compression type", _ENCODINGS)

    def _inflated(self, body: Body) -> bytearray:
        """Decompress the body, on any thread. Raises `BadHttpMessage`."""
        limits, is_json = self._inference.limits, self._target.is_json
        limit_bytes = limits.inflated_bytes
        if is_json:
            limit_bytes = min(limit_bytes, limits.json_bytes)
        try:
            return inflate(body, limit_bytes)
        except TooLong:
            if limit_bytes != limits.input_bytes:
                raise
            size = f"more than {limit_bytes}"
            raise over_input_size(size, limit_bytes, is_json=is_json) from None

    def _work(
        self, work: Callable[[], Any], go_on: Callable[[Any], object], headers: Headers = JSON, *, is_long: bool = True
    ) -> asyncio.Future[Any] | None:
        """Do work, and go on if the client is still there. A thread does it if it `is_long`. `headers` are those of an
        error.
        """
        exchange = self._exchange
        return self._inference.work(
            work,
            lambda result: exchange.is_gone or go_on(result),
            lambda error: self._refuse(error, headers),
            is_long=is_long,
        )

    def _refuse(self, error: BaseException, headers: Headers) -> None:
        plan: HttpRequestPlan | None = self.plan
        # Without JSON there is no plan yet, and no id.
        request_id = "" if plan is None else plan.request_id
        if isinstance(error, BadHttpMessage):
            self._exchange.fail(error.status, error.text, headers)
            return
        if isinstance(error, WrongSize):
            error = refused(error, self.hosted, request_id)
        elif not isinstance(error, MoonpoolError):
            _log.error("answering a request for inference failed", exc_info=error)
        text = public_text(error, request_id)
        self._exchange.fail(http_status(error), text, error_headers(error, headers))

    def _read(self, body: Body) -> None:
        text = self._exchange.text
        if text is not None:
            # The rest is an array that stubs see, so inputs have to be views of it.
            self._read_parts(text, body.obj, 0, True)  # type: ignore[union-attr]
            return
        length: int | None = self._exchange.head.header_length
        if length is None:
            length = len(body)
        elif not 0 <= length <= len(body):
            wrong = f"inference header size should be in range (0, {len(body)}), got: {length}"
            self._exchange.fail(400, wrong, TEXT)
            return
        self._read_parts(memoryview(body)[:length], body, length, False)

    def _read_parts(self, text: Body, data: Any, offset: int, is_shared: bool) -> None:
        """Read the JSON, and then the tensors, which lie in `data` from `offset` on. Stubs see `data` if it
        `is_shared`.
        """
        inference = self._inference
        length, most_bytes = len(text), inference.limits.json_bytes
        if length > most_bytes:
            if most_bytes == inference.limits.input_bytes:
                over = over_input_size(str(length), most_bytes, is_json=True)
                self._exchange.fail(over.status, over.text, TEXT)
            else:
                self._exchange.fail(413, too_much_json(length, most_bytes), TEXT)
            return
        if length > LONG_BYTES:
            take = partial(self._take, data, offset, is_shared)
            parse = partial(self._work, partial(self._long_plan, text), take)
            inference.turns.take(self._exchange, parse)
            return
        try:
            if length:
                plan = self._target.plan(text)
            else:
                plan, data = raw_plan(self.hosted.model.config, data)
        except MoonpoolError as error:
            self.refuse(error)
        else:
            self._take(data, offset, is_shared, plan)

    def _long_plan(self, text: Body) -> HttpRequestPlan:
        """Return the plan of a request with this JSON, on a thread, which also copies its tensors.

        Raises `MoonpoolError`.
        """
        plan, service, model = read_plan(text), self._inference.service, self.hosted.model
        plan.inputs = [
            each if each.values is None else each._replace(values=service.placed(model, each.values))
            for each in plan.inputs
        ]
        return plan

    def _take(self, data: Any, offset: int, is_shared: bool, plan: HttpRequestPlan) -> None:
        """Send a request of this plan."""
        self.plan, hosted, service = plan, self.hosted, self._inference.service
        # A request with parameters from headers is like none before.
        if not self._exchange.head.forwarded:
            try:
                request = plan.usual(service, hosted, data, offset, None, plan.details, has_views=is_shared)
            except MoonpoolError as error:
                self.refuse(error)
                return
            if request is not None:
                self.send(request)
                return
        size_bytes = service.read_bytes(hosted.model, plan.inputs) if plan.has_shared else 0
        is_long = size_bytes > call.LONG_COPY_BYTES
        self._work(partial(self._made, data, offset), self.send, is_long=is_long)

    def _made(self, data: Any, offset: int) -> InferenceRequest:
        """Make and check the request, on any thread. Raises `MoonpoolError`."""
        plan, hosted, service = self.plan, self.hosted, self._inference.service
        arrays = plan.arrays(hosted.model.name, data, offset)
        for name, code, shape, place, *_ in plan.inputs:
            if place is not None:
                arrays[name] = service.read_shared(hosted.model, name, code, shape, place)
        details = with_parameters(plan.details, self._exchange.head.forwarded)
        return plan.make(service, hosted, arrays, details)

    def begin_trace(self, request: InferenceRequest) -> Trace | None:
        return begin_trace(self._inference.service, self._exchange, self.hosted, request)

    def watch(self) -> None:
        if self._exchange.is_gone:
            self.cancel()
        else:
            self._exchange.cancel = self.cancel

    # The response

    def refuse(self, error: BaseException) -> None:
        self._refuse(error, JSON)

    def fail(self, error: BaseException) -> None:
        if self.trace is not None:
            self.trace.mark("HTTP_SEND_START")
        self._refuse(error, TEXT)

    def render(self, response: Response) -> tuple[Headers, list[Part]] | LongAnswer:
        inference = self._inference
        most_bytes = inference.limits.json_bytes
        return render(inference.service, self.hosted.model, self.plan, response, most_bytes)

    def reply(self, rendered: tuple[Headers, list[Part]] | LongAnswer) -> None:
        if isinstance(rendered, LongAnswer):
            self._inference.start(self._write(rendered))
        else:
            headers, parts = rendered
            self._respond(headers, parts)

    async def _write(self, answer: LongAnswer) -> None:
        """Write the JSON of a long answer, with turns for others, and send it."""
        try:
            text = await write(self._exchange, answer.document, self._inference.limits.json_bytes)
        except Exception as error:
            self.fail(error)
        else:
            if text:
                headers, parts = finished(text, answer.parts)
                self._respond(headers, parts)

    def _respond(self, headers: Headers, parts: list[Part]) -> None:
        if self.trace is not None:
            self.trace.mark("HTTP_SEND_START")
        exchange, target = self._exchange, self._target
        if target.load_form:
            headers = with_load(self._inference.service, headers, target.load_form)
        encoding = target.accepts
        if encoding is None:
            exchange.respond(200, headers, parts)
            return
        headers = (*headers, (b"Content-Encoding", encoding.encode()))
        self._inference.work(
            partial(deflate, encoding, parts),
            partial(exchange.respond, 200, headers),
            self.refuse,
            is_long=sum(map(len, parts)) > _LONG_DEFLATE_BYTES,
        )


def with_load(service: Service, headers: Headers, form: str) -> Headers:
    """Return the headers of a response, with the load of this server if there is one to tell."""
    load = service.metrics.endpoint_load(form)
    return headers if load is None else (*headers, (LOAD, load.encode("ascii")))


def begin_trace(service: Service, exchange: HttpExchange, hosted: Hosted, request: InferenceRequest) -> Trace | None:
    """Return the trace of a request that is about to be submitted, or None if it is not traced.

    The trace ends with the exchange.
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
        if isinstance(exchange.ended, _TracesEnd):
            exchange.ended.traces.append(trace)
        else:
            exchange.ended = _TracesEnd(trace)
    return trace


class _TracesEnd:
    """Ends the traces of the requests that one exchange has become."""

    def __init__(self, trace: Trace) -> None:
        self.traces = [trace]

    def __call__(self) -> None:
        for trace in self.traces:
            trace.mark("HTTP_SEND_END")
            trace.end()
