"""The runtime's own thread: descriptors that become readable, and things to do at a time.

Callers wait for their answers themselves where they can. What has no caller to wait for it happens here: the
control channels of all stubs, their output, their deaths, delayed batches, deadlines. Callbacks must
not block; what takes long gets a thread of its own.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from moonpool.runtime.poller import Poller
from moonpool.runtime.timer import Timer

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("moonpool")
_ONCE = select.EPOLLIN | select.EPOLLONESHOT


class Reactor:
    """Runs callbacks on one daemon thread. All methods may be called from any thread."""

    def __init__(self, name: str = "moonpool-reactor") -> None:
        self._epoll = Poller()
        self._timer = Timer()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._epoll.register(self._timer.fileno(), select.EPOLLIN)
        self._readers: dict[int, Callable[[], object]] = {}
        # What is watched once at a time stays registered between the times.
        self._once: dict[int, Callable[[], object]] = {}
        self._armed: set[int] = set()
        # Of those that are watched: whose room is waited for, and who is left alone for a while.
        self._writers: set[int] = set()
        self._paused: dict[int, object] = {}
        self._soon: deque[Callable[[], object]] = deque()
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._running = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether this is the reactor's thread."""
        return threading.get_ident() == self._thread.ident

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run `callback` on the reactor's thread, in the order of the calls."""
        self._soon.append(callback)
        if not self.is_here:
            self._wake()

    def call_at(self, when: float, callback: Callable[[], object]) -> None:
        """Run `callback` at `time.monotonic()` seconds `when`, to some microseconds."""
        self.call_soon(lambda: self._push(when, callback))

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Run `callback` after so many seconds."""
        self.call_at(time.monotonic() + delay_s, callback)

    def watch(self, fd: int, callback: Callable[[], object]) -> None:
        """Run `callback` whenever `fd` is readable or at its end, until `forget`."""
        self.call_soon(lambda: self._watch(fd, callback))

    def watch_once(self, fd: int, callback: Callable[[], object]) -> None:
        """Run `callback` once, when `fd` is readable or at its end. `fd` must not be closed before.

        It stays known, as it is soon watched again, until it is closed or `forget` comes.
        """
        if self.is_here:
            self._arm(fd, callback)
        else:
            self.call_soon(lambda: self._arm(fd, callback))

    def _arm(self, fd: int, callback: Callable[[], object]) -> None:
        self._once[fd] = callback
        try:
            self._epoll.modify(fd, _ONCE)
        except FileNotFoundError:  # it is new, or was closed meanwhile and is another one now
            self._epoll.register(fd, _ONCE)
            self._armed.add(fd)

    def watch_room(self, fd: int, *, wanted: bool) -> None:
        """Run the callback of a watched `fd` also whenever it can be written to. On the reactor's thread only.

        Nothing happens where `fd` was forgotten meanwhile: another file may get its number.
        """
        if wanted and fd in self._readers:
            self._writers.add(fd)
        else:
            self._writers.discard(fd)
        self._arrange(fd)

    def pause(self, fd: int, delay_s: float) -> None:
        """Leave what can be read from a watched `fd` there for so long. On the reactor's thread only."""
        if fd not in self._readers or fd in self._paused:
            return
        pause = self._paused[fd] = object()
        self._arrange(fd)

        def resume() -> None:
            # Not of another file, which got the number meanwhile.
            if self._paused.get(fd) is pause:
                del self._paused[fd]
                self._arrange(fd)

        self.call_later(delay_s, resume)

    def _arrange(self, fd: int) -> None:
        """Say what is waited for. The end of `fd` is seen in any case."""
        if fd in self._readers:
            read = 0 if fd in self._paused else select.EPOLLIN
            self._epoll.modify(fd, read | (select.EPOLLOUT if fd in self._writers else 0))

    def forget(self, fd: int) -> None:
        """Watch `fd` no more. On the reactor's thread only, and before `fd` is closed."""
        if self._readers.pop(fd, None) is not None or fd in self._armed:
            self._once.pop(fd, None)
            self._armed.discard(fd)
            self._writers.discard(fd)
            self._paused.pop(fd, None)
            with contextlib.suppress(FileNotFoundError):
                self._epoll.unregister(fd)

    def close(self) -> None:
        """Stop the thread when what was to run soon has run. May be called many times."""
        if not self._running:
            return
        self.call_soon(self._stop)
        if not self.is_here:
            self._thread.join()
            self._epoll.close()
            self._timer.close()
            # Whoever calls later must not write to a file that got its number.
            wake_fd, self._wake_fd = self._wake_fd, -1
            os.close(wake_fd)

    def _stop(self) -> None:
        self._running = False

    def _wake(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed: there is nobody to wake
            os.eventfd_write(self._wake_fd, 1)

    def _push(self, when: float, callback: Callable[[], object]) -> None:
        heapq.heappush(self._later, (when, next(self._numbers), callback))

    def _watch(self, fd: int, callback: Callable[[], object]) -> None:
        known = fd in self._readers
        self._readers[fd] = callback
        if not known:
            self._epoll.register(fd, select.EPOLLIN)

    def _run(self) -> None:
        while True:
            self._run_soon()
            self._run_due()
            if not self._running:
                return
            if self._soon:
                continue
            # epoll's timeouts are whole milliseconds; a batch may wait for a few microseconds.
            self._timer.set(self._later[0][0] if self._later else None)
            for fd, _ in self._epoll.poll():
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                elif fd == self._timer.fileno():
                    self._timer.clear()
                elif fd in self._once:
                    self._call(self._once.pop(fd))
                else:
                    self._call(self._readers.get(fd, _nothing))

    def _run_soon(self) -> None:
        for _ in range(len(self._soon)):
            self._call(self._soon.popleft())

    def _run_due(self) -> None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            self._call(heapq.heappop(self._later)[2])

    @staticmethod
    def _call(callback: Callable[[], object]) -> None:
        try:
            callback()
        except BaseException:  # whatever it was, all stubs depend on this thread
            _log.exception("a callback of the reactor failed: %r", callback)


def _nothing() -> None:
    """For a descriptor that was forgotten in the same round in which it became readable."""
