"""One RPC as its handler sees it, and the operations on it that gRPC's core gets.

Theory of operation. The core takes operations from any thread, and reports on the polling thread (`grpc.core`) when they are done.
`_lock` guards the flags of a call and is held for a few instructions only, never while the core or a callback is called: the core
releases the interpreter, and another thread may then get the end of the call.

The core must not get an operation once the end of a call was reported, because its queue may be closed by then, and that would end
the process. So `_start` counts itself in `_starting` before it gives the core an operation. If the end is reported meanwhile, `ended`
is kept in `_ended`, and the last thread that leaves `_start` calls it. `_is_over` is set together with the decision to send a
status, so that exactly one thread sends it; later messages and statuses do nothing.

Order at the end. When the client goes before there was a status, `on_gone` runs first, then `ended`, which takes the call out of the
server's set. With the last call the queue may be shut down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from grpc._cython import cygrpc

from moonpool.runtime.server.grpc.status import OK, Status
from moonpool.runtime.server.metrics import Meter

_log = logging.getLogger("moonpool")
Metadata = tuple[tuple[str, str | bytes], ...]


class GrpcCall:
    """One RPC. All methods are for any thread.

    Once the client is gone, or the call has a status, sending does nothing.
    """

    __slots__ = (
        "_call",
        "_ended",
        "_has_begun",
        "_is_gone",
        "_is_over",
        "_lock",
        "_meter",
        "_on_drain",
        "_on_gone",
        "_starting",
        "begun_ns",
        "metadata",
        "method",
    )

    def __init__(self, event: Any, meter: Meter) -> None:
        """`meter` counts how it ends."""
        self._meter = meter
        self._call = event.call
        self._lock = threading.Lock()
        # If the initial metadata was sent, if no message may be sent any more, if the client went before there was a status.
        self._has_begun = self._is_over = self._is_gone = False
        # The time of `time.monotonic_ns`.
        self.begun_ns = time.monotonic_ns()
        self.method: bytes = event.call_details.method
        self.metadata: Metadata = event.invocation_metadata
        self._on_gone: Callable[[], object] | None = None
        self._on_drain: Callable[[], object] | None = None
        # The number of threads that are giving the core an operation, and what the last of them has to call.
        self._starting = 0
        self._ended: Callable[[], object] | None = None

    def watch_end(self, ended: Callable[[], object]) -> None:
        """Have `ended` called once, on any thread, when the call has ended, after what `when_gone` asked for."""

        def closed(_: object) -> None:
            with self._lock:
                self._is_gone, self._is_over = not self._is_over, True
                on_gone, self._on_gone = self._on_gone, None
                self._on_drain = None
                self._ended = ended if self._starting else None
                is_free = not self._starting
            try:
                if self._is_gone:
                    self._meter.answered("CANCELLED")
                    if on_gone is not None:
                        on_gone()
            finally:
                if is_free:
                    ended()

        self._call.start_server_batch((cygrpc.ReceiveCloseOnServerOperation(0),), closed)

    def when_gone(self, callback: Callable[[], object]) -> None:
        """Call back when the client cancels, its deadline passes or its connection ends before it has a status.

        It happens on the polling thread, or at once if the client has gone already.
        """
        with self._lock:
            if not self._is_over:
                self._on_gone = callback
                return
        if self._is_gone:
            callback()

    def when_draining(self, callback: Callable[[], object]) -> None:
        """Call back when the server is about to end, so that the call ends soon."""
        self._on_drain = callback

    def drain(self) -> None:
        """Tell the handler that the server is about to end."""
        if self._on_drain is not None:
            self._on_drain()

    def receive(self, received: Callable[[bytes | None], object]) -> None:
        """Receive the next message, or None if no more come."""
        operations = (cygrpc.ReceiveMessageOperation(0),)
        if not self._start(operations, lambda event: received(event.batch_operations[0].message())):
            received(None)

    def reply(self, message: bytes, sent: Callable[[], object] | None = None) -> None:
        """Send the only message and the status OK. `sent` is called on the polling thread."""
        self._finish(OK, message, sent)

    def fail(self, status: Status) -> None:
        """Send a status that is an error, and no more messages."""
        self._finish(status)

    def finish(self) -> None:
        """Send the status OK after all messages."""
        self._finish(OK)

    def _finish(
        self,
        status: Status,
        message: bytes | None = None,
        sent: Callable[[], object] | None = None,
    ) -> None:
        operations = []
        if not self._has_begun:
            operations.append(cygrpc.SendInitialMetadataOperation(None, 0))
        if message is not None:
            operations.append(cygrpc.SendMessageOperation(message, 0))
        operations.append(
            cygrpc.SendStatusFromServerOperation(None, status.number, status.details, 0)
        )
        done = _done if sent is None else lambda _: sent()
        if self._start(operations, done, is_last=True):
            self._meter.answered(status.code)

    def send(self, message: bytes, sent: Callable[[], object]) -> bool:
        """Send one message of several. The next may follow once `sent` was called. Returns False if the call is over."""
        operations = [cygrpc.SendMessageOperation(message, 0)]
        if not self._has_begun:
            operations.insert(0, cygrpc.SendInitialMetadataOperation(None, 0))
        return self._start(operations, lambda _: sent())

    def _start(
        self, operations: Any, done: Callable[[Any], object], *, is_last: bool = False
    ) -> bool:
        with self._lock:
            if self._is_over:
                return False
            self._is_over = is_last
            self._has_begun = self._has_begun or not _receives(operations)
            self._starting += 1
        # Without the lock: another thread may run meanwhile, and get the end of the call.
        error = self._call.start_server_batch(operations, done)
        with self._lock:
            self._starting -= 1
            ended = None
            if not self._starting:
                # It refers to this call, and the cycle would keep the call in memory until the collector runs.
                ended, self._ended = self._ended, None
        if ended is not None:
            ended()
        if error:
            _log.error("gRPC refused an operation on %s with error %d", self.method, error)
            return False
        return True


def _receives(operations: Any) -> bool:
    return isinstance(operations[0], cygrpc.ReceiveMessageOperation)


def _done(event: Any) -> None:
    """Ignore the event: nothing waits for this operation."""


Handler = Callable[[GrpcCall], None]


class Method(NamedTuple):
    """The handler of an RPC, its API in restrictions, and whether it changes the server."""

    handle: Handler
    api: str
    is_change: bool = False
