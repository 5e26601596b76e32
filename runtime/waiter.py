"""How a caller waits for its outcome, and how it is asked to drive an execution meanwhile.

Whoever waits for an answer anyway may as well wait on the stub's socket itself: a hand-over
between threads costs more than the trip to the stub and back. So when a batch is sent, one of the callers in
it is appointed to receive the answer for all of them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from moonpool.runtime.errors import RequestTimedOut
from moonpool.runtime.request import Response

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonpool.runtime.execution import Execution
    from moonpool.runtime.request import Outcome

_log = logging.getLogger("moonpool")
_MAIN = threading.main_thread().ident


def is_interruptible() -> bool:
    """Whether signal handlers run on this thread."""
    return threading.get_ident() == _MAIN


class Waiter:
    """What the scheduler knows of a caller."""

    __slots__ = ()
    # Whether a backend that blocks may execute on the thread that submits the request.
    may_block = False
    # Whether signal handlers run on the thread of this caller, and may raise anywhere in what it does here.
    interruptible = False
    # Whether this caller takes more than one response, which decoupled models may give.
    takes_many = False

    def respond(self, outcome: Outcome) -> None:
        """Here is a response that is not the last. On the reactor's thread; must not block."""
        raise NotImplementedError

    def resolve(self, outcome: Outcome | None) -> None:
        """Here is the outcome; None only for a caller who takes many, and will get no more.

        Called once, from any thread.
        """
        raise NotImplementedError

    def appoint(self, execution: Execution) -> bool:  # noqa: ARG002 - what the others use
        """Whether this caller will drive the execution. Called from any thread."""
        return False


class ThreadWaiter(Waiter):
    """A thread that blocks."""

    __slots__ = ("_bell", "_execution", "_gone", "interruptible", "outcome")
    may_block = True

    def __init__(self) -> None:
        # A bare lock is the cheapest thing that a thread can wait on with a time limit.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._execution: Execution | None = None
        self._gone = False
        self.interruptible = is_interruptible()
        self.outcome: Outcome | None = None

    def resolve(self, outcome: Outcome | None) -> None:
        self.outcome = outcome
        self._ring()

    def appoint(self, execution: Execution) -> bool:
        self._execution = execution
        if self._gone and execution.claim(object()):
            # The thread left just before, and did not see it; another one may be appointed.
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
        """Block until the outcome is there; drives `own`, and executions that this thread is appointed to.

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
        """The thread waits no longer: it takes no appointment any more. For that thread."""
        self._gone = True


class PunctualWaiter(ThreadWaiter):
    """A thread that blocks until a time, so no longer in a backend either."""

    __slots__ = ()
    may_block = False


class RequestFuture(Future[Response]):
    """The response to come. Cancelling it takes the request out of the queue."""

    def __init__(self) -> None:
        super().__init__()
        # What to do when it is cancelled. Whoever pops it, cancel or the outcome, ends the future.
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
    """Nobody blocks: the outcome goes into a `concurrent.futures.Future`."""

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
        except SystemExit:  # the only thing that callbacks can raise through a future here
            _log.exception("a callback of a future tried to end the thread that serves all")
