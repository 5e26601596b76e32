"""Waits for descriptors, even if the kernel has no watches left for this user.

The kernel limits the watches of epoll for all processes of a user (`/proc/sys/fs/epoll/max_user_watches`), so another program
can take all of them. Descriptors that epoll refuses then are waited for with `poll`, which needs no watches and more time.
"""

from __future__ import annotations

import errno
import select

# The errors for no watch, and no memory for one.
NO_WATCH = (errno.ENOSPC, errno.ENOMEM)
_DISARMED = -1


class Poller:
    """As `select.epoll`, of which it has these methods. For one thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        # The descriptors that epoll has no room for, with the events that are waited for.
        self._beyond: dict[int, int] = {}

    def register(self, fd: int, events: int) -> None:
        """Wait for `events` of `fd`. Raises `FileExistsError` if it is known."""
        if fd in self._beyond:
            raise FileExistsError(errno.EEXIST, "it is waited for already")
        try:
            self._epoll.register(fd, events)
        except OSError as error:
            if error.errno not in NO_WATCH:
                raise
            self._beyond[fd] = events

    def modify(self, fd: int, events: int) -> None:
        """Wait for other events. Raises `FileNotFoundError` if `fd` is not known."""
        if fd in self._beyond:
            self._beyond[fd] = events
        else:
            self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Wait for `fd` no more. Raises `FileNotFoundError` if it is not known."""
        if self._beyond.pop(fd, None) is None:
            self._epoll.unregister(fd)

    def poll(self) -> list[tuple[int, int]]:
        """Wait until something has happened; returns descriptors and events."""
        if not self._beyond:
            return self._epoll.poll()
        poll = select.poll()
        poll.register(self._epoll.fileno(), select.POLLIN)
        for fd, events in self._beyond.items():
            if events != _DISARMED:
                poll.register(fd, events & (select.POLLIN | select.POLLOUT))
        found: list[tuple[int, int]] = []
        for fd, events in poll.poll():
            if fd == self._epoll.fileno():
                found += self._epoll.poll(0)
                continue
            found.append((fd, events))
            if self._beyond[fd] & select.EPOLLONESHOT:
                self._beyond[fd] = _DISARMED
        return found

    def close(self) -> None:
        """Give up the epoll. May be called many times."""
        self._epoll.close()
