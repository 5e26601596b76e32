"""The responses to one request, one after another: for threads and for event loops."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from moonpool.runtime.errors import RequestTimedOut, own
from moonpool.runtime.request import Response
from moonpool.runtime.waiter import Waiter, is_interruptible

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from moonpool.runtime.request import InferenceRequest, Outcome
    from moonpool.runtime.scheduler import Scheduler


class _End:
    """Behind the last response."""


_END = _End()


class StreamWaiter(Waiter):
    """Collects responses until somebody takes them. Knows nothing of the stream, which may be dropped."""

    __slots__ = ("bell", "interruptible", "waiting", "wake")
    takes_many = True

    def __init__(self) -> None:
        self.interruptible = is_interruptible()
        self.waiting: deque[Outcome | _End] = deque()
        # A thread waits for the next response by this; a task has something else to wake it.
        self.bell = threading.Lock()
        self.bell.acquire()
        self.wake: Callable[[], None] | None = None

    def respond(self, outcome: Outcome) -> None:
        self.waiting.append(outcome)
        self._ring()

    def resolve(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self.waiting.append(outcome)
        self.waiting.append(_END)
        self._ring()

    def _ring(self) -> None:
        wake = self.wake
        if wake is not None:
            wake()
            return
        try:
            self.bell.release()
        except RuntimeError:  # it rings already
            return


class ResponseStream:
    """Iterate over it, with `for` or `async for`; it ends after the last response.

    A response that is an error is raised; where the model goes on after it, so may whoever iterates.
    Closing it before the end, or dropping it, cancels the request: the model finds out by `is_cancelled`.
    One thread, or one task, at a time.
    """

    def __init__(
        self, scheduler: Scheduler, request: InferenceRequest, timeout_s: float | None
    ) -> None:
        """Submit the request. Raises what `Scheduler.submit` raises."""
        self._scheduler = scheduler
        self._request = request
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._waiter = request.waiter = StreamWaiter()
        self._has_ended = False
        execution = scheduler.submit(request)
        if execution is not None:
            execution.drive_in_reactor()

    def _tell_cancelled(self) -> None:
        """Set the flag that lets the model stop. Responses that it still sends are received. For tests of models."""
        self._scheduler.tell_cancelled(self._request)

    # For threads

    def __iter__(self) -> ResponseStream:
        return self

    def __next__(self) -> Response:
        """The next response. Raises what the model answered instead, `RequestTimedOut`, `StubDied`."""
        if self._has_ended:
            raise StopIteration
        self._check_time()
        waiting = self._waiter.waiting
        while not waiting:
            left_s = -1.0 if self._deadline is None else self._deadline - time.monotonic()
            if (self._deadline and left_s <= 0) or not self._waiter.bell.acquire(timeout=left_s):
                self._time_out()
        outcome = waiting.popleft()
        if outcome is _END:
            self._has_ended = True
            raise StopIteration
        return _response(outcome)

    # For event loops

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> Response:
        """As `next`, for a task."""
        if self._has_ended:
            raise StopAsyncIteration
        self._check_time()
        waiting = self._waiter.waiting
        if not waiting:
            await self._wait()
        outcome = waiting.popleft()
        if outcome is _END:
            self._has_ended = True
            raise StopAsyncIteration
        return _response(outcome)

    async def _wait(self) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        self._waiter.wake = _waker(loop, woken)
        try:
            async with asyncio.timeout(
                None if self._deadline is None else self._deadline - time.monotonic()
            ):
                while not self._waiter.waiting:
                    await woken.wait()
                    woken.clear()
        except TimeoutError:
            self._time_out()
        finally:
            self._waiter.wake = None

    # End

    def _check_time(self) -> None:
        """Also where responses come faster than they are taken."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._time_out()

    def _time_out(self) -> None:
        self.close()
        raise RequestTimedOut("Request timeout expired")

    def close(self) -> None:
        """Take no more responses; cancels the request where the last has not come. Any thread."""
        if not self._has_ended:
            self._has_ended = True
            if _END not in self._waiter.waiting:
                self._scheduler.leave(self._request)
            self._waiter.waiting.clear()
            # Whoever waits for the next response elsewhere finds the end.
            self._waiter.resolve(None)

    async def aclose(self) -> None:
        """As `close`."""
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
        # A collector may run this in the middle of anything, so it takes no lock.
        if not getattr(self, "_has_ended", True):
            scheduler, request = self._scheduler, self._request
            scheduler.reactor.call_soon(lambda: scheduler.leave(request))


def _waker(loop: asyncio.AbstractEventLoop, woken: asyncio.Event) -> Callable[[], None]:
    """Wakes a task of this loop once, however often it is called until then."""
    pending = [True]

    def wake() -> None:
        try:
            pending.pop()
        except IndexError:  # it is about to wake up
            return
        try:
            loop.call_soon_threadsafe(set_woken)
        except RuntimeError:  # the loop is closed: nobody waits there any more
            return

    def set_woken() -> None:
        pending.append(True)
        woken.set()

    return wake


def _response(outcome: object) -> Response:
    if isinstance(outcome, Response):
        return outcome
    raise own(outcome)  # type: ignore[arg-type]
