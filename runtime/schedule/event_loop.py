"""Callers in an asyncio event loop: the loop itself waits on the stub's work channel.

Handing an answer from another thread to an event loop costs more than the trip to the stub, so the loop watches the
sockets of the stubs that execute for it.

Theory of operation. Everything happens on the loop's thread, with two exceptions: `resolve` and `appoint` of a waiter,
which hand over with `call_soon_threadsafe`, and the end of a driver, which comes on any thread when its loop is
collected. A loop may stop for good at any time without a word. So it never claims an execution before its answer can be
read: until then anybody else can, and the supervisor gives to the reactor what nobody claims for longer than a second
(`Supervisor.rescue`). A caller that leaves while its loop watches for the execution gives it to the reactor at once, as
the others in the batch still wait.

Requests that come in one turn of the loop, from many clients or over one connection, are gathered and go to the
scheduler together, so that they share a batch. The loop does so only while there are several: after a batch with
several, or while an answer is awaited. A caller that leaves before that is skipped (`Scheduler.submit_all`), as
`cancel` has marked its request.

The loop watches one descriptor, an epoll over the sockets. If the loop watched the sockets themselves, uvloop would not
report all of them: when a stub ends with something unread, its socket has an error, and libuv stops watching it without
a word. When an answer can be read, several threads may know, and the one that claims it reads it. The loop may so be
woken by an answer that is another's. It looks whether there is anything to read before it reads, and forgets a socket
that has nothing for it.

If one answer alone is awaited, the loop looks for it for a moment before it sleeps, as a thread does. It claims the
execution for that time, and offers it again if the answer did not come.

*Signals.* In a loop of the main thread, a signal handler may raise anywhere (`scheduler.Scheduler`). Such a loop
submits and reads only with what is compiled, and leaves all else to the reactor. What it has claimed, it names in the
`except` that surrounds the claim, and the reactor goes on with it. What it has not claimed can be claimed by anybody.
Its tables of sockets are changed in an order in which they are right after each step. asyncio itself may lose a
callback, if it is interrupted between taking it and calling it. So other threads wake this loop by a descriptor
(`Bell`), which is reported until all is done.

A stub's socket belongs to its link, which another thread may close at any time; its number can then be given to another
file while it is still watched. So a driver duplicates the descriptor and watches the duplicate, which only it closes.

Where a work channel lies in memory, the *socket* of all this is its bell.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import select
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from moonpool.runtime.arguments import check_timeout
from moonpool.runtime.errors import RequestTimedOut
from moonpool.runtime.model.backend import Pending
from moonpool.runtime.model.request import InferenceRequest, Outcome
from moonpool.runtime.process.event_loop import watch
from moonpool.runtime.process.threads import is_interruptible
from moonpool.runtime.schedule.lane import Execution
from moonpool.runtime.schedule.scheduler import Scheduler

running_loop = asyncio._get_running_loop


class Descriptor:
    """A descriptor that is closed with this object."""

    __slots__ = ("_files", "fd")

    def __init__(self, make: Callable[..., int], *arguments: int) -> None:
        """Raise what `make` raises, which returns a descriptor."""
        # One call into C: no signal handler runs between the descriptor and its owner. A file closes in one call, too.
        self._files: list[io.FileIO] = []
        self._files.extend(map(io.FileIO, map(make, *((each,) for each in arguments))))
        self.fd = self._files[0].fileno()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __del__(self) -> None:
        if hasattr(self, "_files"):  # a signal handler may have raised before
            self.close()


class WatchedSocket:
    """One stub's socket, under a descriptor number that only its watcher uses."""

    __slots__ = ("_descriptor", "_poll", "execution", "fd", "is_registered", "link")

    def __init__(self, link: Pending) -> None:
        """Duplicate the socket of a stub. Raises OSError if the stub has ended and its socket is closed."""
        self.link = link
        self._descriptor = Descriptor(os.dup, link.fileno())
        self.fd = self._descriptor.fd
        # True while the epoll reports it.
        self.is_registered = False
        # The execution whose answer is to come.
        self.execution: Execution | None = None
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def is_readable(self) -> bool:
        return bool(self._poll.poll(0))

    def close(self) -> None:
        self._descriptor.close()


class WatchedSockets:
    """A table of watched sockets. `epoll` reports the `fd` of those that are readable. Not thread-safe.

    A socket is in the table before the epoll has it, and until the epoll has it no more: it could not be found
    otherwise, and be reported for ever.
    """

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self._by_link: dict[object, WatchedSocket] = {}
        self._by_fd: dict[int, WatchedSocket] = {}

    def of(self, link: Pending) -> WatchedSocket:
        """Return the socket of a stub, and watch it from now on.

        Raises OSError if the stub's socket is closed, or the kernel has no watches left for this user.
        """
        watched = self._by_link.get(link)
        if watched is None:
            watched = WatchedSocket(link)
            self._by_link[link] = self._by_fd[watched.fd] = watched
        if not watched.is_registered:
            try:
                self.epoll.register(watched.fd, select.EPOLLIN)
            except FileExistsError:  # a signal handler raised right after this, the last time
                pass
            except OSError:
                self.forget(watched)
                raise
            watched.is_registered = True
        return watched

    def find(self, fd: int) -> WatchedSocket | None:
        return self._by_fd.get(fd)

    def forget(self, watched: WatchedSocket) -> None:
        watched.is_registered = False
        # It may be closed already, if all of this is collected at once.
        with contextlib.suppress(OSError):
            self.epoll.unregister(watched.fd)
        # In this order, a socket that `of` finds can also be found by its descriptor.
        self._by_link.pop(watched.link, None)
        self._by_fd.pop(watched.fd, None)
        watched.close()

    def all(self) -> list[WatchedSocket]:
        return list(self._by_fd.values())

    def close(self) -> list[Execution]:
        """Stop watching. Returns the executions whose answers have not come."""
        executions = [each.execution for each in self.all() if each.execution is not None]
        for watched in self.all():
            self.forget(watched)
        self.epoll.close()
        return executions


class Bell:
    """A descriptor that is readable from `ring` to `silence`."""

    def __init__(self) -> None:
        self._descriptor = Descriptor(os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.fd = self._descriptor.fd
        # Functions of C: no signal handler runs inside.
        self.ring = partial(os.eventfd_write, self.fd, 1)
        self.silence = partial(os.eventfd_read, self.fd)


class LoopDriver:
    """Drives executions in one event loop. All methods are for the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # True if signal handlers run on the loop's thread.
        self.is_interruptible = is_interruptible()
        self._sockets = WatchedSockets()
        # The sockets on which answers are awaited, and the number of requests in the last batch that was answered.
        self._awaited: set[WatchedSocket] = set()
        self._width = 1
        # Requests that wait for the end of this turn of the loop.
        self._gathered: dict[Scheduler, list[InferenceRequest]] = {}
        # Wakes the loop for the requests that it has gathered, and for calls from other threads. The epoll reports it
        # until it is silenced. A callback of asyncio may be lost, if a signal handler raises right before it.
        self._calls: deque[tuple[Callable[[Any], object], object]] = deque()
        self._bell = Bell() if self.is_interruptible else None
        # True from the first call of another thread until the bell is silenced, so that many calls ring once.
        self._is_ringing = False
        if self._bell is not None:
            self._sockets.epoll.register(self._bell.fd, select.EPOLLIN)
        self._is_watching = False

    def watch(self) -> None:
        """Let the loop watch from now on. Calling it twice does no harm."""
        if not self._is_watching:
            watch(self._loop, self._sockets.epoll.fileno(), self._look)
            self._is_watching = True

    def submit(self, scheduler: Scheduler, request: InferenceRequest) -> None:
        """Send a request whose waiter is in this loop. Raises what `Scheduler.submit` raises, or makes it the outcome.

        If there may be more in this turn of the loop, they are sent together at its end. A single caller does not wait
        for that.
        """
        if LoopDriver.gather(self, scheduler, request):
            return
        if self.is_interruptible and not scheduler.is_atomic:
            scheduler.submit_soon([request])
            return
        execution = scheduler.submit(request)
        if execution is not None:
            execution.offer()
            LoopDriver.drive(self, execution)

    def gather(self, scheduler: Scheduler, request: InferenceRequest) -> bool:
        """Return True if a request is sent at the end of this turn of the loop, since there may be more by then."""
        is_busy = self._width > 1 or self._awaited
        # While no instance is idle, requests gather in the queue.
        if scheduler not in self._gathered and not (is_busy and scheduler.has_idle):
            return False
        if not self._gathered:
            if self._bell is None:
                self._loop.call_soon(self._send_gathered)
            else:
                self._bell.ring()
        self._gathered.setdefault(scheduler, []).append(request)
        return True

    def _send_gathered(self) -> None:
        gathered, self._gathered = self._gathered, {}
        # One request alone has shown that its callers do not come together.
        self._width = max(map(len, gathered.values()))
        for scheduler, requests in gathered.items():
            scheduler.submit_all(requests)

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
            self._awaited.add(watched)
            if len(self._awaited) == 1 and execution.port is not None:
                self._loop.call_soon(self._look_for, watched)

    def _look_for(self, watched: WatchedSocket) -> None:
        """Look for the only answer that is awaited for a moment, as waking this thread takes longer than a quick
        model.
        """
        if len(self._awaited) == 1:
            self._take(watched, False)

    def _take(self, watched: WatchedSocket, is_here: bool = True) -> bool:
        """Read the answer for which a socket is watched. Returns False if another one does.

        If the answer `is_here` perhaps, look for it a moment, and leave it if it does not come.
        """
        execution = watched.execution
        if execution is None:
            return False
        try:
            if not execution.claim(self):
                return False
            # The bell of a stub may be rung for nothing.
            port = execution.port
            if not (execution.is_ready() if is_here or port is None else port.look()):
                execution.offer()
                return True
            watched.execution = None
            self._awaited.discard(watched)
            self._width = len(execution.requests)
            execution.scheduler.keep_pace(execution)
            execution.scheduler.finish(execution, interruptible=self.is_interruptible)
        except BaseException:
            # In one instruction: another signal may follow.
            execution.scheduler.reactor.soon.append(partial(execution.abandon, self))
            execution.scheduler.reactor.wake()
            self._awaited.discard(watched)
            raise
        return True

    def _hear(self, bell: Bell) -> None:
        """Do what the loop was woken for. Wherever a signal handler raises, the bell rings until it is done."""
        if not self._gathered and not self._calls:
            try:
                # In this order: a thread that sees it ringing has appended its call before the last look here.
                self._is_ringing = False
                bell.silence()
                if self._calls:
                    bell.ring()
            except BaseException:
                bell.ring()
                raise
            return
        if self._gathered:
            # As in `_send_gathered`.
            self._width = max(map(len, self._gathered.values()))
        for scheduler, requests in self._gathered.items():
            # This takes the requests out of the list, so each is sent once.
            scheduler.submit_soon(requests)
        self._gathered = {}
        for _ in range(len(self._calls)):
            callback, argument = self._calls[0]
            callback(argument)
            self._calls.popleft()

    def call(self, callback: Callable[[Any], object], argument: object) -> bool:
        """Call something on the loop's thread, soon; perhaps twice, if a signal handler raises in it. From any thread.

        Returns False if the loop is closed.
        """
        try:
            if self._bell is None:
                self._loop.call_soon_threadsafe(callback, argument)
                return True
            if not self._loop.is_closed():
                self._calls.append((callback, argument))
                if not self._is_ringing:
                    self._is_ringing = True
                    self._bell.ring()
                return True
        except (RuntimeError, ReferenceError):  # nobody waits there any more
            return False
        except BaseException:  # a signal handler raised, perhaps right before the bell rang
            if self._bell is not None:
                self._bell.ring()
            raise
        return False

    def _look(self) -> None:
        for place, (fd, _) in enumerate(self._sockets.epoll.poll(0)):
            if self._bell is not None and fd == self._bell.fd:
                self._hear(self._bell)
                continue
            watched = self._sockets.find(fd)
            # Finishing one of those before may have read this answer meanwhile, and sent the next batch there.
            if watched is None or (place and not watched.is_readable()):
                continue
            if not self._take(watched):
                # Another one's answer, or the end of the stub. The next `drive` watches the socket again.
                watched.execution = None
                self._awaited.discard(watched)
                self._sockets.forget(watched)

    def hand_over(self, request: InferenceRequest) -> None:
        """Give the execution of a caller that leaves to the reactor, if this loop watches for it.

        The loop may be about to end, and the others in the batch still wait.
        """
        for watched in self._sockets.all():
            execution = watched.execution
            if execution is not None and request in execution.requests:
                self._awaited.discard(watched)
                self._sockets.forget(watched)
                if execution.claim(self):
                    execution.drive_in_reactor()

    def close(self) -> None:
        """Give all executions to the reactor: the loop has ended."""
        for execution in self._sockets.close():
            if execution.claim(self):
                execution.drive_in_reactor()


class OwnDriver(LoopDriver):
    """The driver that a loop has, which ends with the loop."""

    def __del__(self) -> None:
        if getattr(self, "_sockets", None) is not None:  # a signal handler may have raised before
            self.close()


def driver_of(loop: Any) -> LoopDriver:
    """Return the driver of a loop. On the loop's thread."""
    # The loop itself keeps its driver. A table would keep loops for ever: a driver watches an execution, which
    # refers to a request, whose future refers to its loop.
    driver: LoopDriver | None = getattr(loop, "_moonpool_driver", None)
    if driver is None:
        # In this order, a loop has one driver, wherever a signal handler raises.
        driver = loop._moonpool_driver = OwnDriver(weakref.proxy(loop))  # type: ignore[arg-type]
    driver.watch()
    return driver


class LoopWaiter:
    """A caller in an event loop, which gets its outcome on the loop's thread: a `Waiter`."""

    __slots__ = ("_loop", "driver")
    may_block = interruptible = may_be_told_again = takes_many = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.driver = driver_of(loop)

    def respond(self, outcome: Outcome) -> None:
        raise NotImplementedError

    def settle(self, outcome: Outcome | None) -> None:
        """Take the outcome. On the loop's thread."""
        raise NotImplementedError

    def is_settled(self) -> bool:
        """Return True if nobody waits here any more. On the loop's thread."""
        raise NotImplementedError

    def _is_here(self) -> bool:
        return running_loop() is self._loop

    def resolve(self, outcome: Outcome | None) -> None:
        if running_loop() is self._loop:
            self.settle(outcome)
        else:
            self.driver.call(self.settle, outcome)

    def appoint(self, execution: Execution) -> bool:
        if LoopWaiter._is_here(self):
            self.driver.drive(execution)
            return True
        return self.driver.call(self._drive, execution)

    def gather(self, scheduler: Scheduler, request: InferenceRequest) -> bool:
        return LoopWaiter._is_here(self) and self.driver.gather(scheduler, request)

    def _drive(self, execution: Execution) -> None:
        try:
            if not self.is_settled():
                self.driver.drive(execution)
                return
        except BaseException:
            execution.scheduler.reactor.soon.append(partial(execution.abandon, self))
            execution.scheduler.reactor.wake()
            raise
        if execution.claim(self):  # the caller left meanwhile
            execution.drive_in_reactor()

    def submit(self, scheduler: Scheduler, request: InferenceRequest) -> None:
        """Send a request of this waiter. Raises what `Scheduler.submit` raises."""
        request.waiter = self
        try:
            self.driver.submit(scheduler, request)
        except BaseException:
            # In one instruction: another signal may follow.
            scheduler.reactor.soon.append(partial(scheduler.leave, request))
            scheduler.reactor.wake()
            raise

    def leave(self, scheduler: Scheduler, request: InferenceRequest) -> None:
        """Cancel the request, as nobody waits for it any more."""
        self.driver.hand_over(request)
        scheduler.leave_soon(request)


class TaskWaiter(LoopWaiter):
    """A task that awaits a future of its loop."""

    __slots__ = ("future",)
    may_be_told_again = True

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.future: asyncio.Future[Outcome | None] = loop.create_future()

    def settle(self, outcome: Outcome | None) -> None:
        if not self.future.done():
            self.future.set_result(outcome)

    def is_settled(self) -> bool:
        return self.future.done()


async def wait_for_outcome(scheduler: Scheduler, request: InferenceRequest, timeout_s: float | None) -> Outcome | None:
    """Submit a request and await its outcome. Cancelling the task cancels the request.

    Raises what `Scheduler.submit` raises, `InvalidRequest` and `RequestTimedOut`.
    """
    check_timeout(timeout_s)
    waiter = TaskWaiter(asyncio.get_running_loop())
    try:
        waiter.submit(scheduler, request)
        if timeout_s is None:
            return await waiter.future
        async with asyncio.timeout(timeout_s):
            return await waiter.future
    except TimeoutError:
        waiter.leave(scheduler, request)
        raise RequestTimedOut("Request timeout expired") from None
    except BaseException:
        waiter.leave(scheduler, request)
        raise
