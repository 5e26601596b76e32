"""The event loop of a server, which goes on if its user has no watches of epoll left.

libuv aborts the process if epoll refuses a descriptor for any reason except that it has it already. So every descriptor
that libuv is about to watch is first put into its epoll here. If that fails, only one connection fails. The kernel
limits the watches of all processes of a user together (`/proc/sys/fs/epoll/max_user_watches`), so another program can
take them all.

Theory of operation. All of this happens on the loop's thread. libuv calls the kernel only after the loop's callbacks,
so it cannot act between the check here and its own. A descriptor stays in the epoll until it is closed, with one
exception: if libuv gets an event of a descriptor that it does not watch at the moment, it removes the descriptor. So
call `hold` before reading is resumed, too.

A future of asyncio has its loop run a task in the next turn, after a look at all descriptors. For that the loop gives
up the interpreter's lock, and then mostly waits for the thread that has woken it. So a `Wakeup` runs the task itself.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
from collections.abc import Callable, Coroutine
from contextvars import Context
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


class Wakeup(asyncio.Future[None]):
    """A future that runs the one task that awaits it as soon as it is set. Set it in a callback of the loop, and in no
    task.
    """

    _go_on: Callable[[Wakeup], object] | None = None

    def add_done_callback(self, fn: Callable[[Any], object], /, *, context: Context | None = None) -> None:
        """Note the task that awaits this."""
        self._go_on = fn if context is None else lambda woken: context.run(fn, woken)

    def set_result(self, result: None, /) -> None:
        """Run the task."""
        super().set_result(result)
        self._run()

    def cancel(self, msg: Any = None) -> bool:
        """Have the loop run the task, which is cancelled."""
        is_cancelled = super().cancel(msg)
        if is_cancelled:
            self.get_loop().call_soon(self._run)
        return is_cancelled

    def _run(self) -> None:
        go_on, self._go_on = self._go_on, None
        if go_on is not None:
            go_on(self)


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
