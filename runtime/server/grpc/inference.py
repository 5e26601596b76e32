"""ModelInfer: one request, one response, no thread of its own.

Theory of operation. A request is read, checked and submitted on the polling thread, which received it. The response is written on
the thread that got the answer of the stub: the polling thread itself, the thread of `answers`, or a thread of the runtime. No
thread waits for a single request. A request or a response with more than `LARGE_BYTES` to copy takes the same steps on a thread of a
pool, as the polling thread has other clients.

A call may end at any time, on the polling thread, while another thread still makes its request. So `when_gone` comes last, after the
request was submitted: if the client has gone by then, it calls `leave` at once. `GrpcCall` drops everything that is sent after the
end.

`close` comes after the last call has ended. It first ends `answers`, which leaves executions to the reactors of their models, and
then the pool.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping

from moonpool.ipc.errors import Closed, MoonpoolError
from moonpool.runtime.errors import InvalidRequest, ModelNotFound, OutOfThreads
from moonpool.runtime.hosting.model_control import version_of
from moonpool.runtime.model.request import (
    InferenceRequest,
    Outcome,
    Parameter,
    Response,
    Waiter,
    WireTensor,
)
from moonpool.runtime.process.threads import TaskPool
from moonpool.runtime.schedule.scheduler import Execution
from moonpool.runtime.server.grpc.answers import Answers
from moonpool.runtime.server.grpc.call import GrpcCall, Metadata
from moonpool.runtime.server.grpc.infer_request import InferMessage
from moonpool.runtime.server.grpc.infer_response import answer
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.status import UNREADABLE, Status, status_of
from moonpool.runtime.server.grpc.wire import BadProtobuf
from moonpool.runtime.server.inference.request import Hosted, check_has_one_response
from moonpool.runtime.server.inference.response import copied_bytes
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.tracing.trace import Trace

# Larger tensors are copied on a thread of their own.
LARGE_BYTES = 1 << 18
_COPYING_THREADS = 4


class GrpcInference:
    """Answers requests for inference, and has what all of them need: models, waiting for stubs, threads for large copies."""

    def __init__(self, service: Service, turn: threading.Lock, options: GrpcOptions) -> None:
        self.service = service
        self.answers = Answers(turn)
        self._copying = TaskPool(_COPYING_THREADS, "moonpool-grpc-copying")
        pattern = options.header_forward_pattern
        self._forwards = re.compile(pattern) if pattern else None

    def find(self, message: InferMessage) -> Hosted:
        """Return the model that is asked. Raises `ModelNotFound`, `ModelUnavailable`, `InvalidRequest`."""
        try:
            hosted: Hosted = self.service.models.find(message.model, version_of(message.version))
        except ModelNotFound:
            # Asking for metadata raises the error that names the reason.
            self.service.metadata.model_config(message.model, message.version)
            raise
        return hosted

    def find_plain(self, message: InferMessage) -> Hosted:
        """Return the model for ModelInfer. Raises as `find`, and `ModelError` for a decoupled model."""
        hosted = self.find(message)
        check_has_one_response(hosted, "ModelInfer RPC")
        return hosted

    def forwarded(self, metadata: Metadata) -> dict[str, Parameter] | None:
        """Return the headers that models get as parameters."""
        if self._forwards is None:
            return None
        return {
            key: value
            for key, value in metadata
            if isinstance(value, str) and self._forwards.fullmatch(key)
        }

    def trace(
        self, call: GrpcCall, hosted: Hosted, message: InferMessage, request: InferenceRequest
    ) -> Trace | None:
        """Return the trace of a request that is about to be submitted, or None if it is not traced."""
        traces = self.service.traces
        if not traces.is_on:
            return None
        headers = dict(call.metadata)
        context = (headers.get("traceparent"), headers.get("tracestate"))
        parent, state = (each if isinstance(each, str) else None for each in context)
        trace = traces.begin(hosted.model, message.request_id, parent, state)
        if trace is not None:
            trace.mark("GRPC_WAITREAD_START", call.begun_ns)
            trace.mark("GRPC_WAITREAD_END", message.read_ns)
            trace.follow(request)
        return trace

    def read(
        self, data: bytes, take: Callable[[InferMessage], object], fail: Callable[[Status], object]
    ) -> None:
        """Give a request to `take`: here, or, if reading its tensors takes long, on another thread.

        `fail` is called for bytes that are not a message, and for a message with too many fields.
        """
        self.run(len(data), lambda: self._read(data, take, fail))

    def _read(
        self, data: bytes, take: Callable[[InferMessage], object], fail: Callable[[Status], object]
    ) -> None:
        try:
            message = InferMessage(data)
        except BadProtobuf:
            fail(UNREADABLE)
            return
        except InvalidRequest as error:
            fail(status_of(error))
            return
        self.run(self._bytes_in_memory(message), lambda: take(message))

    def _bytes_in_memory(self, message: InferMessage) -> int:
        """Return how many bytes have to be copied from memory of the client."""
        try:
            plan = message.read()
            if not plan.is_large:
                return 0
            return self.service.read_bytes(self.find(message).model, plan.inputs)
        except MoonpoolError:  # `take` meets the same error
            return 0

    def submit(self, hosted: Hosted, request: InferenceRequest, waiter: Waiter) -> None:
        """Send a request. Raises what `Scheduler.submit` raises."""
        request.waiter = waiter
        execution = hosted.scheduler.submit(request)
        if execution is not None:
            execution.offer()
            self.drive(execution)

    def drive(self, execution: Execution) -> None:
        """Wait for the answer of an execution that is offered: on a thread of gRPC, or, after `close`, in the reactor."""
        if not self.answers.drive(execution) and execution.claim(self):
            execution.drive_in_reactor()

    def run(self, size_bytes: int, work: Callable[[], object]) -> None:
        """Do work that copies so many bytes: here, or, if that takes long, on another thread."""
        if size_bytes <= LARGE_BYTES:
            work()
            return
        try:
            self._copying.submit(work)
        except (Closed, OutOfThreads):
            # The last calls end while the server closes. Without a thread, other clients wait, which is better than to refuse this one.
            work()

    def close(self) -> None:
        """End the threads, after the last call has ended."""
        self.answers.close()
        self._copying.shutdown()

    # ModelInfer

    def handle(self, call: GrpcCall) -> None:
        """Receive and answer a ModelInfer."""
        call.receive(lambda data: self._received(call, data))

    def is_ours(self, call: GrpcCall, data: bytes) -> bool:  # noqa: ARG002
        """Return whether the request is answered here. If not, it was given to somebody else."""
        return True

    def refuse(self, call: GrpcCall, message: InferMessage, error: MoonpoolError) -> None:  # noqa: ARG002
        """Answer a request whose model was not found."""
        call.fail(status_of(error))

    def _received(self, call: GrpcCall, data: bytes | None) -> None:
        if data is None:
            call.fail(UNREADABLE)
            return
        if self.is_ours(call, data):
            self.read(data, lambda message: self._begin(call, message), call.fail)

    def _begin(self, call: GrpcCall, message: InferMessage) -> None:
        waiter: _OneResponse | None = None
        try:
            hosted = self.find_plain(message)
        except MoonpoolError as error:
            self.refuse(call, message, error)
            return
        try:
            request = message.request(self.service, hosted, self.forwarded(call.metadata))
            waiter = _OneResponse(self, call, message, hosted)
            waiter.trace = self.trace(call, hosted, message, request)
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

    __slots__ = ("_call", "_hosted", "_inference", "_message", "trace")

    def __init__(
        self, inference: GrpcInference, call: GrpcCall, message: InferMessage, hosted: Hosted
    ) -> None:
        self._inference = inference
        self._call = call
        self._message = message
        self._hosted = hosted
        self.trace: Trace | None = None

    def leave(self, request: InferenceRequest) -> None:
        """Cancel the request, as the client has gone."""
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
            outputs: Mapping[str, WireTensor] = response.outputs  # type: ignore[assignment]
            self._inference.run(copied_bytes(outputs.values()), lambda: self._reply(response))
        elif outcome is not None:
            self.fail(outcome)

    def _reply(self, response: Response) -> None:
        asked = self._message
        try:
            service, model = self._inference.service, self._hosted.model
            data = answer(service, model, asked.read(), asked.request_id, response)
        except Exception as error:
            self.fail(error)
            return
        if self.trace is None:
            self._call.reply(data)
        else:
            self.trace.mark("GRPC_SEND_START")
            self._call.reply(data, self._sent)

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        if self.trace is not None:
            self.trace.mark("GRPC_SEND_START")
        self._call.fail(status_of(error, self._message.request_id))
        self._sent()

    def _sent(self) -> None:
        if self.trace is not None:
            self.trace.mark("GRPC_SEND_END")
            self.trace.end()
