"""ModelStreamInfer: many requests and their responses over one call.

Responses of models that give one come in the order of the requests, those of decoupled models as the model sends
them. What a client does not read is kept for it up to a limit; then the stream ends, as nothing can slow
down a model that sends by itself. Of requests, no more are read than may be in flight.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from moonpool.runtime.frontend.grpc.infer_response import (
    answer,
    error_in_stream,
    last_in_stream,
)
from moonpool.runtime.frontend.grpc.status import Status, status_of
from moonpool.runtime.request import Response
from moonpool.runtime.waiter import Waiter

if TYPE_CHECKING:
    from moonpool.runtime.execution import Execution
    from moonpool.runtime.frontend.grpc.call import Call
    from moonpool.runtime.frontend.grpc.infer_request import Asked
    from moonpool.runtime.frontend.grpc.inference import Inference
    from moonpool.runtime.frontend.submission import Hosted
    from moonpool.runtime.frontend.trace import Trace
    from moonpool.runtime.request import InferenceRequest, Outcome

_MAX_IN_FLIGHT = 1024
ENDING = Status("UNAVAILABLE", "the server is ending")
_ERROR_MODE = ("triton_grpc_error", "true")


class Stream:
    """One call of ModelStreamInfer. Its parts are called from the polling thread and from those of answers."""

    def __init__(self, inference: Inference, call: Call, max_backlog_bytes: int) -> None:
        self.inference = inference
        self._call = call
        self._max_backlog_bytes = max_backlog_bytes
        self._ends_at_errors = _ERROR_MODE in call.metadata
        self._lock = threading.Lock()
        # Requests that have not had their last response, and of those the ones that are answered in order.
        self._open: set[StreamRequest] = set()
        self._in_order: deque[StreamRequest | _Refused] = deque()
        # Messages for the client: the first of them is on its way where `_is_sending`.
        self._messages: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._is_sending = self._is_over = False
        # Whether a request is being read or waited for, and whether the client will send no more.
        self._is_reading = self._has_all = False
        self._is_draining = False

    def begin(self) -> None:
        """Read the first request."""
        self._call.when_gone(self._gone)
        self._call.when_draining(self._drain)
        self._read_on()

    # Requests

    def _read_on(self) -> None:
        """Read the next request, if there may be one more."""
        with self._lock:
            is_full = len(self._open) >= _MAX_IN_FLIGHT
            is_slow = self._backlog_bytes > self._max_backlog_bytes // 2
            if self._is_reading or self._has_all or self._is_over or is_full or is_slow:
                return
            self._is_reading = True
        self._call.receive(self._received)

    def _received(self, data: bytes | None) -> None:
        with self._lock:
            # What comes while the server is ending is not asked any more.
            is_last = data is None or self._has_all
            if is_last:
                self._is_reading, self._has_all = False, True
        if data is None or is_last:
            self._finish_if_done()
            return
        # The next one is read when this one is in its queue: so they stay in order.
        self.inference.read(data, self._take, self._end)

    def _take(self, asked: Asked) -> None:
        request: StreamRequest | None = None
        try:
            hosted = self.inference.find(asked)
            made = asked.request(
                self.inference.service, hosted, self.inference.forwarded(self._call.metadata)
            )
            request = StreamRequest(self, asked, hosted, made)
            request.trace = self.inference.trace(self._call, hosted, asked, made)
            self._add(request)
            self.inference.submit(hosted, made, request)
        except Exception as error:
            text = error_in_stream(status_of(error, asked.request_id).text, asked.request_id)
            if request is None:
                self._refuse(text)
            else:
                request.end_trace()
                self.ended(request, text)
        with self._lock:
            self._is_reading = False
            was_left = self._is_over
        if was_left and request is not None:
            request.cancel()
        self._read_on()

    def _add(self, request: StreamRequest) -> None:
        with self._lock:
            self._open.add(request)
            if not request.is_decoupled:
                self._in_order.append(request)

    # Responses

    def send(self, message: bytes) -> None:
        """A message for the client, after those that wait."""
        with self._lock:
            self._put(message)
        self._flush()

    def ended(self, request: StreamRequest, last: bytes | None) -> None:
        """The last message for a request, if there is one."""
        with self._lock:
            self._open.discard(request)
            if request.is_decoupled:
                if last is not None:
                    self._put(last)
            else:
                request.last = last
                self._let_go()
        self._flush()
        self._read_on()
        self._finish_if_done()

    def _refuse(self, message: bytes) -> None:
        """What became no request is answered in its turn all the same."""
        with self._lock:
            self._in_order.append(_Refused(message))
            self._let_go()
        self._flush()

    def _let_go(self) -> None:
        """Send what has waited for its turn. With the lock held."""
        while self._in_order and self._in_order[0] not in self._open:
            message = self._in_order.popleft().last
            if message is not None:
                self._put(message)

    def ends_at(self, status: Status) -> bool:
        """Whether the client wants the stream to end at an error of a model; it does then."""
        if self._ends_at_errors:
            self._end(status)
        return self._ends_at_errors

    def _put(self, message: bytes) -> None:
        if not self._is_over:
            self._messages.append(message)
            self._count(len(message))

    def _count(self, more_bytes: int) -> None:
        self._backlog_bytes += more_bytes
        self.inference.backlog.change(self, more_bytes)

    def _flush(self) -> None:
        """Send the next message, unless one is on its way."""
        most = self.inference.backlog.most()
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
                message = self._messages[0]
        if too_much:
            self.end_unread()
        else:
            self._call.send(message, self._sent)

    def end_unread(self) -> None:
        """Too much waits for the client."""
        words = "bytes of responses wait for the client of this stream, who does not read them"
        self._end(Status("RESOURCE_EXHAUSTED", f"{self._backlog_bytes} {words}"))

    def _sent(self) -> None:
        with self._lock:
            self._is_sending = False
            if self._messages:
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
        """The server is ending: what was asked is still answered."""
        with self._lock:
            self._is_draining = not self._has_all
            self._has_all = True
        self._finish_if_done()

    def _end(self, status: Status) -> None:
        self._call.fail(status)
        self._gone()

    def _gone(self) -> None:
        """Nobody wants the responses any more."""
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
    """The place of a request that was none."""

    __slots__ = ("last",)

    def __init__(self, message: bytes) -> None:
        self.last: bytes | None = message


class StreamRequest(Waiter):
    """One request of a stream."""

    __slots__ = ("_asked", "_hosted", "_request", "_stream", "is_decoupled", "last", "trace")
    takes_many = True

    def __init__(
        self, stream: Stream, asked: Asked, hosted: Hosted, request: InferenceRequest
    ) -> None:
        self._stream = stream
        self._asked = asked
        self._hosted = hosted
        self._request = request
        self.is_decoupled = hosted.model.config.decoupled
        # What the client gets for it in its turn.
        self.last: bytes | None = None
        self.trace: Trace | None = None

    def cancel(self) -> None:
        """The client is gone."""
        self._hosted.scheduler.cancel(self._request)
        self.end_trace()

    def end_trace(self) -> None:
        """Nothing follows."""
        if self.trace is not None:
            self.trace.end()

    def appoint(self, execution: Execution) -> bool:
        return self._stream.inference.answers.drive(execution)

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
        """The outcome for the client; None where it was the end of the stream."""
        asked, model = self._asked, self._hosted.model
        error = outcome
        if isinstance(outcome, Response):
            try:
                service, plan = self._stream.inference.service, asked.read()
                return answer(service, model, plan, asked.request_id, outcome, final)
            except Exception as unwritable:
                error = unwritable
        status = status_of(error, asked.request_id)  # type: ignore[arg-type]
        if self._stream.ends_at(status):
            return None
        return error_in_stream(status.text, asked.request_id, model.name, final)
