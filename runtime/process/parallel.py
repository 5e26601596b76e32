"""Calls a function for several objects at the same time.

Theory of operation. Each call has a thread. The calling thread waits for all of them, and may be interrupted at any
moment by a signal handler that raises. It must not leave then: its caller cleans up after the exception, and must find
no thread still at work. So the exception is kept, calls that have not begun are cancelled, `interrupted` asks those
that run to end sooner, and the wait goes on. A second signal may come at any moment of that. So all of it happens
inside of the `try`, and an exception only begins another turn. If one comes between two turns, it goes on at once, and
the calls end by themselves.

No signal handler may find the calling thread in a lock that a call needs (`threads.py`). So it waits on bare locks, and
`interrupted` and `takes_long` run on threads of their own. A thread that begins and `cancel` may meet: each sets its
own flag first and looks at the other one then. If no thread can be started, the call runs in the calling thread.

`attended` does the same for one call, which may ask for calls on the thread that waits (`Here`). That thread may leave
at any moment, so nobody waits for it without looking whether it is still there.

`awaited` does the same for a task of an event loop, which must not stand still. So it waits for a future, and calls
`interrupted`, which must be quick, itself. A handler may also raise between asyncio and a callback, which is lost
then, and so `awaited` looks now and then.

A `TaskPool` does not do this: its tasks may wait for each other, and a load may ask for another one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from moonpool.runtime.errors import OutOfThreads
from moonpool.runtime.process.threads import start_thread_safely

T = TypeVar("T")
R = TypeVar("R")
# A signal that comes right before a wait begins is noticed after this time.
_NOTICE_S = 0.5
# The time after which somebody should be told what is waited for.
PATIENCE_S = 1.0
# An `interrupted` that raises itself is not called for ever.
_MOST_TOLD = 10


def in_parallel(
    function: Callable[[T], R],
    items: Sequence[T],
    name: str,
    interrupted: Callable[[], object] | None = None,
    *,
    takes_long: Callable[[], object] | None = None,
) -> list[R]:
    """Call `function` for each item in a thread of its own, and return the results in the order of the items.

    Raises the first exception after all calls have ended. An exception of a signal handler comes first. In that case
    `interrupted` is called at once, to make the calls end sooner. `takes_long` is called once, if they have not ended
    after `PATIENCE_S`.
    """
    tasks = [_Task(function, item, f"{name}-{index}") for index, item in enumerate(items)]
    signals: list[BaseException] = []
    told = 0
    unstarted = iter(tasks)
    patience_ends = time.monotonic() + PATIENCE_S
    while True:
        try:
            if told < len(signals) <= _MOST_TOLD:
                for task in tasks:
                    task.cancel()
                if interrupted is not None:
                    _apart(interrupted, name)
                told = len(signals)
            for task in unstarted:
                task.start_or_run()
            for task in tasks:
                while not task.wait():
                    if takes_long is not None and time.monotonic() > patience_ends:
                        tell, takes_long = takes_long, None
                        _apart(tell, name)
            break
        except BaseException as error:
            # Raised later, because the code that cleans up after it must find all calls done.
            signals.append(error)
    for task in tasks:
        task.join()
    errors = [*signals, *(task.error for task in tasks if task.error is not None)]
    if errors:
        raise errors[0]
    return [result for task in tasks for result in task.results]


def _apart(act: Callable[[], object], name: str) -> None:
    """Act on a thread of its own, and do not wait for it."""
    try:
        start_thread_safely(threading.Thread(target=act, name=f"{name}-told", daemon=True))
    except OutOfThreads:
        act()


class _Task(Generic[T, R]):
    """One call of the function in a thread of its own."""

    def __init__(
        self, function: Callable[[T], R], item: T, name: str, told: Callable[[], object] | None = None
    ) -> None:
        """Take `told`, which is called at the end, too, on the thread of the call."""
        self.results: list[R] = []
        self.error: BaseException | None = None
        self._call = partial(function, item)
        self._has_begun = self._has_ended = self._is_cancelled = False
        # Released at the end.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._told = told
        self._thread = threading.Thread(target=self._run, name=name)

    def _run(self) -> None:
        self._has_begun = True
        try:
            if not self._is_cancelled:
                self.results.append(self._call())
        except BaseException as error:
            self.error = error
        finally:
            self._has_ended = True
            self._bell.release()
            if self._told is not None:
                self._told()

    def start(self) -> None:
        """Begin the call. Raises `OutOfThreads`."""
        start_thread_safely(self._thread)

    def try_to_start(self) -> bool:
        """Begin the call. Returns False if there is no thread for it."""
        try:
            self.start()
        except OutOfThreads:
            return False
        return True

    def start_or_run(self) -> None:
        """Begin the call, or make it now if there is no thread for it."""
        if not self.try_to_start():
            self._run()

    def cancel(self) -> None:
        """Cancel the call unless it runs already."""
        self._is_cancelled = True

    @property
    def is_over(self) -> bool:
        """True if the call has ended, or was cancelled before it began."""
        return self._has_ended or (self._is_cancelled and not self._has_begun)

    def wait(self) -> bool:
        """Wait a moment for the end of the call. Returns False if it has not ended."""
        return self.is_over or self._bell.acquire(timeout=_NOTICE_S)

    def join(self) -> None:
        """Wait for the last steps of the thread after the call has ended."""
        if self._thread.ident is not None:
            self._thread.join()


class Abandoned(Exception):
    """The thread for which a function works has left, or what it called has raised."""


class Here:
    """Has calls made on the thread that attends to a function, one at a time. For the function's thread."""

    def __init__(self, *, is_elsewhere: bool = True) -> None:
        """If the function is not elsewhere, but on that thread, it makes the calls itself."""
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._is_elsewhere = is_elsewhere
        self._refuses = False

    def __call__(self, function: Callable[[], R]) -> R:
        """Return the result of a call. Raises `Abandoned`, also for what the call raises."""
        if not self._is_elsewhere:
            return function()
        results: list[R] = []
        bell = threading.Lock()
        bell.acquire()

        def call() -> None:
            try:
                if not self._refuses:
                    results.append(function())
            finally:
                bell.release()

        self._calls.put(call)
        while not bell.acquire(timeout=_NOTICE_S):
            if self._refuses:
                break
        if not results:
            raise Abandoned
        return results[0]

    def attend(self) -> None:
        """Wait a moment for a call, and make it."""
        with contextlib.suppress(Empty):
            call = self._calls.get(timeout=_NOTICE_S)
            if call is not None:
                call()

    def refuse(self) -> None:
        """Make no more calls."""
        self._refuses = True

    def wake(self) -> None:
        self._calls.put(None)


def attended(function: Callable[[Here], R], name: str, interrupted: Callable[[], object]) -> R:
    """Call a function on a thread of its own, and make the calls here that it asks for. Returns what it returns.

    Raises what it raises. If a signal handler raises here, or a call, `interrupted` is called, to make the function end
    sooner, and that exception is raised after the end of the function.
    """
    here = Here()
    task = _Task(lambda _: function(here), None, name, here.wake)
    signals: list[BaseException] = []
    told = 0
    has_started = has_thread = False
    try:
        while True:
            try:
                if told < len(signals) <= _MOST_TOLD:
                    here.refuse()
                    task.cancel()
                    _apart(interrupted, name)
                    told = len(signals)
                if task.is_over:
                    break
                if not has_started:
                    has_started = True
                    has_thread = task.try_to_start()
                    if not has_thread:
                        break
                here.attend()
            except BaseException as error:
                signals.append(error)
        if has_started and not has_thread and not signals:
            return function(Here(is_elsewhere=False))
    finally:
        here.refuse()
    task.join()
    errors = [*signals, *([] if task.error is None else [task.error])]
    if errors:
        raise errors[0]
    return task.results[0]


async def awaited(function: Callable[[], R], name: str, interrupted: Callable[[], object]) -> R:
    """Call a function on a thread of its own for a task, which goes on when it has ended. Raises what it raises, and
    `OutOfThreads`.

    If the task is cancelled, or a signal handler raises in it, `interrupted` is called again and again, to make the
    call end sooner, and that exception is raised after that: the code that cleans up must find nothing at work.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    turn = loop.create_future()

    def wake() -> None:
        if not turn.done():
            turn.set_result(None)

    def ring() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(wake)

    task = _Task(lambda _: function(), None, name, ring)
    signals: list[BaseException] = []
    has_started = False
    while True:
        try:
            if signals:
                task.cancel()
            turn = loop.create_future()
            if task.is_over:
                break
            if not has_started:
                has_started = True
                task.start()
            if 0 < len(signals) <= _MOST_TOLD:
                interrupted()
            # The callback of the end may be lost.
            look = loop.call_later(_NOTICE_S, wake)
            await turn
            look.cancel()
        except (GeneratorExit, OutOfThreads):  # nobody waits any more, or nothing has begun
            raise
        except BaseException as error:
            signals.append(error)
    errors = [*signals, *([] if task.error is None else [task.error])]
    if errors:
        raise errors[0]
    return task.results[0]
