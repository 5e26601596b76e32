"""The thread that waits for the answers of stubs to requests that came over gRPC.

The polling thread sends a request and goes back to its queue, so another one waits on the stubs' sockets, for all
of them. Neither wakes the other: what wakes each is what it waits for.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.runtime.execution import Execution


_log = logging.getLogger("moonpool")


class _Watched:
    """A stub's socket under a number of its own, as the socket may be closed and the number given to another."""

    __slots__ = ("execution", "fd", "link", "round")

    def __init__(self, link: object, fd: int) -> None:
        self.link = link
        self.fd = os.dup(fd)
        self.execution: Execution | None = None
        # In which round of looking the execution came.
        self.round = 0


class Answers:
    """Drives executions. `drive` is for any thread."""

    def __init__(self, turn: threading.Lock) -> None:
        """`turn` is held by whoever works off an event: see `grpc.core`."""
        self._turn = turn
        self._lock = threading.Lock()
        self._by_link: dict[object, _Watched] = {}
        self._by_fd: dict[int, _Watched] = {}
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._is_closed = False
        self._round = 0
        self._thread = threading.Thread(target=self._run, name="moonpool-grpc-answers", daemon=True)
        self._thread.start()

    def drive(self, execution: Execution) -> bool:
        """Wait for the answer of an execution that is offered, and claim it when it is there.

        False where nobody waits here any more.
        """
        link = execution.pending
        with self._lock:
            if self._is_closed:
                return False
            if not execution.is_offered:
                return True
            watched = self._by_link.get(link)
            if watched is None:
                try:
                    watched = _Watched(link, link.fileno())
                except OSError:  # the stub has ended, and was cleared away
                    return False
                self._by_link[link] = watched
                self._by_fd[watched.fd] = watched
                self._epoll.register(watched.fd, select.EPOLLIN)
            watched.execution = execution
            watched.round = self._round
        return True

    def _run(self) -> None:
        while True:
            ready = self._epoll.poll()
            with self._lock:
                self._round += 1
            for fd, _ in ready:
                if fd == self._wake_fd:
                    return
                execution = self._take(fd)
                if execution is not None and execution.claim(self):
                    self._finish(execution)

    def _finish(self, execution: Execution) -> None:
        try:
            with self._turn:
                execution.finish()
        except BaseException:  # all clients depend on this thread
            _log.exception("an answer could not be handed out")

    def _take(self, fd: int) -> Execution | None:
        with self._lock:
            watched = self._by_fd.get(fd)
            if watched is None:
                return None
            execution = watched.execution
            if execution is not None and watched.round == self._round:
                # It came after the look: what was seen may have been the answer to somebody else, who has read it.
                return None
            watched.execution = None
            if execution is None or not execution.is_offered:
                # Somebody else's answer, or the end of the stub. Whoever comes next adds it again.
                self._forget(watched)
            return execution

    def _forget(self, watched: _Watched) -> None:
        del self._by_link[watched.link], self._by_fd[watched.fd]
        self._epoll.unregister(watched.fd)
        os.close(watched.fd)

    def close(self) -> None:
        """Wait no more; what is executing is left to the reactors of its models."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        for watched in list(self._by_link.values()):
            execution = watched.execution
            self._forget(watched)
            if execution is not None and execution.claim(self):
                execution.drive_in_reactor()
        self._epoll.close()
        os.close(self._wake_fd)
