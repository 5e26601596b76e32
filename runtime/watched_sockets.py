"""The sockets of stubs that somebody waits for beside other things, behind one epoll."""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonpool.runtime.backend import Pending
    from moonpool.runtime.execution import Execution


class WatchedSocket:
    """One stub's socket, under a descriptor number that only its owner uses.

    The socket's own number may be closed by another thread and be given to another file while it is watched.
    """

    __slots__ = ("_poll", "execution", "fd", "link", "round")

    def __init__(self, link: Pending) -> None:
        """Raises OSError where the stub has ended, and was cleared away."""
        self.link = link
        self.fd = os.dup(link.fileno())
        # What it is watched for.
        self.execution: Execution | None = None
        # In which round of looking that came, for owners that count them.
        self.round = 0
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def is_readable(self) -> bool:
        return bool(self._poll.poll(0))


class WatchedSockets:
    """A table of them; `epoll` tells the `fd` of those that are readable. The owner sees to threads."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self._by_link: dict[object, WatchedSocket] = {}
        self._by_fd: dict[int, WatchedSocket] = {}

    def of(self, link: Pending) -> WatchedSocket:
        """Return the socket of a stub, which is watched from now on.

        Raises OSError as `WatchedSocket` does, and if the kernel has no watches left for this user.
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
        """Watch nothing any more; returns what was watched for."""
        executions = [each.execution for each in self.all() if each.execution is not None]
        for watched in self.all():
            self.forget(watched)
        self.epoll.close()
        return executions
