"""The event loop of a server, which goes on if its user has no watches of epoll left.

libuv aborts the process if epoll refuses a descriptor for any reason except that it has it already. So every descriptor
that libuv is about to watch is first put into its epoll here. If that fails, only one connection fails. The kernel
limits the watches of all processes of a user together (`/proc/sys/fs/epoll/max_user_watches`), so another program can
take them all.

Theory of operation. All of this happens on the loop's thread. libuv calls the kernel only after the loop's callbacks,
so it cannot act between the check here and its own. A descriptor stays in the epoll until it is closed, with one
exception: if libuv gets an event of a descriptor that it does not watch at the moment, it removes the descriptor. So
call `hold` before reading is resumed, too.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from moonpool.runtime.process.reactor import NO_WATCH
from moonpool.runtime.process.threads import trusted_handlers

T = TypeVar("T")
_EPOLL = "anon_inode:[eventpoll]"


class Watches:
    """The epoll of a loop. For the loop's thread."""

    def __init__(self, epoll_fd: int) -> None:
        """Own a descriptor of the epoll from now on."""
        self._epoll = select.epoll.fromfd(epoll_fd)

    def hold(self, fd: int) -> bool:
        """Get a place for `fd`, which libuv is about to watch. If this returns False, libuv must not watch it."""
        try:
            self._epoll.register(fd, 0)
        except FileExistsError:
            return True
        except OSError as error:
            if error.errno in NO_WATCH:
                return False
            raise
        return True

    def close(self) -> None:
        self._epoll.close()


class _NoWatches(Watches):
    """Stands for the epoll of a loop that was not made here, and does nothing."""

    def __init__(self) -> None:
        pass

    def hold(self, fd: int) -> bool:  # noqa: ARG002 - as above
        return True

    def close(self) -> None:
        pass


def watches_of(loop: asyncio.AbstractEventLoop) -> Watches:
    """Return the epoll of a loop."""
    watches: Watches | None = getattr(loop, "_moonpool_watches", None)
    return watches or _NoWatches()


def watch(loop: asyncio.AbstractEventLoop, fd: int, callback: Callable[..., object], *arguments: object) -> None:
    """Call `loop.add_reader`. Raises OSError if the epoll has no place for `fd`."""
    loop.add_reader(fd, callback, *arguments)
    # After `add_reader`, which adds the descriptor for a test, and removes it again.
    if not watches_of(loop).hold(fd):
        loop.remove_reader(fd)
        raise _no_watches()


def _no_watches() -> OSError:
    return OSError(errno.ENOSPC, "this user has no watches of epoll left")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `uvloop.run` does. No signal handler of the process may raise meanwhile."""
    with trusted_handlers(), asyncio.Runner(loop_factory=_new_loop) as runner:
        loop = runner.get_loop()
        try:
            return runner.run(main)
        finally:
            watches_of(loop).close()


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop  # only servers have it

    before = _epolls()
    loop = uvloop.new_event_loop()
    made = _epolls() - before
    if len(made) == 1:
        loop._moonpool_watches = Watches(os.dup(made.pop()))  # type: ignore[attr-defined]
    return loop


def _epolls() -> set[int]:
    """List the descriptors of epolls that this process has."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _EPOLL:
                found.add(int(name))
        except FileNotFoundError:  # the descriptor of the folder itself
            continue
    return found
