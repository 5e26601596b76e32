"""Callers that wait on a thread or with a future, and how they drive executions meanwhile.

A thread that waits for an answer anyway waits on the stub's socket itself: a hand-over between threads costs more
than the trip to the stub and back. So when a batch is sent, one of the callers in it is appointed to receive the answer
for all of them.

Theory of operation. A thread that waits blocks on a bare lock, its bell, which `resolve` and `appoint` release. It wakes
up for its outcome, or to drive an execution. A bell that rings already is left alone, so one wake-up may mean both, and
the thread looks at both. An appointment can come while the thread leaves, because its time is over or a signal handler
raised. Each side then writes first and reads second: the thread sets `_gone` and then cancels its request, while
`appoint` sets `_execution` and then looks at `_gone`. If the thread is gone, `appoint` claims the execution itself, to
learn whether the thread took it, and if not, offers it to the next caller.

A future has no thread. Cancelling it and resolving it race for the one item in `RequestFuture.leave`, and the one that pops it
ends the future.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from moonpool.ipc.errors import PeerGone
from moonpool.runtime.errors import RequestTimedOut, own
from moonpool.runtime.model.request import InferenceRequest, Outcome, Response, Waiter
from moonpool.runtime.quick import forms, learn, learn_object
from moonpool.runtime.schedule.execution import Execution
from moonpool.runtime.schedule.scheduler import Scheduler

_log = logging.getLogger("moonpool")
_MAIN = threading.main_thread().ident


def is_interruptible() -> bool:
    """Return True if signal handlers run on this thread."""
    return threading.get_ident() == _MAIN


class ThreadWaiter(Waiter):
    """A thread that blocks until its outcome is there."""

    __slots__ = ("_bell", "_execution", "_gone", "interruptible", "outcome")
    may_block = True

    def __init__(self) -> None:
        # The bell. A bare lock is the cheapest thing that a thread can wait on with a time limit.
        self._bell = bell = threading.Lock()
        bell.acquire()
        self._execution: Execution | None = None
        self._gone = False
        self.interruptible = threading.get_ident() == _MAIN
        self.outcome: Outcome | None = None

    def resolve(self, outcome: Outcome | None) -> None:
        self.outcome = outcome
        try:
            self._bell.release()
        except RuntimeError:  # it rings already
            return

    def appoint(self, execution: Execution) -> bool:
        self._execution = execution
        if self._gone and execution.claim(object()):
            # The thread left just before, and did not see the execution. Another one may be appointed.
            self._execution = None
            execution.offer()
            return False
        self._ring()
        return True

    def _ring(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:  # it rings already
            return

    def wait(self, deadline: float | None, own: Execution | None) -> Outcome:
        """Block until the outcome is there. Drives `own`, and executions that this thread is appointed to.

        Raises `RequestTimedOut` at `deadline` (seconds of `time.monotonic`).
        """
        if own is not None:
            own.drive(deadline, interruptible=self.interruptible)
        while self.outcome is None:
            timeout_s = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._bell.acquire(timeout=timeout_s):
                raise RequestTimedOut("Request timeout expired")
            execution, self._execution = self._execution, None
            if execution is not None and execution.claim(self):
                execution.drive(deadline, interruptible=self.interruptible)
        return self.outcome

    def leave(self) -> None:
        """Take no appointment any more. For the thread that waited."""
        self._gone = True


class PunctualWaiter(ThreadWaiter):
    """A thread that blocks until a time at most, and so cannot execute in a backend that blocks."""

    __slots__ = ()
    may_block = False


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


class FutureWaiter(Waiter):
    """A caller that does not block: the outcome goes into a `concurrent.futures.Future`."""

    __slots__ = ("future",)

    def __init__(self, leave: Callable[[], None]) -> None:
        self.future = RequestFuture()
        self.future.leave.append(leave)

    def resolve(self, outcome: Outcome | None) -> None:
        try:
            self.future.leave.pop()
        except IndexError:  # cancelled
            return
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            if isinstance(outcome, Response):
                self.future.set_result(outcome)
            else:
                self.future.set_exception(outcome)
        except SystemExit:  # all else that a callback raises, the future logs itself
            _log.exception("a callback of a future tried to end the thread that serves all")


def wait_for_response(
    scheduler: Scheduler, request: InferenceRequest, timeout_s: float | None
) -> Response:
    """Submit a request and wait for its outcome on this thread.

    Raises what `Scheduler.submit` raises, `RequestTimedOut`, and the error of the outcome.
    """
    if timeout_s is None and forms is not None:
        outcome: Outcome | None = _quick_outcome(scheduler, request)
        return outcome if type(outcome) is Response else response_of(outcome)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    waiter = request.waiter = ThreadWaiter() if deadline is None else PunctualWaiter()
    try:
        outcome = waiter.wait(deadline, scheduler.submit(request))
    except BaseException:
        waiter.leave()
        scheduler.leave(request)
        raise
    return outcome if type(outcome) is Response else response_of(outcome)


def _quick_outcome(scheduler: Scheduler, request: InferenceRequest) -> Outcome | None:
    """Do what `wait_for_response` does without a time limit. Returns the outcome."""
    try:
        return forms.outcome(scheduler, request)  # type: ignore[no-any-return]
    except BaseException:
        # It has no waiter if a signal handler raised before the call.
        waiter = getattr(request, "waiter", None)
        if waiter is not None:
            waiter.leave()
            scheduler.leave(request)
        raise


def response_of(outcome: Outcome | None) -> Response:
    """Return a response, or raise the error that came in its place."""
    if isinstance(outcome, Response):
        return outcome
    raise own(outcome)  # type: ignore[arg-type]


learn(ThreadWaiter)
learn_object("new lock", threading.Lock)
learn_object("main thread", _MAIN)
learn_object("peer gone", PeerGone)
learn(PunctualWaiter)
