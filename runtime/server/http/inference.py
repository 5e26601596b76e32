"""The route for inference over HTTP: from a connection into a scheduler and back, without a task or a thread between.

Theory of operation. A request is read, checked and submitted in the callback of the connection that received it, and the response
is written in the callback that got the answer of the stub: the loop waits on the stub's socket itself (`schedule.event_loop`). Work
that would hold the loop for longer than a hand-over takes runs in `executor`: compression, and copies of more than a megabyte from
or to memory of clients. It goes on in the loop afterwards, unless the client has gone meanwhile. JSON of more than a megabyte is
read there as well, one body at a time (`turns`): orjson holds the interpreter while it parses, but what becomes of the values takes
ten times as long, and lets the loop run in between.

An `InferCall` belongs to the loop. On a thread of the executor it only reads or writes memory that nothing else uses at that time:
the body, the arrays of its inputs, the response. A client that goes cancels the submission, after which the scheduler calls
nobody. Whatever a thread still does then ends by itself, and its result is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.memo import Memo
from moonpool.runtime.errors import InvalidRequest, own
from moonpool.runtime.isolation.public_text import public_text
from moonpool.runtime.model.details import with_parameters
from moonpool.runtime.model.request import InferenceRequest, Outcome, Response, WireTensor
from moonpool.runtime.schedule.event_loop import LoopWaiter
from moonpool.runtime.schedule.scheduler import Scheduler
from moonpool.runtime.server.http.body import (
    ENCODINGS,
    TooLong,
    accepted,
    deflate,
    inflate,
    over_input_size,
)
from moonpool.runtime.server.http.connection import HttpExchange, error_headers, http_status
from moonpool.runtime.server.http.head import (
    HEADER_LENGTH,
    JSON,
    TEXT,
    BadHttpMessage,
    Body,
    Headers,
    Part,
)
from moonpool.runtime.server.http.infer_request import HttpRequestPlan, raw_plan, read_plan
from moonpool.runtime.server.http.infer_response import render
from moonpool.runtime.server.http.json_text import too_much_json
from moonpool.runtime.server.http.options import HttpLimits
from moonpool.runtime.server.http.turns import LONG_BYTES, Turns
from moonpool.runtime.server.inference.request import (
    Hosted,
    check_has_one_response,
    refused,
    room_for_body,
)
from moonpool.runtime.server.inference.response import copied_bytes
from moonpool.runtime.server.inference.tensors import WrongSize
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.tracing.trace import Trace
from moonpool.runtime.stubs.regions import CallerMemory

# The headers by which load balancers ask for the load, and get it (ORCA).
LOAD_FORM, LOAD = b"endpoint-load-metrics-format", b"endpoint-load-metrics"
_ENCODINGS = ((b"Accept-Encoding", b"gzip, deflate"), *TEXT)
_log = logging.getLogger("moonpool")
# Larger work takes longer than a hand-over to a thread, and is not done in the loop.
_LONG_DEFLATE_BYTES = 64 << 10
_LONG_COPY_BYTES = 1 << 20
# Clients that send binary tensors send the same short JSON every time, but for the id.
_MEMORABLE_BYTES = 2048


class InferTarget:
    """The model that a path names, and the form of the body by its headers. One serves all requests of the same head."""

    __slots__ = ("accepts", "encoding", "header_length", "load_form", "model", "version")

    def __init__(self, model: str, version: int | None, headers: dict[bytes, bytes]) -> None:
        self.model = model
        self.version = version
        self.encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        self.accepts = accepted(headers.get(b"accept-encoding", b""))
        # The form in which a load balancer wants to know the load; "" if it does not.
        self.load_form = headers.get(LOAD_FORM, b"").decode("latin-1")
        # None if the whole body is JSON.
        self.header_length: int | None = None
        given = headers.get(HEADER_LENGTH)
        if given is not None:
            self.header_length = _leading_number(given)


_LEADING_NUMBER = re.compile(rb"\s*([+-]?[0-9]{1,20})")


def _leading_number(text: bytes) -> int:
    """Read a number as C does: up to the first character that does not belong to it, and 0 if there is no number."""
    found = _LEADING_NUMBER.match(text)
    return 0 if found is None else int(found[1])


class HttpInference:
    """The route for inference. For the loop's thread."""

    def __init__(
        self,
        service: Service,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        limits: HttpLimits,
    ) -> None:
        """Run in `executor` what would hold the loop for long."""
        self.service = service
        self.limits = limits
        self.turns = Turns(loop)
        self._loop = loop
        self._executor = executor
        self._plans: Memo[bytes, HttpRequestPlan] = Memo(512)

    def handle(self, exchange: HttpExchange, target: InferTarget) -> None:
        """Answer the request, now or later."""
        try:
            hosted = self.find(target.model, target.version)
        except MoonpoolError as error:
            exchange.fail(http_status(error), public_text(error), error_headers(error, TEXT))
        else:
            InferCall(self, exchange, target, hosted).begin()

    def find(self, model: str, version: int | None) -> Hosted:
        """Return the model, if it can be asked over HTTP. Raises `MoonpoolError`."""
        hosted: Hosted = self.service.models.find(model, version)
        check_has_one_response(hosted, "HTTP end point")
        return hosted

    def most_bytes_of(self, target: InferTarget) -> int:
        """Return the largest body of such a request."""
        is_json = target.header_length is None and target.encoding == "identity"
        return self.limits.json_bytes if is_json else self.limits.body_bytes

    def memory_for(self, target: InferTarget, size_bytes: int) -> memoryview | None:
        """Return memory that the model's stubs see, so that nobody copies the tensors in a large body, or None for any memory."""
        length = target.header_length or 0
        if target.encoding != "identity" or not 0 < length < size_bytes:
            return None
        try:
            memory = self.caller_memory(target)
        except MoonpoolError:  # answered once the body has come
            return None
        # The JSON is received apart: a stub that could change it might have the request name memory of other clients.
        array = room_for_body(memory, size_bytes - length, 0)
        return None if array is None else array.data

    def caller_memory(self, target: InferTarget) -> CallerMemory | None:
        """Return the memory in which callers of this model write in place, if its backend has such. Raises `MoonpoolError`."""
        return self.service.caller_memory(self.find(target.model, target.version).model)

    def plan(self, text: Body) -> HttpRequestPlan:
        """Return the plan of a request with this JSON. Raises `MoonpoolError`. For the loop's thread if the text is short."""
        if len(text) > _MEMORABLE_BYTES:
            return read_plan(text)
        raw = bytes(text)
        plan = self._plans.get(raw)
        if plan is None:
            plan = self._plans.keep(raw, read_plan(raw))
        return plan

    def elsewhere(
        self,
        exchange: HttpExchange,
        function: Callable[[], Any],
        go_on: Callable[[Any], None],
        headers: Headers,
    ) -> asyncio.Future[Any] | None:
        """Call a function that takes long in a thread, and `go_on` in the loop with its result.

        `headers` are those of the response if the function fails. Returns what is done when the function is; None if it is not called.
        """

        def done(future: asyncio.Future[Any]) -> None:
            if future.cancelled():  # the server ends, and the client with it
                return
            error = future.exception()
            if error is None:
                if not exchange.is_gone:
                    go_on(future.result())
            elif isinstance(error, BadHttpMessage):
                exchange.fail(error.status, error.text, headers)
            else:
                if not isinstance(error, MoonpoolError):
                    _log.error("answering a request for inference failed", exc_info=error)
                exchange.fail(http_status(error), public_text(error), error_headers(error, headers))

        try:
            begun = self._loop.run_in_executor(self._executor, function)
        except MoonpoolError as error:  # there is no thread, or the server ends
            exchange.fail(http_status(error), public_text(error), error_headers(error, headers))
            return None
        begun.add_done_callback(done)
        return begun


class InferCall:
    """One request. The scheduler calls it with the outcome."""

    __slots__ = ("_arrays", "_exchange", "_hosted", "_plan", "_route", "_target", "_trace")

    def __init__(
        self, route: HttpInference, exchange: HttpExchange, target: InferTarget, hosted: Hosted
    ) -> None:
        self._route = route
        self._exchange = exchange
        self._target = target
        self._hosted = hosted
        self._plan: HttpRequestPlan
        self._arrays: dict[str, Any]
        self._trace: Trace | None = None

    def begin(self) -> None:
        """Read the request and send it to the model."""
        encoding, body = self._target.encoding, self._exchange.body
        if encoding == "identity":
            self._read(body)
        elif encoding in ENCODINGS:
            inflated = partial(self._inflated, body)
            self._route.elsewhere(self._exchange, inflated, self._read, TEXT)
        else:
            self._exchange.fail(501, "Unsupported compression type", _ENCODINGS)

    def _inflated(self, body: Body) -> bytearray:
        """Decompress the body, on any thread. Raises `BadHttpMessage`."""
        limits, is_json = self._route.limits, self._target.header_length is None
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

    def _elsewhere(self, function: Callable[[], Any], go_on: Callable[[Any], None]) -> None:
        self._route.elsewhere(self._exchange, function, go_on, JSON)

    def _fail(self, error: BaseException, headers: Headers) -> None:
        plan: HttpRequestPlan | None = getattr(self, "_plan", None)
        text = public_text(error, "" if plan is None else plan.request_id)
        self._exchange.fail(http_status(error), text, error_headers(error, headers))

    def _read(self, body: Body) -> None:
        text = self._exchange.text
        if text is not None:
            # The rest is an array that stubs see, so inputs have to be views of it.
            self._read_parts(text, body.obj, 0, True)  # type: ignore[union-attr]
            return
        length = self._target.header_length
        if length is None:
            length = len(body)
        elif not 0 <= length <= len(body):
            wrong = f"inference header size should be in range (0, {len(body)}), got: {length}"
            self._exchange.fail(400, wrong, TEXT)
            return
        json = body if length == len(body) else memoryview(body)[:length]
        self._read_parts(json, body, length, False)

    def _read_parts(self, text: Body, data: Any, offset: int, is_shared: bool) -> None:
        """Read the JSON, and then the tensors, which lie in `data` from `offset` on. Stubs see `data` if it `is_shared`."""
        limits = self._route.limits
        length, most_bytes = len(text), limits.json_bytes
        if length > most_bytes:
            if most_bytes == limits.input_bytes:
                over = over_input_size(str(length), most_bytes, is_json=True)
                self._exchange.fail(over.status, over.text, TEXT)
            else:
                self._exchange.fail(413, too_much_json(length, most_bytes), TEXT)
            return
        if length > LONG_BYTES:
            parse = partial(self._route.plan, text)
            take = partial(self._take, data, offset, is_shared)
            self._route.turns.take(
                self._exchange, partial(self._route.elsewhere, self._exchange, parse, take, JSON)
            )
            return
        try:
            if length:
                plan = self._route.plan(text)
            else:
                plan, data = raw_plan(self._hosted.model.config, data)
        except MoonpoolError as error:
            self._fail(self._told(error), JSON)
        else:
            self._take(data, offset, is_shared, plan)

    def _take(self, data: Any, offset: int, is_shared: bool, plan: HttpRequestPlan) -> None:
        """Send a request of this plan."""
        self._plan, hosted = plan, self._hosted
        try:
            request = self._repeated(plan, data, offset, is_shared)
            if request is not None:
                self._submit(request)
                return
            self._arrays = plan.arrays(hosted.model.name, data, offset)
        except MoonpoolError as error:
            self._fail(self._told(error), JSON)
            return
        is_long = False
        if plan.has_shared:
            size_bytes = self._route.service.read_bytes(hosted.model, plan.inputs)
            is_long = size_bytes > _LONG_COPY_BYTES
        if is_long:
            self._elsewhere(self._read_shared, self._send)
        else:
            self._send(None)

    def _repeated(
        self, plan: HttpRequestPlan, data: Any, offset: int, has_views: bool
    ) -> InferenceRequest | None:
        """Return the request if it differs from a checked one only in the bytes of its tensors. Raises `MoonpoolError`."""
        prepared, hosted = plan.prepared, self._hosted
        if (
            prepared is None
            or prepared.signature is not hosted.signature
            or len(data) - offset != prepared.size_bytes
            # A request with parameters from headers is like none before.
            or self._exchange.head.forwarded
        ):
            return None
        service, sent = self._route.service, prepared.sent
        return prepared.request(
            service, hosted.model, data, offset, sent, prepared.details, has_views
        )

    def _told(self, error: MoonpoolError) -> MoonpoolError:
        """Return the error as Triton words it: for a wrong size it names the model and the request."""
        if isinstance(error, WrongSize):
            # Without JSON there is no plan yet, and no id.
            plan: HttpRequestPlan | None = getattr(self, "_plan", None)
            return refused(error, self._hosted, "" if plan is None else plan.request_id)
        return error

    def _read_shared(self) -> None:
        """Read the inputs that lie in memory of clients. May run on any thread."""
        arrays = self._arrays
        for name, code, shape, place, *_ in self._plan.inputs:
            if place is not None and name not in arrays:
                try:
                    arrays[name] = self._route.service.read_shared(
                        self._hosted.model, name, code, shape, place
                    )
                except InvalidRequest as error:
                    raise self._told(error) from None

    def _send(self, _: None) -> None:
        plan, hosted = self._plan, self._hosted
        try:
            if plan.has_shared:
                self._read_shared()
            details = with_parameters(plan.details, self._exchange.head.forwarded)
            is_typical = details is plan.details
            request = plan.make(
                self._route.service, hosted, self._arrays, details, is_typical=is_typical
            )
        except MoonpoolError as error:
            self._fail(error, JSON)
            return
        del self._arrays
        self._submit(request)

    def _submit(self, request: InferenceRequest) -> None:
        exchange = self._exchange
        if self._route.service.traces.is_on:
            self._trace = begin_trace(self._route.service, exchange, self._hosted, request)
        try:
            submission = LoopSubmission(self._hosted.scheduler, request, self)
        except MoonpoolError as error:
            self._fail(own(error), JSON)
            return
        if not exchange.is_gone:
            exchange.cancel = submission.cancel

    def __call__(self, outcome: Outcome) -> None:
        """Answer the client."""
        if self._trace is not None:
            self._trace.mark("INFER_RESPONSE_COMPLETE")
            self._trace.mark("HTTP_SEND_START")
        if not isinstance(outcome, Response):
            self._fail(outcome, TEXT)
            return
        service, model, plan = self._route.service, self._hosted.model, self._plan
        most_bytes = self._route.limits.json_bytes
        outputs: Mapping[str, WireTensor] = outcome.outputs  # type: ignore[assignment]
        if plan.places and copied_bytes(outputs.values()) > _LONG_COPY_BYTES:
            self._route.elsewhere(
                self._exchange,
                lambda: render(service, model, plan, outcome, most_bytes),
                self._respond,
                TEXT,
            )
            return
        try:
            rendered = render(service, model, plan, outcome, most_bytes)
        except MoonpoolError as error:
            self._fail(error, TEXT)
        except Exception as error:
            # The caller has other requests of the batch to answer, so nothing is raised.
            _log.exception("the response of %r cannot be written", model)
            self._fail(error, TEXT)
        else:
            self._respond(rendered)

    def _respond(self, rendered: tuple[Headers, list[Part]]) -> None:
        headers, parts = rendered
        exchange, encoding = self._exchange, self._target.accepts
        if self._target.load_form:
            headers = with_load(self._route.service, headers, self._target.load_form)
        if encoding is None:
            exchange.respond(200, headers, parts)
            return
        headers = (*headers, (b"Content-Encoding", encoding.encode()))
        if sum(map(len, parts)) <= _LONG_DEFLATE_BYTES:
            exchange.respond(200, headers, deflate(encoding, parts))
            return
        self._elsewhere(
            lambda: deflate(encoding, parts),
            lambda compressed: exchange.respond(200, headers, compressed),
        )


def with_load(service: Service, headers: Headers, form: str) -> Headers:
    """Return the headers of a response, with the load of this server if there is one to tell."""
    load = service.metrics.endpoint_load(form)
    return headers if load is None else (*headers, (LOAD, load.encode("ascii")))


class LoopSubmission(LoopWaiter):
    """A request that was sent from an event loop. All methods are for the loop's thread.

    It can be cancelled at any time, as a client may go. No answer is handed from one thread to another: the loop waits on the
    stub's socket itself.
    """

    __slots__ = ("_is_over", "_on_outcome", "_request", "_scheduler")

    def __init__(
        self,
        scheduler: Scheduler,
        request: InferenceRequest,
        on_outcome: Callable[[Outcome], object],
    ) -> None:
        """Send it. `on_outcome` is called once, in this loop, maybe before this returns.

        Raises what `Scheduler.submit` raises, and then `on_outcome` is not called.
        """
        super().__init__(asyncio.get_running_loop())
        self._scheduler = scheduler
        self._request = request
        self._on_outcome = on_outcome
        self._is_over = False
        self.submit(scheduler, request)

    def settle(self, outcome: Outcome | None) -> None:
        if not self._is_over:
            on_outcome = self._on_outcome
            self._release()
            on_outcome(outcome)  # type: ignore[arg-type]  # None is for those who take many

    def is_settled(self) -> bool:
        return self._is_over

    def cancel(self) -> None:
        """Drop the request, or tell its model, as the client has gone. `on_outcome` is not called any more."""
        if not self._is_over:
            request = self._request
            self._release()
            self.leave(self._scheduler, request)

    def _release(self) -> None:
        # The request refers to this object, and so does the callback through its exchange. Unless these references go,
        # tensors stay in memory until the collector looks for cycles.
        self._is_over = True
        del self._on_outcome, self._request


def begin_trace(
    service: Service, exchange: HttpExchange, hosted: Hosted, request: InferenceRequest
) -> Trace | None:
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
        exchange.ended = partial(_end, trace)
    return trace


def _end(trace: Trace) -> None:
    trace.mark("HTTP_SEND_END")
    trace.end()
