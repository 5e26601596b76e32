"""The responses to one request, one after another: for threads and for event loops.

Theory of operation. `StreamWaiter` collects responses, on the reactor's thread or on the one that settles the batch,
and a thread or a task takes them out. A deque lies between them, whose append and popleft are atomic. A thread waits on
a bell, a bare lock that is released to wake it. The first response and the last one wake their consumer at once. A
model may send others faster than they can be handed over one by one, since two threads would take the interpreter's
lock from each other for each of them. So the reactor wakes the consumer when it has taken in all that the stub had
sent, or `_MANY` responses. A task that waits puts a function into `wake`, which has the driver of its loop wake it,
once however many responses come. The driver does so even if a signal handler raises meanwhile (`event_loop.py`), and
what it sets is a future, in one step. In a loop in which none can raise, that step runs the task (`Wakeup`). The
waiter does not refer to the stream, so a stream that nobody has any more is collected, and that cancels the request. A
collector may run in the middle of anything, under any lock, so `__del__` leaves the cancelling to the reactor.

Responses that nobody takes are bounded by a `ResponseBacklog`. When it is full, the waiter drops what waits and ends
the stream with an error, and what the stub still sends is dropped. So a consumer that has seen a response in the deque
may find none.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from moonpool.runtime.arguments import check_timeout
from moonpool.runtime.errors import BacklogFull, RequestTimedOut
from moonpool.runtime.model.request import InferenceRequest, Outcome, Response, Waiter
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.schedule.backlog import ResponseBacklog, held_bytes
from moonpool.runtime.schedule.callers import response_of, submit_to_reactor
from moonpool.runtime.schedule.lane import LEAVE_S
from moonpool.runtime.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    import asyncio


class _End:
    """Stands behind the last response."""


_END = _End()
# Responses for which a consumer is woken before the reactor has taken in all that the stub had sent.
_MANY = 16


class StreamWaiter(Waiter):
    """Collects responses until somebody takes them."""

    __slots__ = ("_count", "_reactor", "backlog", "bell", "give_up", "waiting", "wake")
    takes_many = True

    def __init__(self, reactor: Reactor, name: str, backlog_bytes: int) -> None:
        """Use `reactor` for waking the consumer after a turn of it. At most `backlog_bytes` wait, an option of the
        model `name`.
        """
        self._reactor = reactor
        # It refers to this object until it is closed.
        self.backlog = ResponseBacklog(name, backlog_bytes, self._overflow)
        # Cancels the request if nobody takes its responses. It refers to this object, too, and goes when the request
        # ends.
        self.give_up: Callable[[], None] | None = None
        # The responses since the consumer was woken last; -1 before the first one.
        self._count = -1
        self.waiting: deque[Outcome | _End] = deque()
        # Wakes a thread that waits for the next response; `wake` wakes a task.
        self.bell = threading.Lock()
        self.bell.acquire()
        self.wake: Callable[[], None] | None = None

    def respond(self, outcome: Outcome) -> None:
        backlog = self.backlog
        if backlog.is_closed:  # it was full, or nobody reads any more
            return
        self.waiting.append(outcome)
        backlog.came_bytes += held_bytes(outcome)
        backlog.look()
        self._count += 1
        if self._count == 1:
            self._reactor.call_soon(self._ring)
        elif not self._count or self._count == _MANY:
            self._ring()

    def take_ready(self, most: int) -> list[Response]:
        """Take at most so many responses, and none behind an error or the end. For the consumer."""
        waiting = self.waiting
        taken: list[Response] = []
        with suppress(IndexError):  # there are no more
            while len(taken) < most and type(waiting[0]) is Response:
                outcome = waiting.popleft()
                if type(outcome) is not Response:  # the backlog was full right then
                    waiting.appendleft(outcome)
                    break
                taken.append(outcome)
        if taken:
            self.backlog.taken_bytes += sum(map(held_bytes, taken))
        return taken

    def _overflow(self, error: BacklogFull) -> None:
        self.waiting.clear()
        give_up = self.give_up
        self.resolve(error)
        if give_up is not None:
            self._reactor.call_soon(give_up)

    def resolve(self, outcome: Outcome | None) -> None:
        self.give_up = None
        if outcome is not None:
            self.waiting.append(outcome)
        self.waiting.append(_END)
        self._ring()

    def _ring(self) -> None:
        self._count = 0
        wake = self.wake
        if wake is not None:
            wake()
            return
        try:
            self.bell.release()
        except RuntimeError:  # it rings already
            return


class ResponseStream:
    """Iterates over the responses, with `for` or `async for`, and ends after the last one.

    A response that is an error is raised. If the model goes on after it, iterating again goes on, too.
    Closing the stream before its end, or dropping it, cancels the request, and the model sees `is_cancelled`.
    For one thread or one task at a time.
    """

    def __init__(self, scheduler: Scheduler, request: InferenceRequest, timeout_s: float | None) -> None:
        """Submit the request. Raises what `Scheduler.submit` raises."""
        self._scheduler = scheduler
        self._request = request
        check_timeout(timeout_s)
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._waiter = request.waiter = StreamWaiter(scheduler.reactor, scheduler.name, scheduler.backlog_bytes)
        self._waiter.give_up = partial(scheduler.leave, request)
        self._has_ended = False
        submit_to_reactor(scheduler, request)

    def _tell_cancelled(self) -> None:
        """Set the flag that lets the model stop. Responses that it still sends are received. For tests of models."""
        self._scheduler.tell_cancelled(self._request)

    # For threads

    def __iter__(self) -> ResponseStream:
        return self

    def __next__(self) -> Response:
        """Return the next response. Raises the error that the model answered instead, `RequestTimedOut`, `StubDied`."""
        if self._has_ended:
            raise StopIteration
        if self._deadline is not None:
            self._check_time()
        outcome = self._next()
        while outcome is None:
            left_s = -1.0 if self._deadline is None else self._deadline - time.monotonic()
            if (self._deadline and left_s <= 0) or not self._waiter.bell.acquire(timeout=left_s):
                self._time_out()
            outcome = self._next()
        if type(outcome) is Response:
            return outcome
        if isinstance(outcome, _End):
            raise StopIteration
        return response_of(outcome)

    def _next(self) -> Outcome | _End | None:
        """Take the next outcome, if there is one."""
        waiter = self._waiter
        waiting = waiter.waiting
        try:
            # The end stays there for the next look: a signal handler may raise before it is noted.
            outcome = waiting[0] if isinstance(waiting[0], _End) else waiting.popleft()
        except IndexError:
            return None
        if isinstance(outcome, _End):
            self._has_ended = True
            waiter.backlog.close()
        else:
            waiter.backlog.taken_bytes += held_bytes(outcome)
        return outcome

    # For event loops

    @property
    def _is_ready(self) -> bool:
        """True if the next response, an error or the end, is there already."""
        return bool(self._waiter.waiting)

    def _take_ready(self, most: int) -> list[Response]:
        """Take the responses that are there already, at most so many, and none behind an error or the end."""
        return self._waiter.take_ready(most)

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> Response:
        """Return the next response, as `__next__` does, for a task."""
        if self._has_ended:
            raise StopAsyncIteration
        self._check_time()
        while (outcome := self._next()) is None:
            await self._wait()
        if isinstance(outcome, _End):
            raise StopAsyncIteration
        return response_of(outcome)

    async def _wait(self) -> None:
        import asyncio

        from moonpool.runtime.process.event_loop import Wakeup
        from moonpool.runtime.schedule.event_loop import driver_of

        loop = asyncio.get_running_loop()
        driver = driver_of(loop)

        async def wait() -> None:
            while not self._waiter.waiting:
                # A signal handler must not raise in the midst of a task and of the driver.
                woken = loop.create_future() if driver.is_interruptible else Wakeup(loop=loop)
                self._waiter.wake = _waker(driver.call, woken)
                # Again: a response may have come before there was anything to wake.
                if not self._waiter.waiting:
                    await woken

        try:
            if self._deadline is None:
                await wait()
            else:
                async with asyncio.timeout(self._deadline - time.monotonic()):
                    await wait()
        except TimeoutError:
            self._time_out()
        finally:
            self._waiter.wake = None

    # End

    def _check_time(self) -> None:
        """Raise `RequestTimedOut` when time is over, even if responses come faster than they are taken."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._time_out()

    def _time_out(self) -> None:
        self.close()
        raise RequestTimedOut("Request timeout expired")

    def close(self) -> None:
        """Take no more responses. Cancels the request if the last one has not come. Any thread may call it."""
        if not self._has_ended:
            try:
                self._has_ended = True
                self._waiter.backlog.close()
                if _END not in self._waiter.waiting:
                    self._scheduler.leave_soon(self._request)
                self._waiter.waiting.clear()
                # Another thread or task that waits for the next response finds the end.
                self._waiter.resolve(None)
            except BaseException:  # a signal handler raised, and a second call would do nothing
                # In one instruction: another signal may follow.
                self._scheduler.reactor.soon.append(self._leave)
                self._scheduler.reactor.flush(LEAVE_S)
                raise

    def _leave(self) -> None:
        """Cancel the request, and wake the reader of the next response, which finds the end.

        On the reactor's thread.
        """
        self._scheduler.leave(self._request)
        self._waiter.resolve(None)

    async def aclose(self) -> None:
        """Close the stream."""
        self.close()

    def __enter__(self) -> ResponseStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> ResponseStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A collector may run this in the middle of anything, so this takes no lock.
        if not getattr(self, "_has_ended", True):
            scheduler, request, waiter = self._scheduler, self._request, self._waiter
            waiter.backlog.close()
            waiter.give_up = None
            scheduler.reactor.call_soon(lambda: scheduler.leave(request))


def _waker(call: Callable[[Callable[[Any], object], object], bool], woken: asyncio.Future[None]) -> Callable[[], None]:
    """Return a function that wakes the task that awaits `woken`, once however often it is called.

    `call` is `LoopDriver.call`.
    """
    pending = [True]

    def wake() -> None:
        try:
            pending.pop()
            call(_set, woken)
        except IndexError:  # it is about to wake up
            return
        except BaseException:  # a signal handler raised: this is no call
            pending.append(True)
            raise

    return wake


def _set(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)
