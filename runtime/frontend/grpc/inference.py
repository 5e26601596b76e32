"""ModelInfer: one request, one response, no thread of its own."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import InvalidRequest, ModelError, ModelNotFound
from moonpool.runtime.frontend.grpc.answers import Answers
from moonpool.runtime.frontend.grpc.backlog import Backlog
from moonpool.runtime.frontend.grpc.handlers import UNREADABLE
from moonpool.runtime.frontend.grpc.infer_request import Asked
from moonpool.runtime.frontend.grpc.infer_response import answer
from moonpool.runtime.frontend.grpc.status import status_of
from moonpool.runtime.frontend.grpc.stream import Stream
from moonpool.runtime.frontend.grpc.wire import BadMessage
from moonpool.runtime.frontend.tensors import copied_bytes
from moonpool.runtime.model_control import version_of
from moonpool.runtime.request import Response
from moonpool.runtime.waiter import Waiter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from moonpool.runtime.execution import Execution
    from moonpool.runtime.frontend.grpc.call import Call, Metadata
    from moonpool.runtime.frontend.grpc.options import GrpcOptions
    from moonpool.runtime.frontend.grpc.status import Status
    from moonpool.runtime.frontend.service import Service
    from moonpool.runtime.frontend.submission import Hosted
    from moonpool.runtime.frontend.trace import Trace
    from moonpool.runtime.request import InferenceRequest, Outcome, Parameter, Wire

# What is larger is copied on a thread of its own: the polling thread has other clients.
LARGE_BYTES = 1 << 18
_COPYING_THREADS = 4


class Inference:
    """What all requests for inference need: the models, who waits for their answers, who copies what is large."""

    def __init__(self, service: Service, turn: threading.Lock, options: GrpcOptions) -> None:
        self.service = service
        self.answers = Answers(turn)
        self._copying = ThreadPoolExecutor(_COPYING_THREADS, "moonpool-grpc-copying")
        pattern = options.header_forward_pattern
        self._forwards = re.compile(pattern) if pattern else None
        self._max_backlog_bytes = options.max_backlog_bytes
        self.backlog: Backlog[Stream] = Backlog(options.max_backlogs_bytes)

    def find(self, asked: Asked) -> Hosted:
        """Who is asked. Raises `ModelNotFound`, `ModelUnavailable`, `InvalidRequest`."""
        try:
            hosted: Hosted = self.service.models.find(asked.model, version_of(asked.version))
        except ModelNotFound:
            # Which of the reasons it is, is in the metadata's words.
            self.service.metadata.model_config(asked.model, asked.version)
            raise
        return hosted

    def find_plain(self, asked: Asked) -> Hosted:
        """As `find`, for ModelInfer. Raises `ModelError`, too."""
        hosted = self.find(asked)
        if hosted.model.config.decoupled:
            raise ModelError(
                "ModelInfer RPC doesn't support models with decoupled transaction policy",
                "UNSUPPORTED",
            )
        return hosted

    def forwarded(self, metadata: Metadata) -> dict[str, Parameter] | None:
        """The headers that the server was told to hand on to models as parameters."""
        if self._forwards is None:
            return None
        return {
            key: value
            for key, value in metadata
            if isinstance(value, str) and self._forwards.fullmatch(key)
        }

    def trace(
        self, call: Call, hosted: Hosted, asked: Asked, request: InferenceRequest
    ) -> Trace | None:
        """Of a request that is about to be submitted, if it is one to be traced."""
        traces = self.service.traces
        if not traces.is_on:
            return None
        headers = dict(call.metadata)
        context = (headers.get("traceparent"), headers.get("tracestate"))
        parent, state = (each if isinstance(each, str) else None for each in context)
        trace = traces.begin(hosted.model, asked.request_id, parent, state)
        if trace is not None:
            trace.mark("GRPC_WAITREAD_START", call.begun_ns)
            trace.mark("GRPC_WAITREAD_END", asked.read_ns)
            trace.follow(request)
        return trace

    def read(
        self, data: bytes, take: Callable[[Asked], object], fail: Callable[[Status], object]
    ) -> None:
        """Give a request to `take`: here, or, where it takes long to read its tensors, on a thread of its own.

        `fail` is called for bytes that are no message, or one that holds too much.
        """
        self.run(len(data), lambda: self._read(data, take, fail))

    def _read(
        self, data: bytes, take: Callable[[Asked], object], fail: Callable[[Status], object]
    ) -> None:
        try:
            asked = Asked(data)
        except BadMessage:
            fail(UNREADABLE)
            return
        except InvalidRequest as error:
            fail(status_of(error))
            return
        self.run(self._bytes_in_memory(asked), lambda: take(asked))

    def _bytes_in_memory(self, asked: Asked) -> int:
        """How much is to be copied from memory of the client."""
        try:
            plan = asked.read()
            if not plan.is_large:
                return 0
            return self.service.read_bytes(self.find(asked).model, plan.inputs)
        except MoonpoolError:  # it is told in its turn
            return 0

    def submit(self, hosted: Hosted, request: InferenceRequest, waiter: Waiter) -> None:
        """Send a request. Raises what `Scheduler.submit` raises."""
        request.waiter = waiter
        execution = hosted.scheduler.submit(request)
        if execution is not None:
            execution.offer()
            self.drive(execution)

    def drive(self, execution: Execution) -> None:
        """Have somebody wait for the answer of an execution that is offered."""
        if not self.answers.drive(execution) and execution.claim(self):
            execution.drive_in_reactor()

    def run(self, size_bytes: int, work: Callable[[], object]) -> None:
        """Do what copies so many bytes: here, or, where that takes long, on a thread of its own."""
        if size_bytes <= LARGE_BYTES:
            work()
            return
        try:
            self._copying.submit(work)
        except RuntimeError:  # shut down
            work()

    def close(self) -> None:
        """After the last call has ended."""
        self.answers.close()
        self._copying.shutdown()

    # ModelInfer

    def handle(self, call: Call) -> None:
        """The handler of ModelInfer."""
        call.receive(lambda data: self._received(call, data))

    def handle_stream(self, call: Call) -> None:
        """The handler of ModelStreamInfer."""
        Stream(self, call, self._max_backlog_bytes).begin()

    def is_ours(self, call: Call, data: bytes) -> bool:  # noqa: ARG002
        """Whether it is to be answered here; where it is not, somebody else has been given it."""
        return True

    def refuse(self, call: Call, asked: Asked, error: MoonpoolError) -> None:  # noqa: ARG002
        """There is no such model for it."""
        call.fail(status_of(error))

    def _received(self, call: Call, data: bytes | None) -> None:
        if data is None:
            call.fail(UNREADABLE)
            return
        if self.is_ours(call, data):
            self.read(data, lambda asked: self._begin(call, asked), call.fail)

    def _begin(self, call: Call, asked: Asked) -> None:
        waiter: _OneResponse | None = None
        try:
            hosted = self.find_plain(asked)
        except MoonpoolError as error:
            self.refuse(call, asked, error)
            return
        try:
            request = asked.request(self.service, hosted, self.forwarded(call.metadata))
            waiter = _OneResponse(self, call, asked, hosted)
            waiter.trace = self.trace(call, hosted, asked, request)
            self.submit(hosted, request, waiter)
        except Exception as error:
            if waiter is None:
                call.fail(status_of(error))
            else:
                waiter.fail(error)
            return
        leave = waiter.leave
        call.when_gone(lambda: leave(request))


class _OneResponse(Waiter):
    """The client of a ModelInfer."""

    __slots__ = ("_asked", "_call", "_hosted", "_inference", "trace")

    def __init__(self, inference: Inference, call: Call, asked: Asked, hosted: Hosted) -> None:
        self._inference = inference
        self._call = call
        self._asked = asked
        self._hosted = hosted
        self.trace: Trace | None = None

    def leave(self, request: InferenceRequest) -> None:
        """The client is gone."""
        self._hosted.scheduler.cancel(request)
        if self.trace is not None:
            self.trace.end()

    def appoint(self, execution: Execution) -> bool:
        return self._inference.answers.drive(execution)

    def resolve(self, outcome: Outcome | None) -> None:
        if self.trace is not None:
            self.trace.mark("INFER_RESPONSE_COMPLETE")
        if isinstance(outcome, Response):
            response = outcome
            outputs: Mapping[str, Wire] = response.outputs  # type: ignore[assignment]
            self._inference.run(copied_bytes(outputs.values()), lambda: self._reply(response))
        elif outcome is not None:
            self.fail(outcome)

    def _reply(self, response: Response) -> None:
        asked = self._asked
        try:
            service, model = self._inference.service, self._hosted.model
            message = answer(service, model, asked.read(), asked.request_id, response)
        except Exception as error:
            self.fail(error)
            return
        if self.trace is None:
            self._call.reply(message)
        else:
            self.trace.mark("GRPC_SEND_START")
            self._call.reply(message, self._sent)

    def fail(self, error: BaseException) -> None:
        """The client gets an error."""
        if self.trace is not None:
            self.trace.mark("GRPC_SEND_START")
        self._call.fail(status_of(error, self._asked.request_id))
        self._sent()

    def _sent(self) -> None:
        if self.trace is not None:
            self.trace.mark("GRPC_SEND_END")
            self.trace.end()
