"""One RPC as its handler sees it, and the operations on it that gRPC's core is given.

The core takes operations from any thread and says on the thread that polls (`grpc.core`) when they are done.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from grpc._cython import cygrpc

from moonpool.runtime.frontend.grpc.status import OK, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.runtime.frontend.frontend_metrics import Meter

_log = logging.getLogger("moonpool")
Metadata = tuple[tuple[str, str | bytes], ...]


class Call:
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
        # Whether the initial metadata was sent, and whether nothing more may be.
        self._has_begun = self._is_over = self._is_gone = False
        # In nanoseconds of `time.monotonic_ns`.
        self.begun_ns = time.monotonic_ns()
        self.method: bytes = event.call_details.method
        self.metadata: Metadata = event.invocation_metadata
        self._on_gone: Callable[[], object] | None = None
        self._on_drain: Callable[[], object] | None = None
        # How many threads are about to give the core an operation, and what the last of them has to call.
        self._starting = 0
        self._ended: Callable[[], object] | None = None

    def watch_end(self, ended: Callable[[], object]) -> None:
        """Ask to be told of the call's end, once, on any thread; whoever waits for the client to go is told before."""

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
        """Have this done when the client cancels, its deadline passes or its connection ends before it has a status.

        On the polling thread, or here and now where it has happened.
        """
        with self._lock:
            if not self._is_over:
                self._on_gone = callback
                return
        if self._is_gone:
            callback()

    def when_draining(self, callback: Callable[[], object]) -> None:
        """Have this done when the server is about to end, and the call should come to its end soon."""
        self._on_drain = callback

    def drain(self) -> None:
        """The server is about to end."""
        if self._on_drain is not None:
            self._on_drain()

    def receive(self, received: Callable[[bytes | None], object]) -> None:
        """Have the next message; None where none comes any more."""
        operations = (cygrpc.ReceiveMessageOperation(0),)
        if not self._start(operations, lambda event: received(event.batch_operations[0].message())):
            received(None)

    def reply(self, message: bytes, sent: Callable[[], object] | None = None) -> None:
        """The only message, and the status OK. `sent` is called on the polling thread."""
        self._finish(OK, message, sent)

    def fail(self, status: Status) -> None:
        """No message any more, but a status that is an error."""
        self._finish(status)

    def finish(self) -> None:
        """All messages were sent."""
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
        """One message of several; the next may follow when `sent` was called. False if the call is over."""
        operations = [cygrpc.SendMessageOperation(message, 0)]
        if not self._has_begun:
            operations.insert(0, cygrpc.SendInitialMetadataOperation(None, 0))
        return self._start(operations, lambda _: sent())

    def _start(
        self, operations: Any, done: Callable[[Any], object], *, is_last: bool = False
    ) -> bool:
        # The core must not be given an operation once the end of a call was told: by then its queue may
        # be closed, and that would end the process. So the end waits for whoever is about to.
        with self._lock:
            if self._is_over:
                return False
            self._is_over = is_last
            self._has_begun = self._has_begun or not _receives(operations)
            self._starting += 1
        # Not with the lock held: another thread may run meanwhile, and be told of the end.
        error = self._call.start_server_batch(operations, done)
        with self._lock:
            self._starting -= 1
            ended = None
            if not self._starting:
                # It refers to this call, which would stay until a cycle is looked for.
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
    """Nothing waits for this operation."""
