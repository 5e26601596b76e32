"""ModelStreamInfer: many requests and their responses over one call.

Responses of models that give one come in the order of the requests, and those of decoupled models as the model sends
them. Responses that a client does not read are kept for it up to a limit. Then the stream ends, as nothing can slow
down a model that sends by itself.

Theory of operation. The thread of the event loop reads the requests of a stream one by one, and reads the next one when
this one is in its model's queue: so they stay in order, even if a large one is copied on another thread. It stops
reading at `_MAX_IN_FLIGHT` open requests, or when half the allowed backlog waits for the client, and goes on in `_sent`
and `ended`.

Responses come from any thread. The lock of a stream guards its requests, its messages and its flags. The call and the
scheduler have locks of their own, so neither is called with the lock held. A method sets a flag under the lock
(`_is_sending`, `_is_reading`, `_is_over`), and the thread that set it acts after releasing the lock. Only
`backlog.change` is called with the lock held; the lock of the backlog is innermost. One message at a time is with gRPC,
or several small ones, and `_sent` sends the next ones: a model that sends many is quicker than the loop, which so
writes them together.

A stream ends in one of three ways, and the call takes only the first status. Everything is answered and the client will
send no more; the server drains, which counts as the end of the client's requests; or the stream is ended early, for an
error or for a client that does not read. In the last case, and if the client goes, `_gone` takes all open requests
under the lock and cancels them after it. A request that is being submitted at that time may not be in the set yet, or
not with the scheduler, so `_take` looks at `_is_over` afterwards and cancels it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial

from moonpool.runtime.model.request import InferenceRequest, Outcome, Response
from moonpool.runtime.schedule.event_loop import LoopWaiter
from moonpool.runtime.server.grpc.call import TOGETHER_BYTES, GrpcCall
from moonpool.runtime.server.grpc.infer_request import InferMessage
from moonpool.runtime.server.grpc.infer_response import answer_in_stream, error_in_stream, last_in_stream
from moonpool.runtime.server.grpc.inference import GrpcInference
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.status import ENDING, Status, status_of
from moonpool.runtime.server.inference.request import Hosted
from moonpool.runtime.server.tracing.traces import Trace

_MAX_IN_FLIGHT = 1024
_ERROR_MODE = ("triton_grpc_error", "true")


class Streams:
    """The handler of ModelStreamInfer."""

    def __init__(self, inference: GrpcInference, options: GrpcOptions) -> None:
        self._inference = inference
        self._max_backlog_bytes = options.max_backlog_bytes
        self.backlog = Backlog(options.max_backlogs_bytes)

    def handle(self, call: GrpcCall) -> None:
        Stream(self._inference, call, self.backlog, self._max_backlog_bytes).begin()


class Backlog:
    """Counts the bytes that wait for the clients of all streams together. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._total_bytes = 0
        self._of: dict[Stream, int] = {}

    def change(self, stream: Stream, by_bytes: int) -> None:
        """Count so many bytes more for a stream, or fewer."""
        with self._lock:
            self._total_bytes += by_bytes
            left = self._of.pop(stream, 0) + by_bytes
            if left:
                self._of[stream] = left

    def most(self) -> Stream | None:
        """Return the stream for which the most bytes wait if too many wait for all, else None."""
        if self._total_bytes <= self._most_bytes:
            return None
        with self._lock:
            return max(self._of, key=self._of.__getitem__, default=None)


class Stream:
    """One call of ModelStreamInfer. Its methods are called on the loop's thread and on those that bring answers."""

    def __init__(self, inference: GrpcInference, call: GrpcCall, backlog: Backlog, max_backlog_bytes: int) -> None:
        self.inference = inference
        self._call = call
        self._backlog = backlog
        self._max_backlog_bytes = max_backlog_bytes
        self._ends_at_errors = _ERROR_MODE in call.metadata
        self._lock = threading.Lock()
        # Requests that have not had their last response, and those of them that are answered in order.
        self._open: set[StreamRequest] = set()
        self._in_order: deque[StreamRequest | _Refused] = deque()
        # Messages for the client. If `_is_sending`, the first of them are with gRPC, and so many.
        self._messages: deque[bytes] = deque()
        self._sending = 0
        self._backlog_bytes = 0
        self._is_sending = self._is_over = False
        # If a request is being read or waited for, and if the client will send no more.
        self._is_reading = self._has_all = False
        self._is_draining = False

    def begin(self) -> None:
        """Read the first request."""
        self._call.when_gone(self._gone)
        self._call.when_draining(self._drain)
        self._read_on()

    # Requests

    def _read_on(self) -> None:
        """Read the next request, unless too much is open or waits for the client."""
        with self._lock:
            is_full = len(self._open) >= _MAX_IN_FLIGHT
            is_slow = self._backlog_bytes > self._max_backlog_bytes // 2
            if self._is_reading or self._has_all or self._is_over or is_full or is_slow:
                return
            self._is_reading = True
        self._call.receive(self._received)

    def _received(self, data: bytes | InferMessage | None) -> None:
        with self._lock:
            # While the server ends, further requests are dropped.
            is_last = data is None or self._has_all
            if is_last:
                self._is_reading, self._has_all = False, True
        if data is None or is_last:
            self._finish_if_done()
            return
        received_ns = time.monotonic_ns()
        # The next one is read when this one is in its queue, so that they stay in order.
        self.inference.read(data, partial(self._take, received_ns), partial(self._unread, received_ns))

    def _unread(self, received_ns: int, status: Status) -> None:
        self.count(received_ns, has_failed=True)
        self._end(status)

    def _take(self, received_ns: int, message: InferMessage) -> None:
        refuse = partial(self._refuse, received_ns, message)
        try:
            hosted = self.inference.find(message)
        except Exception as error:
            refuse(error)
        else:
            submit = partial(self._submit, received_ns, message, hosted)
            self.inference.make(message, hosted, self._call.metadata, submit, refuse)

    def _submit(self, received_ns: int, message: InferMessage, hosted: Hosted, request: InferenceRequest) -> None:
        waiter = StreamRequest(self, message, hosted, request, received_ns)
        self._add(waiter)
        try:
            if self.inference.service.capture is not None:
                self.inference.service.capture.take(hosted.model, request)
            waiter.trace = self.inference.trace(self._call, hosted, message, request)
            waiter.submit(hosted.scheduler, request)
        except Exception as error:
            waiter.end_trace()
            waiter.has_failed = True
            self.ended(waiter, _early_error(message, error))
        if self._go_on():
            waiter.cancel()

    def _refuse(self, received_ns: int, message: InferMessage, error: BaseException) -> None:
        """Answer a message that became no request, in its turn."""
        self.count(received_ns, has_failed=True)
        with self._lock:
            refused = _Refused(_early_error(message, error))
            self._in_order.append(refused)
            if not self._is_over:
                self._count(len(refused.last))
            self._release()
        self._flush()
        self._go_on()

    def _go_on(self) -> bool:
        """Read the next request after one was taken. Returns True if the stream has ended meanwhile."""
        with self._lock:
            self._is_reading = False
            is_over = self._is_over
        self._read_on()
        return is_over

    def _add(self, request: StreamRequest) -> None:
        with self._lock:
            self._open.add(request)
            if not request.is_decoupled:
                self._in_order.append(request)

    # Responses

    def send(self, message: bytes) -> None:
        """Send a message after those that wait."""
        with self._lock:
            self._put(message)
        self._flush()

    def ended(self, request: StreamRequest, last: bytes | None) -> None:
        """End a request with its last message, if there is one."""
        self.count_once(request, has_failed=request.has_failed)
        with self._lock:
            self._open.discard(request)
            if request.is_decoupled:
                if last is not None:
                    self._put(last)
            else:
                request.last = last
                # It waits from now on, until it was sent, for the answers to earlier requests and for the client.
                if last is not None and not self._is_over:
                    self._count(len(last))
                self._release()
        self._flush()
        self._read_on()
        self._finish_if_done()

    def count(self, received_ns: int, *, has_failed: bool) -> None:
        """Count a request that has ended."""
        self._call.meter.clients.ended(received_ns, has_failed=has_failed)

    def count_once(self, request: StreamRequest, *, has_failed: bool) -> None:
        """Count a request that has ended, unless it is counted: its answer and the end of the stream may come
        together.
        """
        with self._lock:
            received_ns, request.received_ns = request.received_ns, 0
        if received_ns:
            self.count(received_ns, has_failed=has_failed)

    def _release(self) -> None:
        """Send the messages whose turn has come. Called with the lock held."""
        while self._in_order and self._in_order[0] not in self._open:
            message = self._in_order.popleft().last
            if message is not None and not self._is_over:
                self._messages.append(message)

    def ends_at(self, status: Status) -> bool:
        """End the stream at an error of a model if the client wants that, and return whether it does."""
        if self._ends_at_errors:
            self._end(status)
        return self._ends_at_errors

    def _put(self, message: bytes) -> None:
        if not self._is_over:
            self._messages.append(message)
            self._count(len(message))

    def _count(self, more_bytes: int) -> None:
        self._backlog_bytes += more_bytes
        self._backlog.change(self, more_bytes)

    def _flush(self) -> None:
        """Send the next message, unless one is on its way."""
        most = self._backlog.most()
        if most is not None:
            most.end_unread()
        with self._lock:
            if self._backlog_bytes > self._max_backlog_bytes and not self._is_over:
                too_much = self._backlog_bytes
            elif self._is_sending or self._is_over or not self._messages:
                return
            else:
                too_much = 0
                self._is_sending = True
                messages = self._first_messages()
                self._sending = len(messages)
        if too_much:
            self.end_unread()
        else:
            self._call.send(messages, self._sent)

    def _first_messages(self) -> list[bytes]:
        """Return the messages that are sent together, of those that wait. Needs the lock."""
        first: list[bytes] = []
        size_bytes = 0
        for message in self._messages:
            size_bytes += len(message)
            if first and size_bytes > TOGETHER_BYTES:
                break
            first.append(message)
        return first

    def end_unread(self) -> None:
        """End the stream, as too much waits for its client."""
        words = "bytes of responses wait for the client of this stream, who does not read them"
        self._end(Status("RESOURCE_EXHAUSTED", f"{self._backlog_bytes} {words}"))

    def _sent(self) -> None:
        with self._lock:
            self._is_sending = False
            # All of them were dropped if the stream has ended meanwhile.
            for _ in range(min(self._sending, len(self._messages))):
                self._count(-len(self._messages.popleft()))
        self._flush()
        self._read_on()
        self._finish_if_done()

    # The end

    def _finish_if_done(self) -> None:
        with self._lock:
            if self._is_over or not self._has_all or self._open or self._messages:
                return
            self._is_over = True
        if self._is_draining:
            self._call.fail(ENDING)
        else:
            self._call.finish()

    def _drain(self) -> None:
        """Answer the requests that have come, and end the stream."""
        with self._lock:
            self._is_draining = not self._has_all
            self._has_all = True
        self._finish_if_done()

    def _end(self, status: Status) -> None:
        self._call.fail(status)
        self._gone()

    def _gone(self) -> None:
        """Cancel everything, as nobody wants the responses any more."""
        with self._lock:
            self._is_over = True
            left = list(self._open)
            self._open.clear()
            self._in_order.clear()
            self._messages.clear()
            self._count(-self._backlog_bytes)
        for request in left:
            request.cancel()


class _Refused:
    """Keeps the turn of a message that became no request."""

    __slots__ = ("last",)

    def __init__(self, message: bytes) -> None:
        self.last: bytes = message


def _early_error(message: InferMessage, error: BaseException) -> bytes:
    text = status_of(error, message.request_id).text
    return error_in_stream(text, message.request_id)


class StreamRequest(LoopWaiter):
    """One request of a stream. Its responses are sent by the threads that bring them."""

    __slots__ = (
        "_asked",
        "_hosted",
        "_request",
        "_stream",
        "has_failed",
        "is_decoupled",
        "last",
        "received_ns",
        "trace",
    )
    takes_many = True

    def __init__(
        self, stream: Stream, asked: InferMessage, hosted: Hosted, request: InferenceRequest, received_ns: int
    ) -> None:
        super().__init__(stream.inference.loop)
        self._stream = stream
        self._asked = asked
        self._hosted = hosted
        self._request = request
        self.is_decoupled = hosted.model.config.decoupled
        # The last message, which waits for its turn.
        self.last: bytes | None = None
        self.trace: Trace | None = None
        # The time when it had come, until it is counted, then 0; and if one of its responses is an error.
        self.received_ns = received_ns
        self.has_failed = False

    def cancel(self) -> None:
        """Cancel the request, as the client has gone."""
        self._hosted.scheduler.cancel(self._request)
        self._stream.count_once(self, has_failed=True)
        self.end_trace()

    def end_trace(self) -> None:
        if self.trace is not None:
            self.trace.end()

    def is_settled(self) -> bool:
        # The loop goes on when the client has left.
        return False

    def respond(self, outcome: Outcome) -> None:
        message = self._message(outcome, final=False)
        if message is not None:
            self._stream.send(message)

    def resolve(self, outcome: Outcome | None) -> None:
        if self.trace is not None:
            self.trace.mark("INFER_RESPONSE_COMPLETE")
        last = None
        if outcome is not None:
            last = self._message(outcome, final=True)
        elif self._asked.read().parameters.wants_empty_final:
            last = last_in_stream(self._hosted.model.name, self._asked.request_id)
        self._stream.ended(self, last)
        self.end_trace()

    def _message(self, outcome: Outcome, *, final: bool) -> bytes | None:
        """Return the outcome as a message, or None if it ended the stream."""
        asked, model = self._asked, self._hosted.model
        error = outcome
        if isinstance(outcome, Response):
            try:
                service, plan = self._stream.inference.service, asked.read()
                return answer_in_stream(service, model, plan, asked.request_id, outcome, final)
            except Exception as unwritable:
                error = unwritable
        self.has_failed = True
        status = status_of(error, asked.request_id)  # type: ignore[arg-type]
        if self._stream.ends_at(status):
            return None
        return error_in_stream(status.text, asked.request_id, model.name, final)
