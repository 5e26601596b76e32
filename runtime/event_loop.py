"""The event loop of a server, which outlives that the kernel has no watches of epoll left for its user.

libuv ends the process where epoll refuses a descriptor for any reason but that it is there already. So what libuv is about
to watch is put into its epoll here, before: where that fails, it fails for one connection. The kernel counts watches for
all processes of a user (`/proc/sys/fs/epoll/max_user_watches`), so another program can take all of them at any moment.

Theory of operation. All of this happens on the loop's thread, and libuv goes to the kernel only after all that the loop
was to do, so nothing comes between. A descriptor that is in the epoll stays there until it is closed, or until libuv meets an
event of one that it does not watch at the moment, and takes it out: so a place is asked for before reading is resumed, too.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
from typing import TYPE_CHECKING, TypeVar

from moonpool.runtime.poller import NO_WATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

T = TypeVar("T")
_EPOLL = "anon_inode:[eventpoll]"


class Watches:
    """The epoll of a loop. For the loop's thread."""

    def __init__(self, epoll_fd: int) -> None:
        """Own a descriptor of it."""
        self._epoll = select.epoll.fromfd(epoll_fd)

    def hold(self, fd: int) -> bool:
        """Have a place for `fd`, which libuv is about to watch; False where there is none, and libuv must not."""
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
    """Of a loop that was not made here: everything is left to it."""

    def __init__(self) -> None:
        pass

    def hold(self, fd: int) -> bool:  # noqa: ARG002 - as above
        return True

    def close(self) -> None:
        pass


def watches_of(loop: asyncio.AbstractEventLoop) -> Watches:
    """The epoll of the loop."""
    watches: Watches | None = getattr(loop, "_moonpool_watches", None)
    return watches or _NoWatches()


def watch(
    loop: asyncio.AbstractEventLoop, fd: int, callback: Callable[..., object], *arguments: object
) -> None:
    """As `loop.add_reader`. Raises OSError where there is no place for `fd`."""
    loop.add_reader(fd, callback, *arguments)
    # Afterwards: libuv has only tried whether there was a place.
    if not watches_of(loop).hold(fd):
        loop.remove_reader(fd)
        raise OSError(errno.ENOSPC, "this user has no watches of epoll left")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As `uvloop.run`."""
    with asyncio.Runner(loop_factory=_new_loop) as runner:
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
    """The descriptors of epolls that this process has."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _EPOLL:
                found.add(int(name))
        except FileNotFoundError:  # the descriptor of the folder itself
            continue
    return found
