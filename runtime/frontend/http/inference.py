"""Requests for inference on their way from a connection into a scheduler and back, without a task or a thread between."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.memo import Memo
from moonpool.ipc.memory import ALIGNMENT
from moonpool.runtime.details import with_parameters
from moonpool.runtime.errors import InvalidRequest, ModelError, own
from moonpool.runtime.frontend.http.encoding import ENCODINGS, TooLong, accepted, deflate, inflate
from moonpool.runtime.frontend.http.head import HEADER_LENGTH, JSON, TEXT, BadMessage
from moonpool.runtime.frontend.http.infer_request import Plan, raw_plan, read_plan
from moonpool.runtime.frontend.http.infer_response import render
from moonpool.runtime.frontend.http.intake import over_input_size
from moonpool.runtime.frontend.http.json_text import too_much_json
from moonpool.runtime.frontend.http.prepared import Prepared
from moonpool.runtime.frontend.http.tracing import begin_trace
from moonpool.runtime.frontend.http.turns import LONG_BYTES, Turns
from moonpool.runtime.frontend.requests import make_request, refused
from moonpool.runtime.frontend.statuses import http_status
from moonpool.runtime.frontend.submission import LoopSubmission
from moonpool.runtime.frontend.tensors import WrongSize, copied_bytes
from moonpool.runtime.public_text import public_text
from moonpool.runtime.python_backend import PythonBackend
from moonpool.runtime.request import Response

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor

    from moonpool.runtime.frontend.http.exchange import Body, Exchange, Part
    from moonpool.runtime.frontend.http.head import Headers
    from moonpool.runtime.frontend.http.options import HttpLimits
    from moonpool.runtime.frontend.service import Service
    from moonpool.runtime.frontend.submission import Hosted
    from moonpool.runtime.frontend.trace import Trace
    from moonpool.runtime.regions import CallerMemory
    from moonpool.runtime.request import InferenceRequest, Outcome, Wire

_ENCODINGS = ((b"Accept-Encoding", b"gzip, deflate"), *TEXT)
_log = logging.getLogger("moonpool")
# What takes longer than a hand-over to a thread is not done in the loop.
_LONG_DEFLATE_BYTES = 64 << 10
_LONG_COPY_BYTES = 1 << 20
# Which bodies are received into memory that the model's stubs see.
_LONG_BODY_BYTES = 64 << 10
_HUGE_BODY_BYTES = 64 << 20
_UINT8 = np.dtype(np.uint8)
# Clients that send binary tensors send the same JSON every time, but for the id.
_MEMORABLE_BYTES = 2048


class InferTarget:
    """Which model a path names, and what the headers that come with it say. For all requests of the same head."""

    __slots__ = ("accepts", "encoding", "header_length", "model", "version")

    def __init__(self, model: str, version: int | None, headers: dict[bytes, bytes]) -> None:
        self.model = model
        self.version = version
        self.encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        self.accepts = accepted(headers.get(b"accept-encoding", b""))
        # None for a body that is nothing but JSON.
        self.header_length: int | None = None
        given = headers.get(HEADER_LENGTH)
        if given is not None:
            self.header_length = _leading_number(given)


_LEADING_NUMBER = re.compile(rb"\s*([+-]?[0-9]{1,20})")


def _leading_number(text: bytes) -> int:
    """As C reads a number: what stands behind it does not matter, and where there is none it is 0."""
    found = _LEADING_NUMBER.match(text)
    return 0 if found is None else int(found[1])


class Inference:
    """The route. For the loop's thread."""

    def __init__(
        self,
        service: Service,
        loop: asyncio.AbstractEventLoop,
        executor: Executor,
        limits: HttpLimits,
    ) -> None:
        """What takes long runs in `executor`."""
        self.service = service
        self.limits = limits
        self.turns = Turns(loop)
        self._loop = loop
        self._executor = executor
        self._plans: Memo[bytes, Plan] = Memo(512)

    def handle(self, exchange: Exchange, target: InferTarget) -> None:
        """Answer the request, now or later."""
        try:
            hosted = self.find(target.model, target.version)
        except MoonpoolError as error:
            exchange.fail(http_status(error), public_text(error), TEXT)
        else:
            InferCall(self, exchange, target, hosted).begin()

    def find(self, model: str, version: int | None) -> Hosted:
        """The model, if it can be asked over HTTP. Raises `MoonpoolError`."""
        hosted: Hosted = self.service.models.find(model, version)
        if hosted.model.config.decoupled:
            raise ModelError(
                "HTTP end point doesn't support models with decoupled transaction policy",
                "UNSUPPORTED",
            )
        return hosted

    def most_bytes_of(self, target: InferTarget) -> int:
        """The largest body of such a request."""
        is_json = target.header_length is None and target.encoding == "identity"
        return self.limits.json_bytes if is_json else self.limits.body_bytes

    def memory_for(self, target: InferTarget, size_bytes: int) -> memoryview | None:
        """Memory that the model's stubs see, so that the tensors in a large body need not be copied."""
        length = target.header_length or 0
        is_long = _LONG_BODY_BYTES < size_bytes < _HUGE_BODY_BYTES
        if target.encoding != "identity" or not is_long or not 0 < length < size_bytes:
            return None
        try:
            memory_of_callers = self.caller_memory(target)
            if memory_of_callers is None:
                return None
            # The first tensor is to begin where any may begin.
            gap = -length % ALIGNMENT
            memory = memory_of_callers.empty((gap + size_bytes,), _UINT8, gap + size_bytes)
        except MoonpoolError:  # what is wrong is said once the body is there, or it goes without
            return None
        return memory[gap:].data

    def caller_memory(self, target: InferTarget) -> CallerMemory | None:
        """Where callers of this model write in place, if its backend has such memory. Raises `MoonpoolError`."""
        model = self.find(target.model, target.version).model
        backend = self.service.models.backends.of(model.config)
        return backend.memory_of(model) if isinstance(backend, PythonBackend) else None

    def plan(self, body: Body, length: int) -> Plan:
        """What the JSON says that the body begins with. Raises `MoonpoolError`."""
        text = body if length == len(body) else memoryview(body)[:length]
        if length > _MEMORABLE_BYTES:
            return read_plan(text)
        raw = bytes(text)
        plan = self._plans.get(raw)
        if plan is None:
            plan = self._plans.keep(raw, read_plan(raw))
        return plan

    def elsewhere(
        self,
        exchange: Exchange,
        function: Callable[[], Any],
        go_on: Callable[[Any], None],
        headers: Headers,
    ) -> None:
        """Call a function that takes long in a thread, and go on here with what it returns.

        `headers` are those of the response where it fails.
        """

        def done(future: asyncio.Future[Any]) -> None:
            if future.cancelled():  # the server ends, and the client with it
                return
            error = future.exception()
            if error is None:
                if not exchange.is_gone:
                    go_on(future.result())
            elif isinstance(error, BadMessage):
                exchange.fail(error.status, error.text, headers)
            else:
                if not isinstance(error, MoonpoolError):
                    _log.error("answering a request for inference failed", exc_info=error)
                exchange.fail(http_status(error), public_text(error), headers)

        self._loop.run_in_executor(self._executor, function).add_done_callback(done)


class InferCall:
    """One request. It is called with the outcome."""

    __slots__ = ("_arrays", "_exchange", "_hosted", "_plan", "_route", "_target", "_trace")

    def __init__(
        self, route: Inference, exchange: Exchange, target: InferTarget, hosted: Hosted
    ) -> None:
        self._route = route
        self._exchange = exchange
        self._target = target
        self._hosted = hosted
        self._plan: Plan
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
        """Decompress the body, on any thread. Raises `BadMessage`."""
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
        plan: Plan | None = getattr(self, "_plan", None)
        text = public_text(error, "" if plan is None else plan.request_id)
        self._exchange.fail(http_status(error), text, headers)

    def _read(self, body: Body) -> None:
        length = self._target.header_length
        if length is None:
            length = len(body)
        elif not 0 <= length <= len(body):
            text = f"inference header size should be in range (0, {len(body)}), got: {length}"
            self._exchange.fail(400, text, TEXT)
            return
        limits = self._route.limits
        most_bytes = limits.json_bytes
        if length > most_bytes:
            if most_bytes == limits.input_bytes:
                over = over_input_size(str(length), most_bytes, is_json=True)
                self._exchange.fail(over.status, over.text, TEXT)
            else:
                self._exchange.fail(413, too_much_json(length, most_bytes), TEXT)
            return
        if length > LONG_BYTES:
            self._route.turns.take(self._exchange, partial(self._parse, body, length))
        else:
            self._parse(body, length)

    def _parse(self, body: Body, length: int) -> None:
        """Parse the body, whose first `length` bytes are JSON, and send the request."""
        data: Any = body
        # Arrays are to be views of the array that the body was received into: stubs may see it.
        is_shared = False
        if type(body) is memoryview and isinstance(body.obj, np.ndarray):
            data, is_shared = body.obj, True
        hosted = self._hosted
        try:
            if length:
                plan = self._plan = self._route.plan(body, length)
                prepared = plan.prepared
                if (
                    prepared is not None
                    and prepared.signature is hosted.signature
                    # A request with parameters of its own is not like any that was before.
                    and not self._exchange.head.forwarded
                ):
                    service, model = self._route.service, hosted.model
                    request = prepared.request(service, model, data, length, has_views=is_shared)
                    if request is not None:
                        if plan.places:
                            service.lend_targets(model, request, plan.places)
                        self._submit(request)
                        return
            else:
                plan, data = raw_plan(hosted.model.config, body)
                self._plan = plan
            self._arrays = plan.arrays(hosted.model.name, data, length)
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

    def _told(self, error: MoonpoolError) -> MoonpoolError:
        """Where a size is wrong Triton names the model and the request."""
        if isinstance(error, WrongSize):
            # Without JSON there is no plan yet, and no id.
            plan: Plan | None = getattr(self, "_plan", None)
            return refused(error, self._hosted, "" if plan is None else plan.request_id)
        return error

    def _read_shared(self) -> None:
        """Fetch the inputs that lie in clients' memory."""
        arrays = self._arrays
        for name, code, shape, _, _, place in self._plan.inputs:
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
            request = make_request(hosted, self._arrays, plan.outputs, details)
            if plan.places:
                self._route.service.lend_targets(hosted.model, request, plan.places)
        except MoonpoolError as error:
            self._fail(error, JSON)
            return
        del self._arrays
        if details is plan.details and Prepared.can_be(plan, request):
            plan.prepared = Prepared(plan, hosted, request)
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
        """The model has answered."""
        if self._trace is not None:
            self._trace.mark("INFER_RESPONSE_COMPLETE")
            self._trace.mark("HTTP_SEND_START")
        if not isinstance(outcome, Response):
            self._fail(outcome, TEXT)
            return
        service, model, plan = self._route.service, self._hosted.model, self._plan
        most_bytes = self._route.limits.json_bytes
        outputs: Mapping[str, Wire] = outcome.outputs  # type: ignore[assignment]
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
            # Whoever calls has others in the batch to tell.
            _log.exception("the response of %r cannot be written", model)
            self._fail(error, TEXT)
        else:
            self._respond(rendered)

    def _respond(self, rendered: tuple[Headers, list[Part]]) -> None:
        headers, parts = rendered
        exchange, encoding = self._exchange, self._target.accepts
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
