"""Callers in an asyncio event loop: the loop itself waits on the stub's socket.

Handing an answer from another thread to an event loop costs more than the trip to the stub; so the loop
watches the sockets of the stubs that execute for it.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

from moonpool.runtime.errors import RequestTimedOut
from moonpool.runtime.event_loop import watch
from moonpool.runtime.waiter import Waiter
from moonpool.runtime.watched_sockets import WatchedSockets

if TYPE_CHECKING:
    from moonpool.runtime.execution import Execution
    from moonpool.runtime.request import InferenceRequest, Outcome
    from moonpool.runtime.scheduler import Scheduler


class LoopDriver:
    """Drives executions in one event loop. All methods are for the loop's thread.

    The loop watches one descriptor, which is readable when one of the sockets is. Of the sockets themselves uvloop would not
    tell all: where a stub ends with something unread, its socket has an error, and libuv stops watching without a word.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sockets = WatchedSockets()
        watch(loop, self._sockets.epoll.fileno(), self._look)

    def drive(self, execution: Execution) -> None:
        """Wait for the answer of an execution, and claim it when it can be read.

        Not before: a loop may stop for good at any time, and then another can still claim it.
        """
        if not execution.is_offered:
            return
        try:
            watched = self._sockets.of(execution.pending)
        except OSError:  # the stub has ended, or the kernel has no watches left for this user
            if execution.claim(self):
                execution.drive_in_reactor()
        else:
            watched.execution = execution

    def _look(self) -> None:
        for place, (fd, _) in enumerate(self._sockets.epoll.poll(0)):
            watched = self._sockets.find(fd)
            # What came of those before may have read it meanwhile, and sent there again.
            if watched is None or (place and not watched.is_readable()):
                continue
            execution, watched.execution = watched.execution, None
            if execution is not None and execution.claim(self):
                execution.finish()
            else:
                # Somebody else's answer, or the end of the stub. Whoever comes next adds it again.
                self._sockets.forget(watched)

    def hand_over(self, request: InferenceRequest) -> None:
        """A caller leaves; if this loop drives the execution that it is in, the reactor does from now on.

        The loop may be about to end, and the others in the batch still wait.
        """
        for watched in self._sockets.all():
            execution = watched.execution
            if execution is not None and request in execution.requests:
                self._sockets.forget(watched)
                if execution.claim(self):
                    execution.drive_in_reactor()

    def close(self) -> None:
        """The loop has ended."""
        for execution in self._sockets.close():
            if execution.claim(self):
                execution.drive_in_reactor()

    def __del__(self) -> None:
        self.close()


def _driver_of(loop: asyncio.AbstractEventLoop) -> LoopDriver:
    # The loop itself keeps its driver. A table beside it would keep loops for ever: what a driver
    # watches may refer to a request, whose future refers to its loop.
    driver: LoopDriver | None = getattr(loop, "_moonpool_driver", None)
    if driver is None:
        driver = LoopDriver(weakref.proxy(loop))
        loop._moonpool_driver = driver  # type: ignore[attr-defined]
    return driver


class LoopWaiter(Waiter):
    """Somebody in an event loop, which may be told there only."""

    __slots__ = ("_loop", "driver")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.driver = _driver_of(loop)

    def settle(self, outcome: Outcome | None) -> None:
        """Here is the outcome. In the loop."""
        raise NotImplementedError

    def is_settled(self) -> bool:
        """Whether nobody waits here any more. In the loop."""
        raise NotImplementedError

    def _is_here(self) -> bool:
        return asyncio._get_running_loop() is self._loop

    def resolve(self, outcome: Outcome | None) -> None:
        if self._is_here():
            self.settle(outcome)
        else:
            self._elsewhere(self.settle, outcome)

    def appoint(self, execution: Execution) -> bool:
        if self._is_here():
            self.driver.drive(execution)
            return True
        return self._elsewhere(self._drive, execution)

    def _drive(self, execution: Execution) -> None:
        if not self.is_settled():
            self.driver.drive(execution)
        elif execution.claim(self):  # left meanwhile
            execution.drive_in_reactor()

    def _elsewhere(self, callback: object, argument: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback, argument)  # type: ignore[arg-type]
        except RuntimeError:  # the loop is closed: nobody waits there any more
            return False
        return True

    def submit(self, scheduler: Scheduler, request: InferenceRequest) -> None:
        """Send a request of this waiter. Raises what `Scheduler.submit` raises."""
        request.waiter = self
        execution = scheduler.submit(request)
        if execution is not None:
            execution.offer()
            self.driver.drive(execution)

    def leave(self, scheduler: Scheduler, request: InferenceRequest) -> None:
        """Nobody waits any more; cancels the request."""
        self.driver.hand_over(request)
        scheduler.leave(request)


class TaskWaiter(LoopWaiter):
    """A task that awaits a future of its loop."""

    __slots__ = ("future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.future: asyncio.Future[Outcome | None] = loop.create_future()

    def settle(self, outcome: Outcome | None) -> None:
        if not self.future.done():
            self.future.set_result(outcome)

    def is_settled(self) -> bool:
        return self.future.done()


async def wait_for_outcome(
    scheduler: Scheduler, request: InferenceRequest, timeout_s: float | None
) -> Outcome | None:
    """Submit a request and await its outcome. Cancelling the task cancels the request.

    Raises what `Scheduler.submit` raises, and `RequestTimedOut`.
    """
    waiter = TaskWaiter(asyncio.get_running_loop())
    try:
        waiter.submit(scheduler, request)
        if timeout_s is None:
            return await waiter.future
        async with asyncio.timeout(timeout_s):
            return await waiter.future
    except TimeoutError:
        raise RequestTimedOut("Request timeout expired") from None
    finally:
        if not waiter.future.done() or waiter.future.cancelled():
            waiter.leave(scheduler, request)
