"""One RPC as its handler sees it, and the RPCs of a server that have not ended.

Theory of operation. A call belongs to the thread of the server's event loop, where its transport reports what the
client does. Handlers may use it on any thread: a method that is called elsewhere has the loop call it again, so the
flags need no lock, and calls of one thread keep their order. Once the loop is closed, all calls have ended with their
connections, and what a thread still sends is dropped.

A call ends once. `_is_over` is set together with the decision to send a status (`_put`), or when the client has gone,
or its deadline has passed (`end_early`). Later messages and statuses do nothing. `end_early` calls what `when_gone`
asked for, where handlers cancel the request in the scheduler. The transport calls `OpenCalls.ended` once it has nothing
more to do with the call, also after a status was sent: so a drain waits until the last byte is on its way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.status import OK, Status, status_of
from moonpool.runtime.server.meter import Meter
from moonpool.runtime.server.restriction import GRPC_PREFIX, Restriction

_running_loop = asyncio._get_running_loop
Metadata = tuple[tuple[str, str | bytes], ...]
Received = Callable[[Any], object]
Message: TypeAlias = bytes | tuple[bytes | memoryview, ...]
"""A message for a client, which may come in pieces. They keep their memory until they are sent."""
TOGETHER_BYTES = 64 << 10
"""The size of messages up to which several may be sent together. A larger one may be packed on another thread."""
_TOO_MANY = Status("RESOURCE_EXHAUSTED", "Concurrent RPC limit exceeded!")
_UNKNOWN = Status("UNIMPLEMENTED", "")
_LATE = Status("DEADLINE_EXCEEDED", "Deadline Exceeded")


class PlacedMessage(Protocol):
    """A large message that is received into memory of its handler's choice."""

    @property
    def memory(self) -> memoryview:
        """Memory of the message's size."""


class GrpcCall:
    """One RPC. All methods without another note are for any thread.

    Once the client is gone, or the call has a status, sending does nothing.
    """

    __slots__ = (
        "_calls",
        "_is_gone",
        "_is_over",
        "_on_drain",
        "_on_gone",
        "_timer",
        "begun_ns",
        "metadata",
        "method",
        "received_ns",
    )

    def __init__(self, calls: OpenCalls, method: bytes, metadata: Metadata, timeout_s: float | None) -> None:
        GrpcCall.begin(self, calls, method, metadata, timeout_s)

    def begin(self, calls: OpenCalls, method: bytes, metadata: Metadata, timeout_s: float | None) -> None:
        """Begin a call, which ends early after `timeout_s` seconds. On the loop's thread."""
        self._calls = calls
        self.method = method
        self.metadata = metadata
        # The time of `time.monotonic_ns`.
        self.begun_ns = time.monotonic_ns()
        # If the call is one request for inference, the time when it had come, by which it is counted; else 0.
        self.received_ns = 0
        # If no message may be sent any more, and if the client went before there was a status.
        self._is_over = self._is_gone = False
        self._on_gone: Callable[[], object] | None = None
        self._on_drain: Callable[[], object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._timer = calls.loop.call_later(timeout_s, self.end_early, _LATE)

    # The transport's

    def _receive(self, received: Received) -> None:
        """Do as `receive` says. On the loop's thread."""
        raise NotImplementedError

    def _transmit(self, message: Message | None, status: Status | None, sent: Callable[[], object] | None) -> None:
        """Send a message, a status or both, and call `sent` when the message has left. On the loop's thread."""
        raise NotImplementedError

    # The handler's

    @property
    def meter(self) -> Meter:
        """The counts of the protocol."""
        return self._calls.meter

    @property
    def is_gone(self) -> bool:
        """True if nobody waits for an answer any more."""
        return self._is_gone

    def when_gone(self, callback: Callable[[], object]) -> None:
        """Call back when the client cancels, its deadline passes or its connection ends before it has a status.

        It happens on the loop's thread, or at once if the client has gone already.
        """
        if _running_loop() is not self._calls.loop:
            if not self._hand_over(self.when_gone, callback):
                callback()
        elif not self._is_over:
            self._on_gone = callback
        elif self._is_gone:
            callback()

    def when_draining(self, callback: Callable[[], object]) -> None:
        """Call back when the server is about to end, so that the call ends soon."""
        self._on_drain = callback

    def drain(self) -> None:
        """Tell the handler that the server is about to end. On the loop's thread."""
        if self._on_drain is not None:
            self._on_drain()

    def receive(self, received: Received) -> None:
        """Receive the next message, or None if no more come. `received` is called on the loop's thread.

        It gets bytes, or what `Method.place` returned for a large message.
        """
        if _running_loop() is self._calls.loop:
            self._receive(received)
        elif not self._hand_over(self._receive, received):
            received(None)

    def reply(self, message: Message, sent: Callable[[], object] | None = None) -> None:
        """Send the only message and the status OK. `sent` is called on the loop's thread when the message has left."""
        GrpcCall._put(self, message, OK, sent)

    def fail(self, status: Status) -> None:
        """Send a status that is an error, and no more messages."""
        GrpcCall._put(self, None, status, None)

    def finish(self) -> None:
        """Send the status OK after all messages."""
        GrpcCall._put(self, None, OK, None)

    def send(self, messages: Sequence[bytes], sent: Callable[[], object]) -> bool:
        """Send one message, or several with not more than `TOGETHER_BYTES`. The next may follow once `sent` was called.

        Returns False if the call is over.
        """
        if self._is_over:
            return False
        self._send(messages, sent)
        return True

    def _send(self, messages: Sequence[bytes], sent: Callable[[], object]) -> None:
        if _running_loop() is not self._calls.loop:
            self._hand_over(self._send, messages, sent)
        elif not self._is_over:
            for message in messages[:-1]:
                self._transmit(message, None, None)
            self._transmit(messages[-1], None, sent)

    def _hand_over(self, function: Callable[..., object], *arguments: object) -> bool:
        """Have the loop call a function; False if the loop is closed."""
        try:
            self._calls.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            return False
        return True

    def _put(self, message: Message | None, status: Status | None, sent: Callable[[], object] | None) -> None:
        if _running_loop() is not self._calls.loop:
            self._hand_over(self._put, message, status, sent)
        elif not self._is_over:
            if status is not None:
                GrpcCall._end(self, status.code)
            self._transmit(message, status, sent)

    def _end(self, code: str) -> None:
        self._is_over = True
        self._on_gone = self._on_drain = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        meter = self._calls.meter
        meter.answered(code)
        if self.received_ns:
            meter.clients.ended(self.received_ns, has_failed=code != OK.code)

    def end_early(self, status: Status | None = None) -> None:
        """End the call for a client that has gone, or with the status for one that must go. On the loop's thread."""
        if self._is_over:
            return
        on_gone = self._on_gone
        self._is_gone = True
        GrpcCall._end(self, "CANCELLED" if status is None else status.code)
        if status is not None:
            self._transmit(None, status, None)
        if on_gone is not None:
            on_gone()


Handler = Callable[[GrpcCall], None]


class Method(NamedTuple):
    """The handler of an RPC, its API in restrictions, and whether it changes the server."""

    handle: Handler
    api: str
    is_change: bool = False
    place: Callable[[bytes, int], PlacedMessage | None] | None = None
    """Chooses the memory for a large message by its first bytes and its size; None for any. Must not block."""


class OpenCalls:
    """OpenCalls the handlers of RPCs, and knows those that have not ended. For the loop's thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, methods: Mapping[bytes, Method], options: GrpcOptions, meter: Meter
    ) -> None:
        """`methods` are found by their paths. `meter` counts how calls end."""
        self.loop = loop
        self.meter = meter
        self.open: set[GrpcCall] = set()
        """The calls that their transports have not reported as ended."""
        self._methods = methods
        self._most = options.max_calls
        self._restriction = None
        if options.restricted or options.control_token is not None:
            self._restriction = Restriction(options.restricted, options.control_token)
        self._emptied: asyncio.Future[None] | None = None

    def begin(self, call: GrpcCall) -> None:
        """Give a call to its handler, or refuse it."""
        self.open.add(call)
        method = self._methods.get(call.method)
        if method is None:
            call.fail(_UNKNOWN)
        elif len(self.open) > self._most:
            call.fail(_TOO_MANY)
        else:
            refusal = None if self._restriction is None else self._refusal(call, method)
            if refusal is not None:
                call.fail(refusal)
                return
            try:
                method.handle(call)
            except Exception as error:
                call.fail(status_of(error))

    def place(self, call: GrpcCall, first: bytes, size_bytes: int) -> PlacedMessage | None:
        """Let the handler choose the memory for a large message of a call, by its first bytes; None for any memory."""
        method = self._methods.get(call.method)
        if method is None or method.place is None:
            return None
        return method.place(first, size_bytes)

    def ended(self, call: GrpcCall) -> None:
        """Forget a call with which its transport has nothing more to do."""
        self.open.discard(call)
        if not self.open and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    async def drain(self, timeout_s: float) -> bool:
        """Tell all calls that the server ends, and wait for their ends. Returns False if the time is over before."""
        for call in list(self.open):
            call.drain()
        if not self.open:
            return True
        self._emptied = self.loop.create_future()
        try:
            await asyncio.wait_for(self._emptied, timeout_s)
        except TimeoutError:
            return False
        return True

    def _refusal(self, call: GrpcCall, method: Method) -> Status | None:
        if self._restriction is None:
            return None
        refusal = self._restriction.refuse(
            method.api,
            lambda name: _header(call, name),
            is_change=method.is_change,
            prefix=GRPC_PREFIX,
            what="protocol",
        )
        if refusal is None:
            return None
        return Status("UNAUTHENTICATED" if refusal.is_unknown else "UNAVAILABLE", refusal.text)


def _header(call: GrpcCall, name: str) -> str | None:
    # The values of one name are a list, as over HTTP: a proxy may have added one of them.
    return ", ".join(str(value) for key, value in call.metadata if key == name) or None
