"""The runtime's own thread, which waits for descriptors and for moments.

Callers wait for their answers themselves if they can. The reactor does all that has no caller: the
control channels of all stubs, their output, their deaths, delayed batches, deadlines. Callbacks must
not block; long work gets a thread of its own.

Theory of operation. All dictionaries and the heap of moments belong to the reactor's thread, so there is no lock.
Another thread appends a callback to `soon` and then writes to the eventfd. The order matters: if the reactor runs the
callback before it sees the eventfd, it wakes once for nothing; the other way round, a callback could wait for the next
event. The reactor looks at `soon` again right before it waits. In each turn it runs as many callbacks as it found, and
`_MOST_SOON` at most. Then it runs what is due and looks at the descriptors, without waiting if there are more
callbacks, so callbacks that add others keep it from neither.

The numbers of descriptors are used again. A thread may close one while an event for it is already in the list that
`poll` returned, and open another file with the same number. Therefore a descriptor is forgotten on the reactor's thread
before it is closed, a pause is undone only if it is still the same one, and an event of a descriptor without a callback
is ignored.

A descriptor that is watched once at a time stays registered in epoll, disarmed, so that the next time takes one call of
the kernel. The kernel drops the registration when the file is closed; `arm` then gets FileNotFoundError, and registers
the new file with that number.

A callback that raises is logged, whatever it raises, because all stubs depend on this thread. The program's handlers
of the log run on another one (`runtime/log.py`).

Closing: `close` waits until the thread has run what was to run soon, then closes the descriptors. A later `call_soon`
finds no eventfd, and its callback never runs. A signal handler may raise while `close` waits, and then the next
`close` does the rest. So it waits for a bare lock, as Python counts a thread as ended for which a `join` was
interrupted.

The kernel limits the watches of epoll for all processes of a user (`/proc/sys/fs/epoll/max_user_watches`), so another
program can take all of them. `Poller` waits for descriptors that epoll refuses with `poll`, which needs no watches and
more time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import itertools
import os
import select
import threading
from _thread import get_ident
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Generic, TypeVar

from moonpool.ipc.errors import Closed
from moonpool.ipc.signals import at_once
from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.process.threads import start_thread

_log = RuntimeLog("moonpool")
_ONCE = select.EPOLLIN | select.EPOLLONESHOT
# The callbacks of one turn: a look at the descriptors costs as much as a few of them.
_MOST_SOON = 64
# The time between two looks of a thread that waits whether the reactor has ended.
_LOOK_S = 1.0
R = TypeVar("R")


class _Call(Generic[R]):
    """A call on the reactor's thread for which another thread waits, on a bare lock: a signal handler may raise
    there.
    """

    __slots__ = ("_action", "done", "error", "results")

    def __init__(self, action: Callable[[], R]) -> None:
        self._action = action
        self.done = threading.Lock()
        self.done.acquire()
        self.results: list[R] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.results.append(self._action())
        except BaseException as error:
            self.error = error
        finally:
            self.done.release()


def _nothing() -> None:
    """Do nothing."""


class Reactor:
    """Runs callbacks on one daemon thread. All methods may be called from any thread."""

    def __init__(self, name: str = "moonpool-reactor") -> None:
        """Start the thread. Raises `OutOfThreads`."""
        self._epoll = Poller()
        self._timer = Timer()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._epoll.register(self._timer.fileno(), select.EPOLLIN)
        self._readers: dict[int, Callable[[], object]] = {}
        # Descriptors that are watched once at a time stay registered in between.
        self._once: dict[int, Callable[[], object]] = {}
        self._armed: set[int] = set()
        # Watched descriptors that the reactor also waits to write to, and those that it does not read for a while.
        self._writers: set[int] = set()
        self._paused: dict[int, object] = {}
        # Appending here and then `wake` is `call_soon`. An append alone is one step, in which no signal handler runs.
        self.soon: deque[Callable[[], object]] = deque()
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._running = True
        # True once it runs nothing any more.
        self.has_ended = False
        # Taken until then.
        self._ends = threading.Lock()
        self._ends.acquire()
        # The thread sets it before it runs anything.
        self._ident = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            start_thread(self._thread)
        except OutOfThreads:
            self._close_descriptors()
            raise

    @property
    def is_here(self) -> bool:
        """True on the reactor's thread."""
        return get_ident() == self._ident

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run `callback` on the reactor's thread, in the order of the calls."""
        self.soon.append(callback)
        if not self.is_here:
            self.wake()

    def run(self, action: Callable[[], object], timeout_s: float) -> bool:
        """Run `action` on the reactor's thread, and wait for its end. Returns False if it has not ended in time.

        It may still run later then. What it raises is logged.
        """
        if self.is_here:
            self._call(action)
            return True
        call = _Call(partial(self._call, action))
        self.call_soon(call.run)
        return call.done.acquire(timeout=timeout_s)

    def ask(self, action: Callable[[], R]) -> R:
        """Run `action` on the reactor's thread, and return its result here, or raise its error. `action` must be quick.

        If a signal handler raises meanwhile, `action` runs all the same, or not at all. Raises `Closed` if the reactor
        has ended.
        """
        if self.is_here:
            return action()
        call = _Call(action)
        self.call_soon(call.run)
        while not call.done.acquire(timeout=_LOOK_S):
            if self.has_ended and not call.done.acquire(blocking=False):
                raise Closed("the runtime has ended")
        if call.error is not None:
            raise call.error
        return call.results[0]

    def flush(self, timeout_s: float) -> None:
        """Wait until the reactor has run what was to run soon, or for so long."""
        self.run(_nothing, timeout_s)

    def call_at(self, when: float, callback: Callable[[], object]) -> None:
        """Run `callback` at `when`, in seconds of `time.monotonic()`, with an accuracy of some microseconds."""
        self.call_soon(lambda: self._push(when, callback))

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Run `callback` after so many seconds."""
        self.call_at(monotonic() + delay_s, callback)

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Run `callback` whenever `fd` is readable or at its end, until `forget`."""
        self.call_soon(lambda: self._watch(fd, callback))

    def watch_once(self, fd: int, callback: Callable[[], object]) -> None:
        """Run `callback` once, when `fd` is readable or at its end. `fd` must not be closed before.

        It stays registered until it is closed or `forget` is called, as it is mostly watched again soon.
        """
        if self.is_here:
            self.arm(fd, callback)
        else:
            self.call_soon(lambda: self.arm(fd, callback))

    def arm(self, fd: int, callback: Callable[[], object]) -> None:
        """Do the same as `watch_once`, on the reactor's thread only."""
        self._once[fd] = callback
        try:
            self._epoll.modify(fd, _ONCE)
        except FileNotFoundError:  # it is new, or was closed meanwhile and is another file now
            self._epoll.register(fd, _ONCE)
            self._armed.add(fd)

    def watch_room(self, fd: int, *, wanted: bool) -> None:
        """Run the callback of a watched `fd` also when it can be written to. On the reactor's thread only.

        Does nothing if `fd` was forgotten meanwhile, as another file may have its number.
        """
        if wanted and fd in self._readers:
            self._writers.add(fd)
        else:
            self._writers.discard(fd)
        self._arrange(fd)

    def pause(self, fd: int, delay_s: float) -> None:
        """Do not read from a watched `fd` for so many seconds. On the reactor's thread only."""
        if fd not in self._readers or fd in self._paused:
            return
        pause = self._paused[fd] = object()
        self._arrange(fd)

        def resume() -> None:
            # Another file may have got the number meanwhile.
            if self._paused.get(fd) is pause:
                del self._paused[fd]
                self._arrange(fd)

        self.call_later(delay_s, resume)

    def _arrange(self, fd: int) -> None:
        """Tell the kernel the events to wait for. It reports the end of `fd` in any case."""
        if fd in self._readers:
            read = 0 if fd in self._paused else select.EPOLLIN
            self._epoll.modify(fd, read | (select.EPOLLOUT if fd in self._writers else 0))

    def forget(self, fd: int) -> None:
        """Stop watching `fd`. On the reactor's thread only, and before `fd` is closed."""
        if self._readers.pop(fd, None) is not None or fd in self._armed:
            self._once.pop(fd, None)
            self._armed.discard(fd)
            self._writers.discard(fd)
            self._paused.pop(fd, None)
            with contextlib.suppress(FileNotFoundError):
                self._epoll.unregister(fd)

    def close(self) -> None:
        """Stop the thread after the callbacks of `call_soon` have run. May be called many times."""
        if self._wake_fd < 0:
            return
        self.call_soon(self._stop)
        if not self.is_here:
            with self._ends:
                self._thread.join()
                self._close_descriptors()

    def _close_descriptors(self) -> None:
        if self._wake_fd < 0:
            return
        self._epoll.close()
        self._timer.close()
        # A later call must not write to another file with its number.
        at_once(partial(setattr, self, "_wake_fd", -1), partial(os.close, self._wake_fd))

    def _stop(self) -> None:
        self._running = False

    def wake(self) -> None:
        """Have the reactor look at `soon`."""
        with contextlib.suppress(OSError, ValueError):  # closed: there is no thread to wake
            os.eventfd_write(self._wake_fd, 1)

    def _push(self, when: float, callback: Callable[[], object]) -> None:
        heapq.heappush(self._later, (when, next(self._numbers), callback))

    def _watch(self, fd: int, callback: Callable[[], object]) -> None:
        known = fd in self._readers
        self._readers[fd] = callback
        if not known:
            self._epoll.register(fd, select.EPOLLIN)

    def _run(self) -> None:
        self._ident = get_ident()
        try:
            self._turn()
        finally:
            self.has_ended = True
            self._ends.release()

    def _turn(self) -> None:
        """Run callbacks, one turn after the other, until the end."""
        soon, later, readers, once = self.soon, self._later, self._readers, self._once
        wake_fd, timer_fd = self._wake_fd, self._timer.fileno()
        while True:
            if soon:
                self._run_soon()
            if later:
                self._run_due()
            if not self._running:
                return
            is_busy = bool(soon)
            if not is_busy:
                # epoll's timeouts are whole milliseconds, and a batch may have to wait for some microseconds.
                self._timer.set(later[0][0] if later else None)
            for fd, _ in self._epoll.poll(waits=not is_busy):
                # No local name for a callback: it would keep what the callback refers to until the next event.
                if fd in once:
                    self._call(once.pop(fd))
                elif fd in readers:
                    self._call(readers[fd])
                elif fd == wake_fd:
                    os.eventfd_read(fd)
                elif fd == timer_fd:
                    self._timer.clear()
                # Any other descriptor was forgotten in this round.

    def _run_soon(self) -> None:
        for _ in range(min(len(self.soon), _MOST_SOON)):
            self._call(self.soon.popleft())

    def _run_due(self) -> None:
        now = monotonic()
        while self._later and self._later[0][0] <= now:
            self._call(heapq.heappop(self._later)[2])

    @staticmethod
    def _call(callback: Callable[[], object]) -> None:
        try:
            callback()
        except BaseException:  # all stubs depend on this thread
            # Memory for the record may be short, too.
            with contextlib.suppress(BaseException):
                _log.exception("a callback of the reactor failed: %r", callback)


# The errors for no watch, and no memory for one.
NO_WATCH = (errno.ENOSPC, errno.ENOMEM)
_DISARMED = -1


class Poller:
    """Waits for descriptors as `select.epoll`, with some of its methods, even without watches. For one thread."""

    __slots__ = ("_beyond", "_epoll")

    def __init__(self) -> None:
        self._epoll = select.epoll()
        # The descriptors for which epoll has no watch, with their events.
        self._beyond: dict[int, int] = {}

    def register(self, fd: int, events: int) -> None:
        """Wait for `events` of `fd`. Raises `FileExistsError` if it is registered."""
        if fd in self._beyond:
            raise FileExistsError(errno.EEXIST, "it is registered already")
        try:
            self._epoll.register(fd, events)
        except OSError as error:
            if error.errno not in NO_WATCH:
                raise
            self._beyond[fd] = events

    def modify(self, fd: int, events: int) -> None:
        """Wait for other events. Raises `FileNotFoundError` if `fd` is not registered."""
        if fd in self._beyond:
            self._beyond[fd] = events
        else:
            self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Stop waiting for `fd`. Raises `FileNotFoundError` if it is not registered."""
        if self._beyond.pop(fd, None) is None:
            self._epoll.unregister(fd)

    def poll(self, *, waits: bool = True) -> list[tuple[int, int]]:
        """Return descriptors with their events. Waits for an event unless `waits` is False."""
        timeout = None if waits else 0
        if not self._beyond:
            return self._epoll.poll(timeout)
        poll = select.poll()
        poll.register(self._epoll.fileno(), select.POLLIN)
        for fd, events in self._beyond.items():
            if events != _DISARMED:
                poll.register(fd, events & (select.POLLIN | select.POLLOUT))
        found: list[tuple[int, int]] = []
        for fd, events in poll.poll(timeout):
            if fd == self._epoll.fileno():
                found += self._epoll.poll(0)
                continue
            found.append((fd, events))
            if self._beyond[fd] & select.EPOLLONESHOT:
                self._beyond[fd] = _DISARMED
        return found

    def close(self) -> None:
        """Close the epoll. May be called many times."""
        self._epoll.close()


_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
# Later than any machine runs, and a number that the kernel takes.
_FAR_S = 1e9


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Timer:
    """A moment of the monotonic clock as a descriptor that becomes readable then: Linux's timerfd. One thread at a
    time.

    The standard library has it only from Python 3.13 on.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._when: float | None = None

    def fileno(self) -> int:
        """Return the descriptor, which is readable from the moment on."""
        return self._fd

    def set(self, when: float | None) -> None:
        """Set the moment to `when`, in seconds of `time.monotonic()`; None for never."""
        if when == self._when:
            return
        self._when = when
        # All zero would disarm it.
        nanoseconds = 0 if when is None else max(1, int(min(when, _FAR_S) * 1e9))
        spec = _Itimerspec()
        spec.value.seconds, spec.value.nanoseconds = divmod(nanoseconds, 1_000_000_000)
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> None:
        """Make the descriptor unreadable again after the moment."""
        self._when = None
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)

    def close(self) -> None:
        """Close the descriptor. May be called many times."""
        if self._fd >= 0:
            at_once(partial(setattr, self, "_fd", -1), partial(os.close, self._fd))
