"""The same thing for several objects at the same time."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")
R = TypeVar("R")
# A signal that comes in the moment before a wait begins is noticed when that wait ends.
_NOTICE_S = 0.5


def in_parallel(
    function: Callable[[T], R],
    items: Sequence[T],
    name: str,
    interrupted: Callable[[], object] | None = None,
) -> list[R]:
    """The results in the order of the items, each from a thread of its own; an exception is raised.

    What a signal handler raises is raised when all have ended; `interrupted` is called at once, to
    have them end sooner.

    Not concurrent.futures: its pools take nothing once the interpreter is on its way out, and that is
    when a forgotten runtime is closed. Where no thread can be started then, one follows the other.
    """
    tasks = [_Task(function, item, f"{name}-{index}") for index, item in enumerate(items)]
    signals: list[BaseException] = []
    unstarted = iter(tasks)
    while True:
        try:
            for task in unstarted:
                task.start()
            for task in tasks:
                task.wait()
            break
        except BaseException as error:
            # What a signal handler raises waits: whoever cleans up after it must find it all done.
            signals.append(error)
            for task in tasks:
                task.cancel()
            if interrupted is not None:
                interrupted()
    for task in tasks:
        task.join()
    errors = [*signals, *(task.error for task in tasks if task.error is not None)]
    if errors:
        raise errors[0]
    return [result for task in tasks for result in task.results]


class _Task(Generic[T, R]):
    """One call of the function in a thread of its own."""

    def __init__(self, function: Callable[[T], R], item: T, name: str) -> None:
        self.results: list[R] = []
        self.error: BaseException | None = None
        self._function = function
        # Whoever takes it out says what becomes of it: the thread, or `cancel`.
        self._waiting = [item]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)

    def _run(self) -> None:
        try:
            item = self._waiting.pop()
        except IndexError:
            return
        try:
            self.results.append(self._function(item))
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:
            self._run()

    def cancel(self) -> None:
        """Unless it runs already."""
        with contextlib.suppress(IndexError):
            self._waiting.pop()
            self._ended.set()

    def wait(self) -> None:
        # Not `Thread.join`: interrupted by a signal handler, Python 3.11 takes the thread for ended.
        while not self._ended.wait(_NOTICE_S):
            pass

    def join(self) -> None:
        """What is left of it when it has ended."""
        if self._thread.ident is not None:
            self._thread.join()
