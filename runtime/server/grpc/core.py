"""gRPC's core and the one thread that polls it.

grpcio's own server hands each call to a thread of a pool, which waits there for the polling thread to read the message: two
hand-overs, which cost more than the rest. Here the polling thread reads the message itself and calls the handler, which must not
block. This uses nothing of `cygrpc` that grpcio's server does not use.

Theory of operation. One thread polls the completion queue and calls the tag of each event, with `_turn` held. When it has read
everything that clients sent, it waits a moment for answers of models itself; `grpc.answers` has another thread for those that take
longer, and explains the turns. All clients depend on the polling thread, so no exception ends it.

Cancellation. A client that cancels, whose deadline passes or whose connection ends causes an event of the call, which the polling
thread turns into `GrpcCall.when_gone`. Handlers cancel the request in the scheduler there.

Drain and end. `stop` shuts the core's server down, which accepts no more calls, and tells every call that the server drains, so that
streams end once they have their responses. `_calls` has the calls whose end was not reported. The queue must get no operation after
its shutdown, so it is shut down (`_end_queue`) only when the server has reported its own shutdown and `_calls` is empty, whichever is
last. If that takes longer than `timeout_s`, all calls are cancelled, and each of them is reported soon. Only the shutdown of the
queue ends the polling thread; then the server is destroyed. `_lock` orders the last acceptance of a call and the shutdown; `_ending`
lets one of several callers of `stop` destroy the server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import grpc
from grpc._cython import cygrpc

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.server.grpc.answers import Answers
from moonpool.runtime.server.grpc.call import GrpcCall, Method
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.status import Status, status_of
from moonpool.runtime.server.metrics import Meter
from moonpool.runtime.server.restriction import GRPC_PREFIX, Restriction

_log = logging.getLogger("moonpool")
# The core may accept so many calls before the polling thread sees the first.
_ACCEPT_AHEAD = 16
_SHUTDOWN = cygrpc.CompletionType.queue_shutdown
_TOO_MANY = Status("RESOURCE_EXHAUSTED", "Concurrent RPC limit exceeded!")
_UNKNOWN = Status("UNIMPLEMENTED", "")


class GrpcCore:
    """Listens, accepts calls and calls their handlers."""

    def __init__(
        self,
        methods: Mapping[bytes, Method],
        options: GrpcOptions,
        turn: threading.Lock,
        answers: Answers,
        meter: Meter,
    ) -> None:
        """Take the port. `methods` are found by their paths. Raises `MoonpoolError`."""
        self._methods = methods
        self._turn = turn
        self._answers = answers
        self._meter = meter
        self._max_calls = options.max_calls
        self._restriction = None
        if options.restricted or options.control_token is not None:
            self._restriction = Restriction(options.restricted, options.control_token)
        self._queue = cygrpc.CompletionQueue()
        self._server = cygrpc.Server(options.channel_arguments(), False)
        self._server.register_completion_queue(self._queue)
        self.port = self._bind(options)
        # Calls whose end was not reported yet.
        self._calls: set[GrpcCall] = set()
        self._lock, self._ending = threading.Lock(), threading.Lock()
        self._is_stopping = self._is_stopped = self._is_destroyed = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moonpool-grpc", daemon=True)

    def _bind(self, options: GrpcOptions) -> int:
        host = f"[{options.address}]" if ":" in options.address else options.address
        address = f"{host}:{options.port}"
        if options.address.startswith("unix:"):
            address = options.address
        try:
            port: int = self._server.add_http2_port(address.encode(), *_credentials(options))
        except RuntimeError:
            port = 0
        if not port:
            raise MoonpoolError(
                f"gRPC cannot listen on {address}: the port is taken by another process, or this "
                "machine does not have the address"
            )
        return port

    def start(self) -> None:
        """Accept calls. Raises `OutOfThreads`."""
        start_thread(self._thread)
        self._server.start()
        for _ in range(_ACCEPT_AHEAD):
            self._server.request_call(self._queue, self._queue, self._called)

    def stop(self, timeout_s: float) -> bool:
        """Accept no more calls, and cancel those that have not ended when the time is over.

        Returns whether all ended by themselves.
        """
        with self._lock:
            if not self._is_stopping:
                self._is_stopping = True
                if self._thread.ident is None:
                    # The core gives a port back only if it was started.
                    self._server.start()
                self._server.shutdown(self._queue, self._shut_down)
        for call in list(self._calls):
            call.drain()
        with self._ending:
            if self._thread.ident is None and not self._stopped.is_set():
                # The thread was never started, or refused. Nobody has called, so the queue ends at once.
                self._run()
        in_time = self._stopped.wait(timeout_s)
        with self._ending:
            if not self._is_destroyed:
                if not in_time:
                    self._server.cancel_all_calls()
                if self._thread.ident is not None:
                    self._thread.join()
                self._server.destroy()
                self._is_destroyed = True
        return in_time

    # On the polling thread

    def _run(self) -> None:
        answers = self._answers
        answers.poller = threading.get_ident()
        is_over = False
        while not is_over:
            # Not for ever: the core itself looks whether it should end.
            event = self._queue.poll(0 if answers.has_fresh else time.time() + 3600)
            is_over = event.completion_type == _SHUTDOWN
            try:
                if event.tag is not None:
                    with self._turn:
                        event.tag(event)
                elif is_over:
                    answers.attend(0)
                else:
                    # All that clients have sent was read.
                    answers.attend()
            except BaseException:  # all clients depend on this thread
                _log.exception("a callback of gRPC failed")
            # An event keeps its call alive.
            event = None

    def _called(self, event: Any) -> None:
        if not event.success:
            return
        with self._lock:
            if not self._is_stopping:
                self._server.request_call(self._queue, self._queue, self._called)
        call = GrpcCall(event, self._meter)
        self._calls.add(call)
        call.watch_end(lambda: self._ended(call))
        method = self._methods.get(call.method)
        if method is None:
            call.fail(_UNKNOWN)
        elif len(self._calls) > self._max_calls:
            call.fail(_TOO_MANY)
        else:
            refusal = self._refusal(call, method)
            if refusal is not None:
                call.fail(refusal)
                return
            try:
                method.handle(call)
            except Exception as error:
                call.fail(status_of(error))

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

    def _ended(self, call: GrpcCall) -> None:
        self._calls.discard(call)
        if self._is_stopped:
            self._end_queue()

    def _shut_down(self, _: object) -> None:
        self._is_stopped = True
        self._end_queue()

    def _end_queue(self) -> None:
        with self._lock:
            if self._is_stopped and not self._calls and not self._stopped.is_set():
                self._queue.shutdown()
                self._stopped.set()


def _header(call: GrpcCall, name: str) -> str | None:
    # The values of one name are a list, as over HTTP: a proxy may have added one of them.
    return ", ".join(str(value) for key, value in call.metadata if key == name) or None


def _credentials(options: GrpcOptions) -> tuple[object, ...]:
    if not (options.use_ssl or options.use_ssl_mutual):
        return ()
    root = _read(options.root_cert) if options.root_cert else None
    pair = (_read(options.server_key), _read(options.server_cert))
    mutual = options.use_ssl_mutual
    credentials = grpc.ssl_server_credentials([pair], root if mutual else None, mutual)
    return (credentials._credentials,)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise MoonpoolError(
            f"gRPC with TLS needs the PEM file '{path}': {error.strerror}"
        ) from error
