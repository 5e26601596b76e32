"""Callers with a future, and the outcomes that go to them.

Theory of operation. A future has no thread. Cancelling it and resolving it race for the one item in
`RequestFuture.leave`, and the one that pops it ends the future.

*Outcomes of futures.* Whoever ends a request serves all callers: the reactor, or a thread that drives the batch. It
must take no lock that a caller can hold, and run no code of a caller. A future has both: its condition, which a signal
handler can leave taken for good (it raises in `Condition.__enter__`, after the lock was taken), and callbacks.

So `deliver` sets an outcome itself only if the lock is free and nobody has asked to be called. While it has the lock,
nobody can ask. All other outcomes go to a thread, in the order in which they came. That thread may be stuck in one of
them. If it has been for `_STUCK_S` while others wait, another thread goes on with those, and the first one ends after
its outcome. There are `_MOST` threads at most. `_lock` guards the queue, and the worker whose turn it is. The threads
are daemons, start with the first outcome, and end when there has been none for a while.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from moonpool.runtime.errors import OutOfThreads, own
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.request import InferenceRequest, Outcome, Response, Waiter
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.threads import is_interruptible, start_thread
from moonpool.runtime.schedule.lane import LEAVE_S
from moonpool.runtime.schedule.scheduler import Scheduler

_log = RuntimeLog("moonpool")
# Seconds after which a thread that delivers outcomes counts as stuck, and ends if there is none; and the most of these
# threads.
_STUCK_S = 0.05
_IDLE_S = 5.0
_MOST = 32
# Seconds that an end waits for outcomes that are on their way.
_END_S = 1.0


class RequestFuture(Future[Response]):
    """The future of a response. Cancelling it cancels the request."""

    def __init__(self) -> None:
        super().__init__()
        # One function, to call on cancellation. `cancel` or `resolve` pops it, and that one ends the future.
        self.leave: list[Callable[[], None]] = []

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        if is_cancelled:
            with contextlib.suppress(IndexError):
                leave = self.leave.pop()
                self.set_running_or_notify_cancel()
                leave()
        return is_cancelled

    def _invoke_callbacks(self) -> None:
        # As in the base class, which lets a BaseException of one callback end all others.
        for callback in self._done_callbacks:  # type: ignore[attr-defined]
            try:
                callback(self)
            except BaseException as error:
                if is_interruptible() and not isinstance(error, Exception):
                    raise
                _log.exception("a callback of a future failed: %r", callback)


class _Worker:
    """A thread that delivers outcomes."""

    def __init__(self) -> None:
        # Released to wake it.
        self.bell = threading.Lock()
        self.bell.acquire()
        self.is_idle = False
        self.delivered = 0
        self.thread: threading.Thread | None = None


class Deliveries:
    """Gives outcomes to futures. Any thread but one on which signal handlers run may call any method. None blocks but
    `close`.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        # The one whose turn it is, and all that have not ended.
        self._worker: _Worker | None = None
        self._workers: set[_Worker] = set()
        self._is_watching = self._is_closed = False

    def deliver(self, future: Future[Response], outcome: Outcome | None) -> None:
        """Set the outcome of a future, now or soon, whatever its callers do meanwhile."""
        condition = future._condition
        if condition.acquire(blocking=False):
            try:
                if not future._done_callbacks and not future._waiters:  # type: ignore[attr-defined]
                    _set(future, outcome)
                    return
            finally:
                condition.release()
        with self._lock:
            self._waiting.append(partial(_set, future, outcome))
            if self._worker is None:
                self._begin()
            elif self._worker.is_idle:
                self._worker.is_idle = False
                self._worker.bell.release()
            else:
                self._watch()

    def _begin(self) -> None:
        """Start a thread, or try again later. Needs the lock."""
        worker = _Worker()
        worker.thread = threading.Thread(target=self._work, args=(worker,), name="moonpool-futures", daemon=True)
        try:
            start_thread(worker.thread)
        except OutOfThreads:
            self._watch()
        else:
            self._worker = worker
            self._workers.add(worker)
            # The thread may be stuck in its first outcome, and those behind it may have come before.
            self._watch()

    def _work(self, worker: _Worker) -> None:
        while True:
            with self._lock:
                deliver = self._waiting.popleft() if self._has_turn(worker) and self._waiting else None
                if deliver is None and (self._is_closed or not self._has_turn(worker)):
                    self._end(worker)
                    return
                worker.is_idle = deliver is None
            if deliver is not None:
                try:
                    deliver()
                except BaseException:  # what a callback raised, the future has logged
                    _log.exception("an outcome cannot be given to its future")
                # While this thread waits, it must not keep a response.
                del deliver
                worker.delivered += 1
            elif not worker.bell.acquire(timeout=_IDLE_S):
                with self._lock:
                    if worker.is_idle:
                        self._end(worker)
                        return
                    # Somebody has woken it at this moment.
                    worker.bell.acquire()

    def _has_turn(self, worker: _Worker) -> bool:
        return self._worker is worker

    def _end(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        if self._has_turn(worker):
            self._worker = None

    def _watch(self) -> None:
        """Look in a moment if the thread is stuck. Needs the lock."""
        if not self._is_watching:
            self._is_watching = True
            delivered = -1 if self._worker is None else self._worker.delivered
            look = partial(self._look, self._worker, delivered)
            self._reactor.call_later(_STUCK_S, look)

    def _look(self, worker: _Worker | None, delivered: int) -> None:
        """Start another thread if this one has done nothing since, and outcomes wait."""
        with self._lock:
            self._is_watching = False
            if not self._waiting:
                return
            is_stuck = worker is None or worker.delivered == delivered
            if is_stuck and self._worker is worker and len(self._workers) < _MOST:
                self._begin()
            else:
                self._watch()

    def close(self) -> None:
        """End the threads that are not stuck."""
        with self._lock:
            self._is_closed = True
            workers = list(self._workers)
            for worker in workers:
                if worker.is_idle:
                    worker.is_idle = False
                    worker.bell.release()
        end = time.monotonic() + _END_S
        for worker in workers:
            if worker.thread is not None:
                worker.thread.join(max(0.0, end - time.monotonic()))


def _set(future: Future[Response], outcome: Outcome | None) -> None:
    """Set the outcome of a future that has none. May block, and runs callbacks."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Response):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


class FutureWaiter(Waiter):
    """A caller that does not block: the outcome goes into a `concurrent.futures.Future`."""

    __slots__ = ("_deliveries", "future")

    def __init__(self, deliveries: Deliveries, leave: Callable[[], None]) -> None:
        self.future = RequestFuture()
        self.future.leave.append(leave)
        self._deliveries = deliveries

    def resolve(self, outcome: Outcome | None) -> None:
        try:
            self.future.leave.pop()
        except IndexError:  # cancelled
            return
        self._deliveries.deliver(self.future, outcome)


def submit_for_future(scheduler: Scheduler, request: InferenceRequest, deliveries: Deliveries) -> RequestFuture:
    """Submit a request and return the future of its response. Raises what `Scheduler.submit` raises."""
    waiter = FutureWaiter(deliveries, lambda: scheduler.leave_soon(request))
    request.waiter = waiter
    submit_to_reactor(scheduler, request)
    return waiter.future


def submit_to_reactor(scheduler: Scheduler, request: InferenceRequest) -> None:
    """Submit a request that the reactor drives.

    Raises what `Scheduler.submit` raises, and what a signal handler does; then it has left.
    """
    try:
        execution = scheduler.enter(request)
        if execution is not None:
            execution.drive_in_reactor()
    except BaseException:
        # In one instruction: another signal may follow.
        scheduler.reactor.soon.append(lambda: scheduler.leave(request))
        scheduler.reactor.flush(LEAVE_S)
        raise


def wait_for_response(scheduler: Scheduler, request: InferenceRequest, timeout_s: float | None) -> Response:
    """Submit a request and wait for its outcome on this thread.

    Raises what `Scheduler.submit` raises, `InvalidRequest`, `RequestTimedOut`, and the error of the outcome.
    """
    outcome = scheduler.infer(request, timeout_s)
    return outcome if type(outcome) is Response else response_of(outcome)


def response_of(outcome: Outcome | None) -> Response:
    """Return a response, or raise the error that came in its place."""
    if isinstance(outcome, Response):
        return outcome
    raise own(outcome)  # type: ignore[arg-type]
