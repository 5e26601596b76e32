"""ModelInfer: one request, one response, no thread of its own.

Theory of operation. A request is read, checked and submitted on the thread of the server's event loop, which received
it; the rest is that of all calls (`inference.call`). Messages of more than `LARGE_BYTES` are read on a thread of the
pool, as the loop has other clients.

A call may end at any time, while a thread still reads or makes its request: then the request is dropped. `when_gone`
comes last, after the request was submitted: if the client has gone by then, it cancels the request at once. `GrpcCall`
drops everything that is sent after the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import ModelNotFound
from moonpool.runtime.hosting.model_control import version_of
from moonpool.runtime.model.protobuf import BadProtobuf
from moonpool.runtime.model.request import InferenceRequest, Response
from moonpool.runtime.process.threads import TaskPool
from moonpool.runtime.server.grpc.call import GrpcCall, Message, Metadata
from moonpool.runtime.server.grpc.infer_request import GrpcRequestPlan, InferMessage, begun
from moonpool.runtime.server.grpc.infer_response import answer
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.status import UNREADABLE, Status, status_of
from moonpool.runtime.server.inference import call as calls
from moonpool.runtime.server.inference.forwarding import ForwardedHeaders
from moonpool.runtime.server.inference.request import Hosted, check_has_one_response, room_for_body
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.tracing.traces import Trace

# Larger messages are read on a thread, unless they lie where stubs read them.
LARGE_BYTES = 1 << 18
_COPYING_THREADS = 4


class GrpcInference(calls.Inference):
    """Answers requests for inference, and has what all of them need: models, waiting for stubs, threads for work that
    takes long.
    """

    def __init__(self, service: Service, loop: asyncio.AbstractEventLoop, options: GrpcOptions) -> None:
        super().__init__(service, loop, TaskPool(_COPYING_THREADS, "moonpool-grpc-copying"))
        self._forwarding = ForwardedHeaders(options.header_forward_pattern)

    def find(self, message: InferMessage) -> Hosted:
        """Return the model that is asked. Raises `ModelNotFound`, `ModelUnavailable`, `InvalidRequest`."""
        try:
            hosted: Hosted = self.service.models.find(message.model, version_of(message.version))
        except ModelNotFound:
            # Asking for metadata raises the error that names the reason.
            self.service.metadata.model_config(message.model, message.version)
            raise
        return hosted

    def trace(self, call: GrpcCall, hosted: Hosted, message: InferMessage, request: InferenceRequest) -> Trace | None:
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
        """Return a request that begins so, and will be received into memory that the model's stubs see; None for any
        memory.
        """
        try:
            message = begun(first)
            if message is None:
                return None
            memory = self.service.caller_memory(self.find(message).model)
        except (BadProtobuf, MoonpoolError):  # answered once the message has come
            return None
        array = room_for_body(memory, size_bytes, message.tensors_at)
        if array is None:
            return None
        message.place(array)
        return message

    def read(
        self, data: bytes | InferMessage, take: Callable[[InferMessage], object], fail: Callable[[Status], object]
    ) -> None:
        """Give a request to `take`, or the status to `fail` for bytes that are not a message, or a message with too
        many fields.
        """
        self.work(
            partial(_message, data),
            take,
            partial(_refuse, fail),
            # A placed message lies already where its stub reads it.
            is_long=not isinstance(data, InferMessage) and len(data) > LARGE_BYTES,
        )

    def make(
        self,
        message: InferMessage,
        hosted: Hosted,
        metadata: Metadata,
        take: Callable[[InferenceRequest], object],
        refuse: Callable[[BaseException], object],
    ) -> None:
        """Give the request for this model to `take`, or the error to `refuse`."""
        try:
            forwarded = self._forwarding.choose(metadata)
            request = message.usual(self.service, hosted, forwarded)
        except Exception as error:
            refuse(error)
            return
        if request is not None:
            take(request)
            return
        make = partial(message.request, self.service, hosted, forwarded)
        self.work(make, take, refuse, is_long=self._copied_bytes(message, hosted) > LARGE_BYTES)

    def _copied_bytes(self, message: InferMessage, hosted: Hosted) -> int:
        """Return how many bytes are copied to make a request: those in memory of the client, and values in the message
        itself.
        """
        try:
            plan = message.read()
        except MoonpoolError:  # making the request meets the same error
            return 0
        if plan.contents:
            return len(message.data)
        return self.service.read_bytes(hosted.model, plan.inputs) if plan.is_large else 0

    def close(self) -> None:
        """End the threads, after the last call has ended."""
        self.executor.shutdown(wait=False)

    # ModelInfer

    def handle(self, call: GrpcCall) -> None:
        """Receive and answer a ModelInfer."""
        call.receive(partial(self._received, call))

    def _received(self, call: GrpcCall, data: bytes | InferMessage | None) -> None:
        call.received_ns = time.monotonic_ns()
        if data is None:
            call.fail(UNREADABLE)
        else:
            self.read(data, GrpcInferCall(self, call).begin, call.fail)


def _refuse(fail: Callable[[Status], object], error: BaseException) -> None:
    fail(UNREADABLE if isinstance(error, BadProtobuf) else status_of(error))


def _message(data: bytes | InferMessage) -> InferMessage:
    """Return a whole message. Raises `BadProtobuf`, and `InvalidRequest` if it has too many fields."""
    return data.complete() if isinstance(data, InferMessage) else InferMessage(data)


class GrpcInferCall(calls.InferCall):
    """A ModelInfer: its request, and the client who waits for the response."""

    __slots__ = ("_call", "_message")
    _inference: GrpcInference
    plan: GrpcRequestPlan

    def __init__(self, inference: GrpcInference, call: GrpcCall) -> None:
        calls.InferCall.belong(self, inference)
        self._call = call
        self._message: InferMessage = None  # type: ignore[assignment]

    def begin(self, message: InferMessage) -> None:
        """Send the request to the model."""
        self._message, call, inference = message, self._call, self._inference
        try:
            self.hosted = inference.find(message)
            check_has_one_response(self.hosted, "ModelInfer RPC")
        except MoonpoolError as error:
            call.fail(status_of(error))
        else:
            inference.make(message, self.hosted, call.metadata, self._made, self.fail)

    def _made(self, request: InferenceRequest) -> None:
        if not self._call.is_gone:
            self.plan = self._message.read()
            self.send(request)

    def begin_trace(self, request: InferenceRequest) -> Trace | None:
        return self._inference.trace(self._call, self.hosted, self._message, request)

    def watch(self) -> None:
        self._call.when_gone(self.cancel)

    def render(self, response: Response) -> Message:
        service, message = self._inference.service, self._message
        return answer(service, self.hosted.model, self.plan, message.request_id, response)

    def reply(self, rendered: Message) -> None:
        if self.trace is None:
            self._call.reply(rendered)
        else:
            self.trace.mark("GRPC_SEND_START")
            self._call.reply(rendered, self._sent)

    def fail(self, error: BaseException) -> None:
        if self.trace is not None:
            self.trace.mark("GRPC_SEND_START")
        self._call.fail(status_of(error, self._message.request_id))
        self._sent()

    def cancel(self) -> None:
        calls.InferCall.cancel(self)
        if self.trace is not None:
            self.trace.end()

    def _sent(self) -> None:
        if self.trace is not None:
            self.trace.mark("GRPC_SEND_END")
            self.trace.end()
