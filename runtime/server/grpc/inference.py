"""ModelInfer: one request, one response, no thread of its own.

Theory of operation. A request is read, checked and submitted on the thread of the server's event loop, which received it. The loop also
waits for the stub (`LoopDriver`), and writes the response, unless another thread of the runtime got the answer. No thread waits for a
single request. A request or a response with more than `LARGE_BYTES` to copy takes the same steps on a thread of a pool, as the loop has
other clients.

A call may end at any time, on the loop's thread, while another thread still makes its request. So `when_gone` comes last, after the
request was submitted: if the client has gone by then, it calls `leave` at once. `GrpcCall` drops everything that is sent after the
end.

Once the loop is closed, nobody waits in it: `drive` returns False, and executions are left to the reactors of their models.
"""

from __future__ import annotations

import asyncio
import re
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
from moonpool.runtime.schedule.event_loop import driver_of, running_loop
from moonpool.runtime.schedule.execution import Execution
from moonpool.runtime.schedule.scheduler import Scheduler
from moonpool.runtime.server.grpc.call import GrpcCall, Metadata
from moonpool.runtime.server.grpc.infer_request import InferMessage
from moonpool.runtime.server.grpc.infer_response import answer
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.status import UNREADABLE, Status, status_of
from moonpool.runtime.server.grpc.wire import BadProtobuf
from moonpool.runtime.server.inference.request import (
    Hosted,
    check_has_one_response,
    room_for_body,
)
from moonpool.runtime.server.inference.response import copied_bytes
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.tracing.trace import Trace
from moonpool.runtime.stubs.regions import CallerMemory

# Larger tensors are copied on a thread of their own.
LARGE_BYTES = 1 << 18
_COPYING_THREADS = 4


class GrpcInference:
    """Answers requests for inference, and has what all of them need: models, waiting for stubs, threads for large copies."""

    def __init__(
        self, service: Service, loop: asyncio.AbstractEventLoop, options: GrpcOptions
    ) -> None:
        self.service = service
        self.copying = TaskPool(_COPYING_THREADS, "moonpool-grpc-copying")
        """Threads for work that takes long."""
        self._loop = loop
        self._driver = driver_of(loop)
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

    def place(self, first: bytes, size_bytes: int) -> InferMessage | None:
        """Return a request that begins so, and will be received into memory that the model's stubs see; None for any memory."""
        try:
            message = InferMessage.begun(first)
            if message is None:
                return None
            memory = self.caller_memory(self.find(message))
        except (BadProtobuf, MoonpoolError):  # answered once the message has come
            return None
        array = room_for_body(memory, size_bytes, message.tensors_at)
        if array is None:
            return None
        message.place(array)
        return message

    def caller_memory(self, hosted: Hosted) -> CallerMemory | None:
        """Return the memory in which callers of this model write in place, if its backend has such."""
        return self.service.caller_memory(hosted.model)

    def read(
        self,
        data: bytes | InferMessage,
        take: Callable[[InferMessage], object],
        fail: Callable[[Status], object],
    ) -> None:
        """Give a request to `take`: here, or, if reading its tensors takes long, on another thread.

        `fail` is called for bytes that are not a message, and for a message with too many fields.
        """
        # A placed message lies already where its stub reads it.
        size_bytes = 0 if isinstance(data, InferMessage) else len(data)
        self.run(size_bytes, lambda: self._read(data, take, fail))

    def _read(
        self,
        data: bytes | InferMessage,
        take: Callable[[InferMessage], object],
        fail: Callable[[Status], object],
    ) -> None:
        try:
            message = data.complete() if isinstance(data, InferMessage) else InferMessage(data)
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
        """Send a request. Raises what `Scheduler.submit` raises, or makes it the outcome."""
        request.waiter = waiter
        if running_loop() is self._loop:
            self._driver.submit(hosted.scheduler, request)
            return
        if waiter.takes_many:
            # Behind those of its stream that the loop has gathered.
            try:
                self._loop.call_soon_threadsafe(self._submit_here, hosted.scheduler, request)
            except RuntimeError:
                pass
            else:
                return
        execution = hosted.scheduler.submit(request)
        if execution is not None:
            execution.offer()
            if not self.drive(execution) and execution.claim(self):
                execution.drive_in_reactor()

    def _submit_here(self, scheduler: Scheduler, request: InferenceRequest) -> None:
        try:
            self._driver.submit(scheduler, request)
        except Exception as error:
            request.waiter.resolve(error)

    def drive(self, execution: Execution) -> bool:
        """Wait in the loop for the answer of an execution that is offered. Returns False if the loop is closed."""
        if running_loop() is self._loop:
            self._driver.drive(execution)
            return True
        try:
            self._loop.call_soon_threadsafe(self._driver.drive, execution)
        except RuntimeError:
            return False
        return True

    def run(self, size_bytes: int, work: Callable[[], object]) -> None:
        """Do work that copies so many bytes: here, or, if that takes long, on another thread."""
        if size_bytes <= LARGE_BYTES:
            work()
            return
        try:
            self.copying.submit(work)
        except (Closed, OutOfThreads):
            # The last calls end while the server closes. Without a thread, other clients wait, which is better than to refuse this one.
            work()

    def close(self) -> None:
        """End the threads, after the last call has ended."""
        self.copying.shutdown(wait=False)

    # ModelInfer

    def handle(self, call: GrpcCall) -> None:
        """Receive and answer a ModelInfer."""
        call.receive(lambda data: self._received(call, data))

    def is_ours(self, call: GrpcCall, data: bytes | InferMessage) -> bool:  # noqa: ARG002
        """Return whether the request is answered here. If not, it was given to somebody else."""
        return True

    def refuse(self, call: GrpcCall, message: InferMessage, error: MoonpoolError) -> None:  # noqa: ARG002
        """Answer a request whose model was not found."""
        call.fail(status_of(error))

    def _received(self, call: GrpcCall, data: bytes | InferMessage | None) -> None:
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
        return self._inference.drive(execution)

    def resolve(self, outcome: Outcome | None) -> None:
        if self.trace is not None:
            self.trace.mark("INFER_RESPONSE_COMPLETE")
        if isinstance(outcome, Response):
            response = outcome
            outputs: Mapping[str, WireTensor] = response.outputs  # type: ignore[assignment]
            # Other outputs leave as views.
            has_places = bool(self._message.read().places)
            size_bytes = copied_bytes(outputs.values()) if has_places else 0
            self._inference.run(size_bytes, lambda: self._reply(response))
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
