"""The sockets of stubs that an event loop or a poller watches beside other things, behind one epoll.

Theory of operation. A stub's socket belongs to its link, which another thread may close at any time; its number can then
be given to another file while it is still watched. So a watcher duplicates the descriptor and watches the duplicate,
which only it closes. Nothing here takes a lock: an event loop uses its table on its own thread, and gRPC's poller guards
its table itself. `Execution.claim` decides which party reads an answer.
"""

from __future__ import annotations

import os
import select

from moonpool.runtime.model.backend import Pending
from moonpool.runtime.schedule.scheduler import Execution


class WatchedSocket:
    """One stub's socket, under a descriptor number that only its watcher uses."""

    __slots__ = ("_poll", "execution", "fd", "link", "round")

    def __init__(self, link: Pending) -> None:
        """Duplicate the socket of a stub. Raises OSError if the stub has ended and its socket is closed."""
        self.link = link
        self.fd = os.dup(link.fileno())
        # The execution whose answer is to come.
        self.execution: Execution | None = None
        # The round of polling in which the execution was set, for watchers that count them.
        self.round = 0
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def is_readable(self) -> bool:
        return bool(self._poll.poll(0))


class WatchedSockets:
    """A table of watched sockets. `epoll` reports the `fd` of those that are readable. Not thread-safe."""

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
            try:
                self.epoll.register(watched.fd, select.EPOLLIN)
            except OSError:
                os.close(watched.fd)
                raise
            self._by_link[link] = self._by_fd[watched.fd] = watched
        return watched

    def find(self, fd: int) -> WatchedSocket | None:
        return self._by_fd.get(fd)

    def forget(self, watched: WatchedSocket) -> None:
        del self._by_link[watched.link], self._by_fd[watched.fd]
        self.epoll.unregister(watched.fd)
        os.close(watched.fd)

    def all(self) -> list[WatchedSocket]:
        return list(self._by_link.values())

    def close(self) -> list[Execution]:
        """Stop watching. Returns the executions whose answers have not come."""
        executions = [each.execution for each in self.all() if each.execution is not None]
        for watched in self.all():
            self.forget(watched)
        self.epoll.close()
        return executions
