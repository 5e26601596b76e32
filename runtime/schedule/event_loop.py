"""Callers in an asyncio event loop: the loop itself waits on the stub's socket.

Handing an answer from another thread to an event loop costs more than the trip to the stub, so the loop watches the
sockets of the stubs that execute for it.

Theory of operation. Everything happens on the loop's thread, with two exceptions: `resolve` and `appoint` of a waiter, which
hand over with `call_soon_threadsafe`, and the end of a driver, which comes on any thread when its loop is collected. A loop
may stop for good at any time without a word. So it never claims an execution before its answer can be read: until then
anybody else can, and the supervisor gives to the reactor what nobody claims for longer than a second (`Supervisor.rescue`).
A caller that leaves while its loop watches for the execution gives it to the reactor at once, as the others in the batch
still wait.

The loop watches one descriptor, an epoll over the sockets. If the loop watched the sockets themselves, uvloop would not
report all of them: when a stub ends with something unread, its socket has an error, and libuv stops watching it without
a word. When an answer can be read, several threads may know, and the one that claims it reads it. The loop may so be woken by an
answer that is another's. It looks whether there is anything to read before it reads, and forgets a socket that has
nothing for it.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from moonpool.runtime.errors import RequestTimedOut
from moonpool.runtime.model.request import InferenceRequest, Outcome, Waiter
from moonpool.runtime.process.event_loop import watch
from moonpool.runtime.schedule.scheduler import Execution, Scheduler
from moonpool.runtime.schedule.watched_sockets import WatchedSockets

_running_loop = asyncio._get_running_loop


class LoopDriver:
    """Drives executions in one event loop. All methods are for the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sockets = WatchedSockets()
        watch(loop, self._sockets.epoll.fileno(), self._look)

    def drive(self, execution: Execution) -> None:
        """Wait for the answer of an execution, and claim it when it can be read."""
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
            # Finishing one of those before may have read this answer meanwhile, and sent the next batch there.
            if watched is None or (place and not watched.is_readable()):
                continue
            execution, watched.execution = watched.execution, None
            if execution is not None and execution.claim(self):
                execution.finish()
            else:
                # Another one's answer, or the end of the stub. The next `drive` watches the socket again.
                self._sockets.forget(watched)

    def hand_over(self, request: InferenceRequest) -> None:
        """Give the execution of a caller that leaves to the reactor, if this loop watches for it.

        The loop may be about to end, and the others in the batch still wait.
        """
        for watched in self._sockets.all():
            execution = watched.execution
            if execution is not None and request in execution.requests:
                self._sockets.forget(watched)
                if execution.claim(self):
                    execution.drive_in_reactor()

    def close(self) -> None:
        """Give all executions to the reactor: the loop has ended."""
        for execution in self._sockets.close():
            if execution.claim(self):
                execution.drive_in_reactor()

    def __del__(self) -> None:
        self.close()


def _driver_of(loop: Any) -> LoopDriver:
    # The loop itself keeps its driver. A table would keep loops for ever: a driver watches an execution, which
    # refers to a request, whose future refers to its loop.
    try:
        return loop._moonpool_driver  # type: ignore[no-any-return]
    except AttributeError:
        driver: LoopDriver = LoopDriver(weakref.proxy(loop))  # type: ignore[arg-type]
        loop._moonpool_driver = driver
        return driver


class LoopWaiter(Waiter):
    """A caller in an event loop, which gets its outcome on the loop's thread."""

    __slots__ = ("_loop", "driver")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.driver = _driver_of(loop)

    def settle(self, outcome: Outcome | None) -> None:
        """Take the outcome. On the loop's thread."""
        raise NotImplementedError

    def is_settled(self) -> bool:
        """Return True if nobody waits here any more. On the loop's thread."""
        raise NotImplementedError

    def _is_here(self) -> bool:
        return _running_loop() is self._loop

    def resolve(self, outcome: Outcome | None) -> None:
        if _running_loop() is self._loop:
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
        elif execution.claim(self):  # the caller left meanwhile
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
        """Cancel the request, as nobody waits for it any more."""
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
